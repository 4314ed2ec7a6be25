"""Runs: resumed, side by side, with forged files, broken workers, signals and a full disk."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.faults import edits
from tests.faults.case import (
    Act,
    Case,
    Change,
    Complaint,
    Made,
    either,
    fast,
    refused,
    unchanged,
    works,
)
from tests.faults.table.artifacts import CHECKPOINT, GO_ON, READERS
from tests.faults.table.data import LOG, log, table
from tests.faults.workspace import (
    COSTS,
    DATASET,
    EVALUATE,
    FIRST,
    LAST,
    ONE,
    PARTITION,
    PLAN,
    PREPARE,
    PROFILE,
    PROFILED,
    TINY,
    TRAIN,
    TWO,
    compare_runs,
    hash_document,
    in_run,
    same_artifact,
    same_run,
    same_tensors,
    whole,
)

CALIBRATE = f"calibrate {TINY} calibrate.cap_mib=1 calibrate.max_bytes=4096 calibrate.repeats=3"

if TYPE_CHECKING:
    from tests.faults.process import Running

NEW: dict[str, Any] = {"variables": in_run("runs/new")}
OWN: dict[str, Any] = {"variables": in_run(ONE), "outputs": (ONE,)}
RANKS: dict[str, Any] = {"ranks": (0, 1), "limit_s": 90, "is_exec": True}
TWO_RANKS = f"{TRAIN} launch.num_ranks=2"
STOPPED_RANK_CODE = 75


def latest_whole(step: int | None = None, run_dir: str = ONE) -> Callable[[Made], str | None]:
    """A check: ``latest`` names a whole checkpoint, of this step if given."""

    def check(made: Made) -> str | None:
        checkpoints = made.folder / run_dir / "checkpoints"
        latest = (checkpoints / "latest").read_text().strip()
        if step is not None and latest != f"step-{step:08d}":
            return f"latest is {latest}, not step {step}"
        return whole(checkpoints / latest)

    return check


def finished(made: Made) -> str | None:
    """A check: a run that was finished is reported as it was."""
    summary = json.loads((made.folder / ONE / "summary.json").read_text())
    rates = {name: made.figures[0].get(name) for name in ("samples_per_s", "loss", "auc")}
    return None if all(rates[name] == summary[name] for name in rates) else f"figures are {rates}"


def tidy(below: str) -> Callable[[Made], Complaint]:
    """A check: nothing hidden is left beside the artifacts in a directory."""

    def check(made: Made) -> Complaint:
        found = sorted(path.name for path in (made.folder / below).glob(".*") if path.is_dir())
        return ("left", f"{below} still holds {found}") if found else None

    return check


SLOTS = (
    f"{TRAIN} placement=all_cold placement.cold_tier=cached placement.cache_load_frac=0.75 "
    "pipeline=look_ahead trainer.eval_splits=[] trainer.num_epochs=1000 trainer.max_steps=400 "
    "trainer.save_every_steps=150"
)


def _killed_and_resumed(words: str, lines: int) -> Act:
    """Run the command a second time, beside the first, killed once and started again."""

    def act(running: Running) -> Complaint:
        from tests.faults.process import start

        case = replace(running.case, variables=in_run("runs/second"))
        for is_killed in (True, False):
            scratch = running.scratch / f"killed-{is_killed}"
            (scratch / "tmp").mkdir(parents=True)
            other = start(case, words, running.folder, scratch)
            if is_killed:
                other.wait_for("runs/second/metrics.jsonl", lines=lines)
                if other.poll() is not None:
                    return "unclear", "the second command ended before it was killed"
                os.killpg(other.pid, signal.SIGKILL)
                other.wait(20)
            elif (code := other.wait(50)) != 0:
                said = (scratch / "err").read_text().strip().splitlines()[-1:]
                return "unclear", f"started again: exit code {code}, {said}"
        return None

    return act


def _second_as_first(made: Made) -> str | None:
    return compare_runs(made.folder / "runs/second", made.folder / "runs/new")


def _resume_cases() -> Iterator[Case]:
    for name, words in (("slots", SLOTS), ("half-slots", f"{SLOTS} placement.cold_rows=bf16")):
        yield works(f"resume/{name}-after-a-kill", words, act=_killed_and_resumed(words, 200), check=_second_as_first, limit_s=120, **NEW)
    yield works("resume/in-halves", f"{TRAIN} trainer.max_steps=8\n{TRAIN}", check=same_run("runs/new", ONE), **NEW)
    yield works("resume/in-halves-workers", f"{TRAIN} trainer.max_steps=8 trainer.num_workers=2\n{TRAIN} trainer.num_workers=2", check=same_run("runs/new", ONE), **NEW)
    yield works("resume/in-halves-ranks", f"{TWO_RANKS} trainer.max_steps=8\n{TWO_RANKS}", check=same_run("runs/new", TWO), limit_s=90, **NEW)
    adaptive = "placement.adapt_every_steps=3 placement.adapt_max_rows=4"
    # Neither the moves nor the stop between two of them changes a loss or a row.
    yield works("resume/in-halves-adaptive", f"{TWO_RANKS} {adaptive} trainer.max_steps=8\n{TWO_RANKS} {adaptive}", check=same_run("runs/new", TWO), limit_s=90, **NEW)
    yield works("resume/from-other-run", f"{TRAIN} trainer.resume={ONE}/{FIRST}", check=same_tensors("runs/new", ONE), **NEW)
    warm, layer = f"{TRAIN} trainer.warm_start={ONE}", "model.over_layer_sizes=[16,1]"
    yield refused("resume/warm-dim", f"{warm} model.embedding_dim=8 model.dense_layer_sizes=[8,8]", "embedding_dim|shape", **NEW)
    yield refused("resume/warm-layer", f"{warm} {layer}", "warm_start_names", **NEW)
    yield works("resume/warm-layer-left-out", f"{warm} {layer} +trainer.warm_start_names={{over_arch:null}}", **NEW)
    yield refused("resume/warm-name-of-nothing", f"{warm} +trainer.warm_start_names={{nothing:user}}", "warm_start_names.nothing", **NEW)
    yield refused("resume/names-without-warm-start", f"{TRAIN} +trainer.warm_start_names={{user:user}}", "warm_start_names", **NEW)
    yield works("resume/goes-on", GO_ON, check=latest_whole(24), **OWN)
    older = f"{GO_ON} trainer.resume={ONE}/{FIRST} trainer.save_every_steps=2"
    yield works("resume/from-older", f"{older} trainer.max_steps=14", check=latest_whole(14), **OWN)
    yield works("resume/from-older-to-between", f"{older} trainer.max_steps=15", check=latest_whole(15), **OWN)
    yield works("resume/from-older-to-same", f"{older} trainer.max_steps=16", check=latest_whole(16), **OWN)
    yield works("resume/from-older-keep-one", f"{older} trainer.max_steps=14 trainer.keep_checkpoints=1", check=latest_whole(14), **OWN)
    yield either("resume/none-with-newer", f"{GO_ON} trainer.resume=none trainer.max_steps=2", "resume|checkpoints", check=latest_whole(2), **OWN)
    yield either("resume/none-keep-one", f"{GO_ON} trainer.resume=none trainer.max_steps=2 trainer.keep_checkpoints=1", "resume|checkpoints", check=latest_whole(2), **OWN)
    yield works("resume/finished", TRAIN, check=finished, variables=in_run(ONE))
    yield works("resume/finished-ranks", TWO_RANKS, variables=in_run(TWO), limit_s=90)
    yield either("resume/evaluate-into-run", EVALUATE, ONE, variables=in_run(ONE))
    yield either("resume/prepare-into-run", PREPARE, ONE, variables=in_run(ONE), outputs=("data/tiny",))
    yield either("resume/fewer-steps", f"{TRAIN} trainer.max_steps=14", "num_steps|max_steps", variables=in_run(ONE))
    changed = [
        ("model", "model.over_layer_sizes=[16,1]", "model"),
        ("model-dim", "model.embedding_dim=8 model.dense_layer_sizes=[8,8]", "model"),
        ("model-kind", "model=dcnv2", "model"),
        ("optimizer", "optimizer=sgd", "optimizer"),
        ("optimizer-dense", "optimizer.dense_kind=sgd", "optimizer"),
        ("dataset", "paths.dataset=data/other/dataset", "dataset"),
        ("dataset-cold", "paths.dataset=data/other/dataset placement=all_cold", "dataset"),
        ("order", "order=all_hot", "order"),
    ]
    for name, override, key in changed:
        yield refused(f"resume/{name}-changed", f"{GO_ON} {override}", key, variables=in_run(ONE))
        if name in ("model", "optimizer", "dataset"):
            yield refused(f"resume/{name}-changed-path", f"{TRAIN} trainer.resume={ONE}/{FIRST} {override}", key, **NEW)
    again = edits.several(edits.copied("data/other/dataset", DATASET))
    yield refused("resume/dataset-replaced", GO_ON, "dataset", again, variables=in_run(ONE))
    for name in ("batch_size=32", "seed=7", "precision=bf16"):
        yield either(f"resume/{name.partition('=')[0]}-changed", f"{GO_ON} trainer.{name}", name.partition("=")[0], **OWN)
    for name in ("placement=all_cold", "placement=torchrec", "placement=coverage placement.coverage_frac=0.2"):
        key = name.partition(" ")[0].replace("=", "-")
        yield works(f"resume/{key}-changed", f"{GO_ON} {name}", check=latest_whole(24), **OWN)
        yield works(f"resume/{key}-changed-path", f"{TRAIN} trainer.resume={ONE}/{FIRST} {name}", **NEW)
    yield works("resume/more-ranks", f"{GO_ON} launch.num_ranks=2", check=latest_whole(24), limit_s=90, **OWN)
    yield works("resume/fewer-ranks", GO_ON, check=latest_whole(24, TWO), variables=in_run(TWO), outputs=(TWO,))
    yield refused("resume/model-changed-ranks", f"{GO_ON} launch.num_ranks=2 model.over_layer_sizes=[16,1]", "model", variables=in_run(TWO), **RANKS)
    yield works("resume/latest-missing", GO_ON, edits.deleted(f"{ONE}/checkpoints/latest"), check=latest_whole(24), **OWN)
    half = edits.copied(f"{ONE}/{FIRST}", f"{ONE}/checkpoints/.step-00000024.0a1b2c3d.tmp")
    yield works("resume/half-checkpoint", GO_ON, half, check=tidy(f"{ONE}/checkpoints"), **OWN)
    retired = edits.several(edits.copied(DATASET, "data/tiny/.dataset.0a1b2c3d.old"), edits.deleted(DATASET))
    data = ("data/tiny",)
    yield works("resume/dataset-retired", PROFILE, retired, check=same_artifact(DATASET), outputs=data)
    for name, words in (("prepare", PREPARE), ("profile", PROFILE), ("plan", PLAN)):
        own = {"prepare": "dataset", "profile": "profile", "plan": "partition"}[name]
        stale = edits.directory(f"data/tiny/.{own}.0a1b2c3d.tmp")
        yield works(f"resume/{name}-after-a-kill", words, stale, check=tidy("data/tiny"), outputs=data)


def _tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    """The tensors of the checkpoint, changed and saved again, in a manifest that agrees."""
    name = "tensors/00000-00000.safetensors"

    def edit(folder: Path) -> None:
        from safetensors.torch import load, save

        tensors = load((folder / CHECKPOINT / name).read_bytes())
        change(tensors)
        forged(CHECKPOINT, name, lambda: save(tensors))(folder)

    return edit


def _value(suffix: str, value: float) -> Change:
    def change(tensors: dict[str, Any]) -> None:
        name = next(name for name in sorted(tensors) if name.endswith(suffix))
        tensors[name].view(-1)[-1] = value

    return _tensors(change)


def _first_piece(**change: Any) -> Change:
    def edit(document: Any) -> None:
        tensors = document["content"]["tensors"]
        name = next(name for name in sorted(tensors) if name.endswith("t0.weight"))
        tensors[name]["pieces"][0] |= change

    return edits.rehashed(CHECKPOINT, edit)


def _state_cases() -> Iterator[Case]:
    """A checkpoint whose hashes are right and whose content is not, and damaged records beside it."""
    for name, change in (("negative", {"first": [-1, 0]}), ("shifted", {"first": [3, 0]}), ("column", {"first": [0, 1]}), ("flat", {"first": [0]})):
        for reader in ("resume", "evaluate"):
            words, more = READERS[reader]
            yield refused(f"state/piece-{name}-{reader}", words, "t0.weight", _first_piece(**change), **more)
    for name, suffix, value in (("rows-nan", "t0.weight", float("nan")), ("rows-inf", "t3.weight", float("inf")), ("layer-nan", ".bias", float("nan"))):
        for reader in ("resume", "evaluate"):
            words, more = READERS[reader]
            yield refused(f"state/{name}-{reader}", words, "tensors/00000", _value(suffix, value), **more)
    words, more = READERS["resume"]
    yield refused("state/sum-negative", words, "momentum1", _value("t0.weight/momentum1", -1.0), **more)
    yield refused("state/sum-nan", words, "momentum1", _value("t0.weight/momentum1", float("nan")), **more)
    yield refused("state/dense-sum-negative", words, "/sum", _value("/sum", -1.0), **more)
    for name, value in (("null", None), ("empty", {}), ("list", [1]), ("text", "x")):
        yield refused(f"state/loader-{name}", words, "step-00000016", edits.rehashed(CHECKPOINT, lambda document, value=value: document["content"].update(loader=value)), **more)
    damages = {"binary": b"\xff\x00\x80\n", "list": b"[1, 2]\n", "stepless": b'{"loss": 1.0}\n', "null": b"null\n", "empty": b""}
    for file in ("metrics.jsonl", "eval.jsonl"):
        yield works(f"state/{file}-cut", GO_ON, edits.cut(f"{ONE}/{file}"), check=latest_whole(24), **OWN)
        for name, content in damages.items():
            yield works(f"state/{file}-{name}", GO_ON, edits.written(f"{ONE}/{file}", content), check=latest_whole(24), **OWN)
        yield refused(f"state/{file}-pipe", GO_ON, file, _pipe(f"{ONE}/{file}"), **OWN)
    for name, content in (("binary", b"\xff\x00"), ("empty", b""), ("list", b"[1]"), ("other", b"step-00000099")):
        yield works(f"state/best-{name}", GO_ON, edits.written(f"{ONE}/checkpoints/best", content), check=latest_whole(24), **OWN)
    for name, content in (("binary", b"\xff\x00"), ("list", b"[1]")):
        yield refused(f"state/latest-{name}", GO_ON, "checkpoints/latest", edits.written(f"{ONE}/checkpoints/latest", content), variables=in_run(ONE))
    yield refused("state/latest-pipe", GO_ON, "checkpoints/latest", _pipe(f"{ONE}/checkpoints/latest"), variables=in_run(ONE))


def _pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


CALLBACK = """import os, signal, sys, threading, time
from hotrec.train.callbacks import Callback

