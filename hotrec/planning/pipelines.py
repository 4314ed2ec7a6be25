"""Chooses the train pipeline."""

from __future__ import annotations

from typing import Any

from hotrec.config.groups import TieredConfig, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.planning.machine import Machine
from hotrec.types import ColdTier, HotExchange, PipelineKind, Placement

# Samples per rank from which look-ahead pays on one host. Smaller steps have little to hide, and
# its thread competes with the loader's workers for the cores: the quickstart (two ranks on two
# cores, 256 samples) takes 25 ms a step with look-ahead and 20 ms without.
LEAST_BATCH_ON_ONE_HOST = 2048


def choose_pipeline(config: Config, machine: Machine) -> PipelineKind:
    """Returns the pipeline that trains the configuration's placement, never auto.

    Raises:
        ValueError: If the configured one cannot.
    """
    is_torchrec = isinstance(config.placement, TorchrecPlacement)
    kind = config.pipeline.kind
    if kind is PipelineKind.auto:
        # look_ahead has not been run on CUDA yet.
        may_look_ahead = machine.device == "cpu" and not is_torchrec
        is_on_one_host = machine.world_size <= machine.local_world_size
        is_worth_it = machine.world_size > 1 and (
            not is_on_one_host or config.trainer.batch_size >= LEAST_BATCH_ON_ONE_HOST
        )
        is_ahead = may_look_ahead and is_worth_it
        return PipelineKind.look_ahead if is_ahead else PipelineKind.sparse_dist
    if kind is PipelineKind.look_ahead and is_torchrec:
        raise ValueError(
            "pipeline.kind: expected sparse_dist or base for placement=torchrec, whose tables "
            "TorchRec exchanges, got look_ahead. Set pipeline=sparse_dist."
        )
    if kind is PipelineKind.prefetch:
        _check_prefetch(config, machine)
    return kind


def _check_prefetch(config: Config, machine: Machine) -> None:
    placement = config.placement
    found, is_cached = placement.kind.name, False
    if isinstance(placement, TorchrecPlacement):
        found = f"torchrec with tier {placement.tier.name}"
        is_cached = placement.tier is ColdTier.fused_uvm_caching
    if not is_cached or machine.device != "cuda":
        wanted = "placement=torchrec with placement.tier=fused_uvm_caching on cuda"
        raise ValueError(
            f"pipeline.kind: expected {wanted} for prefetch, which fills FBGEMM's device caches, "
            f"got placement={found} on {machine.device}. Set these, or pipeline=sparse_dist."
        )


def hot_exchange_of(placement: Any, placed: Placement) -> HotExchange:
    """Returns how hot gradients are exchanged: dense if the placement is, else as configured."""
    if placed.is_hot_dense:
        return HotExchange.dense
    if isinstance(placement, TieredConfig):
        return placement.hot_exchange
    return HotExchange.auto
