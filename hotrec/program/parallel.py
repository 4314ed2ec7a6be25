"""Shards a TorchRec model with its hot rows replicated, in the place of TorchRec's own wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from hotrec.build import check_host_memory
from hotrec.config.groups import CostPlacement
from hotrec.config.roots import PlannerConfig
from hotrec.cost_model.profile import Profile
from hotrec.embedding.convert import shard, use_hot_cold
from hotrec.embedding.initialize import initialize_embeddings, set_unsplit
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.planning.constraints import placement_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import make_plan
from hotrec.planning.unsharded import make_machine
from hotrec.program.choice import (
    OFF,
    PLAIN,
    Choice,
    Tables,
    choose_by_cost,
    choose_given,
    constraints_of,
)
from hotrec.program.tables import (
    EmbeddingOptimizer,
    apply_rule,
    default_sharders,
    embedding_bags,
    embedding_modules,
    initial_bounds,
    shared_rule,
    tables_of,
)
from hotrec.runtime.ranks import Ranks, broadcast_object, joined_ranks, same_verdict
from hotrec.train.dense_sync import check_modules
from hotrec.types import Partition, PipelineKind, Placement

logger = logging.getLogger(__name__)

# Makes an optimizer from parameters, as a class of torch.optim does.
DenseOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
Hot = Profile | Partition | Placement | Choice | str
# Of a rank, for TorchRec's estimates where no batch was seen; that of TorchRec's planner.
ASSUMED_BATCH_SIZE = 512


def parallelize(
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
    """Shard a TorchRec model over the ranks and make its optimizer; a collective.

    ::

        hot = hotrec.profile(loader, model, num_batches=500)
        model, optimizer = hotrec.parallelize(
            model,
            hot,
            embedding_optimizer=functools.partial(RowWiseAdagrad, lr=0.1),
            dense_optimizer=functools.partial(torch.optim.Adagrad, lr=0.1),
        )
        pipeline = hotrec.Pipeline(model, optimizer, device)

    Each ``EmbeddingBagCollection`` is split into hot rows, which every rank holds, and cold rows,
    which are sharded, if that is predicted to be faster than TorchRec's own plan on the unsplit
    tables (``choice_of`` says what was chosen). Other sharded modules stay TorchRec's. Losses and
    weights are those of the unsplit model.

    Args:
        model: The model, not sharded yet; its forward returns (loss, anything), as TorchRec's
            pipelines expect. It is changed in place. Tables on the device meta get initial weights
            that depend on seed, table and row alone; others keep theirs.
        hot: Counts of ``profile``, from which hot rows and the pipeline are chosen on rank 0;
            or the hot rows (``Partition``), with the place of the others (``Placement``); or the
            ``Choice`` of an earlier run; or "off" for plain TorchRec.
        dense_optimizer: Makes the optimizer of the dense layers from their parameters, such as
            ``torch.optim.Adagrad`` or ``functools.partial`` of it.
        embedding_optimizer: Update rule of all embedding rows, such as
            ``functools.partial(RowWiseAdagrad, lr=0.1)``; None if the tables have theirs by
            ``apply_optimizer_in_backward``.
        pipeline: look_ahead, sparse_dist, base, or auto for the one that is predicted to be
            fastest.
        device: Device of this rank; None for that of the process group, or cuda where there is one.
        batch_size: Samples of a rank's batch; None for the profile's.
        machine: The machine to plan for; None for what is found on rank 0.
        costs: Directory of measured costs, "measured" (at data/costs), a built-in set, or "auto".
        hot_budget_mib: Most memory for hot rows and their state, in MiB; None for what is free.
        may_decline: Whether TorchRec's own plan may be chosen.
        plan: TorchRec's sharding plan for "off"; None for that of ``DistributedModelParallel``.
        seed: Seed of initial weights; None for torch's on rank 0.

    Returns:
        The sharded model and the optimizer of all its parameters, for ``Pipeline``.

    Raises:
        ValueError: On every rank, if a table has no update rule, or cannot be split; if arguments
            contradict one another; if nothing fits the memory.
        RankError: On the other ranks, if one rank raised.
    """
    kind = same_verdict(lambda: _check_arguments(hot, pipeline, plan))
    ranks = joined_ranks(device)
    same_verdict(lambda: apply_rule(model, embedding_optimizer))
    if isinstance(hot, str) or hot == PLAIN:
        return _plain(model, plan, ranks.device, dense_optimizer)
    bags = same_verdict(lambda: embedding_bags(model))
    rule, bounds = same_verdict(lambda: (shared_rule(bags), initial_bounds(bags)))
    weights = {
        name: table.weight
        for bag in bags
        for name, table in bag.embedding_bags.items()
        if name not in bounds
    }
    if isinstance(hot, Profile | Choice):
        batch_size = batch_size or hot.batch_size

    def make_machine_here() -> Machine:
        return machine or make_machine(
            PlannerConfig(),
            world_size=ranks.world_size,
            ranks_per_host=ranks.local_world_size,
            device=ranks.device.type,
            batch_size=batch_size or ASSUMED_BATCH_SIZE,
        )

    found = broadcast_object(same_verdict(make_machine_here))
    sharders = default_sharders()
    tables = Tables(
        configs=tables_of(bags),
        rule=rule,
        num_dense_values=_count_dense(model),
        can_look_ahead=_can_look_ahead(model),
        plan=partial(make_plan, model, sharders, found),
    )
    settings = CostPlacement(hot_budget_mib=hot_budget_mib, may_decline=may_decline)

    def choose() -> Choice | None:
        if isinstance(hot, Choice):
            return hot
        if isinstance(hot, Partition | Placement):
            return choose_given(hot, kind, tables, found)
        if not ranks.is_first:
            return None
        return choose_by_cost(hot, settings, kind, tables, found, costs)

    choice = broadcast_object(same_verdict(choose))
    assert choice is not None
    if ranks.is_first:
        logger.info("%s", choice.why)
    sharded = _shard(model, choice, tables, found, ranks)
    given_seed = broadcast_object(torch.initial_seed() if seed is None else seed)
    initialize_embeddings(sharded, given_seed, bounds)
    set_unsplit(sharded, weights)
    sharded.hotrec_choice = choice
    return sharded, make_optimizer(sharded, rule, dense_optimizer)


def choice_of(model: nn.Module) -> Choice:
    """What ``parallelize`` chose for the model that it returned.

    Raises:
        ValueError: If the model is another.
    """
    choice = getattr(model, "hotrec_choice", None)
    if not isinstance(choice, Choice):
        raise ValueError(
            f"model {type(model).__name__}: expected the one that hotrec.parallelize returned, got "
            "another. Pass that one."
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
            "plan: expected none with hot rows, whose tables the plan does not know, got one. "
            f"Leave it out, or train it with hot={OFF!r}."
        )
    names = [kind.value for kind in (PipelineKind.auto, PipelineKind.look_ahead, *_IN_LINE)]
    name = pipeline.value if isinstance(pipeline, PipelineKind) else pipeline
    if name not in names:
        raise ValueError(f"pipeline: expected one of {names}, got {name!r}. Choose one of these.")
    is_own = isinstance(hot, Choice | str)
    if is_own and name != PipelineKind.auto.value:
        raise ValueError(
            f"pipeline: expected auto with {'a choice' if isinstance(hot, Choice) else repr(hot)}, "
            f"which has its own, got {name!r}. Leave it out."
        )
    return PipelineKind(name)


_IN_LINE = (PipelineKind.sparse_dist, PipelineKind.base)


def _plain(
    model: nn.Module,
    plan: ShardingPlan | None,
    device: torch.device,
    dense_optimizer: DenseOptimizer,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """TorchRec's recipe: its planner, DDP, and the fused and the dense optimizer."""
    sharded = DistributedModelParallel(model, device=device, plan=plan)
    optimizers: list[KeyedOptimizer] = [sharded.fused_optimizer]
    rest = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    replicated = sorted(name for name in rest if ".embedding_bags." in f".{name}")
    if replicated:
        logger.warning(
            "hot=%r: as in TorchRec's recipe, the dense optimizer trains the tables that the plan "
            "gives no fused one, such as replicated ones: %s",
            *(OFF, replicated[:4]),
        )
    if rest:
        optimizers.append(KeyedOptimizerWrapper(rest, dense_optimizer))
    sharded.hotrec_choice = PLAIN
    return sharded, CombinedOptimizer(optimizers)


