"""One of several ranks prints a shared error; if it dies first, another rank prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotrec.cli import print_once as module
from hotrec.cli.print_once import note_of, notes_folder, print_once


class Ranks:
    """The ranks of a host, one after the other in this process."""

    def __init__(self, attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = attempt
        self.printed: list[tuple[int, str]] = []
        self._patch = monkeypatch

    def error_file(self, rank: int) -> Path:
        return self.attempt / str(rank) / "error.json"

    def fail(self, rank: int, text: str, origin: int | None = None, dies: bool = False) -> None:
        self.error_file(rank).parent.mkdir(parents=True, exist_ok=True)
        self._patch.setenv("TORCHELASTIC_ERROR_FILE", str(self.error_file(rank)))
        self._patch.setenv("RANK", str(rank))

        def show() -> None:
            if dies:
                raise SystemExit(143)
            self.printed.append((rank, text))

        print_once(text, show, origin)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    return Ranks(tmp_path / "attempt_0", monkeypatch)


def test_the_same_error_is_printed_once(ranks: Ranks) -> None:
    for rank in (1, 0, 2):
        ranks.fail(rank, "error: a")
    ranks.fail(3, "error: b")
    assert ranks.printed == [(1, "error: a"), (3, "error: b")]
    notes = notes_folder(str(ranks.error_file(0)))
    assert notes is not None
    assert all(note_of(notes, rank).exists() for rank in range(4))


def test_other_ranks_do_not_repeat_the_error_of_its_origin(ranks: Ranks) -> None:
    ranks.fail(1, "error: a")
    ranks.fail(0, "error: [rank 1] a", origin=1)
    assert ranks.printed == [(1, "error: a")]


def test_an_error_of_another_host_is_printed_once_on_this_host(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.fail(rank, "error: [rank 5] a", origin=5)
    assert ranks.printed == [(0, "error: [rank 5] a")]


def test_another_rank_prints_if_the_first_one_dies_before_it_has(ranks: Ranks) -> None:
    with pytest.raises(SystemExit):
        ranks.fail(0, "error: a", dies=True)
    ranks.fail(1, "error: a")
    ranks.fail(2, "error: [rank 0] a", origin=0)
    assert ranks.printed == [(1, "error: a"), (2, "error: [rank 0] a")]


def test_torchrun_gets_the_error_of_a_rank(ranks: Ranks) -> None:
    ranks.fail(0, "error: a")
    assert json.loads(ranks.error_file(0).read_text())["message"] == "error: a"
    ranks.error_file(0).write_text("by torch")
    ranks.fail(0, "error: b")
    assert ranks.error_file(0).read_text() == "by torch"


def test_without_torchrun_every_error_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    printed: list[str] = []
    for _ in range(2):
        print_once("a", lambda: printed.append("a"))
    assert printed == ["a", "a"]
