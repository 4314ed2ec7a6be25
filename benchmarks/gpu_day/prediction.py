"""Stage 5: calibrate, plan, train and report on one GPU: predictions compared with measurements.

The program's own commands, as a user would start them, on synthetic data. The prediction of memory
is that of the tables and their state, and is compared with their size; next to it is the peak use
of the device by the whole run, which has to fit, too.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_day.record import OK, NotHereError, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, main
from hotrec.report.units import show_bytes, show_error, show_seconds

POLL_S = 0.05
# A prediction this close to what was measured is good.
STEP_TARGET, MEMORY_TARGET = 0.15, 0.10
TRAIN = "train "
REAL = (
    "data=synthetic_criteo_like", "dataset_name=gpu_day",
    # Four times the rows: 5 GB, so that tables and not libraries fill the memory.
    "data.synthetic.num_rows=[5840,2332,3504560,3504564,1220,96,50068,2532,12,372580,22732,3504564,"
    "12776,108,59968,3504564,40,22608,8692,16,3504564,72,60,1144724,420,570288]",
    "data.synthetic.num_train=600000", "data.synthetic.num_valid=20000",
    "data.synthetic.num_test=20000", "data.synthetic.num_periods=1",
    "data.synthetic.drift_frac=0.0", "trainer.batch_size=8192",
)  # fmt: skip
REAL_TRAIN = ("trainer.num_epochs=3", "trainer.max_steps=160", "trainer.num_workers=8")
REHEARSED = ("experiment=synthetic_smoke",)
REHEARSED_TRAIN = ("trainer.num_epochs=2", "trainer.max_steps=32")
QUICK = (
    "calibrate.max_bytes=65536", "calibrate.repeats=3", "calibrate.cap_mib=4",
    "calibrate.budget_s=1",
)  # fmt: skip
IN_MEMORY = ("placement=all_cold", "placement.cold_tier=fused")
COMPILED = "all cold, compiled"
RUNS: dict[str, tuple[str, ...]] = {
    "TorchRec's planner": ("placement=torchrec", "pipeline=sparse_dist"),
    "all cold": (*IN_MEMORY, "pipeline=sparse_dist"),
    "all cold, look_ahead": (*IN_MEMORY, "pipeline=look_ahead"),
    "slots 10%": (
        "placement=all_cold", "placement.cold_tier=cached", "placement.cache_load_frac=0.1",
        "pipeline=look_ahead",
    ),
    # What no other stage runs.
    "all cold, bf16": (*IN_MEMORY, "pipeline=sparse_dist", "trainer.precision=bf16"),
    COMPILED: (*IN_MEMORY, "pipeline=sparse_dist", "trainer.compile=true"),
}  # fmt: skip
# Of the few rows of a rehearsal more, for the batches in flight.
REHEARSED_SLOTS = ("placement.cache_load_frac=0.5",)


def _command(words: Sequence[str], folder: Path, run_dir: str, said: Path, printed: Path) -> None:
    """A command, in a process forked for it."""
    # Loaders fork their workers, as in a command that a shell started.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(folder)
    os.environ["HOTREC_RUN_DIR"] = run_dir
    for path, descriptor in ((printed, 1), (said, 2)):
        with path.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = ["hotrec", *words]
    from hotrec.cli import main as run

    code = run(words)
    atexit._run_exitfuncs()  # which a forked process would leave out
    sys.exit(code)


class Program:
    """The program's commands, in a directory of their own.

    Args:
        folder: where they read and write.
        device: that they compute on.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device

    def __call__(self, *words: str, run_dir: str | None = None) -> dict[str, Any]:
        """Run a command, in a process that has loaded the libraries but not started CUDA.

        Returns:
            What it prints, with "peak_bytes", the device's memory it had in use at most.

        Raises:
            RuntimeError: if it fails, with the last lines of what it said.
        """
        said, printed = self._folder / "said.txt", self._folder / "printed.txt"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["hotrec.cli.app", "hotrec.runs.train"])
        process = context.Process(
            target=_command,
            args=(words, self._folder, run_dir or f"runs/{words[0]}", said, printed),
        )
        peak = before = self._used_bytes()
        process.start()
        while process.exitcode is None:
            peak = max(peak, self._used_bytes())
            process.join(POLL_S)
        text, lines = said.read_text(errors="replace"), printed.read_text().splitlines()
        print(f"$ hotrec {' '.join(words)}\n{text}", flush=True)
        if process.exitcode != 0 or not lines:
            last = " / ".join(text.splitlines()[-3:])
            raise RuntimeError(f"hotrec {words[0]}: exit code {process.exitcode}: {last}")
        figures: dict[str, Any] = json.loads(lines[-1])
        return {**figures, "peak_bytes": peak - before}

    def _used_bytes(self) -> int:
        """Of the device, by everybody."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def train(program: Program, name: str, words: Sequence[str]) -> dict[str, Any]:
    """Train; what was predicted and what was measured.

    Raises:
        NotHereError: on the stand-in, for which nothing can be compiled.
    """
    if name == COMPILED and torch.cuda.cudart() is None:
        raise NotHereError("trainer.compile: the stand-in runs no compiled kernels")
    run_dir = f"runs/{''.join(letter if letter.isalnum() else '_' for letter in name)}"
    return {"run_dir": run_dir, **program("train", *words, run_dir=run_dir)}


def errors(part: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Of the predicted step and memory, relative to what was measured; None if one is missing."""
    predicted, measured = _table_bytes(part)
    pairs = ((part["predicted_step_s"], part["measured_step_s"]), (predicted, measured))
    step, memory = ((p / m - 1) if p and m else None for p, m in pairs)
    return step, memory


def _table_bytes(part: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Predicted and measured bytes of the tables in the device's memory."""
    return part["predicted_device_bytes"], part["measured_device_bytes"]


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
                show_bytes(part["peak_bytes"]) if part["peak_bytes"] else DASH,
            ]
        )
    header = [
        "run", "step predicted", "measured", "error", "waits for data", "tables predicted",
        "measured", "error", "in use at most",
    ]  # fmt: skip
    note = (
        "Step: the median from step 50 on, as `hotrec train` compares it. Tables: the device's "
        "memory of the tables and their state. In use at most: by all of the "
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
    words = [*day.pick(REAL, REHEARSED), "trainer.device=cuda"]
    training = [*words, *day.pick(REAL_TRAIN, REHEARSED_TRAIN), "trainer.eval_splits=[]"]
    folder = Path(tempfile.mkdtemp(prefix="gpu_day_"))
    program = Program(folder, day.device)
    planning = (*words, "placement=cost", "plan.world_size=1", "plan.device=cuda")
    commands = {
        "prepare": words,
        "calibrate": (*words, *day.pick((), QUICK)),
        "plan": planning,
    }
    try:
        for name, of_command in commands.items():
            day.record.part(name, lambda n=name, w=of_command: program(n, *w))
        for name, own in RUNS.items():
            more = REHEARSED_SLOTS if day.is_rehearsal and "slots" in name else ()
            whole = (*training, *own, *more)
            day.record.part(f"{TRAIN}{name}", lambda n=name, w=whole: train(program, n, w))
        done = [part["run_dir"] for part in day.record.parts.values() if "run_dir" in part]
        day.record.part("report", lambda: program("report", f"runs=[{','.join(done)}]"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(run, summarize))
