"""Requests to the planner, and the pipelines that can train them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hotrec.planner.machine import Machine
from hotrec.planner.plan import TorchrecTables
from hotrec.types import (
    Levels,
    PipelineKind,
    PipelineSpec,
    Placement,
    PopularRows,
    Tier,
    TorchrecTier,
)

# Samples per rank from which look-ahead pays on one host. Smaller steps have little to hide, and
# its thread competes with the loader's workers for the cores: the quickstart (two ranks on two
# cores, 256 samples) takes 25 ms a step with look-ahead and 20 ms without.
MIN_BATCH_ON_ONE_HOST = 2048
# TorchRec's pipelines. Split tables gain nothing from the overlap of their ids, and the tables that
# TorchRec shards do: in 51 measured cells, the best of the candidates by these rules was within
# 3.1% of the best of all pipelines and plans.
OF_SPLITS = (PipelineKind.base, PipelineKind.sparse_dist)
OF_TORCHREC = (PipelineKind.sparse_dist, PipelineKind.base)


@dataclass(frozen=True)
class Replayed:
    """Traffic of look-ahead with a number of slots, over the batches after the first ones.

    Args:
        num_slots: Slots over all ranks.
        row_hit_frac: Hits among the distinct rows of batches.
        num_in: Rows fetched per batch.
        num_out: Rows written back per batch.
    """

    num_slots: int
    row_hit_frac: float
    num_in: float
    num_out: float


class Replay(Protocol):
    """The first training batches, replayed through any number of slots."""

    def predict(self, load_frac: float, popular_rows: Mapping[str, PopularRows]) -> Replayed | None:
        """Traffic of look-ahead with slots for this fraction of the rows; None if they are too few.

        Args:
            load_frac: Slots, as a fraction of the rows.
            popular_rows: Initial rows of the slots, by table.
        """


@dataclass(frozen=True)
class SlotRequest:
    """How to choose the slots of a given placement.

    Args:
        samples_in_flight: Maximum number of samples of all ranks whose rows look-ahead keeps at
            once, in training or evaluation.
        read: Reads the batches to replay, enough for the fewest slots, as a fraction of the rows.
        place: Returns the placement with slots for a fraction of the rows; None if their number is
            given.
        is_fetch_open: Whether the planner chooses how rows are fetched to the device.
    """

    samples_in_flight: int
    read: Callable[[float], Replay]
    place: Callable[[float], Placement] | None = None
    is_fetch_open: bool = False


@dataclass(frozen=True)
class ByCost:
    """The split that is predicted to be fastest.

    Args:
        hot_budget_bytes: Maximum memory for hot rows with their optimizer state; None for no limit
            except the memory itself.
        may_pool: Whether whole tables may exchange pooled vectors.
        may_decline: Whether TorchRec's own plans may be chosen.
        fixed_hot: Hot rows of tables for which the user chose their number.
    """

    hot_budget_bytes: float | None = None
    may_pool: bool = True
    may_decline: bool = True
    fixed_hot: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenTables:
    """A split from a policy, a saved partition or the caller.

    Args:
        placement: The hot rows and the placement of the others.
        slots: How to choose its slots; None if no table has any.
    """

    placement: Placement
    slots: SlotRequest | None = None

    @property
    def has_slots(self) -> bool:
        return any(table.tier is Tier.CACHED for table in self.placement.tables.values())

    @property
    def is_all_in_slots(self) -> bool:
        """Whether the rows of all tables are in slots, which the tables then share."""
        return all(table.tier is Tier.CACHED for table in self.placement.tables.values())


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan.

    Args:
        tables: How the tables are placed, or what may be chosen.
        pipeline: The pipeline; kind auto leaves the choice to the planner.
        kinds: The pipelines that can train the model.
        num_workers: Loader workers of a rank; None if batches are made beforehand.
        name: The configured placement, for messages.
        is_routed_by_loader: Whether loader workers split the ids.
    """

    tables: ByCost | GivenTables | TorchrecTables
    pipeline: PipelineSpec = PipelineSpec()
    kinds: tuple[PipelineKind, ...] = tuple(PipelineKind)
    num_workers: int | None = None
    name: str = ""
    is_routed_by_loader: bool = False

    @property
    def has_slots(self) -> bool:
        return isinstance(self.tables, GivenTables) and self.tables.has_slots

    def pipelines(self, machine: Machine) -> tuple[PipelineSpec, ...]:
        """The pipelines among which predictions and a trial choose, for hot and cold rows.

        Raises:
            ValueError: If the requested one cannot train the tables.
        """
        kind = self.pipeline.kind
        self._check(machine)
        if self.has_slots:
            kinds: tuple[PipelineKind, ...] = (PipelineKind.look_ahead,)
        elif kind is not PipelineKind.auto:
            kinds = (kind,)
        elif isinstance(self.tables, TorchrecTables):
            kinds = self._first(OF_TORCHREC)
        else:
            # look_ahead has not been run on CUDA yet, and one rank has nothing to exchange.
            is_ahead = machine.device == "cpu" and machine.world_size > 1
            may_be_ahead = is_ahead and PipelineKind.look_ahead in self.kinds
            ahead = (PipelineKind.look_ahead,) if may_be_ahead else ()
            kinds = (*ahead, *self._first(OF_SPLITS))
        levels: tuple[Levels, ...] = (self.pipeline.levels,)
        if isinstance(self.tables, TorchrecTables):
            levels = (Levels.one,)
        elif self.pipeline.levels is Levels.auto:
            levels = (Levels.one, Levels.two) if machine.world.has_levels else (Levels.one,)
        return tuple(
            replace(self.pipeline, kind=kind, levels=level) for kind in kinds for level in levels
        )

    def default_pipeline(self, machine: Machine) -> PipelineSpec:
        """The pipeline without predictions; auto depends on the hosts and the batch.

        Raises:
            ValueError: If the requested one cannot train the tables.
        """
        pipelines = self.pipelines(machine)
        in_line = [pipeline for pipeline in pipelines if not pipeline.is_look_ahead]
        is_large = machine.world.num_hosts > 1 or machine.batch_size >= MIN_BATCH_ON_ONE_HOST
        return pipelines[0] if is_large or not in_line else in_line[0]

    @property
    def torchrec_pipeline(self) -> PipelineSpec:
        """The pipeline of TorchRec's own plans, which cannot be trained with look-ahead."""
        is_base = self.pipeline.kind is PipelineKind.base
        [kind] = (PipelineKind.base,) if is_base else self._first(OF_TORCHREC)
        return self.pipeline.of_torchrec.with_kind(kind)

    def _first(self, kinds: Sequence[PipelineKind]) -> tuple[PipelineKind, ...]:
        """The first of these that can train the model."""
        return tuple(kind for kind in kinds if kind in self.kinds)[:1]

    def _check(self, machine: Machine) -> None:
        check_pipeline(
            self.pipeline.kind,
            machine.device,
            has_slots=self.has_slots,
            torchrec=self.tables if isinstance(self.tables, TorchrecTables) else None,
            name=self.name,
        )


