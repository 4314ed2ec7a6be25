"""``hotrec init`` on the command line: what it writes, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotrec.cli import main

Printed = pytest.CaptureFixture[str]
PREPARE = ("prepare", "data=part", "paths.dataset=dataset")


@pytest.fixture(autouse=True)
def _log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two labels, of which one is a leak of the other, and a bad line."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 3 // 2},{n % 9 // 8},u{n % 41},{n % 17}" for n in range(2000)]
    (tmp_path / "dt=2024-05-01").mkdir()
    text = "\n".join(["clicked,bought,user,item_id", *lines, "1,0"])
    (tmp_path / "dt=2024-05-01" / "part.csv").write_text(text)


def init(printed: Printed, *words: str) -> dict[str, Any]:
    assert main(["init", "dt=2024-05-01/part.csv", *words]) == 0
    return dict(json.loads(printed.readouterr().out))


def test_it_says_what_to_look_at(capfd: Printed) -> None:
    figures = init(capfd)
    assert figures["label"] == "clicked"
    for what in ("part.csv line 2002", "bought"):
        assert any(what in remark for remark in figures["remarks"])
    # Nobody asked to lose a line, so the next command stops, and says which line it is.
    assert "\n  on_bad_line" not in Path("conf/data/part.yaml").read_text()
    assert main([*PREPARE]) == 1
    assert "line 2002: expected 4 columns, got 2" in capfd.readouterr().err
    # Enough steps, unless a batch is given.
    for words, batch_size in (((), 64), (("trainer.batch_size=32",), 32)):
        assert main(["train", "--cfg", "job", "data=part", *words]) == 0
        shown = yaml.safe_load(capfd.readouterr().out)
        assert shown["trainer"]["batch_size"] == batch_size


def test_several_labels_are_no_features(capfd: Printed) -> None:
    figures = init(capfd, "label=[clicked,bought]")
    assert figures["label"] == ["clicked", "bought"]
    kinds = {"clicked": "label", "bought": "label", "user": "categorical", "item_id": "categorical"}
    assert figures["columns"] == kinds
    assert main([*PREPARE, "data.source.on_bad_line=skip"]) == 0
    for label in ("{clicked: 1}", "[[clicked]]"):
        assert main(["init", "dt=2024-05-01/part.csv", f"label={label}", "name=b"]) == 1
        assert "error: label: expected the name of a column" in capfd.readouterr().err
