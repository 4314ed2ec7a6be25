"""Shards a TorchRec model with its hot rows replicated, instead of TorchRec's own wrapper."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from hotrec.assemble.constraints import placement_constraints, torchrec_constraints
from hotrec.assemble.machine import make_machine
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.assemble.trainable import check_host_memory
from hotrec.cost_model.profile import Profile
from hotrec.embedding.convert import shard, use_hot_cold
from hotrec.embedding.fused import can_update_tables, check_optimizer
from hotrec.embedding.optimizers import (
    ModelOptimizer,
    make_optimizer,
    make_replicated_tables,
    replicated_tables,
)
from hotrec.embedding.packed import is_packed
from hotrec.embedding.sharding import HotColdSequenceSharder, HotColdSharder
from hotrec.embedding.tables import torchrec_collections
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.request import ByCost
from hotrec.program.choice import (
    OFF,
    Choice,
    Tables,
    choose_by_cost,
    choose_given,
    choose_off,
)
from hotrec.program.guard import Guard
from hotrec.program.tables import (
    EmbeddingOptimizer,
    InitialTables,
    SplitCollection,
    apply_rule,
    check_tables,
    default_sharders,
    embedding_modules,
    make_layers,
    once_in_tree,
    rules_of,
    shared_rule,
    split_collections,
    tables_of,
)
from hotrec.runtime.hosts import gather_hosts
from hotrec.runtime.memory import MIB
from hotrec.runtime.ranks import Ranks, broadcast_object, joined_ranks, rank, same_verdict
from hotrec.train.dense_sync import check_modules, share_first
from hotrec.train.traced import features_read
from hotrec.types import OptimizerKind, Partition, PipelineKind, PipelineSpec, Placement

logger = logging.getLogger(__name__)

# Creates an optimizer from parameters, like a class of torch.optim.
DenseOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Hot = Profile | Partition | Placement | Choice | str
# Batch size per rank for TorchRec's estimates if unknown; the default of TorchRec's planner.
ASSUMED_BATCH_SIZE = 512


def parallelize(  # noqa: PLR0913
    model: nn.Module,
    hot: Hot,
    *,
    dense_optimizer: DenseOptimizer,
    embedding_optimizer: EmbeddingOptimizer | None = None,
    pipeline: PipelineKind | str = PipelineKind.auto,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    machine: Machine | None = None,
    costs: str | Path = "auto",
    hot_budget_mib: float | None = None,
    may_decline: bool = True,
    plan: ShardingPlan | None = None,
    seed: int | None = None,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shard a TorchRec model over the ranks and create its optimizer; a collective.

    ::

        hot = hotrec.profile(loader, model, num_batches=500)
        model, optimizer = hotrec.parallelize(
            model,
            hot,
            embedding_optimizer=functools.partial(RowWiseAdagrad, lr=0.1),
            dense_optimizer=functools.partial(torch.optim.Adagrad, lr=0.1),
        )
        pipeline = hotrec.Pipeline(model, optimizer, device)

    Each ``EmbeddingBagCollection`` is split into hot rows, which are replicated on every rank, and
    cold rows, which are sharded, if that is predicted to be faster than TorchRec's own plan on the
    unsplit tables (``choice_of`` returns the choice). So is each ``EmbeddingCollection`` with a
    table in ``hot``. Other sharded modules are left to TorchRec. Losses and weights are those of
    the unsplit model.

    Args:
        model: The unsharded model; its forward returns (loss, anything), as TorchRec's pipelines
            expect, or only the loss. It is modified in place. Tables on the device meta get initial
            weights that only depend on seed, table and row; others keep theirs.
        hot: Counts of ``profile``, from which hot rows and the pipeline are chosen on rank 0;
            or the hot rows (``Partition``), with the place of the others (``Placement``); or the
            ``Choice`` of an earlier run; or "off" for plain TorchRec.
        dense_optimizer: Creates the optimizer of the dense layers from their parameters, such as
            ``torch.optim.Adagrad`` or ``functools.partial`` of it.
        embedding_optimizer: Update rule of all embedding rows, such as
            ``functools.partial(RowWiseAdagrad, lr=0.1)``; None if the tables have theirs by
            ``apply_optimizer_in_backward``.
        pipeline: look_ahead, sparse_dist, base, or auto for the one that is predicted to be fastest
            (sparse_dist with "off"). With look_ahead (see ``choice_of``) only ``Pipeline`` can
            train the model; any other loop is an error.
        device: Device of this rank; None for that of the process group, or cuda if available.
        batch_size: Samples of a rank's batch; None for the profile's.
        machine: The machine to plan for; None to detect it on rank 0.
        costs: Directory of measured costs, "measured" (at data/costs), a built-in set, or "auto".
        hot_budget_mib: Maximum memory for hot rows and their state, in MiB; None for the free
            memory.
        may_decline: Whether TorchRec's own plan may be chosen; if the tables exceed the GPU's
            memory, also one that keeps them on the host.
        plan: TorchRec's sharding plan for "off"; None for that of ``DistributedModelParallel``.
        seed: Seed of initial weights; None for torch's on rank 0.

    Returns:
        The sharded model and the optimizer of all its parameters, for ``Pipeline``.

    Raises:
        ValueError: On every rank, if a table has no update rule, or cannot be split; if arguments
            conflict; if no plan fits the memory.
        RankError: On the other ranks, if one rank raised.
    """
    kind = same_verdict(lambda: _check_arguments(hot, pipeline, plan))
    ranks = joined_ranks(device)
    is_plain = isinstance(hot, str) or (isinstance(hot, Choice) and hot.is_off)

    def check() -> tuple[list[SplitCollection], InitialTables]:
        check_tables(model)
        apply_rule(model, embedding_optimizer)
        for rule in rules_of(model).values():
            check_optimizer(rule, ranks.device, has_tables=is_plain)
        found = split_collections(model, _known_tables(hot), at_least=0 if is_plain else 1)
        return found, InitialTables.of(found)

    collections, initial = same_verdict(check)
    initial.take_first(ranks.device)
    given_seed = broadcast_object(torch.initial_seed() if seed is None else seed)
    # TorchRec draws different numbers for each choice, which must not affect the model's.
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    with torch.random.fork_rng(devices), once_in_tree(model):
        same_verdict(lambda: make_layers(model, ranks.device))
        if is_plain:
            plain = hot if isinstance(hot, Choice) else choose_off(kind)
            sharded, optimizer = _plain(model, plan, ranks.device, dense_optimizer)
            return _finish(sharded, optimizer, plain, initial, given_seed)
        rule = same_verdict(lambda: shared_rule(collections))
        if isinstance(hot, Profile | Choice):
            batch_size = batch_size or hot.batch_size

        hosts = gather_hosts()

        def make_machine_here() -> Machine:
            return machine or make_machine(
                world_size=ranks.world_size,
                ranks_per_host=ranks.local_world_size,
                device=ranks.device.type,
                batch_size=batch_size or ASSUMED_BATCH_SIZE,
                found=hosts,
            )

        found = broadcast_object(same_verdict(make_machine_here))

        def plan_of(theirs: TorchrecTables, _: PipelineSpec) -> ShardingPlan:
            check_optimizer(rule, ranks.device, has_tables=True)
            constraints = torchrec_constraints(
                tables.configs, theirs, batch_size=found.batch_size, device=found.device
            )
            return make_plan(model, default_sharders(), found, constraints)

        tables = Tables(
            configs=tables_of(collections),
            rule=rule,
            num_dense_values=_count_dense(model),
            kinds=_fitting_pipelines(model, collections),
            plan=plan_of,
            packed=[table.name for table in tables_of(list(filter(is_packed, collections)))],
        )
        budget = None if hot_budget_mib is None else hot_budget_mib * MIB
        may_pool = can_update_tables(rule.kind, ranks.device.type)
        by_cost = ByCost(budget, may_pool=may_pool, may_decline=may_decline)

        def choose() -> Choice | None:
            if isinstance(hot, Choice):
                return hot
            if isinstance(hot, Partition | Placement):
                return choose_given(hot, kind, tables, found)
            if not ranks.is_first:
                return None
            assert isinstance(hot, Profile)
            return choose_by_cost(hot, by_cost, kind, tables, found, costs)

        choice = broadcast_object(same_verdict(choose))
        assert choice is not None
        if choice.pipeline is PipelineKind.look_ahead:
            same_verdict(lambda: _check_ahead(model))
        sharded = _shard(model, choice, tables, found, ranks)
        optimizer = make_optimizer(sharded, rule, dense_optimizer)
        return _finish(sharded, optimizer, choice, initial, given_seed)


