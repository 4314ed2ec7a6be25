"""Stage 5: calibrate, plan, train and report on one GPU: predicted against measured.

The program's own commands, as a user would start them, on synthetic data. A prediction of memory is
one of the tables and their state, and is compared with what they take; beside it stands what the
device had in use at most because of the run, by everything that has to fit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.record import OK, Parts, Summary, Table
from benchmarks.gpu_day.stage import Day, main
from hotrec.report.units import show_bytes, show_error, show_seconds

REPOSITORY = Path(__file__).resolve().parents[2]
POLL_S = 0.05
# A prediction this close to what was measured is good.
STEP_TARGET, MEMORY_TARGET = 0.15, 0.10
TRAIN = "train "
REAL = (
    "data=synthetic_criteo_like", "dataset_name=gpu_day",
    # Four times the rows: 5 GB, so that tables and not libraries fill the memory.
    "data.synthetic.num_rows=[5840,2332,3504560,3504564,1220,96,50068,2532,12,372580,22732,3504564,"
    "12776,108,59968,3504564,40,22608,8692,16,3504564,72,60,1144724,420,570288]",
    "data.synthetic.num_train=1000000", "data.synthetic.num_valid=20000",
    "data.synthetic.num_test=20000", "data.synthetic.num_periods=1",
    "data.synthetic.drift_frac=0.0", "trainer.batch_size=8192",
)  # fmt: skip
REAL_TRAIN = ("trainer.num_epochs=2", "trainer.max_steps=220", "trainer.num_workers=8")
REHEARSED = ("experiment=synthetic_smoke",)
REHEARSED_TRAIN = ("trainer.num_epochs=4", "trainer.max_steps=64")
QUICK = ("calibrate.max_bytes=65536", "calibrate.repeats=3", "calibrate.cap_mib=4")
IN_MEMORY = ("placement=all_cold", "placement.cold_tier=fused")
RUNS: dict[str, tuple[str, ...]] = {
    "TorchRec's planner": ("placement=torchrec", "pipeline=sparse_dist"),
    "all cold": (*IN_MEMORY, "pipeline=sparse_dist"),
    "all cold, look_ahead": (*IN_MEMORY, "pipeline=look_ahead"),
    "cheapest with hot and cold rows": (
        "placement=cost", "placement.may_decline=false", "pipeline=sparse_dist",
    ),
    "all cold, UVM": (
        "placement=all_cold", "placement.cold_tier=fused_uvm", "pipeline=sparse_dist",
    ),
    "TorchRec's planner, UVM cache 10%, prefetch": (
        "placement=torchrec", "placement.tier=fused_uvm_caching", "placement.cache_load_frac=0.1",
        "pipeline=prefetch",
    ),
    "all cold, UVM cache 10%": (
        "placement=all_cold", "placement.cold_tier=fused_uvm_caching",
        "placement.cache_load_frac=0.1", "pipeline=sparse_dist",
    ),
}  # fmt: skip
REHEARSED_RUNS = ("all cold", "TorchRec's planner")


class Program:
    """The program's commands, in a directory of their own.

    Args:
        folder: where they read and write.
        device: that they compute on.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device

    def __call__(self, *words: str, run_dir: str | None = None) -> dict[str, Any]:
        """Run a command.

        Returns:
            What it prints, with "peak_bytes", the memory it had in use at most.

        Raises:
            RuntimeError: if it fails, with the last lines of what it said.
        """
        environment = {name: v for name, v in os.environ.items() if name != "HOTREC_RUN_DIR"}
        environment["HOTREC_RUN_DIR"] = run_dir or f"runs/{words[0]}"
        with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as printed:
            before = self._used_bytes(None)
            process = subprocess.Popen(
                [sys.executable, "-m", "hotrec", *words], cwd=self._folder, env=environment,
                stdout=printed, stderr=said,
            )  # fmt: skip
            peak = before
            while process.poll() is None:
                peak = max(peak, self._used_bytes(process.pid))
                time.sleep(POLL_S)
            said.seek(0)
            printed.seek(0)
            text, lines = said.read(), printed.read().splitlines()
        print(f"$ hotrec {' '.join(words)}\n{text}", flush=True)
        if process.returncode != 0 or not lines:
            last = " / ".join(text.splitlines()[-3:])
            raise RuntimeError(f"hotrec {words[0]}: exit code {process.returncode}: {last}")
        figures: dict[str, Any] = json.loads(lines[-1])
        return {**figures, "peak_bytes": peak - before}

    def _used_bytes(self, process_id: int | None) -> int:
        """Of the device, by everybody; on CPU, of the process."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return total - free
        try:
            status = Path(f"/proc/{process_id}/status").read_text()
        except OSError:
            return 0
        return sum(int(line.split()[1]) << 10 for line in status.splitlines() if "VmRSS" in line)


def train(program: Program, name: str, words: list[str], folder: Path) -> dict[str, Any]:
    """Train as RUNS says; what was predicted and what was measured."""
    run_dir = f"runs/{''.join(letter if letter.isalnum() else '_' for letter in name)}"
    figures = program("train", *words, *RUNS[name], run_dir=run_dir)
    return {"run_dir": run_dir, **figures}


def errors(part: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Of the predicted step and memory, relative to what was measured; None if one is missing."""
    predicted, measured = _table_bytes(part)
    pairs = ((part["predicted_step_s"], part["measured_step_s"]), (predicted, measured))
    step, memory = ((p / m - 1) if p and m else None for p, m in pairs)
    return step, memory


