"""Checks of the finished configuration: limits of single values, and what must fit together.

They run on the object that OmegaConf makes: Hydra builds schemas with ``'???'`` in them, which a
``__post_init__`` would meet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from hotrec.config.check_data import check_data_spec
from hotrec.config.data import DataSpec
from hotrec.config.groups import VARIANTS, CostPlacement, ModelConfig, OrderAssign, PolicyConfig
from hotrec.config.roots import (
    HOT_COLD_CASES,
    BenchCase,
    BenchConfig,
    BenchRootConfig,
    BenchVariant,
    Config,
    Device,
    TrainerConfig,
)
from hotrec.types import ColdTier, PipelineKind, Precision

# FBGEMM asserts it for every table with a fused optimizer (construct_split_state).
DIM_MULTIPLE = 4


def validate(config: Any) -> None:
    """Check the values of a finished configuration object.

    Raises:
        ValueError: beginning with the full key, and naming what is expected and what was found.
    """
    for full_key, value, item in walk(config):
        _check_limits(full_key, value, item.metadata.get("limits", {}))
    if isinstance(config, BenchRootConfig):
        _check_model(config.model)
        _check_bench(config.bench)
    if isinstance(config, Config):
        check_data_spec(config.data, key="data")
        _check_kinds(config)
        _check_model(config.model)
        _check_trainer(config.trainer)
        _check_names(config)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Every field that is no section, with its full key; the data specification checks itself."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        full_key = f"{prefix}{item.name}"
        if isinstance(value, DataSpec):
            continue
        if is_dataclass(value):
            yield from walk(value, f"{full_key}.")
        else:
            yield full_key, value, item


def _check_limits(full_key: str, value: Any, limits: dict[str, float]) -> None:
    if value is None:
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{full_key}: expected a finite number, got {value}.")
    tests = {
        "at_least": lambda limit: value >= limit,
        "above": lambda limit: value > limit,
        "at_most": lambda limit: value <= limit,
        "below": lambda limit: value < limit,
    }
    if not all(tests[name](limit) for name, limit in limits.items()):
        wanted = " and ".join(
            f"{name.replace('_', ' ')} {limit:g}" for name, limit in limits.items()
        )
        raise ValueError(f"{full_key}: expected a value {wanted}, got {value}.")


def _check_kinds(config: Config) -> None:
    for group, variants in VARIANTS.items():
        chosen = getattr(config, group)
        expected = next(name for name, kind in variants.items() if type(chosen) is kind)
        if chosen.kind.name != expected:
            raise ValueError(
                f"{group}.kind: expected {expected}, which {group}={expected} chose, got "
                f"{chosen.kind.name}. Choose with {group}={chosen.kind.name}."
            )


def _check_model(model: ModelConfig) -> None:
    if model.embedding_dim % DIM_MULTIPLE:
        below = model.embedding_dim // DIM_MULTIPLE * DIM_MULTIPLE
        raise ValueError(
            f"model.embedding_dim: expected a multiple of {DIM_MULTIPLE} (FBGEMM's tables take no "
            f"other, on CPU or CUDA), got {model.embedding_dim}. Take {max(below, DIM_MULTIPLE)} "
            f"or {below + DIM_MULTIPLE}."
        )
    for name in ("dense_layer_sizes", "over_layer_sizes"):
        sizes = getattr(model, name)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"model.{name}: expected sizes of at least 1, got {sizes}.")
    if model.dense_layer_sizes[-1] != model.embedding_dim:
        raise ValueError(
            f"model.dense_layer_sizes: expected the last to be model.embedding_dim, "
            f"{model.embedding_dim}, got {model.dense_layer_sizes}."
        )
    if model.over_layer_sizes[-1] != 1:
        raise ValueError(
            f"model.over_layer_sizes: expected the last to be 1, got {model.over_layer_sizes}."
        )


def _check_trainer(trainer: TrainerConfig) -> None:
    if trainer.compile and trainer.warmup_steps < 1:
        raise ValueError(
            f"trainer.warmup_steps: expected at least 1 with trainer.compile, whose first step "
            f"compiles, got {trainer.warmup_steps}. Set trainer.warmup_steps=10."
        )
    if trainer.precision is Precision.tf32 and trainer.device is Device.cpu:
        raise ValueError(
            "trainer.precision: expected fp32 or bf16 with trainer.device=cpu, got tf32, which "
            "only GPUs have. Set trainer.precision=fp32."
        )


def _check_bench(bench: BenchConfig) -> None:
    placements = [case.name for case in BenchCase]
    known = [*placements, *bench.variants]
    if not bench.cases or len(set(bench.cases)) != len(bench.cases):
        raise ValueError(
            f"bench.cases: expected each at most once, and at least one, got {bench.cases}."
        )
    for case in bench.cases:
        if case not in known:
            raise ValueError(f"bench.cases: expected some of {known}, got {case!r}.")
    if bench.pipeline not in (PipelineKind.sparse_dist, PipelineKind.base):
        raise ValueError(
            f"bench.pipeline: expected sparse_dist or base, which every placement has, got "
            f"{bench.pipeline.name}. Give single cases another pipeline by bench.variants."
        )
    for name, variant in bench.variants.items():
        _check_variant(f"bench.variants.{name}", name, variant, bench)
    if bench.block_skip >= bench.block_steps:
        raise ValueError(
            f"bench.block_skip: expected below bench.block_steps {bench.block_steps}, got "
            f"{bench.block_skip}."
        )
    if not bench.table_rows or min(bench.table_rows) < 1:
        raise ValueError(f"bench.table_rows: expected rows >= 1, got {bench.table_rows}.")
    for case, rounds in bench.rounds_of.items():
        if case not in known:
            raise ValueError(f"bench.rounds_of: expected one of {known}, got {case!r}.")
        if rounds < 1:
            raise ValueError(f"bench.rounds_of.{case}: expected at least 1, got {rounds}.")


def _check_variant(key: str, name: str, variant: BenchVariant, bench: BenchConfig) -> None:
    placements = [case.name for case in BenchCase]
    if name in placements:
        raise ValueError(f"{key}: expected a name other than {placements}, got {name!r}.")
    for full_key, value, item in walk(variant, f"{key}."):
        _check_limits(full_key, value, item.metadata.get("limits", {}))
    pipeline = variant.pipeline or bench.pipeline
    if pipeline is PipelineKind.auto:
        raise ValueError(
            f"{key}.pipeline: expected sparse_dist, base, look_ahead or prefetch, got auto. A "
            f"benchmark compares given pipelines; set {key}.pipeline=sparse_dist."
        )
    is_hot_cold = variant.placement in HOT_COLD_CASES
    if not is_hot_cold and pipeline is PipelineKind.look_ahead:
        raise ValueError(
            f"{key}.pipeline: expected another than look_ahead with TorchRec's plan "
            f"{variant.placement.name}, got look_ahead."
        )
    is_cached = variant.tier is ColdTier.fused_uvm_caching
    if pipeline is PipelineKind.prefetch and (is_hot_cold or not is_cached):
        raise ValueError(
            f"{key}.pipeline: expected prefetch only with TorchRec's plans in the tier "
            f"fused_uvm_caching, got prefetch with the placement {variant.placement.name} and the "
            f"tier {variant.tier.name}. Set {key}.pipeline=sparse_dist."
        )
    is_plain = variant.depth == 1 and not variant.micro_batches
    if not is_plain and pipeline is not PipelineKind.look_ahead:
        raise ValueError(
            f"{key}: expected depth 1 and no micro_batches with the pipeline {pipeline.name}, got "
            f"depth {variant.depth}, micro_batches {variant.micro_batches}. They are look_ahead's."
        )
    if variant.num_hot_rows is not None and variant.placement is not BenchCase.hot_cold:
        raise ValueError(
            f"{key}.num_hot_rows: expected null with the placement {variant.placement.name}, got "
            f"{variant.num_hot_rows}. Set {key}.placement=hot_cold."
        )
    has_cold = variant.placement in (BenchCase.hot_cold, BenchCase.all_cold)
    if variant.assign is OrderAssign.by_owner and not has_cold:
        raise ValueError(
            f"{key}.assign: expected as_read with the placement {variant.placement.name}, which "
            f"has no cold rows that travel, got by_owner. Set {key}.placement=hot_cold."
        )


def _check_names(config: Config) -> None:
    known = ["train", "valid", "test"]
    unknown = [split for split in config.trainer.eval_splits if split not in known]
    if unknown:
        raise ValueError(f"trainer.eval_splits: expected some of {known}, got {unknown}.")
    if isinstance(config.placement, PolicyConfig | CostPlacement):
        for table, override in config.placement.overrides.items():
            if isinstance(override, bool) or (
                isinstance(override, str) and override not in ("hot", "cold")
            ):
                raise ValueError(
                    f"placement.overrides.{table}: expected hot, cold, a number of rows or a "
                    f"fraction, got {override!r}."
                )
