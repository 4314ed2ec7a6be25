"""Export and predict: runs and checkpoints that do not fit, and files to score."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from tests.faults import edits
from tests.faults.case import Case, Change, either, fast, refused, unchanged, works
from tests.faults.table.artifacts import CHECKPOINT, DAMAGES
from tests.faults.table.runs import beside, send
from tests.faults.workspace import (
    DATASET,
    DAYS,
    DAYS_RUN,
    EXPORT,
    FIRST,
    ONE,
    PARTITION,
    PREDICT,
    SERVED,
    TWO,
    in_run,
    same_artifact,
    whole,
)

NEW: dict[str, Any] = {"outputs": ("data/new",)}
TENSORS = "tensors/00000-00000.safetensors"
DAYS_CHECKPOINT = f"{DAYS_RUN}/checkpoints/step-00000003"
# The same model and file into the place of an earlier export.
AGAIN = f"export run_dir={ONE} checkpoint={FIRST.rpartition('/')[2]} output={SERVED}"


def _run_cases() -> Iterator[Case]:
    """What is the same for a model that is exported and one that scores."""
    commands = {"export": (EXPORT, ONE, CHECKPOINT, DATASET), "predict": (PREDICT, DAYS_RUN, DAYS_CHECKPOINT, "data/days/dataset")}
    for name, (words, run, checkpoint, dataset) in commands.items():
        faults: dict[str, tuple[Change, str]] = {
            "no-checkpoints": (edits.deleted(f"{run}/checkpoints"), "checkpoints|run_dir"),
            "checkpoint-deleted": (edits.deleted(checkpoint), "checkpoint"),
            "unfinished": (edits.deleted(f"{run}/summary.json"), "run_dir"),
            "config-missing": (edits.deleted(f"{run}/config.yaml"), "config.yaml"),
            "dataset-missing": (edits.deleted(dataset), dataset),
            "dataset-other": (edits.copied("data/other/dataset", dataset), "dataset"),
            "manifest-missing": (edits.deleted(f"{checkpoint}/manifest.json"), "manifest.json"),
            "output-foreign": (edits.directory("data/new"), "data/new"),
            "output-file": (edits.written("data/new", "mine"), "data/new"),
            "output-other-artifact": (edits.copied(dataset, "data/new"), "data/new"),
        }
        for fault, (change, key) in faults.items():
            target = words.partition("output=")[0] + "output=data/new" if fault.startswith("output") else words
            yield refused(f"{name}/{fault}", target, key, change, **NEW)
        for damage, make in DAMAGES.items():
            is_root = damage != "unreadable"
            yield refused(f"{name}/tensors-{damage}", words, "00000-00000.safetensors", make(f"{checkpoint}/{TENSORS}"), is_privileged=is_root, **NEW)
        for words_more, key in (("checkpoint=step-99", "checkpoint"), ("run_dir=runs/none", "run_dir"), ("output=\'\'", "output")):
            yield refused(f"{name}/{words_more.partition('=')[0]}-wrong", f"{words} {words_more}", key, **NEW)
    yield refused("export/tensors-swapped", EXPORT, TENSORS, edits.swapped(f"{CHECKPOINT}/{TENSORS}", f"{ONE}/{FIRST}/{TENSORS}"), **NEW)
    yield works("export/two-ranks", EXPORT.replace(ONE, TWO), **NEW)


def _export_cases() -> Iterator[Case]:
    yield works("export/again", AGAIN, check=same_artifact(SERVED))
    yield refused("export/in-artifact", f"{EXPORT} output={SERVED}/new", "output")
    yield refused("export/foreign-file", AGAIN, "mine.txt", edits.written(f"{SERVED}/mine.txt", "mine"))
    yield refused("export/split-unknown", f"{EXPORT} export.eval_split=dev", "dev", **NEW)
    yield refused("export/rows-unknown", f"{EXPORT} export.rows=fp8", "export.rows", **NEW)
    yield refused("export/test-damaged", EXPORT, "test-00000", edits.garbled(f"{DATASET}/chunks/test-00000.arrow"), **NEW)
    yield refused("export/partition-damaged", EXPORT, "hot_rows.npz", edits.cut(f"{PARTITION}/hot_rows.npz"), **NEW)
    yield either("export/two-at-once", AGAIN, SERVED, act=beside(AGAIN, "data/served/.model*.tmp", codes=(0, 1)), check=same_artifact(SERVED), variables=in_run("runs/new"))


def _input_cases() -> Iterator[Case]:
    header, first = "label,price,user,tags\n", "0,0.5,u0,a0 b0\n"
    texts: dict[str, tuple[str | bytes, str]] = {
        "column-missing": ("label,price,user\n0,0.5,u0\n", "tags"),
        "column-renamed": ("label,price,user,words\n0,0.5,u0,a0\n", "tags"),
        "no-header": (first, "columns|header"),
        "empty": ("", "1.csv"),
        "field-more": (f"{header}{first}0,0.5,u0,a0,b0\n", "1.csv"),
        "price-text": (f"{header}{first}0,dear,u0,a0\n", "1.csv"),
        "label-5": (f"{header}{first}5,0.5,u0,a0\n", "1.csv"),
        "label-missing": (f"{header}{first},0.5,u0,a0\n", "1.csv"),
        "not-utf-8": (header.encode() + b"0,0.5,\xff\xfe,a0\n", "1.csv"),
        "zeros": (b"\0" * 5000, "1.csv"),
    }
    for name, (text, key) in texts.items():
        yield refused(f"predict/{name}", PREDICT, key, edits.written(DAYS, text), **NEW)
    yield works("predict/works", PREDICT, check=lambda made: whole(made.folder / "data/new/scores"), **NEW)
    yield works("predict/without-label", PREDICT, edits.written(DAYS, "price,user,tags\n0.5,u0,a0 b0\n"), **NEW)
    yield works("predict/new-values", PREDICT, edits.written(DAYS, f"{header}1,,stranger,\n"), **NEW)
    either_empty = edits.written(DAYS, header)
    yield either("predict/no-samples", PREDICT, "1.csv", either_empty, **NEW)
    yield works("predict/keep", f"{PREDICT} predict.keep=[user,tags]", **NEW)
    yield refused("predict/keep-unknown", f"{PREDICT} predict.keep=[usr]", "predict.keep", **NEW)
    yield refused("predict/keep-taken", f"{PREDICT} predict.keep=[label]", "predict.keep", **NEW)
    lines = [f"0,0.5,u{n % 7},a0 b0\n" for n in range(30)]
    strange = {"ids-upper": "u", "items-upper": "a"}
    for name, letter in strange.items():
        text = header + "".join(lines).replace(f",{letter}", f",{letter.upper()}").replace(" b", " B")
        column = "user" if letter == "u" else "tags"
        yield refused(f"predict/{name}", PREDICT, f"1.csv column {column}", edits.written(DAYS, text), **NEW)
        yield works(f"predict/{name}-let-through", f"{PREDICT} predict.max_unknown_frac=1", edits.written(DAYS, text), **NEW)
    yield refused("predict/unknown-frac-2", f"{PREDICT} predict.max_unknown_frac=2", "predict.max_unknown_frac", **NEW)
    for name, text in (("middle", f"{header}{first}\n{first}"), ("end", f"{header}{first}\n")):
        yield refused(f"predict/blank-line-{name}", PREDICT, "1.csv line 3", edits.written(DAYS, text), **NEW)
    skips = edits.replaced(f"{DAYS_RUN}/config.yaml", "on_bad_line: error", "on_bad_line: skip")
    for name, text in (("price", "0,dear,u0,a0\n"), ("fields", "0\n1\n"), ("label", "7,0.5,u0,a0\n")):
        yield refused(f"predict/all-bad-{name}", PREDICT, "1.csv", edits.several(skips, edits.written(DAYS, header + text)), **NEW)
    yield works("predict/blank-line-skipped", PREDICT, edits.several(skips, edits.written(DAYS, f"{header}{first}\n{first}\n")), **NEW)
    yield refused("predict/output-in-artifact", PREDICT.replace("data/new", "data/days/dataset"), "output")
    yield refused("predict/file-missing", PREDICT, DAYS, edits.deleted(DAYS), **NEW)
    yield refused("predict/file-directory", PREDICT, DAYS, edits.several(edits.deleted(DAYS), edits.linked(DAYS, ".")), **NEW)
    yield refused("predict/file-unreadable", PREDICT, "1.csv", edits.unreadable(DAYS), is_privileged=False, **NEW)
    yield refused("predict/synthetic-run", PREDICT.replace(DAYS_RUN, ONE), "input", **NEW)
    second = edits.several(edits.written("data/days/2.csv", "label,price\n0,1\n"))
    both = PREDICT.replace(DAYS, f"{DAYS},data/days/2.csv")
    yield refused("predict/second-file", both, "2.csv", second, **NEW)
    yield refused("predict/second-file-ranks", f"{both} launch.num_ranks=2", "2.csv", second, ranks=(0, 1), limit_s=90, is_exec=True, **NEW)
    for damage in ("cut", "flipped", "deleted"):
        yield refused(f"predict/vocabulary-{damage}", PREDICT, "user.arrow", DAMAGES[damage]("data/days/dataset/vocab/user.arrow"), **NEW)


# Kibibytes that are too few.
DISK: list[tuple[str, str, tuple[int, ...]]] = [
    ("export", EXPORT.replace("data/new", "small"), (4, 16, 28)),
    ("predict", PREDICT.replace("data/new", "small"), (4, 8)),
]


def _other_cases() -> Iterator[Case]:
    for name, words, sizes in DISK:
        for kib in sizes:
            yield refused(f"disk/{name}-{kib}k", words, "small", unchanged, disk_bytes=kib << 10)
    for command, words, ready in (
        ("export", AGAIN, "data/served/.model*.tmp"),
        ("predict", PREDICT, "data/new/.scores*.tmp"),
    ):
        for name, number in (("kill", signal.SIGKILL), ("term", signal.SIGTERM), ("int", signal.SIGINT)):
            quiet: dict[str, Any] = {"speaks": False, "may_leave": number == signal.SIGKILL}
            yield Case(f"signal/{command}-{name}", (words,), act=send("launcher", number, ready, 0), exit_codes=(128 + number,), is_exec=True, **quiet)


FAST = ("export/tensors-flipped", "predict/column-missing")
CASES = [
    fast(case) if case.name in FAST else case
    for case in (*_run_cases(), *_export_cases(), *_input_cases(), *_other_cases())
]