class Told(Callback):
    def on_log(self, line):
        {body}
"""


def _callback_cases() -> Iterator[Case]:
    words = f"{TRAIN} trainer.callbacks=[told.Told]"
    more: dict[str, Any] = {"is_exec": True, "limit_s": 120, "variables": {**in_run("runs/new"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", ".")))}}
    ends = {"exit": "sys.exit(0)", "interrupt": "raise KeyboardInterrupt", "generator": "raise GeneratorExit", "error": "raise ValueError"}
    for name, body in ends.items():
        yield refused(f"callback/{name}", words, "told.Told.on_log", edits.written("told.py", CALLBACK.format(body=body)), **more)
        yield refused(f"callback/import-{name}", words, "told.Told", edits.written("told.py", f"import os, sys\n{body}\n"), **more)
    sleep = "threading.Thread(target=time.sleep, args=(600,)).start()"
    yield refused("callback/thread", words, "told.Told", edits.written("told.py", CALLBACK.format(body=sleep)), **more)
    meddles = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.chdir('/'); __import__('torch').manual_seed(1)"
    yield works("callback/meddles", words, edits.written("told.py", CALLBACK.format(body=meddles)), check=same_run("runs/new", ONE), **more)
    without = edits.written("prometheus_client.py", "raise ImportError('no package')\n")
    yield refused("callback/metrics-port-without-package", f"{TRAIN} trainer.metrics_port=9400", "trainer.metrics_port", without, **more)


def beside(
    words: str,
    ready: str,
    *,
    codes: tuple[int, ...],
    run_dir: str = "runs/second",
    stopped: bool = False,
    lines: int = 0,
) -> Act:
    """Start a second command once a file is there, while the first runs or is stopped."""

    def act(running: Running) -> Complaint:
        from tests.faults.process import start

        running.wait_for(ready, lines=lines)
        if running.poll() is not None:
            return "unclear", "the first command ended before the second was started"
        if stopped:
            os.killpg(running.pid, signal.SIGSTOP)
        scratch = running.scratch / "second"
        (scratch / "tmp").mkdir(parents=True)
        case = replace(running.case, variables=in_run(run_dir))
        other = start(case, words, running.folder, scratch)
        code = other.wait(40)
        if stopped:
            os.killpg(running.pid, signal.SIGCONT)
        said = (scratch / "err").read_text().strip().splitlines()[-1:]
        if code is None:
            os.kill(other.pid, signal.SIGKILL)
            return "hang", "the second command does not end"
        verdict = "silent" if code == 0 else "unclear"
        return None if code in codes else (verdict, f"the second: exit code {code}, {said}")

    return act


SLOW = "trainer.num_epochs=1000 trainer.max_steps=400 trainer.save_every_steps=0 trainer.eval_splits=[]"


def _together_cases() -> Iterator[Case]:
    step, log_file = "runs/new/metrics.jsonl", "runs/new/log.txt"
    slow = f"{TRAIN} {SLOW}"
    yield works("together/two-runs", slow, act=beside(slow, step, codes=(1,), run_dir="runs/new"), check=latest_whole(400, "runs/new"), **NEW)
    yield works("together/two-runs-start", slow, act=beside(slow, log_file, codes=(1,), run_dir="runs/new"), check=latest_whole(400, "runs/new"), **NEW)
    # Longer than the second takes to start.
    ranks = f"{slow} trainer.max_steps=1000 launch.num_ranks=2"
    yield works("together/two-runs-ranks", ranks, act=beside(ranks, step, codes=(1,), run_dir="runs/new"), check=latest_whole(1000, "runs/new"), limit_s=180, **NEW)
    prepare = f"{PREPARE} data.synthetic.num_train=1000000 data.synthetic.rows_per_chunk=20000"
    both: dict[str, Any] = {"outputs": (DATASET, PROFILED, PARTITION)}
    yield works("together/two-prepares", prepare, act=beside(prepare, "data/tiny/.dataset*.tmp/**/*.arrow", codes=(1,), stopped=True), check=_whole_dataset, limit_s=90, **both)
    other = f"{PREPARE} data.synthetic.seed=9"
    for workers in (0, 2):
        words = f"{TRAIN} trainer.num_workers={workers}"
        act = beside(other, step, codes=(0, 1), stopped=True, lines=2)
        yield either(f"together/prepare-during-run-{workers}", words, "dataset", act=act, check=same_run("runs/new", ONE), outputs=(DATASET,), **NEW)
    yield either("together/prepare-during-evaluate", EVALUATE, "dataset", act=beside(other, log_file, codes=(0, 1), stopped=True), outputs=(DATASET,), **NEW)
    yield either("together/prepare-during-profile", PROFILE, "dataset", act=beside(other, log_file, codes=(0, 1), stopped=True), check=lambda made: whole(made.folder / PROFILED), **NEW, **both)
    yield either("together/profile-during-plan", PLAN, "profile", act=beside(f"{PROFILE} profile.heldout_frac=0.5", log_file, codes=(0, 1), stopped=True), check=lambda made: whole(made.folder / PARTITION), **NEW, **both)
    yield either("together/two-profiles", PROFILE, "profile", act=beside(PROFILE, log_file, codes=(0, 1)), check=same_artifact(PROFILED), **NEW, **both)
    yield either("together/two-plans", PLAN, "partition", act=beside(PLAN, log_file, codes=(0, 1)), check=same_artifact(PARTITION), **NEW, **both)
    yield works("together/evaluate-during-run", GO_ON, act=beside(EVALUATE, f"{ONE}/metrics.jsonl", codes=(0,), lines=17), check=latest_whole(24), **OWN)
    checkpoint = edits.deleted
    for name, change in (("chunk-deleted", checkpoint(f"{DATASET}/chunks/train-00001.arrow")), ("chunk-cut", edits.cut(f"{DATASET}/chunks/train-00001.arrow"))):
        yield either(f"together/{name}-during-run", TRAIN, "train-00001", act=_while_stopped(change, step, 2), check=same_run("runs/new", ONE), outputs=(DATASET,), **NEW)


def _while_stopped(change: Change, ready: str, lines: int) -> Act:
    """Change files at a moment of a run at which nothing of it moves."""

    def act(running: Running) -> Complaint:
        running.wait_for(ready, lines=lines)
        os.killpg(running.pid, signal.SIGSTOP)
        change(running.folder)
        os.killpg(running.pid, signal.SIGCONT)
        return None

    return act


class _Payload:
    """Makes the directory ``marker`` when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("marker",)


