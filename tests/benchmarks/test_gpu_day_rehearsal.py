"""The GPU day, rehearsed on the stand-in for a device, by the line that a user types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_day.__main__ import STAGES, STAND_IN
from benchmarks.gpu_day.record import REHEARSAL
from tests.e2e.conftest import REPOSITORY, environment
from tests.stand_in.build import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
# What the stand-in cannot do.
NOT_HERE = {0: {"gpu", "register", "fork"}}


# What tests/stand_in has too: steps against references, tests/gpu, several ranks on one device. The
# tiers and the predictions take a minute each: `benchmarks/gpu_day.sh --rehearse` has all stages.
ELSEWHERE = (1, 2, 5, 6, 7)
REHEARSED = [stage for stage in STAGES if stage.number not in ELSEWHERE]
# Every stage in a fork of a process that has loaded the libraries, which takes most of its time.
FORKED = """
import os, runpy, sys
from unittest import mock
import hotrec.bench.cases, hotrec.cli.app, hotrec.runs.train
from benchmarks.gpu_day import __main__ as day, tiers, whole

def fork(words, log, limit_s, is_rehearsal):
    if (pid := os.fork()) == 0:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        sys.argv = words[2:]
        try:
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            os._exit(ended.code or 0)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

with mock.patch.object(day, "_run", fork):
    sys.exit(day.main(sys.argv[1:]))
"""


def gpu_day(*words: str, program: str = "") -> subprocess.CompletedProcess[str]:
    variables = environment(PYTHON=sys.executable)
    command = [str(REPOSITORY / "benchmarks" / "gpu_day.sh")]
    if program:
        variables["PYTHONPATH"] = f"{STAND_IN}:{REPOSITORY}"
        command = [sys.executable, "-c", program]
    return subprocess.run([*command, *words], env=variables, capture_output=True, text=True)


def test_every_stage_is_rehearsed(tmp_path: Path) -> None:
    out, numbers = tmp_path / "out", ",".join(str(stage.number) for stage in REHEARSED)
    words = ["--rehearse", "--out", str(out), "--stages", numbers]
    done = gpu_day(*words, program=FORKED)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in REHEARSED:
        document = json.loads((out / f"{stage.stem}.json").read_text())
        assert document["status"] == "ok", document
        assert document["facts"]["gpu"] == "stand-in"
        parts = {name: part["status"] for name, part in document["parts"].items()}
        some = {name for name, how in parts.items() if how == "not here"}
        assert some - {"gpu"} == NOT_HERE.get(stage.number, set()) - {"gpu"}, document
        assert "ok" in parts.values()
        assert set(parts.values()) <= {"ok", "not here"}
        page = (out / f"{stage.stem}.md").read_text()
        assert page.startswith(f"# {stage.title}\n\n{REHEARSAL}\n\n{document['verdict']}\n")
        assert f"code {document['facts']['code']}" in page
        assert f"{stage.stem:<13}  ok" in done.stdout
    document = json.loads((out / "8_curve.json").read_text())
    assert len(document["parts"]["GPU"]["losses"]) == 20
    assert (out / "8_curve.png").read_bytes().startswith(b"\x89PNG")