def _table_bytes(part: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Predicted and measured bytes of the tables in the device's memory; on CPU, in the host's."""
    place = "device" if part["measured_device_bytes"] else "host"
    return part[f"predicted_{place}_bytes"], part[f"measured_{place}_bytes"]


def summarize(parts: Parts) -> Summary:
    runs = {
        name.removeprefix(TRAIN): part
        for name, part in parts.items()
        if name.startswith(TRAIN) and part["status"] == OK
    }
    if not runs:
        return Summary("No training run has ended.", [])
    rows = []
    for name, part in runs.items():
        step, memory = errors(part)
        rows.append(
            [
                name,
                *_cells(part["predicted_step_s"], part["measured_step_s"], step, show_seconds),
                f"{100 * part['data_wait_frac']:.0f}%",
                *_cells(*_table_bytes(part), memory, show_bytes),
                show_bytes(part["peak_bytes"]),
            ]
        )
    header = [
        "run", "step predicted", "measured", "error", "waits for data", "tables predicted",
        "measured", "error", "in use at most",
    ]  # fmt: skip
    note = (
        "Step: the median from step 50 on, as `hotrec train` compares it. Tables: the device's "
        "memory (on CPU the host's) of the tables and their state. In use at most: by all of the "
        "run, CUDA's context, NCCL and activations included."
    )
    tables = [Table("Predicted and measured", header, rows, note)]
    tables += [_stage_table(name, part) for name, part in runs.items() if part["measured_stage_s"]]
    found = [errors(part) for part in runs.values()]
    good_steps = sum(step is not None and abs(step) <= STEP_TARGET for step, _ in found)
    good_memory = sum(memory is not None and abs(memory) <= MEMORY_TARGET for _, memory in found)
    verdict = (
        f"Of {len(runs)} runs {good_steps} have their step predicted within {STEP_TARGET:.0%}, "
        f"{good_memory} their memory within {MEMORY_TARGET:.0%}."
    )
    return Summary(verdict, tables)


def _cells(
    predicted: float | None, measured: float | None, error: float | None, show: Any
) -> list[str]:
    texts = ["-" if value is None else show(value) for value in (predicted, measured)]
    return [*texts, "-" if error is None else show_error(error)]


def _stage_table(name: str, part: Mapping[str, Any]) -> Table:
    rows = []
    for stage, seconds in part["measured_stage_s"].items():
        predicted = part["predicted_stage_s"].get(stage, 0.0)
        if seconds or predicted:
            rows.append([stage, show_seconds(predicted), show_seconds(seconds)])
    return Table(f"Stages: {name}", ["stage", "predicted", "measured"], rows)


def run(day: Day) -> None:
    # Each command needs what the one before has written, so nothing is kept from before.
    day.record.parts.clear()
    device = day.device.type
    words = [*day.pick(REAL, REHEARSED), f"trainer.device={device}"]
    training = [*words, *day.pick(REAL_TRAIN, REHEARSED_TRAIN), "trainer.eval_splits=[]"]
    folder = Path(tempfile.mkdtemp(prefix="gpu_day_"))
    program = Program(folder, day.device)
    try:
        day.record.part("prepare", lambda: program("prepare", *words))
        day.record.part("profile", lambda: program("profile", *words))
        calibration = [*words, *day.pick((), QUICK)]
        day.record.part("calibrate", lambda: program("calibrate", *calibration))
        planning = [*words, "placement=cost", "plan.world_size=1", f"plan.device={device}"]
        day.record.part("plan", lambda: program("plan", *planning))
        for name in day.pick(tuple(RUNS), REHEARSED_RUNS):
            day.record.part(f"{TRAIN}{name}", lambda n=name: train(program, n, training, folder))
        done = [part["run_dir"] for name, part in day.record.parts.items() if "run_dir" in part]
        day.record.part("report", lambda: program("report", f"runs=[{','.join(done)}]"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(run, summarize))
