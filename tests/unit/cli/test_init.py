"""``hotrec init`` on the command line: what it writes, and what it says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotrec.cli import main

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are and commands start; two labels, of which one is a leak of the other."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 3 // 2},{n % 9 // 8},u{n % 41},{n % 17}" for n in range(2000)]
    (tmp_path / "dt=2024-05-01").mkdir()
    text = "\n".join(["clicked,bought,user,item_id", *lines, "1,0"])
    (tmp_path / "dt=2024-05-01" / "part.csv").write_text(text)
    return tmp_path


def init(printed: Printed, *words: str) -> tuple[dict[str, Any], str]:
    """The figures of a command that succeeds, and what it said."""
    assert main(["init", "dt=2024-05-01/part.csv", *words]) == 0
    out, err = printed.readouterr()
    return json.loads(out), err


def test_it_says_what_to_look_at(capfd: Printed) -> None:
    figures, said = init(capfd)
    written = Path("conf/data/part.yaml").read_text()
    assert figures["label"] == "clicked"
    warnings = [line for line in said.splitlines() if " W hotrec.cli.init: " in line]
    assert figures["remarks"] == [line.split(": ", 1)[1] for line in warnings]
    bad = "1 line unreadable: dt=2024-05-01/part.csv line 2002: expected 4 columns, got 2"
    assert any(remark.startswith(bad) for remark in figures["remarks"])
    assert (
        "path column dt (2024-05-01 in the first file) is not used" in said
    )  # a constant is left out
    assert any("bought: alone: all of" in remark for remark in figures["remarks"])
    assert "\n  on_bad_line" not in written  # nobody asked to lose a line
    assert "# on_bad_line: skip" in written
    # So the next command stops, and says which line it is.
    words = ("data=part", "paths.dataset=dataset")
    assert main(["prepare", *words]) == 1
    assert "line 2002: expected 4 columns, got 2" in capfd.readouterr().err
    assert main(["prepare", *words, "data.source.on_bad_line=skip"]) == 0


def test_several_labels_are_no_features(capfd: Printed) -> None:
    figures, _ = init(capfd, "label=[clicked,bought]")
    assert figures["label"] == ["clicked", "bought"]
    assert figures["columns"] == {"clicked": "label", "bought": "label", "user": "categorical",
                                  "item_id": "categorical"}  # fmt: skip
    words = ("data=part", "paths.dataset=dataset", "data.source.on_bad_line=skip")
    assert main(["prepare", *words]) == 0


@pytest.mark.parametrize("label", ["{clicked: 1}", "[[clicked]]"])
def test_labels_are_names(label: str, capfd: Printed) -> None:
    assert main(["init", "dt=2024-05-01/part.csv", f"label={label}"]) == 1
    assert "error: label: expected the name of a column" in capfd.readouterr().err


def test_the_file_has_a_batch_size_that_gives_enough_steps(capfd: Printed) -> None:
    figures, _ = init(capfd)
    assert "batch_size" not in figures["next"]
    for words, batch_size in (((), 64), (("trainer.batch_size=32",), 32)):
        assert main(["train", "--cfg", "job", "data=part", *words]) == 0
        shown = yaml.safe_load(capfd.readouterr().out)
        assert shown["trainer"]["batch_size"] == batch_size
        assert shown["data"]["source"]["files"] == ["dt=2024-05-01/part.csv"]


@pytest.mark.slow
def test_more_ranks_than_cores_are_said(capfd: Printed) -> None:
    init(capfd)
    cores = len(os.sched_getaffinity(0))
    for num_ranks in (cores, cores + 1):
        assert main(["run", "data=part", f"launch.num_ranks={num_ranks}"]) == 1  # a bad line
        said = f"{cores + 1} ranks share {cores} cores" in capfd.readouterr().err
        assert said == (num_ranks > cores)
