"""One of several ranks prints a shared error; if it dies first, another rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotrec.cli import print_once as module
from hotrec.cli.print_once import print_once


@pytest.mark.parametrize(
    ("errors", "printed"),
    [
        # Rank, error, and the rank that raised it if that is another.
        ([(1, "a", None), (0, "a", None), (2, "a", None), (3, "b", None)], [(1, "a"), (3, "b")]),
        ([(1, "a", None), (0, "[rank 1] a", 1)], [(1, "a")]),
        # Of another host: once on this one.
        ([(0, "[rank 5] a", 5), (1, "[rank 5] a", 5)], [(0, "[rank 5] a")]),
        # The first one dies before it has.
        ([(0, "dies", None), (1, "dies", None), (2, "[rank 0] dies", 0)],
         [(1, "dies"), (2, "[rank 0] dies")]),
    ],
)  # fmt: skip
def test_the_same_error_is_printed_once(
    errors: list[tuple[int, str, int | None]], printed: list[tuple[int, str]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    found: list[tuple[int, str]] = []
    for number, (rank, text, origin) in enumerate(errors):
        file = tmp_path / "attempt_0" / f"{rank}" / "error.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", f"{rank}")

        def show(number: int = number, rank: int = rank, text: str = text) -> None:
            if text == "dies" and number == 0:
                raise SystemExit(143)
            found.append((rank, text))

        try:
            print_once(text, show, origin)
        except SystemExit:
            assert text == "dies"
            continue
        assert json.loads(file.read_text())["message"]  # for torchrun
    assert found == printed
