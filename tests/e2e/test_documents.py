"""The keys of every document that a command leaves: its line of JSON, files of a run, manifests.

``tests/frozen/documents.txt`` has the path of every key, of one chain of commands on a small log;
values are not compared. Documents of a kind are taken together: a key that not all have ends in a
question mark. A commit that changes it (HOTREC_UPDATE_GOLDEN=1) says which reader of the
file or the line is meant to notice, and has a line in CHANGELOG.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import hotrec
from tests.frozen.record import check_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
DATA = ("--config-dir", "my_conf", "data=my_log", "trainer.device=cpu")
LOG = """
source:
  format: delimited
  files: [log.csv]
  separator: ","
  split: {kind: time, column: time, valid_from: 1000, test_from: 1200}
  columns:
    label: {kind: label, source: clicked}
    price: {kind: dense}
    user: {kind: categorical}
    item: {kind: categorical_list}
  tables:
    user: {encoding: hashing, num_rows: 50}
"""
MODEL = (
    *("model.embedding_dim=8", "model.dense_layer_sizes=[8]", "model.over_layer_sizes=[8,1]"),
    *("trainer.batch_size=16", "trainer.num_workers=0", "trainer.log_every_steps=10"),
    *("planner.costs=cpu_1gbit", "planner.host_gib=16", "plan.trial=false", "plan.device=cpu"),
)
CALIBRATE = ("calibrate.budget_s=1", "calibrate.repeats=3", "calibrate.cap_mib=1")
SPLIT = ("placement=cost", "placement.may_decline=false", "pipeline=look_ahead")
# The directory of the run, and the words of its command.
CHAIN: dict[str, tuple[str, ...]] = {
    "init": ("init", "log.csv", "name=found", "label=clicked"),
    "prepare": ("prepare", *DATA),
    "calibrate": ("calibrate", *DATA, *MODEL, *CALIBRATE, "calibrate.max_bytes=65536"),
    "plan": ("plan", *DATA, *MODEL, "placement=cost"),
    "plan_coverage": ("plan", *DATA, *MODEL, "placement=coverage"),
    "plan_torchrec": ("plan", *DATA, *MODEL, "placement=torchrec"),
    "train": ("train", *DATA, *MODEL, *SPLIT, "trainer.eval_every_steps=30"),
    "train_torchrec": ("train", *DATA, *MODEL, "placement=torchrec", "pipeline=sparse_dist"),
    "train_all_hot": (
        *("train", *DATA, *MODEL, "order=all_hot", "placement=coverage"),
        *("placement.coverage_frac=0.9", "trainer.eval_every_steps=20"),
    ),
    "train_slots": (
        *("train", *DATA, *MODEL, "placement=all_cold", "pipeline=look_ahead"),
        *("placement.cold_tier=cached", "placement.cache_load_frac=0.95", "pipeline.window=0"),
        *("trainer.eval_batch_size=8", "trainer.batch_size=8", "trainer.max_steps=20"),
    ),
    "train_adapt": (
        *("train", *DATA, *MODEL, "placement=coverage", "pipeline=look_ahead"),
        "placement.adapt_every_steps=20",
    ),
    "evaluate": ("evaluate", "run_dir=runs/train", "num_workers=0"),
    "compare": ("compare", "runs/train", "runs/train_torchrec", "seconds=1"),
    "export": ("export", "run_dir=runs/train_torchrec", "output=model"),
    "predict": ("predict", "run_dir=runs/train", "input=[log.csv]", "output=scores"),
    "compare_plans": ("compare", "plans=smoke", "plans.variants={}", "device=cpu"),
    "report": ("report", "runs=[runs/train,runs/train_torchrec]"),
}
SWEEPS = {
    "sweep_train": (
        *("train", "--multirun", *DATA, *MODEL, "placement=all_hot,all_cold", "pipeline=base"),
        "trainer.max_steps=3",
    ),
    "sweep_plan": ("plan", "--multirun", *DATA, *MODEL, "placement=cost", "plan.world_size=1,2"),
}
# Whose keys are names of this machine.
OPEN = ("packages",)


def write_log(folder: Path) -> None:
    rows = (
        f"{time % 3 // 2},{time % 7},u{time * time % 37},i{time % 5} i{time % 11},{time}"
        for time in range(1500)
    )
    (folder / "log.csv").write_text("\n".join(["clicked,price,user,item,time", *rows, ""]))
    (folder / "my_conf/data").mkdir(parents=True)
    (folder / "my_conf/data/my_log.yaml").write_text(LOG)


@dataclass
class Node:
    """The keys of all documents of a kind: how often a value was there, and the keys in it."""

    times: int = 0
    keys: dict[str, Node] = field(default_factory=dict)

    def add(self, value: Any) -> None:
        self.times += 1
        if isinstance(value, list):
            # A list of values is one itself, which may be empty.
            for element in value:
                if isinstance(element, list | Mapping):
                    self.keys.setdefault("[]", Node()).add(element)
        elif isinstance(value, Mapping):
            for name, of in value.items():
                self.keys.setdefault(name, Node()).add({} if name in OPEN else of)

    def absorb(self, other: Node) -> None:
        self.times += other.times
        for name, of in other.keys.items():
            self.keys.setdefault(name, Node()).absorb(of)

    def names(self) -> str:
        """The keys; one that is not always there has a question mark."""
        return ", ".join(self.marked(name) for name in sorted(self.keys))

    def marked(self, name: str) -> str:
        return name if name == "[]" or self.keys[name].times >= self.times else f"{name}?"

    def lines(self, path: str) -> Iterator[str]:
        """A line for each key, or for all where they hold the same: tables, stages or plans."""
        inner = [of for of in self.keys.values() if of.keys]
        if not self.keys:
            yield path
        elif not inner:
            yield f"{path} {{{self.names()}}}"
        elif len(inner) == len(self.keys) > 1 and set.intersection(*(set(of.keys) for of in inner)):
            yield f"{path} {{{self.names()}}}"
            yield from merged(inner).lines(f"{path}.<name>")
        else:
            for name in sorted(self.keys):
                yield from self.keys[name].lines(f"{path}.{self.marked(name)}")


def merged(nodes: Iterable[Node]) -> Node:
    result = Node()
    for node in nodes:
        result.absorb(node)
    return result


def documents(folder: Path) -> Iterator[tuple[str, Any]]:
    """Kind and content of every JSON, JSON lines and CSV file that stays."""
    for path in sorted(folder.rglob("*")):
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            yield f"manifest of {manifest['kind']}", manifest
        elif path.suffix == ".json":
            yield path.name, json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            yield from ((path.name, json.loads(line)) for line in path.read_text().splitlines())
        elif path.suffix == ".csv" and path.name != "log.csv":
            with path.open(newline="") as file:
                yield path.name, dict.fromkeys(next(csv.reader(file)))


def test_documents_have_the_recorded_keys(tmp_path: Path) -> None:
    write_log(tmp_path)
    found: list[tuple[str, Any]] = []
    for name, words in CHAIN.items():
        outcome = hotrec(*words, cwd=tmp_path, HOTREC_RUN_DIR=f"runs/{name}")
        found.append((f"hotrec {words[0]}", outcome.figures))
    for name, words in SWEEPS.items():
        outcome = hotrec(*words, cwd=tmp_path, HOTREC_RUN_DIR=f"runs/{name}")
        assert outcome.exit_code == 0, outcome.stderr
        jobs = [json.loads(line) for line in outcome.stdout.splitlines()]
        found += [(f"hotrec {words[0]}, a job of a sweep", figures) for figures in jobs]
    kinds: dict[str, Node] = {}
    for kind, document in (*found, *documents(tmp_path)):
        kinds.setdefault(kind, Node()).add(document)
    lines = [line for kind, node in kinds.items() for line in node.lines(f"{kind}:")]
    check_text("documents.txt", "\n".join([*lines, ""]))
