"""Datasets that grow: samples that come again, other splits, generations that would be lost."""

# A case is a line, however long.
# ruff: noqa: E501
# fmt: off
from __future__ import annotations

import bz2
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults import edits
from tests.faults.case import Case, Change, Made, fast, refused, works
from tests.faults.workspace import DAYS_RUN, TINY

HEADER = "at,label,price,user,item"
DAY_MS = 86_400_000
LOG = "prepare --config-dir conf data=log"
APPEND = f"{LOG}\n{LOG} append=[again.csv]"
OUTPUT = {"outputs": ("data/log",)}
TIMES: dict[str, Callable[[int, int], object]] = {
    "ordered": lambda day, n: DAY_MS * day + n,
    "equal": lambda day, n: 7,
    "days": lambda day, n: DAY_MS * day,
    "numbers": lambda day, n: f"{day}.{n:02d}",
    "unordered": lambda day, n: DAY_MS * day + (n * 37) % 60,
}
SPLITS: dict[str, dict[str, Any]] = {
    "random": {"kind": "fraction", "valid_frac": 0.2, "test_frac": 0.2},
    "last": {"kind": "last", "valid_frac": 0.2, "test_frac": 0.2},
    "time": {"kind": "time", "column": "at", "valid_from": 1e15},
}


def rows(day: int, times: str = "ordered") -> list[str]:
    return [f"{TIMES[times](day, n)},{n % 2},{day}.{n * 7919 % 1000:03d},u{(n * n + day) % 17},i{n % 11}" for n in range(60)]


def text(*parts: list[str]) -> str:
    return "\n".join([HEADER, *(row for part in parts for row in part)]) + "\n"


def log(content: str = text(rows(1)), split: str = "time", **source: Any) -> Change:
    """A log in log.csv, and the configuration ``data=log`` that reads it."""
    columns = {"label": {"kind": "label"}, "price": {"kind": "dense"}, "user": {"kind": "categorical"}, "item": {"kind": "categorical"}}
    document = {"format": "delimited", "files": ["log.csv"], "separator": ",", "columns": columns, "split": SPLITS[split], **source}
    return edits.several(edits.written("conf/data/log.yaml", json.dumps({"source": document})), edits.written("log.csv", content))


def again(more: str | bytes, name: str = "again.csv", **settings: Any) -> Change:
    return edits.several(log(**settings), edits.written(name, more))


def hard_linked(folder: Path) -> None:
    log(split="random")(folder)
    os.link(folder / "log.csv", folder / "again.csv")


def in_parquet(folder: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    log(split="random")(folder)
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(folder / "log.csv"), folder / "again.parquet")


def sizes(**expected: int) -> Any:
    def check(made: Made) -> str | None:
        found = made.figures[-1]["num_samples"]
        wrong = {split: found[split] for split, num in expected.items() if found[split] != num}
        return f"{wrong} samples were prepared, not {expected}" if wrong else None

    return check


def kept(number: int) -> Any:
    def check(made: Made) -> str | None:
        found = len(made.figures[-1]["kept"])
        return None if found == number else f"{found} generations are kept, not {number}"

    return check


DAY_1, DAY_2, DAY_3 = (rows(day) for day in (1, 2, 3))
FORMS: dict[str, tuple[Change, str]] = {
    "copy": (again(text(DAY_1), split="random"), "again.csv"),
    "reordered": (again(text(DAY_1[::-1]), split="random"), "again.csv"),
    "crlf": (again(text(DAY_1).replace("\n", "\r\n"), split="random"), "again.csv"),
    "quoted": (again(text(DAY_1).replace("u1,", '"u1",'), split="random"), "again.csv"),
    "gzip": (again(gzip.compress(text(DAY_1).encode()), "again.csv.gz", split="random"), "again.csv.gz"),
    "bz2": (again(bz2.compress(text(DAY_1).encode()), "again.csv.bz2", split="random"), "again.csv.bz2"),
    "symlink": (edits.several(log(split="random"), edits.linked("again.csv", "log.csv")), "again.csv"),
    "hard-link": (hard_linked, "again.csv"),
    "half": (again(text(DAY_1[30:], DAY_2[:30]), split="random"), "again.csv"),
    "cumulative": (again(text(DAY_1, DAY_2), split="random"), "again.csv"),
}
# As a growing log is appended, day by day.
GROWING = log(text(DAY_1, DAY_2, DAY_3), split="time")
BOUNDS = "data.source.split.valid_from={} data.source.split.test_from={}"
FIRST, NEXT = BOUNDS.format(2 * DAY_MS, 3 * DAY_MS), BOUNDS.format(3 * DAY_MS, 4 * DAY_MS)
GROW = f"{LOG}\n{LOG} append=[more.csv]"
MORE = edits.several(log(), edits.written("more.csv", text(DAY_2)))
DAYS = "prepare --config-dir conf data=days append=[more.csv]"
NEW_DAY = edits.written("more.csv", "label,price,user,tags\n" + "".join(f"{n % 2},{n}.25,u{n % 5},a{n % 3}\n" for n in range(60)))
EVALUATE = f"evaluate run_dir={DAYS_RUN} split=valid"
OF_DAYS = {"outputs": ("data/days",)}


