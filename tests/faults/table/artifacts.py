"""Every file of every artifact and every entry of its manifest, damaged; files of runs."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import forge
from tests.faults.case import Case, Change, Check, either, refused, works
from tests.faults.workspace import (
    COSTS,
    DATASET,
    DAYS_RUN,
    EVALUATE,
    EXPORT,
    LAST,
    ONE,
    PARTITION,
    PLAN,
    PREDICT,
    PROFILED,
    TRAIN,
    TWO,
    in_run,
    latest_whole,
    same_artifact,
    same_tensors,
)

CHECKPOINT, DAYS_CHECKPOINT, DAYS_DATASET = f"{ONE}/{LAST}", f"{DAYS_RUN}/checkpoints/step-00000003", "data/days/dataset"
GO_ON = f"{TRAIN} trainer.max_steps=24"
NEW: dict[str, Any] = {"variables": in_run("runs/new")}
RANKS: dict[str, Any] = {"ranks": (0, 1), "limit_s": 90}


@dataclass(frozen=True)
class Reader:
    """A command that reads artifacts, where it writes, and what it makes of whole ones."""

    words: str
    outputs: tuple[str, ...] = ()
    check: Check | None = None
    run: str = "runs/new"

    def case(self, make: Callable[..., Case], name: str, *given: Any, **more: Any) -> Case:
        # A refusal leaves outputs as they were.
        own = {} if make is refused else {"check": self.check}
        return make(name, self.words, *given, outputs=self.outputs, variables=in_run(self.run), **own, **more)


READERS = {
    "plan": Reader(PLAN, (PARTITION, PROFILED), same_artifact(PARTITION, but="manifest.json")),
    "train": Reader(TRAIN, (), same_tensors("runs/new", ONE)),
    "evaluate": Reader(EVALUATE),
    "resume": Reader(GO_ON, (ONE,), latest_whole(24), ONE),
    "priced": Reader(f"{PLAN} planner.costs=measured", (PARTITION,)),
    "report": Reader(f"report runs=[{ONE}] output=page", ("page",)),
    "export": Reader(EXPORT, ("data/new",)),
    "predict": Reader(PREDICT, ("data/new",)),
}
# Who reads which files of what; of files that are alike, two are damaged.
READ = [
    ("train", DATASET, "chunks/train-*"),
    ("train", DATASET, "chunks/valid-*"),
    ("evaluate", DATASET, "chunks/test-*"),
    ("plan", PROFILED, "*/*.npy"),
    ("train", PARTITION, "*.npz"),
    ("evaluate", PARTITION, "*.npz"),
    ("priced", COSTS, "costs.json"),
    ("resume", CHECKPOINT, "random-*"),
    ("resume", CHECKPOINT, "tensors/*"),
    ("evaluate", CHECKPOINT, "tensors/*"),
    ("export", CHECKPOINT, "tensors/*"),
    ("predict", DAYS_CHECKPOINT, "tensors/*"),
    ("predict", DAYS_DATASET, "vocab/*"),
]
# Who reads whose manifest first.
MANIFESTS = {DATASET: "plan", PROFILED: "plan", PARTITION: "train", COSTS: "priced", CHECKPOINT: "resume", DAYS_DATASET: "predict"}


def _short(artifact: str) -> str:
    return artifact.replace("/", "-").removeprefix("data-").removeprefix("runs-")


def _file_cases(reference: Path) -> Iterator[Case]:
    for reader, artifact, pattern in READ:
        for path in sorted((reference / artifact).glob(pattern))[:2]:
            file = path.relative_to(reference / artifact).as_posix()
            about = f"{reader}-{_short(artifact)}-{file.replace('/', '-')}"
            key = f"{path.name}|{path.name.rpartition('-')[0] or path.suffix}"
            for kind in forge.DAMAGES:
                other = forge.other_of(path)
                if kind == "swapped" and other is None:
                    continue  # such as the random numbers of a run that draws none
                yield READERS[reader].case(refused, f"artifact/{about}-{kind}", f"{key}|{other.name}" if kind == "swapped" and other else key, forge.damaged(f"{artifact}/{file}", kind), is_privileged=kind != "unreadable")
            for name, content in (("payload", forge.payload(path.suffix)), ("pickle", forge.CONTENTS["pickle"])):
                change = forge.with_file(artifact, file, forge.change_bytes(lambda _, content=content: content))  # type: ignore[misc]
                yield READERS[reader].case(refused, f"artifact/{about}-{name}", f"{path.name}|{Path(artifact).name}", change)


def _manifest_cases(reference: Path) -> Iterator[Case]:
    for artifact, reader in MANIFESTS.items():
        manifest, short = f"{artifact}/manifest.json", f"{reader}-{_short(artifact)}"
        add = partial(READERS[reader].case, refused)
        key = f"{manifest}|{artifact}:|{artifact} "
        for kind, content in forge.CONTENTS.items():
            yield add(f"manifest/{short}-{kind}", key, forge.written(manifest, content))
        for kind in ("directory", "unreadable"):
            yield add(f"manifest/{short}-{kind}", key, forge.damaged(manifest, kind), is_privileged=kind != "unreadable")
        edits = {"edited": ("content/more", 1), "hash-missing": ("content_hash", forge.GONE), "hash-number": ("content_hash", 7)}
        for kind, (at, value) in edits.items():
            yield add(f"manifest/{short}-{kind}", key, forge.rehashed(artifact, forge.put(at, value), is_hashed=False))
        yield add(f"manifest/{short}-newer", key, forge.rehashed(artifact, forge.put("format_version", 99)))
        yield add(f"manifest/{short}-file-outside", key, forge.rehashed(artifact, _file_outside))
        document = json.loads((reference / manifest).read_text())
        for number, (place, value) in enumerate(forge.places(document)):
            others = forge.other_types(value)
            other = others[number % len(others)]
            kind = "gone" if other is forge.GONE else type(other).__name__
            change = forge.rehashed(artifact, forge.put(place, other), is_hashed=place != ("content_hash",))
            yield READERS[reader].case(either, f"manifest/{short}-{number:03d}-{place[-1]}-{kind}", f"{key}|{artifact.rpartition('/')[2]}|loader state", change)


def _file_outside(document: Any) -> None:
    name = next(iter(document["files"]))
    document["files"]["../" * 12 + "etc/passwd"] = document["files"].pop(name)


TABLE, TRAIN_0 = "schema/tables/0", "splits/train/0"
# Manifests that agree with their hash and say what is not so: what is changed, and who must see it.
UNTRUE: list[tuple[str, str, str, Any, str]] = [
    *(("train", DATASET, f"{TABLE}/num_rows", rows, "t0|made from the dataset") for rows in (5, 999)),
    *(("plan", DATASET, f"{TABLE}/num_rows", rows, "t0|column c0") for rows in (-1, 0, 2**40, 2**70)),
    *(("plan", DATASET, f"{TABLE}/name", name, "t0|t1|../../x") for name in ("t1", "t9", "../../x")),
    *(("plan", DATASET, "schema/features/0/name", name, name) for name in ("c1", "c9")),
    ("plan", DATASET, "schema/features/0/is_multi_hot", True, "c0"),
    ("plan", DATASET, "schema/dense", ["d0"], "dense"),
    ("train", DATASET, "schema/dense", [], "dense|made from the dataset"),
    *(("plan", DATASET, f"{TRAIN_0}/num_samples", num, "train-00000") for num in (600, 1, -5)),
    *(("plan", DATASET, f"{TRAIN_0}/file", file, Path(file).name) for file in ("../../../log.csv", "/dev/zero", "chunks/train-00001.arrow")),
    ("train", DATASET, "splits", {"dev": []}, "splits|train|samples"),
    ("plan", DATASET, TRAIN_0, forge.GONE, "train-00000"),
    ("plan", PROFILED, "num_samples", -1, "profile"),
    ("train", PARTITION, "num_rows", {"t0": 1}, "t0|partition"),
    ("train", PARTITION, "planned_for", 7, "partition"),
    *(("resume", CHECKPOINT, "step", step, "step") for step in (-8, 12)),
    ("evaluate", CHECKPOINT, "facts/world_size", 2, "num_ranks|world_size"),
    ("evaluate", CHECKPOINT, "tensors", {"model/x": [1]}, "tensor"),
    *(("resume", CHECKPOINT, "loader", value, "step-00000016") for value in (None, {}, [1], "x")),
]


LATEST = f"{ONE}/checkpoints/latest"
CONFIG, SUMMARY, METRICS = (f"{ONE}/{name}" for name in ("config.yaml", "summary.json", "metrics.jsonl"))
# Of a run's files: who reads it, and whether it is refused if it is no whole one.
RECORDS: list[tuple[str, str, Callable[..., Case]]] = [
    ("evaluate", CONFIG, refused),
    ("evaluate", LATEST, refused),
    ("resume", LATEST, refused),
    ("report", SUMMARY, refused),
    ("report", METRICS, either),
    ("resume", METRICS, works),
    ("resume", f"{ONE}/eval.jsonl", works),
    ("resume", f"{ONE}/checkpoints/best", works),
    ("resume", f"{ONE}/prediction.json", refused),
    ("report", f"{ONE}/environment.json", refused),
]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RUN_FILES: list[tuple[str, str, Change, str]] = [
    *((f"config-{n}", "evaluate", forge.written(CONFIG, text), CONFIG) for n, text in (("alias-bomb", BOMB), ("tag", "!!python/object/apply:os.system ['touch marker']\n"), ("twice", "trainer: {}\ntrainer: {}\n"))),
    *((f"config-{key.strip().partition(':')[0]}", "evaluate", forge.replaced(CONFIG, old, new), key) for old, new, key in (
        ("trainer:\n", "trainer:\n  cake: 1\n", "cake"), ("batch_size: 64", "batch_size: many", "batch_size"),
        ("embedding_dim: 4", "embedding_dim: 8", "dense_layer"), (DATASET, "data/absent", "data/absent"), (DATASET, "data/other/dataset", "dataset"))),
    *((f"latest-{n}", "evaluate", forge.written(LATEST, text), "latest") for n, text in (("dangling", "step-00000099\n"), ("outside", "../../two/checkpoints/step-00000016"), ("long", "x" * 100_000))),
    ("summary-text", "report", forge.replaced(SUMMARY, '"samples_per_s": ', '"samples_per_s": "fast", "x": '), "samples_per_s"),
    ("metrics-step", "report", forge.written(METRICS, '{"step": "one"}\n'), "metrics.jsonl"),
]


def _run_cases() -> Iterator[Case]:
    for reader, file, make in RECORDS:
        for kind, change in ({k: forge.written(file, c) for k, c in forge.CONTENTS.items()} | {k: forge.damaged(file, k) for k in ("directory", "pipe")}).items():
            verb = refused if make is works and kind in ("directory", "pipe") and "best" not in file else make
            given = () if verb is works else (Path(file).name,)
            if (reader, kind) == ("resume", "empty") and file == LATEST:
                verb = either
            yield READERS[reader].case(verb, f"rundir/{reader}-{Path(file).name}-{kind}", *given, change)
    for name, reader, change, key in RUN_FILES:
        yield READERS[reader].case(refused, f"rundir/{name}", key, change)
    yield READERS["report"].case(works, "rundir/metrics-cut", forge.damaged(METRICS, "cut"))
    for file, kind in ((f"{TWO}/{LAST}/random-00001.pt", "deleted"), (f"{TWO}/{LAST}/random-00001.pt", "swapped"), (f"{TWO}/{LAST}/tensors/00001-00000.safetensors", "flipped"), (f"{DATASET}/chunks/train-00001.arrow", "cut")):
        yield refused(f"artifact/two-ranks-{Path(file).stem}-{kind}", f"{GO_ON} launch.num_ranks=2", Path(file).stem.rpartition("-")[0], forge.damaged(file, kind), variables=in_run(TWO), **RANKS)


def cases(reference: Path) -> Iterator[Case]:
    yield from _file_cases(reference)
    yield from _manifest_cases(reference)
    for number, (reader, artifact, place, value, key) in enumerate(UNTRUE):
        yield READERS[reader].case(refused, f"manifest/untrue-{number:02d}-{place.rpartition('/')[2]}", key, forge.rehashed(artifact, forge.put(f"content/{place}", value)))
    yield from _run_cases()