def check_pipeline(
    kind: PipelineKind,
    device: str,
    *,
    has_slots: bool,
    torchrec: TorchrecTables | None,
    name: str,
) -> None:
    """Checks that a pipeline can train the tables.

    Args:
        kind: The pipeline; auto passes.
        device: "cpu" or "cuda".
        has_slots: Whether rows are in slots.
        torchrec: The plan of TorchRec; None for hot and cold rows.
        name: The placement, for messages.

    Raises:
        ValueError: If it cannot.
    """
    if has_slots and kind not in (PipelineKind.auto, PipelineKind.look_ahead):
        raise ValueError(
            "pipeline.kind: expected look_ahead for placement.cold_tier=cached, whose slots it "
            f"fills, got {kind.name}. Set pipeline=look_ahead, or placement.cold_tier=fused."
        )
    if kind is PipelineKind.look_ahead and torchrec is not None:
        raise ValueError(
            "pipeline.kind: expected sparse_dist or base for placement=torchrec, whose tables "
            "TorchRec exchanges, got look_ahead. Set pipeline=sparse_dist."
        )
    if kind is PipelineKind.prefetch:
        is_cached = torchrec is not None and torchrec.tier is TorchrecTier.fused_uvm_caching
        if not is_cached or device != "cuda":
            found = name if torchrec is None else f"torchrec with tier {torchrec.tier.name}"
            raise ValueError(
                "pipeline.kind: expected placement=torchrec with placement.tier=fused_uvm_caching "
                "on cuda for prefetch, which fills FBGEMM's device caches, got "
                f"placement={found} on {device}. Set these, or pipeline=sparse_dist."
            )