def _finish(
    model: DistributedModelParallel,
    optimizer: ModelOptimizer,
    choice: Choice,
    initial: InitialTables,
    seed: int,
) -> tuple[DistributedModelParallel, ModelOptimizer]:
    """Set the initial weights, and watch how the model is trained."""
    if rank() == 0:  # printed, since a program need not have set up logging
        print(f"hotrec: {choice}", file=sys.stderr, flush=True)
    initial.set(model, seed)
    model.hotrec_choice, model.hotrec_guard = choice, Guard(model, choice, optimizer)
    return model, optimizer


def choice_of(model: nn.Module) -> Choice:
    """The choice of ``parallelize`` for its model.

    Raises:
        ValueError: If the model is not from ``parallelize``.
    """
    choice = getattr(model, "hotrec_choice", None)
    if not isinstance(choice, Choice):
        raise ValueError(
            f"model {type(model).__name__}: expected the result of hotrec.parallelize, got another "
            "model. Pass that one."
        )
    return choice


def _check_arguments(
    hot: Hot, pipeline: PipelineKind | str, plan: ShardingPlan | None
) -> PipelineKind:
    if isinstance(hot, str) and hot != OFF:
        raise ValueError(
            f"hot: expected counts of hotrec.profile, hot rows, a choice or {OFF!r}, got {hot!r}. "
            "Read a saved profile with hotrec.profile(directory)."
        )
    if plan is not None and hot != OFF:
        raise ValueError(
            "plan: expected none with hot rows (the plan lacks their tables), got one. Remove it, "
            f"or train it with hot={OFF!r}."
        )
    names = [kind.value for kind in (PipelineKind.auto, PipelineKind.look_ahead, *_IN_LINE)]
    name = pipeline.value if isinstance(pipeline, PipelineKind) else pipeline
    if name not in names:
        raise ValueError(f"pipeline: expected one of {names}, got {name!r}. Choose one of these.")
    if isinstance(hot, Choice) and name != PipelineKind.auto.value:
        raise ValueError(
            f"pipeline: expected auto with a choice, which has its own, got {name!r}. Remove it."
        )
    if isinstance(hot, str) and name == PipelineKind.look_ahead.value:
        raise ValueError(
            f"pipeline: expected one of TorchRec's with {OFF!r}, got {name!r}. Remove it."
        )
    return PipelineKind(name)


