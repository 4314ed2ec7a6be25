"""A fault, the contract that it breaks, and where it stands in a checkout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        name: Unique; the part of the program, a dot, and what is wrong.
        contract: What holds without the fault, in a sentence.
        file: The file to change, from the root of the repository.
        old: A text that occurs once in it.
        new: What stands there instead.
        tests: Tests that must fail, as pytest takes them, below ``tests/``; the fastest first.
    """

    name: str
    contract: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def change(self, root: Path) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: If the fault does not apply to the file, or does not compile.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (number := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: expected its text once in {self.file}, got it {number} "
                "times. Adapt the fault to the code of today; do not drop the contract."
            )
        changed = text.replace(self.old, self.new)
        if path.suffix == ".py":
            try:
                compile(changed, self.file, "exec")
            except SyntaxError as error:
                raise ValueError(
                    f"mutant {self.name}: expected {self.file} to compile with it, got {error}. "
                    "Correct the fault."
                ) from error
        return changed


def mutant(name: str, contract: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A fault with its tests as further arguments."""
    return Mutant(name, contract, file, old, new, tests)


@contextmanager
def applied(fault: Mutant, root: Path) -> Iterator[None]:
    """Have a checkout with the fault, inside the block.

    Raises:
        ValueError: As ``Mutant.change``.
    """
    path, changed = root / fault.file, fault.change(root)
    text = path.read_text(encoding="utf-8")
    try:
        _write(path, changed)
        yield
    finally:
        _write(path, text)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # A compiled file is current by time and size, and both can be those of the other text.
    Path(cache_from_source(str(path))).unlink(missing_ok=True)
