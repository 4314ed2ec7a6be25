"""Runs: resumed, killed, beside each other, with broken callbacks and workers, on a full disk."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import forge
from tests.faults.case import (
    Act,
    Case,
    Complaint,
    Made,
    either,
    refused,
    unchanged,
    works,
)
from tests.faults.table.artifacts import GO_ON, NEW, RANKS
from tests.faults.table.data import LOG, log
from tests.faults.workspace import (
    DATASET,
    EVALUATE,
    EXPORT,
    EXPORT_AGAIN,
    FIRST,
    ONE,
    PARTITION,
    PLAN,
    PREDICT,
    PREPARE,
    PROFILED,
    SERVED,
    TINY,
    TRAIN,
    TWO,
    in_run,
    latest_whole,
    same_artifact,
    same_run,
    same_tensors,
    whole_artifact,
)

if TYPE_CHECKING:
    from tests.faults.process import Running

OWN: dict[str, Any] = {"variables": in_run(ONE), "outputs": (ONE,)}
TWO_RANKS = f"{TRAIN} launch.num_ranks=2"
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STEP = "runs/new/metrics.jsonl"


# --------------------------------------------------------- resumed: (when) x (what has changed)

# An override, and what must be named if it is refused; None where it works.
CHANGED = {
    "model.over_layer_sizes=[16,1]": (refused, "model"),
    "model.embedding_dim=8 model.dense_layer_sizes=[8,8]": (refused, "model"),
    "model=dcnv2": (refused, "model"),
    "optimizer=sgd": (refused, "optimizer"),
    "optimizer.dense_kind=sgd": (refused, "optimizer"),
    "paths.dataset=data/other/dataset": (refused, "dataset"),
    "paths.dataset=data/other/dataset placement=all_cold": (refused, "dataset"),
    "order=all_hot": (refused, "order"),
    "trainer.batch_size=32": (either, "batch_size"),
    "trainer.seed=7": (either, "seed"),
    "trainer.precision=bf16": (either, "precision"),
    "placement=all_cold": (works, ""),
    "placement=torchrec": (works, ""),
    "placement=coverage placement.coverage_frac=0.2": (works, ""),
    "launch.num_ranks=2": (works, ""),
}
# A run of one rank that has ended, its older checkpoint, and a run of two ranks.
WHEN: dict[str, tuple[str, dict[str, Any]]] = {
    "ended": (GO_ON, {**OWN, "check": latest_whole(24)}),
    "older": (f"{GO_ON} trainer.resume={ONE}/{FIRST}", {**NEW, "check": latest_whole(24, "runs/new")}),
    "ranks": (f"{GO_ON} launch.num_ranks=2", {"variables": in_run(TWO), "outputs": (TWO,), "check": latest_whole(24, TWO)}),
}
SLOTS = (
    "placement=all_cold placement.cold_tier=cached placement.cache_load_frac=0.75 pipeline=look_ahead "
    "trainer.eval_splits=[] trainer.num_epochs=1000 trainer.max_steps=400 trainer.save_every_steps=150"
)


def _killed_and_resumed(words: str, lines: int) -> Act:
    """Run the command a second time, beside the first, killed once and started again."""

    def act(running: Running) -> Complaint:
        case = replace(running.case, variables=in_run("runs/second"))
        other = _start(running, case, words, "killed")
        other.wait_for("runs/second/metrics.jsonl", lines=lines)
        if other.poll() is not None:
            return "unclear", "the second command ended before it was killed"
        os.killpg(other.pid, KILL)
        other.wait(20)
        return _again(running, case, words)

    return act


def _start(running: Running, case: Case, words: str, name: str) -> Running:
    from tests.faults.process import start

    scratch = running.scratch / name
    (scratch / "tmp").mkdir(parents=True)
    return start(case, words, running.folder, scratch)


def _again(running: Running, case: Case, words: str) -> Complaint:
    other = _start(running, case, words, "again")
    if (code := other.wait(case.limit_s)) == 0:
        return None
    said = (other.scratch / "err").read_text().strip().splitlines()[-1:]
    return "hang" if code is None else "unclear", f"started again: exit code {code}, {said}"


def _resume_cases() -> Iterator[Case]:
    for (when, (words, more)), (override, (make, key)) in product(WHEN.items(), CHANGED.items()):
        if when == "ranks":
            more = {**more, **RANKS}
        key = (key,) if key else ()
        yield make(f"resume/{when}-{override.replace(' ', '-').replace('/', '.')}", f"{words} {override}", *key, **more)
    for name, words in (("slots", f"{TRAIN} {SLOTS}"), ("half-slots", f"{TRAIN} {SLOTS} placement.cold_rows=bf16")):
        yield works(f"resume/killed-{name}", words, act=_killed_and_resumed(words, 200), check=same_run("runs/second", "runs/new", in_reference=False), limit_s=120, **NEW)
    yield works("resume/goes-on", GO_ON, check=latest_whole(24), **OWN)
    yield works("resume/fewer-ranks", GO_ON, check=latest_whole(24, TWO), variables=in_run(TWO), outputs=(TWO,))
    yield works("resume/other-run", f"{TRAIN} trainer.resume={ONE}/{FIRST}", check=same_tensors("runs/new", ONE), **NEW)
    yield works("resume/finished", TRAIN, check=_finished, variables=in_run(ONE))
    yield works("resume/finished-ranks", TWO_RANKS, variables=in_run(TWO), limit_s=90)
    yield either("resume/fewer-steps", f"{TRAIN} trainer.max_steps=14", "num_steps|max_steps", variables=in_run(ONE))
    for name, words in (("evaluate", EVALUATE), ("prepare", PREPARE)):
        yield either(f"resume/{name}-into-run", words, ONE, variables=in_run(ONE), outputs=("data/tiny",))
    # What a kill has left is removed or taken up.
    yield refused("resume/dataset-replaced", GO_ON, "dataset", forge.copied("data/other/dataset", DATASET), variables=in_run(ONE))
    yield works("resume/latest-missing", GO_ON, forge.damaged(f"{ONE}/checkpoints/latest", "deleted"), check=latest_whole(24), **OWN)
    half = forge.copied(f"{ONE}/{FIRST}", f"{ONE}/checkpoints/.step-00000024.0a1b2c3d.tmp")
    yield works("resume/half-checkpoint", GO_ON, half, check=_tidy(f"{ONE}/checkpoints"), **OWN)
    retired = forge.several(forge.copied(DATASET, "data/tiny/.dataset.0a1b2c3d.old"), forge.damaged(DATASET, "deleted"))
    yield works("resume/dataset-retired", PLAN, retired, check=same_artifact(DATASET), outputs=("data/tiny",))
    for own, words in ((DATASET, PREPARE), (PROFILED, f"{PREPARE} data.synthetic.seed=9"), (PARTITION, PLAN)):
        stale = forge.damaged(f"data/tiny/.{Path(own).name}.0a1b2c3d.tmp", "directory")
        yield works(f"resume/{Path(own).name}-after-a-kill", words, stale, check=_tidy("data/tiny"), outputs=("data/tiny",))


def _finished(made: Made) -> str | None:
    """A run that was finished is reported as it was."""
    summary = json.loads((made.folder / ONE / "summary.json").read_text())
    rates = {name: made.figures[0].get(name) for name in ("samples_per_s", "loss", "auc")}
    return None if all(rates[name] == summary[name] for name in rates) else f"figures are {rates}"


def _tidy(below: str) -> Callable[[Made], Complaint]:
    """Nothing hidden is left beside the artifacts in a directory."""

    def check(made: Made) -> Complaint:
        found = sorted(path.name for path in (made.folder / below).glob(".*") if path.is_dir())
        return ("left", f"{below} still holds {found}") if found else None

    return check


# --------------------------------------------------- killed and started again: (what) x (when)

KILLED: dict[str, tuple[str, str, str, Any]] = {
    "prepare": (PREPARE, "data/tiny", "data/tiny/.dataset*.tmp", same_artifact(DATASET)),
    "profile": (f"{PREPARE} data.synthetic.seed=9", "data/tiny", "data/tiny/.dataset-profile*.tmp", whole_artifact(PROFILED)),
    "plan": (PLAN, "data/tiny", "data/tiny/.partition*.tmp", same_artifact(PARTITION)),
    "export": (EXPORT_AGAIN, "data/served", "data/served/.model*.tmp", same_artifact(SERVED)),
    "predict": (PREDICT, "data/new", "data/new/.scores*.tmp", whole_artifact("data/new/scores")),
    "train": (TRAIN, "runs/new/checkpoints", "runs/new/checkpoints/.*.tmp", same_run("runs/new", ONE)),
    "train-ranks": (TWO_RANKS, "runs/new/checkpoints", "runs/new/checkpoints/.*.tmp", same_run("runs/new", TWO)),
}
# What is there when it is killed, how often it must have come, and how many seconds ago.
MOMENTS = {"start": ("runs/new/log.txt", 0.0), "writing": ("", 0.0), "later": ("", 0.02), "second": ("", 0.05)}


def _kill_cases() -> Iterator[Case]:
    for (stage, (words, below, writing, same)), (moment, (ready, later_s)) in product(KILLED.items(), MOMENTS.items()):
        def act(running: Running, words: str = words, ready: str = ready or writing, later_s: float = later_s) -> Complaint:
            running.wait_for(ready)
            running.wait(later_s)
            if running.poll() is None:
                os.killpg(running.pid, KILL)
            running.wait(20)
            running.left(12)
            return _again(running, running.case, words)

        def check(made: Made, same: Any = same, below: str = below) -> Any:
            return same(made) or _tidy(below)(made)

        yield Case(f"kill/{stage}-{moment}", (words,), act=act, check=check, exit_codes=(0, 137), speaks=False, may_leave=True, outputs=("data/tiny", "data/served", "data/new"), limit_s=120, grace_s=12, **NEW)


# ---------------------------------------------------------------------------------------- workers


def _worker_cases() -> Iterator[Case]:
    """Errors inside loader workers, of one rank and of two."""
    for chunk, ranks in product(("train-00000", "valid-00000"), (1, 2)):
        more = {**NEW, **(RANKS if ranks == 2 else {})}
        yield refused(f"worker/{chunk}-garbled-{ranks}", f"{TRAIN} trainer.num_workers=2 launch.num_ranks={ranks}", chunk, forge.damaged(f"{DATASET}/chunks/{chunk}.arrow", "garbled"), **more)


# ------------------------------------------------------------------------------ beside each other


def beside(words: str, ready: str, *, codes: tuple[int, ...] = (0, 1), run_dir: str = "runs/second", stopped: bool = False, lines: int = 0) -> Act:
    """Start a second command once a file is there, while the first runs or is stopped."""

    def act(running: Running) -> Complaint:
        running.wait_for(ready, lines=lines)
        if running.poll() is not None:
            return "unclear", "the first command ended before the second was started"
        if stopped:
            os.killpg(running.pid, STOP)
        other = _start(running, replace(running.case, variables=in_run(run_dir)), words, "second")
        code = other.wait(40)
        if stopped:
            os.killpg(running.pid, signal.SIGCONT)
        said = (other.scratch / "err").read_text().strip().splitlines()[-1:]
        if code is None:
            os.kill(other.pid, KILL)
            return "hang", "the second command does not end"
        verdict = "silent" if code == 0 else "unclear"
        return None if code in codes else (verdict, f"the second: exit code {code}, {said}")

    return act


def _together_cases() -> Iterator[Case]:
    log_file = "runs/new/log.txt"
    slow = f"{TRAIN} trainer.num_epochs=1000 trainer.max_steps=400 trainer.save_every_steps=0 trainer.eval_splits=[]"
    # Two of one run directory; on ranks longer than the second takes to start.
    for name, words, ready, steps in (("runs", slow, STEP, 400), ("runs-start", slow, log_file, 400), ("runs-ranks", f"{slow} trainer.max_steps=1000 launch.num_ranks=2", STEP, 1000)):
        yield works(f"together/two-{name}", words, act=beside(words, ready, codes=(1,), run_dir="runs/new"), check=latest_whole(steps, "runs/new"), limit_s=180, **NEW)
    large = f"{PREPARE} data.synthetic.num_train=1000000 data.synthetic.rows_per_chunk=20000"
    both: dict[str, Any] = {**NEW, "outputs": (DATASET, PROFILED, PARTITION)}
    yield works("together/two-prepares", large, act=beside(large, "data/tiny/.dataset*.tmp/**/*.arrow", codes=(1,), stopped=True), check=whole_artifact(DATASET), limit_s=90, **both)
    # What is read is made anew meanwhile.
    other = f"{PREPARE} data.synthetic.seed=9"
    for name, words, ready, check in (
        ("run-0", TRAIN, STEP, same_run("runs/new", ONE)),
        ("run-2", f"{TRAIN} trainer.num_workers=2", STEP, same_run("runs/new", ONE)),
        ("plan", PLAN, log_file, whole_artifact(PARTITION)),
    ):
        yield either(f"together/prepare-during-{name}", words, "dataset|profile", act=beside(other, ready, stopped=True, lines=2 if ready == STEP else 0), check=check, **both)
    yield works("together/evaluate-during-run", GO_ON, act=beside(EVALUATE, f"{ONE}/metrics.jsonl", codes=(0,), lines=17), check=latest_whole(24), **OWN)


# ----------------------------------------------------------------- signals: (what runs) x (which)


def send(number: signal.Signals, ready: str, lines: int) -> Act:
    """A signal to the command, once a file is there."""

    def act(running: Running) -> Complaint:
        running.wait_for(ready, lines=lines)
        if running.poll() is not None:
            return "unclear", "the command ended before the signal"
        os.kill(running.pid, number)
        return None

    return act


LONG = f"{TRAIN} trainer.num_epochs=1000000 trainer.max_steps=1000000 trainer.save_every_steps=500 trainer.watchdog_s=4"
CHUNKS = "data.synthetic.rows_per_chunk=100000"
# What is there, and how many lines of it, when the signal is sent.
STAGES = {
    "train": (f"{LONG} trainer.num_workers=2", STEP, 3),
    "train-ranks": (f"{LONG} launch.num_ranks=2", STEP, 3),
    "prepare": (f"{PREPARE} data.synthetic.num_train=3000000 {CHUNKS}", "data/tiny/.dataset*.tmp/**/*.arrow", 0),
    "prepare-ranks": (f"{PREPARE} launch.num_ranks=2 data.synthetic.num_train=6000000 {CHUNKS}", "data/tiny/.dataset*.tmp/**/*.arrow", 0),
    "evaluate": (f"{EVALUATE} launch.num_ranks=1 num_workers=2", "runs/new/log.txt", 0),
    "calibrate": (f"calibrate {TINY} calibrate.cap_mib=64", "runs/new/log.txt", 0),
    "export": (EXPORT_AGAIN, "data/served/.model*.tmp", 0),
    "predict": (PREDICT, "data/new/.scores*.tmp", 0),
}


def _signal_cases() -> Iterator[Case]:
    more: dict[str, Any] = {"is_exec": True, "limit_s": 50, "grace_s": 12.0, "speaks": False, **NEW}
    for number, (stage, (words, ready, lines)) in product((KILL, signal.SIGTERM, signal.SIGINT), STAGES.items()):
        made = {"outputs": (DATASET,), "check": whole_artifact(DATASET)} if stage.startswith("prepare") else {"outputs": ("data/served", "data/new")}
        yield Case(f"signal/{stage}-{number.name[3:].lower()}", (words,), act=send(number, ready, lines), exit_codes=(128 + number,), may_leave=number == KILL, **made, **more)


# ------------------------------------------------------------------------ a full disk: (what) x (how full)

SMALL_RUN = {"variables": in_run("small/runs")}
# Kibibytes that are too few for each stage; 4 at a time, which is how a tmpfs gives them.
DISK: list[tuple[str, str, tuple[int, ...], dict[str, Any]]] = [
    ("prepare", f"{PREPARE} paths.dataset=small/dataset", (8, 16, 32, 64), {}),
    ("prepare-log", f"{LOG} paths.dataset=small/dataset", (4, 8), {}),
    ("plan", f"{PLAN} paths.partition=small/partition", (4,), {}),
    ("plan-run", PLAN, (8, 32), {**SMALL_RUN, "outputs": (PARTITION,)}),
    ("costs", f"calibrate {TINY} calibrate.cap_mib=1 calibrate.max_bytes=4096 calibrate.repeats=3 paths.costs=small/costs", (4,), {}),
    ("train", TRAIN, (4, 16, 32, 48, 64, 96), SMALL_RUN),
    ("train-ranks", TWO_RANKS, (16, 48, 96, 128), {**SMALL_RUN, **RANKS}),
    ("evaluate", EVALUATE, (4,), SMALL_RUN),
    ("report", f"report runs=[{ONE}] output=small/page", (16, 64), {}),
    ("tmp", f"{TRAIN} trainer.num_workers=2", (4,), {"variables": {"TMPDIR": "small"}}),
    ("export", EXPORT.replace("data/new", "small"), (4, 16, 28), {}),
    ("predict", PREDICT.replace("data/new", "small"), (4, 8), {}),
]


def _disk_cases() -> Iterator[Case]:
    for name, words, sizes, more in DISK:
        for kib in sizes:
            change = log() if name == "prepare-log" else unchanged
            make = either if name in ("tmp", "evaluate") else refused
            yield make(f"disk/{name}-{kib}k", words, "small", change, disk_bytes=kib << 10, **more)


def cases(_: Path) -> Iterator[Case]:
    for part in (_resume_cases, _kill_cases, _worker_cases, _together_cases, _signal_cases, _disk_cases):
        yield from part()
