"""The cases of a benchmark: placements and pipelines of the same model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import by_owner
from hotrec.assemble.plan_job import shapes_of
from hotrec.assemble.trainable import Trainable, assemble
from hotrec.bench.machine import resident_bytes
from hotrec.bench.samples import ZipfTables
from hotrec.bench.stored import StoredSamples
from hotrec.cost_model.costs import Costs
from hotrec.cost_model.histogram import CountHistogram
from hotrec.cost_model.step import Workload
from hotrec.data.batch import Batch
from hotrec.models.flops import DenseWork
from hotrec.models.shape import work_of
from hotrec.planner.machine import Machine
from hotrec.planner.plan import Plan
from hotrec.planner.propose import split_of
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.planner.situation import Situation, build_situation
from hotrec.runtime.hosts import FoundHosts
from hotrec.runtime.ranks import Ranks, barrier, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.train.interleave import Block
from hotrec.train.pipelines import Pipeline
from hotrec.types import Partition, PipelineSpec, Placement, Schema, WireType

IN_LINE = PipelineSpec()


@dataclass(frozen=True)
class Case:
    """A plan to measure, as ``hotrec train`` would train it.

    Args:
        name: Its name.
        plan: The plan.
        placement: The hot rows of split tables and the place of the others; None for TorchRec's
            plans.
        is_by_owner: Whether samples are assigned to the ranks that own most of their cold rows.
    """

    name: str
    plan: Plan
    placement: Placement | None = None
    is_by_owner: bool = False

    @property
    def partition(self) -> Partition | None:
        return None if self.placement is None else self.placement.partition

    @property
    def is_exact(self) -> bool:
        """Whether it must have the same losses as the other exact cases."""
        return self.plan.pipeline.wire is WireType.fp32


def split_case(
    name: str,
    placement: Placement,
    pipeline: PipelineSpec = IN_LINE,
    *,
    is_routed_by_loader: bool = False,
    is_by_owner: bool = False,
) -> Case:
    """The case of a placement with hot and cold rows."""
    request = PlanRequest(
        GivenTables(placement),
        pipeline,
        is_routed_by_loader=is_routed_by_loader,
    )
    return Case(name, Plan(split_of(request, placement), pipeline), placement, is_by_owner)


@dataclass(frozen=True)
class Subject:
    """The model that all cases train, and the memory available to their plans.

    Args:
        spec: Model, tables and optimizers.
        batch_size: Batch size per rank.
        hbm_gib: Memory of each device in GiB; None: free memory when a case is built.
        host_gib: Memory of a host in GiB; None: as detected.
    """

    spec: ModelSpec
    batch_size: int
    hbm_gib: float | None = None
    host_gib: float | None = None

    @cached_property
    def work(self) -> DenseWork:
        """Work of the dense layers."""
        return work_of(self.spec.architecture)

    def on(self, schema: Schema) -> Subject:
        """The same model on tables of other sizes."""
        return replace(self, spec=replace(self.spec, schema=schema))

    def machine(self, ranks: Ranks, hosts: FoundHosts | None = None) -> Machine:
        """The machine of these ranks, as detected by this rank; see ``make_machine``."""
        return make_machine(
            world_size=ranks.world_size,
            ranks_per_host=ranks.local_world_size,
            device=ranks.device.type,
            batch_size=self.batch_size,
            hbm_gib=self.hbm_gib,
            host_gib=self.host_gib,
            found=hosts,
        )

    def situation(
        self,
        histograms: Mapping[str, CountHistogram],
        num_samples: int,
        costs: Costs,
        ranks: Ranks,
        hosts: FoundHosts | None = None,
    ) -> Situation:
        """The situation of the cases' predictions; see ``build_situation``."""
        spec = self.spec
        workload = Workload(
            batch_size=self.batch_size,
            dense_flops=self.work.flops,
            bottom_frac=self.work.bottom_frac,
            num_dense_values=self.work.num_dense_values,
        )
        shapes = shapes_of(spec.schema, spec.architecture, spec.row_bytes)
        machine = self.machine(ranks, hosts)
        return build_situation(shapes, workload, histograms, num_samples, machine, (costs, None))


@dataclass
class Runner:
    """A case on this rank, and its measurements so far."""

    case: Case
    trainable: Trainable
    pipeline: Pipeline
    clock: StageClock  # stage times of the timed steps
    batches: Iterator[Batch]  # of the whole run, and some for the pipeline to hold ahead
    unrouted: Sequence[Batch]  # the same with their original ids
    table_of_feature: Mapping[str, str]
    memory_bytes: int = 0  # growth of this process by the model and its first step
    losses: list[torch.Tensor] = field(default_factory=list)  # of every step on this rank, ()
    blocks: dict[int, Block] = field(default_factory=dict)  # timed blocks by round
    sent_bytes: int = 0  # of the counted steps
    between_hosts_bytes: int = 0  # of these to other hosts
    wire_bytes: int | None = None  # of these on the network interface; None without one
    counted: list[int] = field(default_factory=list)  # indices of the counted steps and batches

    def step(self) -> None:
        """One training step."""
        loss, _, _ = self.pipeline.progress(self.batches)
        self.losses.append(loss)

    def drain(self) -> None:
        """Wait until no rank has communication of this case in flight; collective.

        ``drain`` waits for the pipeline's own threads, and the barrier for collectives that are
        queued in the process group, such as the ids of TorchRec's next batch.
        """
        self.pipeline.drain()
        barrier()


def build_runner(
    subject: Subject,
    case: Case,
    batches: Sequence[Batch],
    ranks: Ranks,
    samples: ZipfTables | StoredSamples | None = None,
) -> Runner:
    """Build a case and run its first step; collective.

    ``samples`` is the source of ``batches``, which are this rank's as read; cases that assign
    samples by owner need it.
    """
    gc.collect()
    before = resident_bytes(ranks.device)
    # Free device memory differs between ranks, but all must plan the same.
    machine = broadcast_object(subject.machine(ranks))
    placed = case.placement
    trainable = assemble(subject.spec, case.plan, placed, machine, ranks.device)
    pipeline = trainable.pipeline()
    if case.is_by_owner:
        assert placed is not None, case.name
        assert samples is not None, case.name
        batches = samples.assigned(
            by_owner(subject.spec.schema, placed),
            len(batches),
            batch_size=subject.batch_size,
            ranks=ranks,
        )
    fed = list(batches)
    if (route := trainable.route) is not None:
        fed = [replace(batch, sparse=route(batch.sparse)) for batch in batches]
    if ranks.device.type == "cuda":
        # As from a loader; routing has made new tensors of them.
        fed = [batch.pin_memory() for batch in fed]
    tables = {feature.name: feature.table for feature in subject.spec.schema.features}
    clock = StageClock(ranks.device)
    runner = Runner(case, trainable, pipeline, clock, iter(fed), batches, tables)
    runner.step()
    runner.drain()
    gc.collect()
    runner.memory_bytes = resident_bytes(ranks.device) - before
    return runner