def _torch_file() -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save({"loader": _Payload(), "random": _Payload()}, stream)
    return stream.getvalue()


def _numpy_file() -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.save(stream, np.array([_Payload()], dtype=object), allow_pickle=True)
    return stream.getvalue()


def _numpy_archive() -> bytes:
    import numpy as np

    stream = io.BytesIO()
    np.savez(stream, t0=np.array([_Payload()], dtype=object), t1=np.array([_Payload()], dtype=object))
    return stream.getvalue()


def _plain() -> bytes:
    return pickle.dumps(_Payload())


def forged(artifact: str, file: str, make: Callable[[], bytes]) -> Change:
    """A file that runs code when it is unpickled, in a manifest that agrees with it."""

    def change(folder: Path) -> None:
        path = folder / artifact / file
        content = make()
        path.write_bytes(content)
        manifest = folder / artifact / "manifest.json"
        if manifest.exists():
            document = json.loads(manifest.read_text())
            digest = hashlib.sha256(content).hexdigest()
            document["files"][file] = {"num_bytes": len(content), "sha256": digest}
            del document["content_hash"]
            document["content_hash"] = hash_document(document)
            manifest.write_text(json.dumps(document))

    return change


def _extension(pa: Any) -> Any:
    """A column whose type is a pickle, as pyarrow's Python extension types once were."""
    storage = pa.array(list(range(60)))
    marks = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": _plain()}
    return pa.table([storage], pa.schema([pa.field("user", storage.type, metadata=marks)]))["user"]