def _cases() -> Iterator[Case]:
    for form, (change, name) in FORMS.items():
        for split in ("random", "last"):
            also = edits.replaced("conf/data/log.yaml", json.dumps(SPLITS["random"]), json.dumps(SPLITS[split]))
            yield refused(f"append/{form}-{split}", f"{LOG}\n{LOG} append=[{name}]", "append", edits.several(change, also), **OUTPUT)
        yield refused(f"append/{form}-in-one-list", f"{LOG} data.source.files=[log.csv,{name}]", "data.source.files", change, **OUTPUT)
    yield refused("append/pattern-and-name", f"{LOG} data.source.files=[log.csv,l*.csv]", "data.source.files", log(), **OUTPUT)
    yield refused("append/twice-in-the-list", f"{LOG}\n{LOG} append=[more.csv,more.csv]", "append", MORE, **OUTPUT)
    yield refused("append/parquet", f"{LOG}\n{LOG} append=[again.parquet] data.source.format=parquet", "append", in_parquet, **OUTPUT)
    for times in TIMES:
        yield refused(f"append/times-{times}", APPEND, "append", again(text(rows(1, times)), content=text(rows(1, times))), **OUTPUT)
        yield refused(f"append/times-{times}-half", APPEND, "append", again(text(rows(2, times), rows(1, times)[30:]), content=text(rows(1, times))), **OUTPUT)
    yield works("append/next-day", GROW, MORE, check=sizes(train=120), **OUTPUT)
    yield works("append/allowed", f"{APPEND} allow_repeats=true", again(text(DAY_1), split="random"), **OUTPUT)
    yield works("append/growing-log", f"{LOG} {FIRST}\n{LOG} append=[log.csv] {NEXT}", GROWING, check=sizes(train=120, valid=60, test=0), **OUTPUT)
    yield refused("append/growing-log-same-bounds", f"{LOG} {FIRST}\n{LOG} append=[log.csv] {FIRST}", "valid_from", GROWING, **OUTPUT)
    late = text(DAY_1, [f"{DAY_MS + 5},1,0.125,late,i1"], DAY_2, DAY_3)
    yield refused("append/growing-log-late", f"{LOG} {FIRST}\n{LOG} append=[again.csv] {NEXT}", "append", edits.several(GROWING, edits.written("again.csv", late)), **OUTPUT)
    for split in ("random", "last"):
        words = " ".join(f"data.source.split.{key}={value}" for key, value in SPLITS[split].items())
        yield refused(f"append/split-{split}", f"{GROW} {words}", "split.kind", MORE, **OUTPUT)
    yield refused("append/split-column", f"{GROW} data.source.split.column=price", "split.column", MORE, **OUTPUT)
    yield refused("append/split-unit", f"{GROW} +data.source.times.at=s", "times.at", MORE, **OUTPUT)
    yield refused("append/split-back", f"{GROW} data.source.split.valid_from={DAY_MS}", "valid_from", MORE, **OUTPUT)
    yield refused("append/on-two-ranks", f"{LOG}\n{LOG} append=[again.csv,more.csv] launch.num_ranks=2", "append", edits.several(again(text(DAY_1), split="random"), edits.written("more.csv", text(DAY_2))), ranks=(0, 1), limit_s=120, **OUTPUT)
    for name, words in (("without", ""), ("empty", "append=[]"), ("pruned", "append=[] prune=null")):
        yield refused(f"generations/rebuilt-{name}", f"{GROW}\n{LOG} {words}".rstrip(), "overwrite=true", MORE, **OUTPUT)
    synthetic = f"prepare {TINY} paths.dataset=data/log/dataset"
    yield refused("generations/rebuilt-synthetic", f"{GROW}\n{synthetic}", "overwrite=true", MORE, **OUTPUT)
    yield refused("generations/damaged", LOG, "overwrite=true", _damaged, **OUTPUT)
    yield works("generations/overwritten", f"{GROW}\n{LOG} overwrite=true", MORE, check=sizes(train=60), **OUTPUT)
    yield works("generations/evaluated", f"{DAYS}\n{EVALUATE}", NEW_DAY, **OF_DAYS)
    yield works("generations/pruned", f"{DAYS}\nprepare --config-dir conf data=days prune=0", NEW_DAY, check=kept(0), **OF_DAYS)
    yield works("generations/kept", f"{DAYS}\nprepare --config-dir conf data=days prune=1", NEW_DAY, check=kept(1), **OF_DAYS)
    yield refused("generations/prune-negative", f"{LOG} prune=-1", "prune", log(), **OUTPUT)
    yield refused("generations/prune-run", "run --config-dir conf data=log prune=1", "prune", log(), **OUTPUT)
    yield refused("generations/prune-nothing", f"{LOG} prune=1", "data/log/dataset", log(), **OUTPUT)


def _damaged(folder: Path) -> None:
    """A grown dataset that lost a file."""
    MORE(folder)
    dataset = folder / "data/log/dataset"
    dataset.mkdir(parents=True)
    manifest = json.loads((folder / "data/days/dataset/manifest.json").read_text())
    manifest["content"]["source"]["generations"] = [{"content_hash": "0" * 64, "num_train": 1, "num_rows": {}}]
    (dataset / "manifest.json").write_text(json.dumps(manifest))


FAST = ("append/copy-random", "append/gzip-last", "append/times-equal", "append/growing-log", "append/split-random", "generations/rebuilt-without", "generations/evaluated")
CASES = [fast(case) if case.name in FAST else case for case in _cases()]