_IN_LINE = (PipelineKind.sparse_dist, PipelineKind.base)


def _plain(
    model: nn.Module,
    plan: ShardingPlan | None,
    device: torch.device,
    dense_optimizer: DenseOptimizer,
) -> tuple[DistributedModelParallel, ModelOptimizer]:
    """TorchRec's planner, DDP, and the fused and the dense optimizer."""
    rules, has_layers = rules_of(model), _has_layers(model)
    sharded = shard(model, plan, default_sharders(), device, data_parallel=has_layers)
    _check_sequences(sharded, device)
    if not has_layers:
        _without_ddp(sharded, device)
    optimizers: list[KeyedOptimizer] = [sharded.fused_optimizer]
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    replicated = replicated_tables(sharded, rest)
    of_rule: dict[OptimizerSpec, dict[str, torch.Tensor]] = {}
    for name in replicated:
        if name in rules and rules[name].kind is not OptimizerKind.adam:
            of_rule.setdefault(rules[name], {})[name] = rest.pop(name)
    for rule, tables in of_rule.items():
        optimizers.append(KeyedOptimizerWrapper(tables, partial(make_replicated_tables, rule)))
    others = sorted(name for name in rest if name in replicated)
    if others:
        logger.warning(
            "hot=%r: as in TorchRec's recipe, the dense optimizer trains replicated tables whose "
            "rule only fused kernels support: %s",
            *(OFF, others[:4]),
        )
    if rest:
        optimizers.append(KeyedOptimizerWrapper(rest, dense_optimizer))
    return sharded, ModelOptimizer(optimizers)


