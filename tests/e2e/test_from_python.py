"""A run made by the program of docs/from_python.md is a run as any other."""

from __future__ import annotations

import json
import re
from contextlib import chdir
from pathlib import Path

import pytest
import yaml

from benchmarks.own_data import write_log
from tests.e2e.conftest import REPOSITORY, hotrec
from tests.helpers.commands import run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def program() -> str:
    """The blocks that plan and train, as the page has them but for the directories' names."""
    text = (REPOSITORY / "docs" / "from_python.md").read_text()
    plan, train = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[1:3]
    return (plan + train).replace("my_log", "events")


def test_a_run_from_python_is_evaluated_exported_and_scored_with(tmp_path: Path) -> None:
    write_log(tmp_path / "events.csv", 3000)
    for words in (["init", "events.csv"], ["prepare", "data=events"]):
        hotrec(*words, cwd=tmp_path)
    (tmp_path / "mine.py").write_text(program())
    with chdir(tmp_path):
        done = run_on_ranks([str(tmp_path / "mine.py")])
    assert done.exit_code == 0, done.stderr
    run_dir = tmp_path / "runs" / "mine"
    summary = json.loads((run_dir / "summary.json").read_text())
    recorded = yaml.safe_load((run_dir / "config.yaml").read_text())
    # It is known from the record of `hotrec prepare` what the dataset was prepared from.
    assert recorded["data"]["source"]["files"] == ["events.csv"]

    evaluated = hotrec("evaluate", cwd=tmp_path)  # of the newest run, which is this
    assert evaluated.figures["run_dir"] == "runs/mine"
    assert evaluated.figures["auc"] == pytest.approx(summary["auc"], abs=1e-6)
    exported = hotrec("export", "output=model", cwd=tmp_path).figures
    assert exported["auc"] == pytest.approx(summary["auc"], abs=1e-5)
    words = ["input=[events.csv]", "output=scores", "run_dir=runs/mine"]
    scored = hotrec("predict", *words, cwd=tmp_path).figures
    assert scored["num_samples"] == 3000