PAYLOADS: list[tuple[str, str, str, Callable[[], bytes]]] = [
    ("resume", CHECKPOINT, "random-00000.pt", _torch_file),
    ("resume", CHECKPOINT, "random-00000.pt", _plain),
    ("resume", CHECKPOINT, "tensors/00000-00000.safetensors", _torch_file),
    ("evaluate", CHECKPOINT, "tensors/00000-00000.safetensors", _torch_file),
    ("evaluate", CHECKPOINT, "tensors/00000-00000.safetensors", _plain),
    ("evaluate", CHECKPOINT, "manifest.json", _plain),
    ("evaluate", ONE, "config.yaml", _plain),
    ("evaluate", ONE, "checkpoints/latest", _plain),
    ("resume", ONE, "prediction.json", _plain),
    ("report", ONE, "summary.json", _plain),
    ("report", ONE, "metrics.jsonl", _plain),
    ("report", ONE, "environment.json", _plain),
    ("profile", DATASET, "chunks/train-00000.arrow", _plain),
    ("profile", DATASET, "manifest.json", _plain),
    ("plan", PROFILED, "counts/t0.npy", _numpy_file),
    ("plan", PROFILED, "counts/t0.npy", _plain),
    ("plan", PROFILED, "heldout/t0.npy", _numpy_file),
    ("train", PARTITION, "hot_rows.npz", _numpy_archive),
    ("evaluate", PARTITION, "hot_rows.npz", _numpy_archive),
    ("priced", COSTS, "costs.json", _plain),
]


