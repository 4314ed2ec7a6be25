"""Short runs train as recorded, bit for bit: five cases of ``benchmarks/same_training.py``.

The bits depend on the processor's vector instructions and on the packages. Where these are not
those of the record, losses and evaluations are compared within a tolerance, weights not at all, and
messages and hot rows exactly. A commit that changes the record says why the numbers moved.

``benchmarks/same_training.py check`` trains all.
"""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from benchmarks.same_training import Program, all_cases, check, record
from tests.helpers.commands import REPOSITORY, environment, ranks_of, run_on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RECORD = REPOSITORY / "benchmarks/results/same_training.json"
# Between AVX2 and AVX-512 no loss of these cases differed.
ELSEWHERE = 1e-4
# With two ranks, and what has state of its own; the script checks all cases.
CASES = (
    "look_ahead/ranks=2", "sparse_dist/ranks=2", "sparse_dist/torchrec=planner",
    "look_ahead/order=all_hot", "look_ahead/slots",
)  # fmt: skip


def run(program: Program, *words: str, run_dir: Path | None = None) -> dict[str, Any]:
    """As the script does it, without the seconds in which each process imports torch."""
    given = {} if run_dir is None else {"HOTREC_RUN_DIR": str(run_dir)}
    with chdir(program.folder):
        return run_on_ranks(words, ranks_of(words), environment(**given)).figures


def test_training_is_as_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Program, "run", run)
    expected = json.loads(RECORD.read_text())
    cases = {name: all_cases()[name] for name in CASES}
    found = record(tmp_path / "found.json", cases, checkout=REPOSITORY, num_jobs=1)
    there, here = ({**made["made_on"], "commit": ""} for made in (expected, found))
    different = check(expected, found, list(cases), 0.0 if here == there else ELSEWHERE)
    said = capsys.readouterr().err
    assert different == [], f"made on {here}, recorded on {there}\n{said}"
