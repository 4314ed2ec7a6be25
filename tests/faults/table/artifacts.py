"""Every kind of artifact, its files, and the commands that read them; manifests; run directories."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import edits
from tests.faults.case import Case, Change, either, fast, refused, works
from tests.faults.workspace import (
    COSTS,
    DATASET,
    EVALUATE,
    FIRST,
    LAST,
    ONE,
    PARTITION,
    PLAN,
    PROFILE,
    PROFILED,
    TRAIN,
    TWO,
    in_run,
)

CHECKPOINT = f"{ONE}/{LAST}"
GO_ON = f"{TRAIN} trainer.max_steps=24"
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    "profile": (PROFILE, {"outputs": (PROFILED,)}),
    "plan": (PLAN, {"outputs": (PARTITION,)}),
    "train": (TRAIN, {}),
    "evaluate": (EVALUATE, {}),
    "resume": (GO_ON, {"variables": in_run(ONE)}),
    "priced": (f"{PLAN} planner.costs=measured", {"outputs": (PARTITION,)}),
    "report": (f"report runs=[{ONE}] output=page", {"outputs": ("page",)}),
}
# An artifact's file, another of equal size if there is one, and who reads its content.
FILES = [
    (DATASET, "chunks/train-00000.arrow", "chunks/train-00001.arrow", ("profile", "train")),
    (DATASET, "chunks/valid-00000.arrow", "chunks/test-00000.arrow", ("train",)),
    (DATASET, "chunks/test-00000.arrow", "", ("evaluate",)),
    (PROFILED, "counts/t0.npy", "heldout/t0.npy", ("plan",)),
    (PROFILED, "heldout/t3.npy", "", ("plan",)),
    (PARTITION, "hot_rows.npz", "", ("train", "evaluate")),
    (COSTS, "costs.json", "", ("priced",)),
    (CHECKPOINT, "tensors/00000-00000.safetensors", f"../{Path(FIRST).name}/tensors/00000-00000.safetensors", ("resume", "evaluate")),
    (CHECKPOINT, "random-00000.pt", "", ("resume",)),
]
DAMAGES = {
    "cut": edits.cut,
    "emptied": edits.emptied,
    "grown": edits.grown,
    "flipped": edits.flipped,
    "deleted": edits.deleted,
    "directory": edits.directory,
    "unreadable": edits.unreadable,
    "looped": edits.looped,
}


def _file_cases() -> Iterator[Case]:
    for artifact, file, neighbour, readers in FILES:
        key = Path(file).name
        for reader in readers:
            words, more = READERS[reader]
            damages = dict(DAMAGES)
            if neighbour:
                damages["swapped"] = partial(edits.swapped, f"{artifact}/{neighbour}")
            for damage, make in damages.items():
                if reader == "evaluate" and damage in ("grown", "looped", "directory"):
                    continue  # as resume, which reads the same way
                name = f"artifact/{reader}-{Path(artifact).name}-{file.replace('/', '-')}-{damage}"
                is_root = damage != "unreadable"
                change = make(f"{artifact}/{file}")
                names = f"{key}|{Path(neighbour).name}" if damage == "swapped" else key
                yield refused(name, words, names, change, is_privileged=is_root, **more)


def _set(path: str, value: Any) -> Any:
    """An edit that sets a value deep in a document."""

    def edit(document: Any) -> None:
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        for part in parents:
            document = document[part]
        document[last] = value

    return edit


# Faults of any manifest, by whether its hash is made to agree again.
BROKEN = {
    "empty": b"",
    "not-json": b"hot: rows\n",
    "null": b"null",
    "list": b"[]",
    "binary": bytes(range(256)),
    "utf-16": json.dumps({"kind": "dataset"}).encode("utf-16"),
    "nested": b"[" * 200_000,
    "long-number": b'{"format_version": ' + b"9" * 10_000 + b"}",
}
EDITED: dict[str, tuple[str, Any]] = {
    "newer": ("format_version", 99),
    "version-text": ("format_version", "1"),
    "other-kind": ("kind", "cake"),
    "kind-list": ("kind", ["dataset"]),
    "content-null": ("content", None),
    "content-empty": ("content", {}),
    "files-list": ("files", ["a"]),
    "files-null": ("files", None),
    "files-empty": ("files", {}),
    "inputs-null": ("made_from", None),
}
MANIFESTS = [
    ("profile", DATASET),
    ("plan", PROFILED),
    ("train", PARTITION),
    ("priced", COSTS),
    ("evaluate", CHECKPOINT),
]


def _manifest_cases() -> Iterator[Case]:
    for reader, artifact in MANIFESTS:
        words, more = READERS[reader]
        manifest, short = f"{artifact}/manifest.json", Path(artifact).name.replace("step-", "")
        changes: dict[str, Change] = {
            fault: edits.written(manifest, content) for fault, content in BROKEN.items()
        }
        for fault, (path, value) in EDITED.items():
            if fault == "inputs-null" and artifact not in (PROFILED, PARTITION):
                continue  # made from nothing
            changes[fault] = edits.rehashed(artifact, _set(path, value))
        changes["edited"] = edits.edited(manifest, _set("content/more", 1))
        changes["hash-missing"] = edits.edited(manifest, lambda document: document.pop("content_hash"))
        changes["hash-number"] = edits.edited(manifest, _set("content_hash", 7))
        changes["size-text"] = edits.rehashed(artifact, _first_file("num_bytes", "many"))
        changes["file-null"] = edits.rehashed(artifact, _first_file("", None))
        changes["file-outside"] = edits.rehashed(artifact, _file_outside)
        changes["directory"] = edits.directory(manifest)
        changes["unreadable"] = edits.unreadable(manifest)
        for fault, change in changes.items():
            is_root = fault != "unreadable"
            key = f"{artifact}/manifest.json|{artifact}:|{artifact} "
            name = f"manifest/{short}-{fault}"
            yield refused(name, words, key, change, is_privileged=is_root, **more)


def _first_file(fact: str, value: Any) -> Any:
    def edit(document: Any) -> None:
        name = next(iter(document["files"]))
        if fact:
            document["files"][name][fact] = value
        else:
            document["files"][name] = value

    return edit


def _file_outside(document: Any) -> None:
    name = next(iter(document["files"]))
    document["files"]["../" * 12 + "etc/passwd"] = document["files"].pop(name)


def _content(artifact: str, path: str, value: Any) -> Change:
    return edits.rehashed(artifact, _set(f"content/{path}", value))


TABLE, TRAIN_0 = "schema/tables/0", "splits/train/0"
# Manifests that agree with their hash and say what is not so: what is changed, and who must see it.
UNTRUE: list[tuple[str, str, Change, str]] = [
    ("rows-fewer", "train", _content(DATASET, f"{TABLE}/num_rows", 5), "t0|made from the dataset"),
    ("rows-more", "train", _content(DATASET, f"{TABLE}/num_rows", 999), "t0|made from the dataset"),
    ("rows-negative", "profile", _content(DATASET, f"{TABLE}/num_rows", -1), "t0"),
    ("rows-zero", "profile", _content(DATASET, f"{TABLE}/num_rows", 0), "t0"),
    ("rows-text", "profile", _content(DATASET, f"{TABLE}/num_rows", "200"), "t0|manifest.json"),
    ("rows-float", "profile", _content(DATASET, f"{TABLE}/num_rows", 200.5), "t0|manifest.json"),
    ("rows-2**70", "profile", _content(DATASET, f"{TABLE}/num_rows", 2**70), "t0|manifest.json"),
    ("rows-2**40", "profile", _content(DATASET, f"{TABLE}/num_rows", 2**40), "t0|column c0"),
    ("table-twice", "profile", _content(DATASET, f"{TABLE}/name", "t1"), "t1"),
    ("table-renamed", "profile", _content(DATASET, f"{TABLE}/name", "t9"), "t0"),
    ("table-dots", "profile", _content(DATASET, f"{TABLE}/name", "../../x"), "../../x|t0"),
    ("feature-twice", "profile", _content(DATASET, "schema/features/0/name", "c1"), "c1"),
    ("feature-renamed", "profile", _content(DATASET, "schema/features/0/name", "c9"), "c9"),
    ("feature-lists", "profile", _content(DATASET, "schema/features/0/is_multi_hot", True), "c0"),
    ("dense-fewer", "profile", _content(DATASET, "schema/dense", ["d0"]), "dense"),
    ("dense-none", "train", _content(DATASET, "schema/dense", []), "dense|made from the dataset"),
    ("schema-null", "profile", _content(DATASET, "schema", None), "manifest"),
    ("chunk-longer", "profile", _content(DATASET, f"{TRAIN_0}/num_samples", 600), "train-00000"),
    ("chunk-shorter", "train", _content(DATASET, f"{TRAIN_0}/num_samples", 1), "train-00000|made from the dataset"),
    ("chunk-negative", "train", _content(DATASET, f"{TRAIN_0}/num_samples", -5), "train-00000"),
    ("chunk-text", "profile", _content(DATASET, f"{TRAIN_0}/num_samples", "many"), "manifest|train-0"),
    ("chunk-outside", "profile", _content(DATASET, f"{TRAIN_0}/file", "../../../log.csv"), "log.csv"),
    ("chunk-absolute", "profile", _content(DATASET, f"{TRAIN_0}/file", "/dev/zero"), "/dev/zero"),
    ("chunk-twice", "profile", _content(DATASET, f"{TRAIN_0}/file", "chunks/train-00001.arrow"), "train-00001"),
    ("split-unknown", "train", _content(DATASET, "splits", {"dev": []}), "splits|train|samples"),
    ("splits-null", "train", _content(DATASET, "splits", None), "manifest"),
    ("profile-samples", "plan", _content(PROFILED, "num_samples", -1), "profile"),
    ("profile-samples-text", "plan", _content(PROFILED, "num_samples", "x"), "profile"),
    ("profile-tables", "plan", _content(PROFILED, "tables", {}), "profile"),
    ("partition-rows", "train", _content(PARTITION, "num_rows", {"t0": 1}), "t0|partition"),
    ("costs-device", "priced", _content(COSTS, "device", 5), "costs"),
    ("step-text", "resume", _content(CHECKPOINT, "step", "8"), "step"),
    ("step-negative", "resume", _content(CHECKPOINT, "step", -8), "step"),
    ("step-other", "resume", _content(CHECKPOINT, "step", 12), "step"),
    ("samples-text", "resume", _content(CHECKPOINT, "num_samples", "x"), "num_samples"),
    ("facts-null", "resume", _content(CHECKPOINT, "facts", None), "facts|manifest"),
    ("world-size", "evaluate", _content(CHECKPOINT, "facts/world_size", 2), "num_ranks|world_size"),
    ("world-size-text", "evaluate", _content(CHECKPOINT, "facts/world_size", "1"), "world_size|num_ranks"),
    ("tensors-null", "evaluate", _content(CHECKPOINT, "tensors", None), "tensors|manifest"),
    ("tensor-shape", "evaluate", _content(CHECKPOINT, "tensors", {"model/x": [1]}), "tensor"),
]


def rewritten_chunk(column: str, value: float, samples: int = 1) -> Change:
    """A chunk of the same size in which samples have another value in one column."""

    def change(folder: Path) -> None:
        import numpy as np
        import pyarrow as pa

        path = folder / DATASET / "chunks/train-00000.arrow"
        table = pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()
        index = table.schema.get_field_index(column)
        values = table.column(index).combine_chunks()
        array = np.array(values.to_numpy(zero_copy_only=False))
        array[:samples] = value
        replacement = pa.array(array, type=values.type)
        table = table.set_column(index, table.schema.field(index), replacement)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())

    return change


CONTENT: list[tuple[str, str, Change, str]] = [
    ("id-changed", "train", rewritten_chunk("c0", 7), "train-00000"),
    ("id-changed-2", "profile", rewritten_chunk("c0", 7), "train-00000"),
    ("id-too-large", "train", rewritten_chunk("c0", 200), "train-00000"),
    ("id-negative", "profile", rewritten_chunk("c0", -1), "train-00000"),
    ("label-changed", "train", rewritten_chunk("label", 0.5), "train-00000"),
    ("label-nan", "train", rewritten_chunk("label", float("nan"), 256), "train-00000"),
]
LATEST = f"{ONE}/checkpoints/latest"
CONFIG, SUMMARY, METRICS = (f"{ONE}/{name}" for name in ("config.yaml", "summary.json", "metrics.jsonl"))
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML_FAULTS: dict[str, str | bytes] = {
    "alias-bomb": BOMB,
    "not-mapping": "- a\n- b\n",
    "number": "5\n",
    "not-yaml": "a: [1, {b\n",
    "binary": bytes(range(128, 256)),
    "empty": "",
    "tag": "!!python/object/apply:os.system ['touch marker']\n",
}
RUN_FILES: list[tuple[str, str, Change, str]] = [
    *((f"config-{n}", "evaluate", edits.written(CONFIG, text), CONFIG) for n, text in YAML_FAULTS.items()),
    ("config-twice", "evaluate", edits.written(CONFIG, "trainer: {}\ntrainer: {}\n"), CONFIG),
    ("config-unknown-key", "evaluate", edits.replaced(CONFIG, "trainer:\n", "trainer:\n  cake: 1\n"), "cake"),
    ("config-type", "evaluate", edits.replaced(CONFIG, "batch_size: 64", "batch_size: many"), "batch_size"),
    ("config-limit", "evaluate", edits.replaced(CONFIG, "batch_size: 64", "batch_size: -1"), "batch_size"),
    ("config-dim", "evaluate", edits.replaced(CONFIG, "embedding_dim: 4", "embedding_dim: 8"), "dense_layer"),
    ("config-deleted", "evaluate", edits.deleted(CONFIG), CONFIG),
    ("config-directory", "evaluate", edits.directory(CONFIG), CONFIG),
    ("config-dataset", "evaluate", edits.replaced(CONFIG, DATASET, "data/absent"), "data/absent"),
    ("config-other-dataset", "evaluate", edits.replaced(CONFIG, DATASET, "data/other/dataset"), "dataset"),
    ("latest-empty", "evaluate", edits.written(LATEST, ""), "latest"),
    ("latest-dangling", "evaluate", edits.written(LATEST, "step-00000099\n"), "latest"),
    ("latest-dangling-resume", "resume", edits.written(LATEST, "step-00000099\n"), "latest"),
    ("latest-empty-resume", "resume", edits.written(LATEST, ""), "latest"),
    ("latest-outside", "evaluate", edits.written(LATEST, "../../two/checkpoints/step-00000016"), "latest"),
    ("latest-binary", "evaluate", edits.written(LATEST, bytes(range(128, 256))), "latest"),
    ("latest-binary-resume", "resume", edits.written(LATEST, bytes(range(128, 256))), "latest"),
    ("latest-long", "evaluate", edits.written(LATEST, "x" * 100_000), "latest"),
    ("latest-directory", "evaluate", edits.directory(LATEST), "latest"),
    ("latest-directory-resume", "resume", edits.directory(LATEST), "latest"),
    ("latest-deleted", "evaluate", edits.deleted(LATEST), "latest"),
    ("summary-empty", "report", edits.emptied(SUMMARY), "summary.json"),
    ("summary-list", "report", edits.written(SUMMARY, "[]"), "summary.json"),
    ("summary-text", "report", edits.edited(SUMMARY, _set("samples_per_s", "fast")), "samples_per_s"),
    ("summary-nested", "report", edits.written(SUMMARY, "[" * 200_000), "summary.json"),
    ("summary-binary", "report", edits.written(SUMMARY, bytes(range(128, 256))), "summary.json"),
    ("metrics-binary", "report", edits.written(METRICS, bytes(range(128, 256))), "metrics.jsonl"),
    ("metrics-not-json", "report", edits.written(METRICS, "step 1\n"), "metrics.jsonl"),
    ("metrics-step", "report", edits.written(METRICS, '{"step": "one"}\n'), "metrics.jsonl"),
    ("prediction-list", "resume", edits.written(f"{ONE}/prediction.json", "[]"), "prediction.json"),
    ("prediction-cut-resume", "resume", edits.cut(f"{ONE}/prediction.json"), "prediction.json"),
    ("environment-list", "report", edits.written(f"{ONE}/environment.json", "[]"), "environment.json"),
]
TWO_RANKS: list[tuple[str, Change, str]] = [
    ("rank-file", edits.deleted(f"{TWO}/{LAST}/random-00001.pt"), "random-00001.pt"),
    ("tensors", edits.flipped(f"{TWO}/{LAST}/tensors/00001-00000.safetensors"), "00001-00000.safetensors"),
    ("rank-files-swapped", edits.swapped(*(f"{TWO}/{LAST}/random-0000{n}.pt" for n in "01")), "random-0000"),
    ("chunk", edits.cut(f"{DATASET}/chunks/train-00001.arrow"), "train-00001.arrow"),
]


def _cases() -> Iterator[Case]:
    yield from _file_cases()
    yield from _manifest_cases()
    for kind, table in (("manifest", UNTRUE), ("artifact", CONTENT), ("rundir", RUN_FILES)):
        for name, reader, change, key in table:
            words, more = READERS[reader]
            yield refused(f"{kind}/{name}", words, key, change, **more)
    for name, change, key in TWO_RANKS:
        words = f"{GO_ON} launch.num_ranks=2"
        more = {"variables": in_run(TWO), "ranks": (0, 1), "limit_s": 90}
        yield refused(f"artifact/two-ranks-{name}", words, key, change, **more)
    yield works("rundir/metrics-last-line-cut", READERS["report"][0], edits.cut(METRICS), outputs=("page",))
    yield either("rundir/metrics-deleted", READERS["report"][0], "metrics", edits.deleted(METRICS), outputs=("page",))


FAST = (
    *("artifact/profile-dataset-chunks-train-00000.arrow-flipped", "artifact/plan-profile-counts-t0.npy-swapped"),
    *("artifact/resume-step-00000016-tensors-__0_0.distcp-flipped", "artifact/train-partition-hot_rows.npz-cut"),
    *("manifest/dataset-newer", "manifest/profile-nested", "manifest/00000016-files-null"),
    *("manifest/costs-binary", "manifest/rows-negative", "rundir/latest-dangling", "rundir/config-tag"),
)
CASES = [fast(case) if case.name in FAST else case for case in _cases()]