def _payload_cases() -> Iterator[Case]:
    for reader, artifact, file, make in PAYLOADS:
        words, more = READERS[reader]
        change = forged(artifact, file, make)
        if file == "manifest.json":
            change = edits.written(f"{artifact}/{file}", _plain())
        name = f"payload/{reader}-{Path(artifact).name}-{file.replace('/', '-')}-{make.__name__.strip('_')}"
        key = "step-00000016" if artifact == CHECKPOINT else Path(file).name
        yield refused(name, words, key, change, **more)
    two = forged(f"{TWO}/{LAST}", "random-00001.pt", _torch_file)
    yield refused("payload/resume-two-ranks", f"{GO_ON} launch.num_ranks=2", "random-00001.pt", two, variables=in_run(TWO), **RANKS)
    output = {"outputs": ("data/log",)}
    yield refused("payload/prepare-text", LOG, "log.csv|columns", log(_plain()), **output)
    yield refused("payload/prepare-parquet", LOG, "log.parquet", table(damage=edits.written("log.parquet", _plain())), **output)
    yield either("payload/prepare-extension", LOG, "log.arrow|user", table("arrow", user=_extension), **output)
    yield refused("payload/prepare-npy", LOG, "log.arrow", table("arrow", lambda folder: edits.written("log.arrow", _numpy_file())(folder)), **output)


