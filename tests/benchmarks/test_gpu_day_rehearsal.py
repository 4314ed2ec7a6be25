"""The GPU day, rehearsed on the stand-in for a device, by the line that a user types."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
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
# What the stand-in cannot do, and what the memory that a case is given does not allow.
NOT_HERE = {
    0: {"gpu", "register", "fork"}, 5: {"train all cold, compiled"}
}  # fmt: skip
DOES_NOT_FIT = {2: {"adam: slots 1.5%"}}


# The stages that tests/stand_in/test_gpu.py has: tests/gpu, and several ranks on one device.
ELSEWHERE = (6, 7)
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
        for status, expected in (("not here", NOT_HERE), ("does not fit", DOES_NOT_FIT)):
            some = {name for name, how in parts.items() if how == status}
            assert some - {"gpu"} == expected.get(stage.number, set()) - {"gpu"}, document
        assert "ok" in parts.values()
        assert set(parts.values()) <= {"ok", "not here", "does not fit"}
        page = (out / f"{stage.stem}.md").read_text()
        assert page.startswith(f"# {stage.title}\n\n{REHEARSAL}\n\n{document['verdict']}\n")
        assert f"code {document['facts']['code']}" in page
        assert f"{stage.stem:<13}  ok" in done.stdout
    document = json.loads((out / "8_curve.json").read_text())
    assert len(document["parts"]["GPU"]["losses"]) == 20
    assert (out / "8_curve.png").read_bytes().startswith(b"\x89PNG")
    check_that_an_archive_is_enough(out, tmp_path / "again", numbers)


def check_that_an_archive_is_enough(out: Path, again: Path, numbers: str) -> None:
    """Nothing is made again that is there."""
    archive = out.with_name("out.tar.gz")
    done = gpu_day("--rehearse", "--from", str(archive), "--out", str(again), "--stages", numbers)
    assert done.returncode == 0
    assert done.stderr.count("kept") == len(REHEARSED)
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_a_stage_that_takes_too_long_stops_no_other(tmp_path: Path) -> None:
    words = ["--rehearse", "--out", str(tmp_path), "--stages", "2,9", "--limit-s", "0.2"]
    done = gpu_day(*words, "--code", "abc123")
    assert done.returncode == 1
    for stem in ("2_tiers", "9_profiles"):
        document = json.loads((tmp_path / f"{stem}.json").read_text())
        found = document["status"], document["error"], document["facts"]["code"]
        assert found == ("failed", "ended after its limit of 0.2 s", "abc123")
        assert f"{stem:<13}  failed" in done.stdout


def test_a_stage_ends_with_the_script(tmp_path: Path) -> None:
    words = ["--rehearse", "--out", str(tmp_path), "--stages", "2"]
    script = subprocess.Popen(
        [REPOSITORY / "benchmarks" / "gpu_day.sh", *words],
        env=environment(PYTHON=sys.executable), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not stages_under_way(tmp_path):
        assert script.poll() is None
        time.sleep(0.05)
    script.terminate()
    assert script.wait() == 128 + signal.SIGTERM
    until_s = time.monotonic() + 30  # on a busy machine a process takes time to end
    while stages_under_way(tmp_path):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def stages_under_way(folder: Path) -> list[str]:
    """Processes that write a document into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
        if f"{folder}/2_tiers.json" in command:
            found.append(command)
    return found