def _count_dense(model: nn.Module) -> int:
    tables = {p for module in embedding_modules(model) for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if p.requires_grad and p not in tables)


def _can_look_ahead(model: nn.Module) -> bool:
    """Whether the dense layers fit ``DenseSync``, and the tables hotrec's exchange alone."""
    is_ours = all(type(m).__name__ == "EmbeddingBagCollection" for m in embedding_modules(model))
    dense = [p for p in model.parameters() if p.requires_grad]
    try:
        check_modules(model)
    except ValueError as error:
        logger.info("no look-ahead: %s", error)
        return False
    return is_ours and _count_dense(model) > 0 and bool(dense)


def _shard(
    model: nn.Module, choice: Choice, tables: Tables, machine: Machine, ranks: Ranks
) -> DistributedModelParallel:
    """Split the tables where the choice does, plan and shard."""
    sharders, placement = default_sharders(), choice.placement
    if placement is None:
        assert choice.torchrec_plan is not None
        constraints = constraints_of(choice.torchrec_plan, tables.configs, machine)
    else:
        split = placement
        same_verdict(lambda: use_hot_cold(model, split))
        sharders.append(HotColdSharder(tables.rule))
        constraints = placement_constraints(placement, choice.cache_stats)
    sharding = same_verdict(lambda: make_plan(model, sharders, machine, constraints))
    if ranks.device.type == "cuda":
        check_host_memory(sharding, machine, tables.rule)
    is_ahead = choice.pipeline is PipelineKind.look_ahead
    sharded = shard(model, sharding, sharders, ranks.device, data_parallel=not is_ahead)
    if is_ahead:
        # DDP would have moved them.
        sharded.to(ranks.device)
    return sharded