def _worker_cases() -> Iterator[Case]:
    from tests.faults.table.artifacts import rewritten_chunk

    workers, chunk = f"{TRAIN} trainer.num_workers=2", "train-00000"
    faults: list[tuple[str, Change, str]] = [
        ("id-too-large", rewritten_chunk("c0", 200), chunk),
        ("id-negative", rewritten_chunk("c0", -1), chunk),
        ("not-arrow", edits.garbled(f"{DATASET}/chunks/train-00000.arrow"), chunk),
        ("valid-not-arrow", edits.garbled(f"{DATASET}/chunks/valid-00000.arrow"), "valid-00000"),
        ("label-nan", rewritten_chunk("label", float("nan"), 256), f"{chunk}|loss"),
    ]
    for name, change, key in faults:
        yield refused(f"worker/{name}", workers, key, change, **NEW)
    for name, change, key in faults[:3]:
        yield refused(f"worker/{name}-ranks", f"{workers} launch.num_ranks=2", key, change, **RANKS, **NEW)
    test = edits.garbled(f"{DATASET}/chunks/test-00000.arrow")
    yield refused("worker/evaluate-not-arrow", f"{EVALUATE} num_workers=2", "test-00000", test, **NEW)
    deleted = _while_stopped(edits.deleted(f"{DATASET}/chunks/train-00001.arrow"), "runs/new/metrics.jsonl", 1)
    yield either("worker/chunk-deleted", workers, "train-00001", act=deleted, check=same_run("runs/new", ONE), outputs=(DATASET,), **NEW)
    late = {**NEW, "outputs": (DATASET,)}
    cut = _while_stopped(edits.emptied(f"{DATASET}/chunks/train-00001.arrow"), "runs/new/metrics.jsonl", 1)
    yield either("worker/chunk-emptied", workers, "train-00001", act=cut, check=same_run("runs/new", ONE), **late)


