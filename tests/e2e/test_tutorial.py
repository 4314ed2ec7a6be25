"""The notebook of the documentation runs from top to bottom, and has its outputs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import REPOSITORY, environment

NOTEBOOK = REPOSITORY / "docs" / "tutorial.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def outputs() -> list[dict[str, Any]]:
    return [output for cell in cells("code") for output in cell["outputs"]]


def test_it_was_run_in_order_and_its_links_lead_to_pages() -> None:
    counts = [cell["execution_count"] for cell in cells("code")]
    assert counts == list(range(1, len(counts) + 1))
    assert not [output for output in outputs() if output["output_type"] == "error"]
    text = "\n".join("".join(cell["source"]) for cell in cells("markdown"))
    linked = re.findall(r"\]\(([\w.]+)\)", text)
    assert linked
    assert [name for name in linked if not (NOTEBOOK.parent / name).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_runs(tmp_path: Path) -> None:
    (tmp_path / "samples").symlink_to(REPOSITORY / "samples")
    code = "\n\n".join("".join(cell["source"]) for cell in cells("code"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(MPLBACKEND="agg", TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr
    stored = "".join("".join(output.get("text", "")) for output in outputs())
    # Not to the last digit: the plan that is trained may be another.
    for pattern in (r"AUC (\S+) on the test split", r"AUC (\S+);"):
        then, now = (re.findall(pattern, text) for text in (stored, done.stdout))
        assert [float(auc) for auc in now] == pytest.approx([float(auc) for auc in then], abs=0.01)
    assert len(re.findall(r"predicted 0\.\d+, clicked 0\.\d+", done.stdout)) == 5
