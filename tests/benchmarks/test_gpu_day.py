"""Parts of the GPU day: its records, and its stages' processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.__main__ import REPOSITORY, Stage, main, pack, parse, run_stage
from benchmarks.gpu_day.record import (
    DoesNotFitError,
    NotHereError,
    Parts,
    Record,
    Summary,
    Table,
    render,
)

FACTS = {"is_rehearsal": True, "code": "c1"}


def summarize(parts: Parts) -> Summary:
    rows = [[name, part["status"]] for name, part in parts.items()]
    return Summary(f"{len(parts)} parts.", [Table("Parts", ["part", "how"], rows)])


def open_record(path: Path, **facts: Any) -> Record:
    return Record(path, {**FACTS, **facts}, {"gpu": None}, summarize)


def fail() -> dict[str, Any]:
    raise RuntimeError("no kernel image is available")


def does_not_fit() -> dict[str, Any]:
    raise DoesNotFitError("needs 103 GB of 80 GB")


def not_here() -> dict[str, Any]:
    raise NotHereError("no CUDA runtime")


def test_a_failed_part_is_recorded_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "1_x.json"
    record = open_record(path)
    record.part("good", lambda: {"figure": 1})
    record.part("large", does_not_fit)
    record.part("absent", not_here)
    record.part("bad", fail)
    record.part("last", lambda: {"figure": 2})
    assert not record.finish()
    document = json.loads(path.read_text())
    assert document["status"] == "failed"
    assert document["verdict"] == "5 parts."
    assert document["parts"]["bad"]["error"] == "RuntimeError: no kernel image is available"
    assert "1 part(s) failed: bad" in render("Stage 1", document, "last words")
    again = open_record(path)
    assert set(again.parts) == {"good", "large", "absent", "last"}
    again.part("good", fail)  # kept, so not called
    again.part("bad", lambda: {})
    assert again.finish()
    assert json.loads(path.read_text())["parts"]["good"]["figure"] == 1
    # Only a rehearsal may lack something.
    measured = open_record(tmp_path / "2_x.json", is_rehearsal=False)
    measured.part("absent", not_here)
    assert not measured.finish()


DYING = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu_day.record import Record, Summary
class Mapped:
    def __del__(self):  # as FBGEMM's mapped memory, when it is freed on a broken device
        os.abort()
def dies():
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    held.append(Mapped())
    raise RuntimeError("an illegal memory access")
held = []
facts = {"is_rehearsal": False, "code": None}
keeps = "--keep-failed" in sys.argv
record = Record(
    Path(sys.argv[1]), facts, {}, lambda parts: Summary("", []), is_broken=lambda: bool(held),
    keeps_failed=keeps,
)
record.part("dies", dies)
record.part("good", lambda: {})
sys.exit(0 if record.finish() else 1)
"""


@pytest.mark.parametrize("how", ["killed", "broken"])
def test_a_stage_whose_process_dies_goes_on_with_the_next_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    # A module of the stages' namespace package.
    package = tmp_path / "benchmarks" / "gpu_day"
    package.mkdir(parents=True)
    (package / "dying.py").write_text(f"HOW = {how!r}\n{DYING}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    options = parse(["--out", str(tmp_path / "out"), "--stages", "1"])
    options.out.mkdir()
    document = run_stage(Stage(7, "dying", "Stage 7: dies"), options)
    assert document["status"] == "failed"
    parts = {name: part["status"] for name, part in document["parts"].items()}
    assert parts == {"dies": "failed", "good": "ok"}
    none = run_stage(Stage(8, "not_there", "Stage 8: none"), options)
    assert none["status"] == "failed"
    assert "No module named" in (options.out / "8_not_there.md").read_text()


def test_a_call_goes_on_where_an_archive_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "day.tar.gz"
    first.mkdir()
    document = {"facts": {"is_rehearsal": False, "code": "c1"}, "status": "ok", "verdict": "v"}
    (first / "0_facts.json").write_text(json.dumps({**document, "elapsed_s": 1.0}))
    (first / "0_facts.png").write_bytes(b"picture")
    pack(first, archive)
    words = ["--stages", "0", "--out", str(second), "--archive", str(archive)]
    assert main([*words, "--from", str(archive)]) == 0
    assert (second / "0_facts.png").read_bytes() == b"picture"
    assert "kept, of code c1" in capsys.readouterr().err
    assert main([*words, "--from", str(archive)]) == 1
    assert (
        f"expected a file, and {second} without documents, got 0_facts" in capsys.readouterr().err
    )