def _check_sequences(sharded: DistributedModelParallel, device: torch.device) -> None:
    """Check that TorchRec looks up the rows of the ids of sequences.

    On a CPU it does not in data-parallel tables (seen with torchrec 1.8.0): rows come in another
    order, and some are not updated.

    Raises:
        ValueError: If a plan replicates such a table.
    """
    if device.type != "cpu":
        return
    for path, module in torchrec_collections(sharded):
        found: Any = sharded.plan.get_plan_for_module(path.removesuffix("."))
        for table, sharding in found.items():
            is_dense = sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value
            if is_dense and isinstance(module, ShardedEmbeddingCollection):
                raise ValueError(
                    f"table {table} plan: expected row-wise, table-wise or column-wise for an "
                    f"EmbeddingCollection on CPU, where TorchRec returns wrong rows of others, got "
                    f"{sharding.sharding_type}. Pass another plan, or hot rows."
                )


def _count_dense(model: nn.Module) -> int:
    tables = {p for module in embedding_modules(model) for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and p not in tables)


def _has_layers(model: nn.Module) -> bool:
    """Whether DDP can wrap the model: it refuses models without a trained parameter."""
    return _count_dense(model) > 0


def _without_ddp(model: DistributedModelParallel, device: torch.device) -> None:
    """Do the same as DDP at its start."""
    model.to(device)
    share_first(model)


def _check_ahead(model: nn.Module) -> None:
    """Raise ValueError if the pipeline look_ahead cannot train a model."""
    check_modules(model)
    if not _has_layers(model):
        raise ValueError(
            f"pipeline look_ahead: expected trained dense layers, got none in "
            f'{type(model).__name__}. Use pipeline="sparse_dist".'
        )


def _known_tables(hot: Hot) -> Collection[str] | None:
    """The tables that are counted, or whose hot rows are chosen; None for all."""
    if isinstance(hot, Choice):
        if hot.placement is None:
            return None
        return hot.placement.partition.num_rows
    if isinstance(hot, Placement):
        return hot.partition.num_rows
    return None if isinstance(hot, str) else hot.num_rows


def _fitting_pipelines(
    model: nn.Module, collections: Sequence[SplitCollection]
) -> list[PipelineKind]:
    """The pipelines that can train a model with this forward and these layers.

    All but base read features before forward; look_ahead only reads those of hotrec's collections,
    and has no DDP.
    """
    embeddings = set(embedding_modules(model))
    try:
        features_read(model, embeddings.__contains__)
    except ValueError as error:
        logger.info("only the pipeline base: %s", error)
        return [PipelineKind.base]
    try:
        check_modules(model)
    except ValueError as error:
        logger.info("no look-ahead: %s", error)
        return [*_IN_LINE]
    is_ours = embeddings <= set(collections)
    return [PipelineKind.look_ahead, *_IN_LINE] if is_ours and _count_dense(model) else [*_IN_LINE]


def _shard(
    model: nn.Module, choice: Choice, tables: Tables, machine: Machine, ranks: Ranks
) -> DistributedModelParallel:
    """Split the tables if the choice has hot rows, plan and shard."""
    sharders, plan, placement = default_sharders(), choice.plan, choice.placement

    def make() -> ShardingPlan:
        if placement is None:
            assert isinstance(plan.tables, TorchrecTables)
            return tables.plan(plan.tables, plan.pipeline)
        use_hot_cold(model, placement)
        for sharder in (HotColdSharder, HotColdSequenceSharder):
            sharders.append(sharder(tables.rule, levels=plan.pipeline.levels))
        constraints = placement_constraints(placement, ranks.device.type)
        return make_plan(model, sharders, machine, constraints)

    sharding = same_verdict(make)
    if ranks.device.type == "cuda":
        check_host_memory(sharding, machine, tables.rule)
    is_ahead = choice.pipeline is PipelineKind.look_ahead
    has_ddp = not is_ahead and _has_layers(model)
    sharded = shard(model, sharding, sharders, ranks.device, data_parallel=has_ddp)
    if not has_ddp:
        _without_ddp(sharded, ranks.device)
    return sharded