def send(role: str, number: signal.Signals, ready: str = "runs/new/metrics.jsonl", lines: int = 3) -> Act:
    """A signal to one process, once a file is there."""

    def act(running: Running) -> Complaint:
        running.wait_for(ready, lines=lines)
        if running.poll() is not None:
            return "unclear", "the command ended before the signal"
        running.signal(role, number)
        return None

    return act


def twice(number: signal.Signals, ready: str) -> Act:
    """A signal to the launcher, and again half a second later."""

    def act(running: Running) -> Complaint:
        running.wait_for(ready)
        for _ in range(2):
            running.signal("launcher", number)
            time.sleep(0.5)
            if running.poll() is not None:
                break
        running.wait(40)
        said = (running.scratch / "err").read_text().splitlines()
        last = said[-1] if said else "nothing"
        is_said = "ended by SIGINT" in last and "ended by" not in "".join(said[:-1])
        return None if is_said else ("unclear", f"expected one line about SIGINT, got {last}")

    return act


LONG = f"{TRAIN} trainer.num_epochs=1000000 trainer.max_steps=1000000 trainer.save_every_steps=500 trainer.watchdog_s=4"
KILL, TERM, INT, HUP, STOP = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGSTOP,
)


def _signal_cases() -> Iterator[Case]:
    more: dict[str, Any] = {"is_exec": True, "limit_s": 50, "grace_s": 12.0, **NEW}
    one, two = f"{LONG} trainer.num_workers=2", f"{LONG} launch.num_ranks=2"
    for name, number in (("kill", KILL), ("term", TERM), ("int", INT), ("hup", HUP)):
        code = (_exit_code(number),)
        quiet: dict[str, Any] = {"speaks": False, "may_leave": number == KILL}
        yield Case(f"signal/one-rank-{name}", (one,), act=send("launcher", number), exit_codes=code, **quiet, **more)
        for role in ("launcher", "agent"):
            # Torchrun's agent has a handler of its own, which ends with the signal it got.
            codes = (*code, 1, 128 + number) if role == "agent" else code
            yield Case(f"signal/{role}-{name}", (two,), act=send(role, number), exit_codes=codes, **quiet, **more)
        if number in (KILL, HUP):
            for rank in (0, 1):
                speaks: dict[str, Any] = {"ranks": (1 - rank,), "key": f"rank {rank}", "may_leave": True}
                if number == HUP:  # all ranks end in good order
                    speaks = {"speaks": False, "may_leave": True}
                yield Case(f"signal/rank-{rank}-{name}", (two,), act=send(f"rank {rank}", number), exit_codes=code, **speaks, **more)
    watched: dict[str, Any] = {"exit_codes": (STOPPED_RANK_CODE,), **more}
    for rank in (0, 1):
        yield Case(f"signal/rank-{rank}-stop", (two,), act=send(f"rank {rank}", STOP), key=f"rank {rank}", ranks=(1 - rank,), may_leave=True, **watched)
    # Without the workers of evaluation, which wait for their turn whatever happens to them.
    alone = "trainer.eval_splits=[]"
    yield Case("signal/worker-stop", (f"{one} {alone}",), act=send("worker", STOP), key="worker|loader", exit_codes=(1, STOPPED_RANK_CODE), may_leave=True, **more)
    yield Case("signal/worker-stop-ranks", (f"{two} {alone} trainer.num_workers=1",), act=send("worker", STOP), key="rank 0", exit_codes=(1, STOPPED_RANK_CODE), ranks=(0, 1), may_leave=True, **more)
    yield Case("signal/worker-kill", (f"{one} {alone}",), act=send("worker", KILL), key="worker|loader", **more)
    yield Case("signal/worker-kill-ranks", (f"{two} {alone} trainer.num_workers=1",), act=send("worker", KILL), key="worker|loader|rank 0", ranks=(0, 1), **more)
    # Ctrl-C twice, the second before a check-up could have seen the first.
    late = "trainer.check_every_steps=1000000 trainer.log_every_steps=1000000"
    for name, words in (("one-rank", one), ("ranks", two)):
        act = twice(INT, "runs/new/tensorboard/*")
        yield Case(f"signal/{name}-int-twice", (f"{words} {late}",), act=act, exit_codes=(_exit_code(INT),), speaks=False, **more)
    stages = [
        ("prepare", f"{PREPARE} data.synthetic.num_train=3000000 data.synthetic.rows_per_chunk=100000", "data/tiny/.dataset*.tmp/**/*.arrow"),
        ("prepare-ranks", f"{PREPARE} launch.num_ranks=2 data.synthetic.num_train=6000000 data.synthetic.rows_per_chunk=100000", "data/tiny/.dataset*.tmp/**/*.arrow"),
        ("profile", f"{PROFILE} paths.dataset=data/large/dataset", "data/tiny/.profile*.tmp/**/*.npy"),
        ("evaluate", f"{EVALUATE} launch.num_ranks=1 num_workers=2", "runs/new/log.txt"),
        ("calibrate", f"calibrate {TINY} calibrate.cap_mib=64", "runs/new/log.txt"),
        ("bench", "bench bench=smoke bench.rounds=500", "runs/new/log.txt"),
    ]
    for stage, words, ready in stages:
        for name, number in (("kill", KILL), ("term", TERM), ("int", INT), ("hup", HUP)):
            if stage in ("calibrate", "bench", "prepare-ranks") and number in (INT, HUP):
                continue
            change = _large_dataset if stage == "profile" else unchanged
            act = send("launcher", number, ready, 0)
            quiet = {"speaks": False, "may_leave": number == KILL}
            if stage.startswith("prepare"):
                quiet |= {"outputs": (DATASET,), "check": _whole_dataset}
            yield Case(f"signal/{stage}-{name}", (words,), change, act=act, exit_codes=(_exit_code(number),), **quiet, **more)


