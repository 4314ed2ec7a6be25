"""Parts of the GPU day: its records, and its stages' processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
