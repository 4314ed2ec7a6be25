"""The GPU day, rehearsed: every stage with tiny sizes on CPU, by the line that a user types."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.__main__ import STAGES
from benchmarks.gpu_day.record import REHEARSAL
from tests.e2e.conftest import REPOSITORY, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
# Parts that show that a stage has measured what it is for.
PARTS = {
    1: {"fbgemm sgd rows device memory", "step rowwise_adagrad look_ahead device memory"},
    2: {"alone, B=64", "all cold, look_ahead, B=64", "TorchRec's planner, B=64"},
    3: {"DLRM, B=32", "MLPerf DCNv2, B=32"},
    4: {"sgd: device memory", "rowwise_adagrad: device memory"},
    5: {"calibrate", "plan", "train all cold", "train TorchRec's planner", "report"},
    6: {"tests/distributed/test_staged.py"},
}


def gpu_day(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REPOSITORY / "benchmarks" / "gpu_day.sh", *words],
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
    )


def documents(folder: Path) -> dict[int, dict[str, Any]]:
    return {s.number: json.loads((folder / f"{s.stem}.json").read_text()) for s in STAGES}


def test_every_stage_is_rehearsed(tmp_path: Path) -> None:
    done = gpu_day("--rehearse", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = documents(tmp_path)
    for stage in STAGES:
        document = found[stage.number]
        assert document["status"] == "ok", document
        assert PARTS[stage.number] <= set(document["parts"])
        assert {part["status"] for part in document["parts"].values()} == {"ok"}
        assert document["machine"]["packages"]["torch"]
        page = (tmp_path / f"{stage.stem}.md").read_text()
        assert page.startswith(f"# {stage.title}\n\n{REHEARSAL}\n\n{document['verdict']}\n")
        assert f"code {document['facts']['code']}" in page
        assert f"{stage.stem:<13}  ok" in done.stdout
    step = found[4]["parts"]["sgd: device memory"]["fresh"]["step"]
    for clock in ("device", "host"):
        assert 0 < step[clock]["p10_s"] <= step[clock]["p50_s"] <= step[clock]["p90_s"]
    tests = found[1]["parts"]["tests/gpu"]["tests"]
    assert any(name.startswith("tests/gpu/test_large_steps.py") for name in tests)
    for name, part in found[5]["parts"].items():
        if name.startswith("train "):
            assert part["predicted_step_s"] > 0
            assert part["measured_step_s"] > 0
            assert part["predicted_host_bytes"] > 0
            assert part["measured_host_bytes"] > 0
            assert part["peak_bytes"] > 0
    # Nothing is made again that is there.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    again = gpu_day("--rehearse", "--out", str(tmp_path))
    assert again.returncode == 0
    assert again.stderr.count("kept") == len(STAGES)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}


def test_a_stage_that_takes_too_long_stops_no_other(tmp_path: Path) -> None:
    words = ["--rehearse", "--out", str(tmp_path), "--stages", "2,4", "--limit-s", "0.2"]
    done = gpu_day(*words, "--code", "abc123")
    assert done.returncode == 1
    for stem in ("2_profiles", "4_tiers"):
        document = json.loads((tmp_path / f"{stem}.json").read_text())
        assert document["status"] == "failed"
        assert document["error"] == "ended after its limit of 0.2 s"
        assert document["facts"]["code"] == "abc123"
        assert "**failed**: ended after its limit" in (tmp_path / f"{stem}.md").read_text()
        assert f"{stem:<13}  failed" in done.stdout


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = gpu_day("--out", str(tmp_path), "--stages", "4", "--limit-s", "60")
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert done.returncode == 1
    page = (tmp_path / "4_tiers.md").read_text()
    assert "expected a CUDA device, got none visible to torch" in page
    assert REHEARSAL not in page


def test_a_stage_ends_with_the_script(tmp_path: Path) -> None:
    words = ["--rehearse", "--out", str(tmp_path), "--stages", "4"]
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
        if f"{folder}/4_tiers.json" in command:
            found.append(command)
    return found