def _exit_code(number: int) -> int:
    """SIGHUP ends a command as SIGTERM does."""
    return 128 + (TERM if number == HUP else number)


def _whole_dataset(made: Made) -> str | None:
    return whole(made.folder / DATASET)


def _large_dataset(folder: Path) -> None:
    """A dataset that takes seconds to count: many links to one chunk."""
    edits.copied(DATASET, "data/large/dataset")(folder)
    manifest = folder / "data/large/dataset/manifest.json"
    document = json.loads(manifest.read_text())
    train = document["content"]["splits"]["train"]
    first = dict(train[0])
    for number in range(4000):
        name = f"chunks/more-{number:05d}.arrow"
        os.link(manifest.parent / first["file"], manifest.parent / name)
        document["files"][name] = document["files"][first["file"]]
        train.append({**first, "file": name})
    del document["content_hash"]
    document["content_hash"] = hash_document(document)
    manifest.write_text(json.dumps(document))


# Kibibytes that are too few for each stage; 4 at a time, which is how a tmpfs gives them.
DISK: list[tuple[str, str, tuple[int, ...], dict[str, Any]]] = [
    ("prepare", f"{PREPARE} paths.dataset=small/dataset", (8, 16, 32, 64), {}),
    ("prepare-log", f"{LOG} paths.dataset=small/dataset", (4, 8), {}),
    ("profile", f"{PROFILE} paths.profile=small/profile", (4, 8, 16, 24), {}),
    ("profile-run", PROFILE, (8, 16), {"variables": in_run("small/runs"), "outputs": (PROFILED,)}),
    ("plan", f"{PLAN} paths.partition=small/partition", (4,), {}),
    ("plan-run", PLAN, (8, 32), {"variables": in_run("small/runs"), "outputs": (PARTITION,)}),
    ("costs", f"{CALIBRATE} paths.costs=small/costs", (4,), {}),
    ("train", TRAIN, (4, 16, 32, 48, 64, 96), {"variables": in_run("small/runs")}),
    ("train-ranks", TWO_RANKS, (16, 48, 96, 128), {"variables": in_run("small/runs"), "ranks": (0, 1), "limit_s": 90}),
    ("evaluate", EVALUATE, (4,), {"variables": in_run("small/runs")}),
    ("report", f"report runs=[{ONE}] output=small/page", (16, 64), {}),
    ("tmp", f"{TRAIN} trainer.num_workers=2", (4,), {"variables": {"TMPDIR": "small"}}),
]


def _disk_cases() -> Iterator[Case]:
    for name, words, sizes, more in DISK:
        for kib in sizes:
            change = log() if name == "prepare-log" else unchanged
            make = either if name in ("tmp", "evaluate") else refused
            yield make(f"disk/{name}-{kib}k", words, "small", change, disk_bytes=kib << 10, **more)


FAST = (
    *("resume/finished", "resume/model-changed", "resume/from-older", "resume/goes-on"),
    *("payload/resume-step-00000016-random-00000.pt-torch_file", "payload/evaluate-step-00000016-tensors-00000-00000.safetensors-plain"),
    *("state/piece-shifted-resume", "state/metrics.jsonl-list", "callback/exit"),
    *("worker/id-too-large", "together/prepare-during-run-0", "disk/prepare-16k", "disk/train-48k"),
)
CASES = [
    fast(case) if case.name in FAST else case
    for case in (
        *_resume_cases(),
        *_state_cases(),
        *_callback_cases(),
        *_together_cases(),
        *_payload_cases(),
        *_worker_cases(),
        *_signal_cases(),
        *_disk_cases(),
    )
]
