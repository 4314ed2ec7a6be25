"""Every key of the configuration says what it means, and somebody reads it."""

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
from hotrec.config import data, groups, roots
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS

PACKAGE = Path(hotrec.__file__).parent
# The parts that are handed a configuration.
READERS = ("assemble/*.py", "runs/*.py", "bench/*.py")
READERS += ("calibrate/**/*.py", "cli/*.py")
# The specification of a dataset reads itself, too.
READERS += ("data/*.py", "config/data.py")
# Constants of the update rules, which optimizer_specs takes by name from those that have them.
READ_BY_NAME = {"eps", "beta1", "beta2"}
# Those of a model's layers, see architecture_of.
READ_BY_NAME |= {"dense_layer_sizes", "over_layer_sizes", "deep_layer_sizes", "num_experts"}
READ_BY_NAME |= {"expert_layer_sizes", "item_columns", "tower_layer_sizes", "args"}
READ_BY_NAME |= {"attention", "attention_layer_sizes", "num_layers", "num_heads"}
READ_BY_NAME |= {"attention_dim", "linear_dim", "dropout", "max_length"}
READ_BY_NAME |= {"cross_num_layers", "cross_low_rank_dim", "_target_"}
# By the properties keeps_best and first_decay_step.
READ_BY_NAME |= {"keep_best", "decay_start_step"}
# Those of the page of a benchmark, see hotrec.bench.job.SETTINGS.
READ_BY_NAME |= set(SETTINGS)


def config_classes() -> Iterator[type]:
    for thing in {**vars(data), **vars(groups), **vars(roots)}.values():
        if not (dataclasses.is_dataclass(thing) and isinstance(thing, type)):
            continue
        if thing.__module__ in (data.__name__, groups.__name__, roots.__name__):
            yield thing


@cache
def attributes_read() -> set[str]:
    """Names of attributes that the readers of configurations read."""
    names = set()
    for path in (path for pattern in READERS for path in PACKAGE.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            elif isinstance(node, ast.MatchClass):
                names.update(node.kwd_attrs)
    return names


def keys_interpolated() -> set[str]:
    """Keys that other keys are made of: ``${dataset_name}``."""
    files = [*PACKAGE.glob("config/*.py"), *conf_dir().rglob("*.yaml")]
    return {name for path in files for name in re.findall(r"\$\{(\w+)\}", path.read_text())}


def test_all_classes_are_looked_at() -> None:
    classes = set(config_classes())
    assert set(ROOTS.values()) <= classes
    for variants in VARIANTS.values():
        assert set(variants.values()) <= classes


@pytest.mark.parametrize("kind", list(config_classes()), ids=lambda kind: kind.__name__)
def test_keys(kind: type) -> None:
    read = attributes_read() | keys_interpolated() | READ_BY_NAME
    for item in dataclasses.fields(kind):
        assert item.metadata.get("meaning"), f"{kind.__name__}.{item.name} says nothing"
        assert item.name in read, f"{kind.__name__}.{item.name} is read by nobody"


def test_a_key_that_nobody_reads_is_found() -> None:
    assert "no_command_reads_this" not in attributes_read()
    assert "batch_size" in attributes_read()


def test_mutable_defaults_are_not_shared() -> None:
    first, second = roots.TrainerConfig(), roots.TrainerConfig()
    first.eval_splits.append("train")
    assert second.eval_splits == ["valid", "test"]
