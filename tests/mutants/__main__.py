"""``python -m tests.mutants``: faults in copies of the code, and whether tests notice them.

run [NAMES]    the tests of the faults whose names begin so must fail
check          every fault fits the code, and its tests are there
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

REPOSITORY = Path(__file__).parents[2]
FAULTS = Path(__file__).parent / "faults"
# What any test would notice, whatever it is for.
_CANNOT_RUN = re.compile(r"^E .*\b(Import|ModuleNotFound|Name|Syntax|UnboundLocal)Error: ", re.M)
_LATE = re.compile(r"^E .*(Timeout [(>]|\] hung: killed after the limit)", re.M)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


@dataclass(frozen=True)
class Fault:
    """A text that occurs once in a file, what stands there instead, and tests that then fail."""

    name: str
    contract: str
    file: str
    old: str
    new: str
    tests: list[str]

    def change(self, root: Path) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: If the fault does not fit.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if (number := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"expected its text once in {self.file}, got it {number} times")
        changed = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            compile(changed, self.file, "exec")
        return changed


def all_faults() -> list[Fault]:
    """Those of all files, in their order."""
    tables = [tomllib.loads(path.read_text("utf-8")) for path in sorted(FAULTS.glob("*.toml"))]
    return [Fault(name, **of) for table in tables for name, of in table.items()]


def misfits(faults: Sequence[Fault]) -> list[str]:
    """What does not fit, a line each."""
    names, contracts = ([getattr(one, of) for one in faults] for of in ("name", "contract"))
    twice = _repeated(names) | _repeated(contracts)
    found = [f"{text}: expected once, got twice" for text in sorted(twice)]
    for fault in faults:
        try:
            fault.change(REPOSITORY)
        except (OSError, SyntaxError, ValueError) as error:
            found.append(f"{fault.name}: {error}. Adapt the fault; do not drop the contract.")
        for test in fault.tests:
            file, *functions = test.partition("[")[0].split("::")
            path = REPOSITORY / "tests" / file
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            if not path.exists() or not all(f"def {name}(" in text for name in functions):
                found.append(f"{fault.name}: expected tests/{test}, got no such test")
    return found


def _repeated(texts: Sequence[str]) -> set[str]:
    return {text for text in texts if texts.count(text) > 1}


def copy_of_code(folder: Path) -> Path:
    """A copy of what git lists or would add."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def verdict_of(fault: Fault, copy: Path, limit_s: float) -> tuple[str, str]:
    """``caught``, ``survived``, ``broken`` or ``late``, and by which test or how."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.change(copy), encoding="utf-8")
    # A file compiled before is current by time and size, and both can be those of the fault.
    words = [sys.executable, "-B", "-m", "pytest", "-qx", "-p", "no:cacheprovider", "--tb=short"]
    words += [f"tests/{test}" for test in fault.tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        done = subprocess.run(
            words, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return "late", f"not done in {limit_s:g} s"
    finally:
        path.write_text(text, encoding="utf-8")
    failed = _FAILED.findall(done.stdout)
    if done.returncode == 0:
        return "survived", done.stdout.strip().splitlines()[-1]
    if done.returncode != 1 or not failed or _CANNOT_RUN.search(done.stdout):
        return "broken", f"pytest's exit code {done.returncode}: {done.stdout.strip()[-200:]!r}"
    return ("late" if _LATE.search(done.stdout) else "caught"), failed[0]


def run(faults: Sequence[Fault], jobs: int, limit_s: float) -> int:
    """Try the faults, ``jobs`` at a time; the exit code."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: Queue[Path] = Queue()
        for job in range(jobs):
            copies.put(copy_of_code(Path(folder) / f"{job}"))

        def try_one(fault: Fault) -> tuple[Fault, str, str, float]:
            copy, start_s = copies.get(), time.monotonic()
            verdict, how = verdict_of(fault, copy, limit_s)
            copies.put(copy)
            return fault, verdict, how, time.monotonic() - start_s

        with ThreadPoolExecutor(jobs) as pool:
            for fault, verdict, how, seconds in pool.map(try_one, faults):
                missed += verdict != "caught"
                print(f"{verdict:9}{seconds:6.1f} s  {fault.name}  {how}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults were caught")
    return int(missed > 0)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["run", "check"])
    parser.add_argument("names", nargs="*", help="only faults whose names begin so")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--limit-s", type=float, default=900, help="for the tests of a fault")
    args = parser.parse_args(arguments)
    faults = all_faults()
    for misfit in (found := misfits(faults)):
        print(misfit)
    if found or args.action == "check":
        return int(bool(found))
    meant = [one for one in faults if one.name.startswith(tuple(args.names) or "")]
    if not meant:
        parser.error(f"expected beginnings of the names of faults, got {args.names}")
    return run(meant, args.jobs, args.limit_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
