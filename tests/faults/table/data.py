"""Logs to prepare that are broken, hostile or odd; names of columns and tables."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults import edits
from tests.faults.case import Case, Change, Made, either, fast, refused, works
from tests.faults.workspace import PREPARE, TINY

LOG = "prepare --config-dir conf data=log"
OUTPUT = {"outputs": ("data/log",)}
HEADER = "label,price,user,tags"
ROWS = [f"{n % 2},{n}.5,u{n % 7},a{n % 5} b{n % 3}" for n in range(60)]
TEXT = "\n".join([HEADER, *ROWS]) + "\n"
COLUMNS: dict[str, dict[str, Any]] = {
    "label": {"kind": "label"},
    "price": {"kind": "dense"},
    "user": {"kind": "categorical"},
    "tags": {"kind": "categorical_list"},
}
SOURCE: dict[str, Any] = {
    "format": "delimited",
    "files": ["log.csv"],
    "separator": ",",
    "columns": COLUMNS,
}


def log(content: str | bytes = TEXT, name: str = "log.csv", **source: Any) -> Change:
    """A log, and the configuration ``data=log`` that reads it."""
    document = {"source": {**SOURCE, "files": [name], **source}}
    return edits.several(
        # JSON is YAML; hydra reads it as it is.
        edits.written("conf/data/log.yaml", json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass")),
        edits.written(name, content),
    )


def line(text: str) -> Change:
    """A log whose 31st sample is this line."""
    return log("\n".join([HEADER, *ROWS[:30], text, *ROWS[30:]]) + "\n")


def zeros(num_bytes: int) -> bytes:
    stream = io.BytesIO()
    with gzip.GzipFile(fileobj=stream, mode="wb", mtime=0) as file:
        for _ in range(num_bytes >> 20):
            file.write(b"\0" * (1 << 20))
    return stream.getvalue()


def bomb(num_bytes: int) -> Change:
    return lambda folder: log(zeros(num_bytes), "log.csv.gz")(folder)


def fifo(folder: Path) -> None:
    log()(folder)
    (folder / "log.csv").unlink()
    os.mkfifo(folder / "log.csv")


def at(path: str) -> Change:
    """A log that is another file of the system."""
    return edits.several(log(), log("", "unused.csv", files=[path]))


JSON = "".join(
    json.dumps({"label": n % 2, "price": n + 0.5, "user": f"u{n % 7}", "tags": [n % 5, n % 3]}) + "\n"
    for n in range(60)
)
VECTOR = {**COLUMNS, "price": {"kind": "dense", "width": 2}}
PARTS = {"label": {"kind": "label"}, "user": {"kind": "categorical"}}


def twice(folder: Path) -> None:
    """Two columns of one name, as joins leave them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = pq.read_table(folder / "log.parquet")
    pq.write_table(made.append_column("price", pa.nulls(made.num_rows)), folder / "log.parquet")


def broken_text(pa: Any) -> Any:
    """A column of texts whose bytes are none."""
    ends = pa.array(range(61), pa.int32()).buffers()[1]
    return pa.StringArray.from_buffers(60, ends, pa.py_buffer(b"\xff" * 60))


def table(suffix: str = "parquet", damage: Change | None = None, spec: Any = COLUMNS, **columns: Any) -> Change:
    """A log in Parquet or Arrow IPC; a column is given by its values or as an array."""

    def change(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        values: dict[str, Any] = {
            "label": [n % 2 for n in range(60)],
            "price": [n + 0.5 for n in range(60)],
            "user": [n % 7 for n in range(60)],
            "tags": [[n % 5, n % 3] for n in range(60)],
        }
        values.update({name: made(pa) if callable(made) else made for name, made in columns.items()})
        made = pa.table({name: value for name, value in values.items() if value is not None})
        name = f"log.{suffix}"
        log("", name, format=suffix, columns=spec)(folder)
        if suffix == "parquet":
            pq.write_table(made, folder / name)
        else:
            with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, made.schema) as out:
                out.write_table(made)
        if damage is not None:
            damage(folder)

    return change


