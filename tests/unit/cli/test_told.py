"""Of what several ranks tell, one does; what nobody has told is told by all who wait for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hotrec.cli import told
from hotrec.cli.told import note_of, notes_folder, tell_once


class Ranks:
    """The ranks of a host, one after the other in this process."""

    def __init__(self, attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = attempt
        self.said: list[tuple[int, str]] = []
        self._patch = monkeypatch

    def error_file(self, rank: int) -> Path:
        return self.attempt / str(rank) / "error.json"

    def tell(self, rank: int, text: str, origin: int | None = None, dies: bool = False) -> None:
        self.error_file(rank).parent.mkdir(parents=True, exist_ok=True)
        self._patch.setenv("TORCHELASTIC_ERROR_FILE", str(self.error_file(rank)))
        self._patch.setenv("RANK", str(rank))

        def say() -> None:
            if dies:
                raise SystemExit(143)
            self.said.append((rank, text))

        tell_once(text, say, origin)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(told, "WAIT_S", 0.05)
    return Ranks(tmp_path / "attempt_0", monkeypatch)


def test_the_same_is_told_once(ranks: Ranks) -> None:
    for rank in (1, 0, 2):
        ranks.tell(rank, "error: a")
    ranks.tell(3, "error: b")
    assert ranks.said == [(1, "error: a"), (3, "error: b")]
    notes = notes_folder(str(ranks.error_file(0)))
    assert notes is not None
    assert all(note_of(notes, rank).exists() for rank in range(4))


def test_ranks_leave_it_to_the_one_whose_error_it_is(ranks: Ranks) -> None:
    ranks.tell(1, "error: a")
    ranks.tell(0, "error: [rank 1] a", origin=1)
    assert ranks.said == [(1, "error: a")]


def test_an_error_of_another_host_is_told_once_here(ranks: Ranks) -> None:
    for rank in (0, 1):
        ranks.tell(rank, "error: [rank 5] a", origin=5)
    assert ranks.said == [(0, "error: [rank 5] a")]


def test_who_ends_before_it_has_told_is_not_relied_on(ranks: Ranks) -> None:
    with pytest.raises(SystemExit):
        ranks.tell(0, "error: a", dies=True)
    ranks.tell(1, "error: a")
    ranks.tell(2, "error: [rank 0] a", origin=0)
    assert ranks.said == [(1, "error: a"), (2, "error: [rank 0] a")]


def test_torchrun_gets_what_ended_a_rank(ranks: Ranks) -> None:
    ranks.tell(0, "error: a")
    assert json.loads(ranks.error_file(0).read_text())["message"] == "error: a"
    ranks.error_file(0).write_text("by torch")
    ranks.tell(0, "error: b")
    assert ranks.error_file(0).read_text() == "by torch"


def test_without_torchrun_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    said: list[str] = []
    for _ in range(2):
        tell_once("a", lambda: said.append("a"))
    assert said == ["a", "a"]
