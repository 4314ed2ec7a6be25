"""How a model is trained: with hot rows or TorchRec's own plan, and the pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig

from hotrec.assemble.torchrec_plan import shardings_by
from hotrec.cost_model.profile import Profile
from hotrec.cost_model.step import Workload
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.planner.partition import most_accessed
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.propose import propose, unpredicted
from hotrec.planner.request import ByCost, GivenTables, PlanRequest
from hotrec.planner.situation import (
    TableShape,
    build_situation,
    choose_costs,
)
from hotrec.runtime.memory import read_fingerprint
from hotrec.types import (
    Levels,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    TableOutput,
    TorchrecPlan,
)

logger = logging.getLogger(__name__)

OFF = "off"
# The default output of `hotrec calibrate`.
COSTS_PATH = Path("data/costs")
# Forward and backward use each weight of a linear layer in three products per sample.
FLOPS_PER_WEIGHT = 6


@dataclass(frozen=True)
class Choice:
    """The choice of ``parallelize``; pass it instead of a profile to reproduce it.

    Args:
        plan: The plan.
        why: The reason as a sentence.
        placement: Hot rows and the place of the others; None for plans of TorchRec.
        batch_size: Batch size per rank that it was chosen for; None if unknown.
        step_s: Predicted seconds of a step; None without a prediction.
        is_off: Whether plain TorchRec was requested, whose sharders and planner shard the model.
    """

    plan: Plan
    why: str
    placement: Placement | None = None
    batch_size: int | None = None
    step_s: float | None = None
    is_off: bool = False

    def __str__(self) -> str:
        why = " ".join(self.why.split())
        return f"{self.name}, {self.num_hot:,} hot rows: {why}"

    @property
    def name(self) -> str:
        """Such as "hot_cold look_ahead", "torchrec planner base", or "off"."""
        return OFF if self.is_off else self.plan.label

    @property
    def pipeline(self) -> PipelineKind:
        """The pipeline."""
        return self.plan.pipeline.kind

    @property
    def torchrec_plan(self) -> TorchrecPlan | None:
        """Which plan of TorchRec's; None with hot and cold rows, and with "off"."""
        return None if self.is_off else self.plan.torchrec_plan

    @property
    def num_hot(self) -> int:
        """Hot rows of all tables."""
        return self.plan.num_hot


def choose_off(kind: PipelineKind) -> Choice:
    """Plain TorchRec, in sparse_dist unless another of its pipelines is requested."""
    spec = PipelineSpec(PipelineKind.sparse_dist if kind is PipelineKind.auto else kind)
    why = "TorchRec's own plan and pipeline were requested."
    return Choice(Plan(TorchrecTables(), spec), why, is_off=True)


@dataclass(frozen=True)
class Tables:
    """The tables of a model and the facts about the rest that a prediction needs.

    Args:
        configs: The tables.
        rule: Their update rule.
        num_dense_values: Parameters of the dense layers.
        kinds: The pipelines that ``auto`` may choose, because they support the model.
        plan: Runs TorchRec's planner on the unsplit model.
        packed: Names of the tables whose rows the model copies to the ids itself.
    """

    configs: Sequence[BaseEmbeddingConfig]
    rule: OptimizerSpec
    num_dense_values: int
    kinds: Sequence[PipelineKind]
    plan: Callable[[TorchrecTables, PipelineSpec], ShardingPlan]
    packed: Collection[str] = ()

    @property
    def shapes(self) -> list[TableShape]:
        return [
            TableShape(
                name=table.name,
                dim=table.embedding_dim,
                row_bytes=self.rule.bytes_per_row(table.embedding_dim),
                num_columns=len(table.feature_names),
                output=self._output(table),
            )
            for table in self.configs
        ]

    def _output(self, table: BaseEmbeddingConfig) -> TableOutput:
        if isinstance(table, EmbeddingBagConfig):
            return TableOutput.pooled
        return TableOutput.packed if table.name in self.packed else TableOutput.expanded

    def request(self, tables: ByCost | GivenTables, kind: PipelineKind, name: str) -> PlanRequest:
        """The request to the planner; the caller may set any pipeline."""
        kinds = self.kinds if kind is PipelineKind.auto else (kind, *self.kinds)
        pipeline = PipelineSpec(kind, levels=Levels.auto)
        return PlanRequest(tables, pipeline, tuple(kinds), name=name)


def choose_given(
    given: Partition | Placement,
    kind: PipelineKind,
    tables: Tables,
    machine: Machine,
) -> Choice:
    """The choice for hot rows that the caller chose; no prediction."""
    placement = Placement.alike(given) if isinstance(given, Partition) else given
    plan = unpredicted(tables.request(GivenTables(placement), kind, "given"), machine)
    why = f"{placement.partition.total_hot} hot rows are given."
    return Choice(plan, why, placement, batch_size=machine.batch_size)


def choose_by_cost(
    counted: Profile,
    by_cost: ByCost,
    kind: PipelineKind,
    tables: Tables,
    machine: Machine,
    costs: str | Path,
) -> Choice:
    """The choice that is predicted to be fastest, on one process.

    Raises:
        ValueError: If the profile is of other tables, or the rows exceed the memory.
        ArtifactError, CostsError: If the costs are missing, invalid or of another kind of device.
    """
    found = {table.name: table.num_embeddings for table in tables.configs}
    if counted.num_rows != found:
        raise ValueError(
            f"profile: expected the tables {dict(sorted(found.items())[:4])} and their rows, got "
            f"{dict(sorted(counted.num_rows.items())[:4])}. Profile this model."
        )
    name, path = ("measured", costs) if isinstance(costs, Path) else (costs, COSTS_PATH)
    measured, note = choose_costs(name, path, machine, read_fingerprint(machine.device))
    if note is not None:
        logger.info("prediction: %s", note)
    histograms = counted.build_histograms()
    # The batches of this program need not be in the order of a log that `hotrec prepare` counted.
    reuse = counted.reuse if counted.batch_size is not None else {}
    situation = build_situation(
        tables.shapes,
        Workload(
            batch_size=machine.batch_size,
            dense_flops=FLOPS_PER_WEIGHT * tables.num_dense_values,
            bottom_frac=0.0,
            num_dense_values=tables.num_dense_values,
        ),
        histograms,
        counted.num_samples,
        machine,
        (measured, note),
        counted.locality,
        reuse,
    )
    shardings = shardings_by(tables.plan, found, machine, tables.rule)
    decision = propose(tables.request(by_cost, kind, "cost"), situation, shardings)
    plan, placement = decision.chosen, None
    if isinstance(plan.tables, SplitTables):
        policy = f"least step, {measured.name}"
        placement = most_accessed(plan.tables, counted.counts, histograms, policy)
    return Choice(
        plan,
        decision.why,
        placement,
        batch_size=machine.batch_size,
        step_s=decision.prediction.step_s,
    )