def joined(side: str, **join: Any) -> Change:
    """A log with a side table, joined on the user."""
    spec = {"files": ["side.csv"], "on": "user", "separator": ",", **join}
    columns = {**COLUMNS, "age": {"kind": "dense"}}
    return edits.several(log(joins={"people": spec}, columns=columns), edits.written("side.csv", side))


def samples(number: int) -> Any:
    def check(made: Made) -> str | None:
        found = sum(made.figures[0]["num_samples"].values())
        return None if found == number else f"{found} samples were prepared, not {number}"

    return check


LONG = "x" * (1 << 20)
REFUSED_LOGS: list[tuple[str, Change, str]] = [
    ("empty", log(""), "log.csv"),
    ("only-header", log(HEADER + "\n"), "log.csv"),
    ("only-header-no-newline", log(HEADER), "log.csv"),
    ("only-newlines", log("\n" * 50), "log.csv"),
    ("binary", log(bytes(range(256)) * 64), "log.csv|columns"),
    ("utf-16", log(TEXT.encode("utf-16")), "log.csv"),
    ("latin-1-header", log(TEXT.replace("user", "us\xe9r").encode("latin-1")), "log.csv"),
    ("column-missing", log(TEXT.replace("price", "cost", 1)), "price"),
    ("column-twice", log(TEXT.replace("price", "user", 1)), "user|price"),
    ("separator", log(separator=";"), "columns|separator"),
    ("separator-long", log(separator=", "), "separator"),
    ("separator-empty", log(separator=""), "separator"),
    ("separator-unicode", log(separator="\u00a7"), "separator"),
    ("separator-newline", log(separator="\n"), "separator"),
    ("short-line", line("1,2.5,u1"), "line 32"),
    ("long-line", line("1,2.5,u1,a1,more"), "line 32"),
    ("quote-open", line('1,2.5,"u1,a1'), "line 32"),
    ("label-2", line("2,2.5,u1,a1"), "label"),
    ("label-half", line("0.5,2.5,u1,a1"), "label"),
    ("label-nan", line("nan,2.5,u1,a1"), "label"),
    ("label-empty", line(",2.5,u1,a1"), "label"),
    ("label-text", line("maybe,2.5,u1,a1"), "label"),
    ("dense-text", line("1,cheap,u1,a1"), "price"),
    ("dense-nan", line("1,nan,u1,a1"), "price"),
    ("dense-inf", line("1,inf,u1,a1"), "price"),
    ("dense-1e39", line("1,1e39,u1,a1"), "price"),
    ("dense-1e999", line("1,1e999,u1,a1"), "price"),
    ("dense-hex", line("1,0x10,u1,a1"), "price"),
    ("dense-underscore", line("1,1_000,u1,a1"), "price"),
    ("one-line-16mb", log(b"x" * (16 << 20)), "log.csv"),
    ("one-line-128mb", log(b"x" * (128 << 20)), "log.csv"),
    ("second-line-128mb", log(TEXT.encode() + b"x" * (128 << 20)), "log.csv"),
    ("gzip-bomb", bomb(2 << 30), "log.csv.gz"),
    ("gzip-cut", log(gzip.compress(TEXT.encode())[:-30], "log.csv.gz"), "log.csv.gz"),
    ("gzip-flipped", edits.several(log(gzip.compress(TEXT.encode()), "log.csv.gz"), edits.flipped("log.csv.gz")), "log.csv.gz"),
    ("gzip-not", log(TEXT, "log.csv.gz"), "log.csv.gz"),
    ("gzip-empty", log(b"", "log.csv.gz"), "log.csv.gz"),
    ("zst-not", log(TEXT, "log.csv.zst"), "log.csv.zst"),
    ("bz2-not", log(TEXT, "log.csv.bz2"), "log.csv.bz2"),
    ("dev-zero", at("/dev/zero"), "/dev/zero"),
    ("dev-null", at("/dev/null"), "/dev/null"),
    ("dev-random", at("/dev/urandom"), "/dev/urandom"),
    ("fifo", fifo, "log.csv"),
    ("stdin", at("/dev/stdin"), "/dev/stdin"),
    ("missing", at("absent.csv"), "absent.csv"),
    ("pattern-empty", at("absent/*.csv"), "absent/*.csv"),
    ("pattern-broken", at("[.csv"), "[.csv"),
    ("directory-empty", edits.several(log(files=["logs"]), lambda folder: (folder / "logs").mkdir()), "logs"),
    ("link-loop", edits.several(log(), edits.looped("log.csv")), "log.csv"),
    ("no-files", log(files=[]), "files"),
    ("second-file-bad", edits.several(log(files=["log.csv", "two.csv"]), edits.written("two.csv", "label,price\n1,2\n")), "two.csv"),
    ("all-skipped", edits.several(log(f"{HEADER}\n" + "x\n" * 9, on_bad_line="skip")), "log.csv|samples"),
    ("no-label-column", log(columns={"user": {"kind": "categorical"}}), "columns"),
    ("label-of-words", log(columns={**COLUMNS, "user": {"kind": "label"}}), "user"),
    ("no-features", log(columns={"label": {"kind": "label"}}), "columns"),
    ("kind-unknown", log(columns={**COLUMNS, "user": {"kind": "cake"}}), "user.kind|kind"),
    ("format-unknown", log(format="xml"), "format"),
    ("split-time-column", log(split={"kind": "time", "column": "absent", "valid_from": 1}), "absent"),
    ("split-time-nan", log(split={"kind": "time", "column": "price", "valid_from": float("nan")}), "valid_from"),
    ("split-all-valid", log(split={"kind": "time", "column": "price", "valid_from": -1}), "train|split"),
    ("split-last-all", log(split={"kind": "last", "valid_frac": 0.5, "test_frac": 0.5}), "split"),
    ("split-negative", log(split={"valid_frac": -0.1}), "valid_frac"),
    ("split-nan", log(split={"valid_frac": float("nan")}), "valid_frac"),
    ("block-huge", log(block_mib=1 << 40), "block_mib"),
    ("chunk-zero", log(rows_per_chunk=0), "rows_per_chunk"),
    ("join-missing", joined("person,years\nu1,3\n"), "side.csv|age|user"),
    ("join-twice", joined("user,age\nu1,3\nu1,4\n"), "side.csv"),
    ("join-empty", joined(""), "side.csv"),
    ("join-text", joined("user,age\nu1,old\n"), "age"),
    ("join-files", joined("user,age\nu1,3\n", files=["absent.csv"]), "absent.csv"),
    ("join-on", joined("user,age\nu1,3\n", on="absent"), "absent"),
    ("fill-nan", log(columns={**COLUMNS, "price": {"kind": "dense", "fill": float("nan")}}), "fill"),
    *((f"hashing-{rows}", log(tables={"user": {"encoding": "hashing", "num_rows": rows}}), "num_rows") for rows in (0, 1, -1, 2**63 - 1, 2**63, 2**64, 2**70)),
    ("min-count-zero", log(tables={"user": {"min_count": 0}}), "min_count"),
    ("table-unknown", log(tables={"absent": {"min_count": 2}}), "absent"),
    ("parquet-cut", table(damage=edits.cut("log.parquet")), "log.parquet"),
    ("parquet-empty", table(damage=edits.emptied("log.parquet")), "log.parquet"),
    ("parquet-not", table(damage=edits.written("log.parquet", TEXT)), "log.parquet"),
    ("parquet-no-rows", table(label=[], price=[], user=[], tags=[]), "log.parquet"),
    ("json-cut", log(JSON[:-9], "log.jsonl", format="json"), "log.jsonl line 60"),
    ("json-array", log("[\n" + JSON + "]\n", "log.jsonl", format="json"), "log.jsonl line 1"),
    ("json-mixed", log(JSON.replace('"u3"', "3"), "log.jsonl", format="json"), "user"),
    ("json-object", log(JSON.replace('"u3"', '{"id": 3}'), "log.jsonl", format="json"), "user"),
    ("json-field-missing", log(JSON.replace('"user"', '"u"'), "log.jsonl", format="json"), "user"),
    ("json-twice", log(JSON.replace('"tags"', '"user"'), "log.jsonl", format="json"), "user|tags"),
    ("json-deep", log(JSON + "[" * 100_000 + "\n", "log.jsonl", format="json"), "log.jsonl line 61"),
    ("label-minus", line("-1,2.5,u1,a1"), "values"),
    ("label-values", log(columns={**COLUMNS, "label": {"kind": "label", "values": ["1"]}}), "label.values"),
    ("number-thousands", line('1,"1,234.5",u1,a1'), "thousands"),
    ("number-decimal", log(columns={**COLUMNS, "price": {"kind": "dense", "decimal": ""}}), "price.decimal"),
    ("number-two-forms", log(columns={**COLUMNS, "bucket": {"kind": "categorical", "source": "price", "derive": "log_bucket", "decimal": ","}}), "bucket"),
    ("vector-ragged", table(price=[[1.0, 2.0]] * 59 + [[1.0]], spec=VECTOR), "line 60"),
    ("vector-of-numbers", table(spec=VECTOR), "price"),
    ("vector-not-said", table(price=[[1.0, 2.0]] * 60), "width"),
    ("times-form", log(times={"price": "hourly"}), "times.price"),
    ("times-without-day", log(times={"price": "%H:%M"}), "times.price"),
    ("parquet-column-twice", edits.several(table(), twice), "price"),
    ("arrow-text-broken", table("arrow", user=broken_text), "user"),
    ("parquet-float-ids", table(user=[n + 0.5 for n in range(60)]), "user"),
    ("parquet-nan-ids", table(user=[float("nan")] * 60), "user"),
    ("parquet-binary-ids", table(user=lambda pa: pa.array([b"\xff\xfe"] * 60)), "user"),
    ("parquet-struct-ids", table(user=[{"a": 1}] * 60), "user"),
    ("parquet-nested-lists", table(tags=[[[1], [2]]] * 60), "tags"),
    ("parquet-list-for-id", table(user=[[1, 2]] * 60), "user"),
    ("parquet-float-lists", table(tags=[[1.5]] * 60), "tags"),
    ("parquet-dense-nan", table(price=[1.0] * 59 + [float("nan")]), "price"),
    ("parquet-dense-inf", table(price=[1.0] * 59 + [float("inf")]), "price"),
    ("parquet-dense-1e300", table(price=[1.0] * 59 + [1e300]), "price"),
    ("parquet-dense-text", table(price=["cheap"] * 60), "price"),
    ("parquet-dense-dates", table(price=lambda pa: pa.array([0] * 60, pa.date32())), "price"),
    ("parquet-label-null", table(label=[None] * 60), "label"),
    ("parquet-label-text", table(label=["maybe"] * 60), "label"),
    ("parquet-column-missing", table(user=None), "user"),
    ("arrow-cut", table("arrow", edits.cut("log.arrow")), "log.arrow"),
    ("arrow-empty", table("arrow", edits.emptied("log.arrow")), "log.arrow"),
    ("arrow-flipped-head", table("arrow", edits.flipped("log.arrow", 0.02)), "log.arrow"),
    ("arrow-not", table("arrow", edits.written("log.arrow", TEXT)), "log.arrow"),
]
GOOD_LOGS: list[tuple[str, Change, int]] = [
    ("plain", log(), 60),
    ("no-final-newline", log(TEXT.rstrip()), 60),
    ("crlf", log(TEXT.replace("\n", "\r\n")), 60),
    ("gzip", log(gzip.compress(TEXT.encode()), "log.csv.gz"), 60),
    ("gzip-members", log(gzip.compress(TEXT[:300].encode()) + gzip.compress(TEXT[300:].encode()), "log.csv.gz"), 60),
    ("extra-column", log("\n".join(f"{row},9" for row in TEXT.splitlines()) + "\n"), 60),
    ("quoted", line('1,2.5,"u,1",a1'), 61),
    ("id-missing", line("1,2.5,,"), 61),
    ("id-1mb", line(f"1,2.5,{LONG},a1"), 61),
    ("one-sample", log(f"{HEADER}\n1,2,u,a\n", split={"valid_frac": 0, "test_frac": 0}), 1),
    ("negative-zero", line("-0,-0.0,u1,a1"), 61),
    ("parquet", table(), 60),
    ("parquet-uint64", table(user=lambda pa: pa.array([2**64 - 1 - n for n in range(60)], pa.uint64())), 60),
    ("parquet-dictionary", table(user=lambda pa: pa.array(["a", "b"] * 30).dictionary_encode()), 60),
    ("parquet-bool-label", table(label=[True, False] * 30), 60),
    ("parquet-whole-float-ids", table(user=[float(n % 7) for n in range(59)] + [None]), 60),
    ("parquet-decimal-ids", table(user=lambda pa: pa.array(range(60)).cast(pa.decimal128(19)).cast(pa.decimal128(38, 2))), 60),
    ("parquet-vectors", table(price=[[1.0, None], None] * 30, spec=VECTOR), 60),
    ("label-words", log(TEXT.replace("\n0", "\nFalse").replace("\n1", "\nTRUE")), 60),
    ("label-minus", log(TEXT.replace("\n0", "\n-1"), columns={**COLUMNS, "label": {"kind": "label", "values": ["-1", "1"]}}), 60),
    ("quoted-newline", line('1,2.5,"u\n\n1",a1'), 61),
    ("json", log(JSON, "log.jsonl", format="json"), 60),
    ("json-gzip", log(gzip.compress(JSON.encode()), "log.jsonl.gz", format="json"), 60),
    ("partitions", edits.several(log(files=["log"], columns=PARTS), *(edits.written(f"log/label={n}/part.csv", "user\n" + "u1\nu2\n" * 15) for n in (0, 1))), 60),
    ("parquet-null-ids", table(user=[None, 1] * 30), 60),
    ("arrow", table("arrow"), 60),
]
NAMES = {
    **{name: name for name in ("items", "type", "forward", "keys", "values", "pop", "update", "clear", "train", "training", "module", "half", "float", "state_dict", "parameters", "weight", "_modules", "__class__", "self", "None", "true", "0", "-x", "user_hot", "user_cold", "c0", "price@number")},
    **{"unicode": "\u65e5\u672c", "accent": "e\u0301", "emoji": "\U0001f600", "long": "x" * 300, "very-long": "x" * 5000},
    **{"colon": "a:b", "equals": "a=b", "comma": "a;b", "braces": "{a}", "brackets": "[a]", "quote": "'a'", "dollar": "${a}", "percent": "%s", "star": "*", "hash": "#a", "bidi": "a\u202eb", "plus": "a+b"},
}
BAD_NAMES = {
    **{"slash": "a/b", "dots": "..", "dot": ".", "path": "../../x", "absolute": "/etc", "newline": "a\nb", "tab": "a\tb", "return": "a\rb", "nul": "a\0b", "escape": "a\x1b[31mb", "empty": "", "blank": " ", "backslash": "a\\b", "dense": "dense"},
    "surrogate": "\ud800",
}


