"""Every key of the configuration is read by somebody."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hotrec
from hotrec.bench.job import SETTINGS
from hotrec.cli.store import conf_dir
from hotrec.config.roots import TrainerConfig
from tests.config.test_refusals import sections

PACKAGE = Path(hotrec.__file__).parent
# The parts that are handed a configuration; the specification of a dataset reads itself, too.
READERS = ("assemble/*.py", "runs/*.py", "bench/*.py", "calibrate/**/*.py", "cli/*.py")
READERS += ("data/*.py", "config/data.py")
# Taken by name from those that have them: constants of the update rules, a model's layers, what
# properties read, and the page of a benchmark.
READ_BY_NAME = {
    *("eps", "keep_best", "decay_start_step", *SETTINGS),
    *("dense_layer_sizes", "over_layer_sizes", "deep_layer_sizes", "num_experts", "max_length"),
    *("expert_layer_sizes", "item_columns", "tower_layer_sizes", "args", "attention", "_target_"),
    *("attention_layer_sizes", "num_layers", "num_heads", "attention_dim", "linear_dim"),
    *("cross_num_layers", "cross_low_rank_dim", "dropout"),
}


@cache
def names_read() -> set[str]:
    """Attributes that readers read, and keys that other keys are made of: ``${dataset_name}``."""

    def names() -> Iterator[str]:
        for path in (path for pattern in READERS for path in PACKAGE.glob(pattern)):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    yield node.attr
                elif isinstance(node, ast.MatchClass):
                    yield from node.kwd_attrs
        for path in (*PACKAGE.glob("config/*.py"), *conf_dir().rglob("*.yaml")):
            yield from re.findall(r"\$\{(\w+)\}", path.read_text())

    return set(names())


@pytest.mark.parametrize("kind", sorted(sections(), key=lambda kind: kind.__name__))
def test_keys(kind: type) -> None:
    found = {item.name for item in dataclasses.fields(kind)}
    assert found - names_read() - READ_BY_NAME == set()


def test_mutable_defaults_are_not_shared() -> None:
    first, second = TrainerConfig(), TrainerConfig()
    first.eval_splits.append("train")
    assert second.eval_splits == ["valid", "test"]
