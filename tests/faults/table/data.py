"""Logs: bytes and names that are wrong, by format; files to score."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.faults import forge
from tests.faults.case import Case, Change, either, refused, works
from tests.faults.workspace import (
    DATASET,
    DAYS,
    DAYS_RUN,
    EXPORT,
    EXPORT_AGAIN,
    LAST,
    ONE,
    PREDICT,
    PREPARE,
    SERVED,
    TINY,
    TWO,
    whole_artifact,
)

LOG = "prepare --config-dir conf data=log"
OUTPUT: dict[str, Any] = {"outputs": ("data/log",)}
COLUMNS: dict[str, dict[str, Any]] = {
    "label": {"kind": "label"},
    "price": {"kind": "dense"},
    "user": {"kind": "categorical"},
    "tags": {"kind": "categorical_list"},
}
ROWS: list[dict[str, Any]] = [
    {"label": n % 2, "price": n + 0.5, "user": f"u{n % 7}", "tags": [f"a{n % 5}", f"b{n % 3}"]}
    for n in range(60)
]


def in_csv(rows: list[dict[str, Any]]) -> bytes:
    lines = [",".join(" ".join(v) if isinstance(v, list) else str(v) for v in row.values()) for row in rows]
    return "\n".join([",".join(rows[0]), *lines, ""]).encode()


def in_json(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def in_parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue())


def in_arrow(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa

    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


# By name of the file: its format, and how it is written.
FORMATS: dict[str, tuple[str, Any]] = {
    "log.csv": ("delimited", in_csv),
    "log.csv.gz": ("delimited", lambda rows: gzip.compress(in_csv(rows))),
    "log.csv.bz2": ("delimited", lambda rows: bz2.compress(in_csv(rows))),
    "log.jsonl": ("json", in_json),
    "log.parquet": ("parquet", in_parquet),
    "log.arrow": ("arrow", in_arrow),
}


def log(content: bytes | None = None, name: str = "log.csv", **source: Any) -> Change:
    """A log, and the configuration ``data=log`` that reads it."""
    of_format, write = FORMATS.get(name, ("delimited", in_csv))
    document = {"format": of_format, "files": [name], "separator": ",", "columns": COLUMNS, **source}
    # JSON is YAML; hydra reads it as it is.
    text = json.dumps({"source": document}, ensure_ascii=False).encode(errors="surrogatepass")
    return forge.several(forge.written("conf/data/log.yaml", text), forge.written(name, write(ROWS) if content is None else content))


BIG = 1 << 27
# Bytes that are no log, by what is wrong.
BAD_BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "log.csv"),
    "only-header": (b"label,price,user,tags\n", "log.csv"),
    "only-newlines": (b"\n" * 50, "log.csv"),
    "binary": (bytes(range(256)) * 64, "log.csv|columns"),
    "utf-16": (in_csv(ROWS).decode().encode("utf-16"), "log.csv"),
    "column-missing": (in_csv(ROWS).replace(b"price", b"cost", 1), "price"),
    "column-twice": (in_csv(ROWS).replace(b"price", b"user", 1), "user|price"),
    "separator": (in_csv(ROWS).replace(b",", b";"), "columns|separator"),
    "short-line": (in_csv(ROWS).replace(b",u3,", b",", 1), "line 5"),
    "long-line": (in_csv(ROWS).replace(b",u3,", b",u3,u3,", 1), "line 5"),
    "quote-open": (in_csv(ROWS).replace(b",u3,", b',"u3,', 1), "line 5"),
    "one-line-16mb": (b"x" * (16 << 20), "log.csv"),
    "one-line-128mb": (b"x" * BIG, "log.csv"),
    "second-line-128mb": (in_csv(ROWS) + b"x" * BIG, "log.csv"),
    "pickle": (forge.CONTENTS["pickle"], "log.csv|columns"),
}
SPECIAL = ("/dev/zero", "/dev/null", "/dev/urandom", "/dev/stdin", "absent.csv", "absent/*.csv", "[.csv")


def _byte_cases() -> Iterator[Case]:
    for kind, (content, key) in BAD_BYTES.items():
        yield refused(f"data/{kind}", LOG, key, log(content), limit_s=40, **OUTPUT)
    for name, kind in product(FORMATS, forge.DAMAGES):
        if kind == "swapped" or name == "log.csv" and kind in ("cut", "grown", "flipped") or (name, kind) in (("log.jsonl", "flipped"), ("log.csv.gz", "grown"), ("log.arrow", "flipped"), ("log.parquet", "flipped"), ("log.arrow", "grown")):
            make: Any = either  # which may make another log of it
        else:
            make = refused
        if kind != "swapped":
            yield make(f"data/{name}-{kind}", LOG, f"{name}|columns|label|price|user|tags", forge.several(log(None, name), forge.damaged(name, kind)), is_privileged=kind != "unreadable", **OUTPUT)
        if name != "log.csv" and kind == "pipe":
            yield refused(f"data/{name}-not", LOG, name, log(in_csv(ROWS)[:-9] + b"[", name), **OUTPUT)
    for file in SPECIAL:
        yield refused(f"data/{file.replace('/', '.')}", LOG, file, forge.several(log(), log(b"", "unused.csv", files=[file])), **OUTPUT)
    yield refused("data/bomb", LOG, "log.csv.gz", lambda folder: log(forge.zeros(1 << 30), "log.csv.gz")(folder), **OUTPUT)
    for name, content in (("bom", b"\xef\xbb\xbf" + in_csv(ROWS)), ("nul", in_csv(ROWS).replace(b"u3", b"\0\0")), ("cr", in_csv(ROWS).replace(b"\n", b"\r")), ("latin-1", in_csv(ROWS).replace(b"u3", b"\xfc3"))):
        yield either(f"data/{name}", LOG, "log.csv", log(content), **OUTPUT)
    yield refused("data/second-file", LOG, "two.csv", forge.several(log(files=["log.csv", "two.csv"]), forge.written("two.csv", "label,price\n1,2\n")), **OUTPUT)
    yield refused("data/two-ranks", f"{LOG} launch.num_ranks=2", "line 5", log(BAD_BYTES["short-line"][0]), ranks=(0, 1), limit_s=90, **OUTPUT)
    for key, value in (("num_rows", f"[{2**64}]"), ("num_train", 2**63)):
        yield refused(f"data/synthetic-{key}", f"{PREPARE} data.synthetic.{key}={value}", key)


# ------------------------------------------------------------------------- names of columns and tables

NAMES = {
    **{name: name for name in ("items", "type", "forward", "keys", "values", "pop", "update", "train", "training", "module", "half", "state_dict", "parameters", "weight", "_modules", "__class__", "self", "None", "0", "-x", "user_hot", "user_cold", "c0", "price@number")},
    **{"unicode": "\u65e5\u672c", "accent": "e\u0301", "emoji": "\U0001f600", "long": "x" * 300, "very-long": "x" * 5000},
    **{"colon": "a:b", "equals": "a=b", "braces": "{a}", "brackets": "[a]", "quote": "'a'", "dollar": "${a}", "percent": "%s", "star": "*", "hash": "#a", "bidi": "a\u202eb", "plus": "a+b"},
}
BAD_NAMES = {"slash": "a/b", "dots": "..", "path": "../../x", "absolute": "/etc", "newline": "a\nb", "nul": "a\0b", "escape": "a\x1b[31mb", "blank": " ", "backslash": "a\\b", "surrogate": "\ud800"}
SMALL = f"{TINY.split('data.synthetic')[0].split(' ', 1)[1]}dataset_name=log model.embedding_dim=4 model.dense_layer_sizes=[8,4] model.over_layer_sizes=[8,1] trainer.batch_size=8 trainer.num_workers=0"
CHAIN = "\n".join(f"{command} --config-dir conf data=log {SMALL}{more}" for command, more in (("prepare", ""), ("train", " placement=coverage trainer.max_steps=2 trainer.eval_splits=[]")))


def _named(column: str = "user", table: str = "") -> Change:
    columns = {**COLUMNS, column: {"kind": "categorical", "source": "user", "table": table}}
    return log(columns={key: value for key, value in columns.items() if key in (column, *COLUMNS)})


def _name_cases() -> Iterator[Case]:
    for name, text in NAMES.items():
        yield either(f"names/feature-{name}", CHAIN, "columns|conf/data/log", _named(text), outputs=("data/log", "runs"))
        yield either(f"names/table-{name}", CHAIN, "table|columns|conf/data/log", _named("u", text), outputs=("data/log", "runs"))
    for name, text in BAD_NAMES.items():
        yield refused(f"names/bad-feature-{name}", LOG, "columns|log.yaml|data/log", _named(text), **OUTPUT)
        yield refused(f"names/bad-table-{name}", LOG, "table|log.yaml|data/log", _named("u", text), **OUTPUT)


# ---------------------------------------------------- datasets that grow: (in which form) x (which split)


# ------------------------------------------------------------- exported, and files to score

NEW: dict[str, Any] = {"outputs": ("data/new",)}
HEADER, FIRST_ROW = "label,price,user,tags\n", "0,0.5,u0,a0 b0\n"
SCORED: dict[str, tuple[str | bytes, str]] = {
    "column-missing": ("label,price,user\n0,0.5,u0\n", "tags"),
    "no-header": (FIRST_ROW, "columns|header"),
    "empty": ("", "1.csv"),
    "field-more": (f"{HEADER}{FIRST_ROW}0,0.5,u0,a0,b0\n", "1.csv"),
    "price-text": (f"{HEADER}{FIRST_ROW}0,dear,u0,a0\n", "1.csv"),
    "label-5": (f"{HEADER}{FIRST_ROW}5,0.5,u0,a0\n", "1.csv"),
    "not-utf-8": (HEADER.encode() + b"0,0.5,\xff\xfe,a0\n", "1.csv"),
    "zeros": (b"\0" * 5000, "1.csv"),
    "blank-line": (f"{HEADER}{FIRST_ROW}\n{FIRST_ROW}", "1.csv line 3"),
    "strangers": (HEADER + "".join(f"0,0.5,U{n % 7},a0 b0\n" for n in range(30)), "1.csv column user"),
}


def _serving_cases() -> Iterator[Case]:
    for name, words, run, checkpoint, dataset in (("export", EXPORT, ONE, LAST, DATASET), ("predict", PREDICT, DAYS_RUN, "checkpoints/step-00000003", "data/days/dataset")):
        for gone, key in ((f"{run}/checkpoints", "checkpoints|run_dir"), (f"{run}/{checkpoint}", "checkpoint"), (f"{run}/summary.json", "run_dir"), (f"{run}/config.yaml", "config.yaml"), (dataset, dataset)):
            yield refused(f"{name}/without-{Path(gone).name}", words, key, forge.damaged(gone, "deleted"), **NEW)
        yield refused(f"{name}/other-dataset", words, "dataset", forge.copied("data/other/dataset", dataset), **NEW)
        target = words.partition("output=")[0] + "output=data/new"
        for taken, change in (("foreign", forge.damaged("data/new", "directory")), ("file", forge.written("data/new", "mine")), ("artifact", forge.copied(dataset, "data/new"))):
            yield refused(f"{name}/output-{taken}", target, "data/new", change, **NEW)
        for more, key in (("checkpoint=step-99", "checkpoint"), ("run_dir=runs/none", "run_dir"), ("output=''", "output"), (f"output={dataset}/new", "output")):
            yield refused(f"{name}/{more.replace('/', '.')}", f"{words} {more}", key, **NEW)
    yield works("export/two-ranks", EXPORT.replace(ONE, TWO), **NEW)
    yield refused("export/foreign-file", EXPORT_AGAIN, "mine.txt", forge.written(f"{SERVED}/mine.txt", "mine"))
    for more, key in (("rows=fp8", "rows"),):
        yield refused(f"export/{more}", f"{EXPORT} {more}", key, **NEW)
    for name, (content, key) in SCORED.items():
        yield refused(f"predict/{name}", PREDICT, key, forge.written(DAYS, content), **NEW)
        yield refused(f"predict/second-{name}", PREDICT.replace(DAYS, f"{DAYS},data/days/2.csv"), key.replace("1.csv", "2.csv"), forge.written("data/days/2.csv", content), **NEW)
    for name, content in (("as-it-is", HEADER + FIRST_ROW), ("without-label", "price,user,tags\n0.5,u0,a0 b0\n"), ("new-values", f"{HEADER}1,,stranger,\n")):
        yield works(f"predict/{name}", PREDICT, forge.written(DAYS, content), check=whole_artifact("data/new/scores"), **NEW)
    yield works("predict/strangers-let-through", f"{PREDICT} max_unknown_frac=1", forge.written(DAYS, SCORED["strangers"][0]), **NEW)
    for more, key in (("max_unknown_frac=2", "max_unknown_frac"), ("keep=[usr]", "keep"), ("keep=[label]", "keep"), (f"run_dir={ONE}", "input")):
        yield refused(f"predict/{more.replace('/', '.')}", f"{PREDICT} {more}", key, **NEW)
    for kind in ("deleted", "pipe", "unreadable"):
        yield refused(f"predict/file-{kind}", PREDICT, "1.csv", forge.damaged(DAYS, kind), is_privileged=kind != "unreadable", **NEW)
    yield refused("predict/ranks", f"{PREDICT} launch.num_ranks=2", "1.csv", forge.written(DAYS, SCORED["price-text"][0]), ranks=(0, 1), limit_s=90, **NEW)


def cases(_: Path) -> Iterator[Case]:
    for part in (_byte_cases, _name_cases, _serving_cases):
        yield from part()