def named(column: str = "user", table: str = "") -> Change:
    columns = {**COLUMNS, column: {"kind": "categorical", "source": "user", "table": table}}
    return log(columns={key: value for key, value in columns.items() if key in (column, *COLUMNS)})


CHAIN = "\n".join(
    f"{command} --config-dir conf data=log {TINY.split('data.synthetic')[0].split(' ', 1)[1]}"
    f"dataset_name=log model.embedding_dim=4 model.dense_layer_sizes=[8,4] "
    f"model.over_layer_sizes=[8,1] trainer.batch_size=8 trainer.num_workers=0 {more}"
    for command, more in (
        ("prepare", ""),
        ("profile", ""),
        ("train", "placement=coverage trainer.max_steps=2 trainer.eval_splits=[]"),
    )
)


def _cases() -> Iterator[Case]:
    for name, change, key in REFUSED_LOGS:
        yield refused(f"data/{name}", LOG, key, change, limit_s=40, **OUTPUT)
    for name, change, number in GOOD_LOGS:
        yield works(f"data/good-{name}", LOG, change, check=samples(number), **OUTPUT)
    yield either("data/bom", LOG, "log.csv", log(TEXT.encode("utf-8-sig")), **OUTPUT)
    yield either("data/nul-bytes", LOG, "log.csv", log(TEXT.replace("u3", "\0\0")), **OUTPUT)
    yield either("data/parquet-flipped-footer", LOG, "log.parquet", table(damage=edits.flipped("log.parquet", 0.98)), **OUTPUT)
    yield either("data/cr-only", LOG, "log.csv", log(TEXT.replace("\n", "\r")), **OUTPUT)
    yield either("data/latin-1-id", LOG, "line 32|log.csv", log(TEXT.replace("u3", "\xfc3").encode("latin-1")), **OUTPUT)
    unreadable = edits.several(log(), edits.unreadable("log.csv"))
    yield refused("data/unreadable", LOG, "log.csv", unreadable, is_privileged=False, **OUTPUT)
    skipped = edits.several(line("1,2.5"), edits.replaced("conf/data/log.yaml", '"files"', '"on_bad_line": "skip", "files"'))
    yield works("data/good-skipped", LOG, skipped, check=samples(60), **OUTPUT)
    yield refused("data/two-ranks-short-line", f"{LOG} launch.num_ranks=2", "line 32", line("1,2.5"), ranks=(0, 1), limit_s=90, **OUTPUT)
    yield refused("data/synthetic-rows", f"{PREPARE} data.synthetic.num_rows=[{2**64}]", "num_rows")
    yield refused("data/synthetic-samples", f"{PREPARE} data.synthetic.num_train={2**63}", "num_train")
    both = {"outputs": ("data/log", "runs")}
    for name, column in NAMES.items():
        yield either(f"names/feature-{name}", CHAIN, "columns|conf/data/log", named(column), **both)
        if name in ("items", "type", "forward", "keys", "unicode", "long", "user_hot", "colon", "percent"):
            yield either(f"names/table-{name}", CHAIN, "table|columns|conf/data/log", named("u", column), **both)
    for name, column in BAD_NAMES.items():
        yield refused(f"names/bad-feature-{name}", LOG, "columns|log.yaml|data/log", named(column), **OUTPUT)
        if name not in ("empty", "dense"):
            yield refused(f"names/bad-table-{name}", LOG, "table|log.yaml|data/log", named("u", column), **OUTPUT)


FAST = (
    *("data/empty", "data/short-line", "data/label-2", "data/dense-nan", "data/gzip-cut"),
    *("data/one-line-16mb", "data/hashing-18446744073709551616", "data/parquet-float-ids"),
    *("data/parquet-cut", "data/good-plain", "data/good-crlf", "names/bad-feature-slash"),
    *("names/bad-table-dots", "names/bad-feature-newline", "names/feature-items", "data/fifo"),
)
CASES = [fast(case) if case.name in FAST else case for case in _cases()]
