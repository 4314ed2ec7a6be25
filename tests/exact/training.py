"""The training of a case with hotrec, on the ranks of the default process group."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer

from hotrec.assemble.constraints import placement_constraints, torchrec_constraints
from hotrec.assemble.order import by_owner
from hotrec.data.batch import Batch
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.embedding.adapt import AdaptiveHotSet, HotSetDecision
from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
    SequenceLayout,
)
from hotrec.embedding.convert import check_replicas
from hotrec.embedding.fused import fused_params
from hotrec.embedding.late import LateLinear
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.packed import PackedLayout
from hotrec.embedding.sharding import HotColdSequenceSharder, HotColdSharder
from hotrec.embedding.torchrec import ddp_modules
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.task import ClickTask
from hotrec.planner.plan import TorchrecTables
from hotrec.runtime.codecs import compress_dense, wire_codecs
from hotrec.train.dense_sync import dense_parameters
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.train.schedule import set_learning_rates
from hotrec.types import (
    POPULAR_ROW,
    Exchange,
    Feature,
    Levels,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Precision,
    RowFetch,
    Schema,
    Table,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
    WireType,
)
from tests.distributed.setups import gather, pretend_hosts, shard_task
from tests.exact import reference
from tests.exact.case import Case, Samples, draw_samples
from tests.exact.reference import (
    DENSE_ADAM_RATE,
    DENSE_RATE,
    EPS,
    LATE,
    RATE,
    SEED,
    layers_of,
    model_of,
)

T = TypeVar("T")
TOLERANCE = 1e-5
IN_HALF = 0.02  # of losses, in 16 bits between ranks
DENSE = {
    "sgd": OptimizerSpec(OptimizerKind.sgd, learning_rate=DENSE_RATE),
    "adam": OptimizerSpec(OptimizerKind.adam, learning_rate=DENSE_ADAM_RATE, eps=EPS),
}
MAX_MOVED = 9  # rows that become hot at once


def make_partition(case: Case) -> Partition:
    return Partition({t.name: t.num_rows for t in case.tables()}, case.hot_rows(), case.partition)


def make_placement(case: Case) -> Placement:
    """The case's partition, and how each table's other rows are served."""
    rng, partition = case.rng(4), make_partition(case)
    hot = dict(partition.hot_rows)
    placements, popular = {}, {}
    for name in partition.num_rows:
        is_pooled = case.placement == "pooled" or (
            case.placement == "mixed" and bool(rng.random() < 0.4)
        )
        if is_pooled:
            hot.pop(name)
        placements[name] = TablePlacement(
            exchange=Exchange.POOLED if is_pooled else Exchange.ROWS,
            tier=Tier(case.tier),
            cache_load_frac=case.slots if case.tier == "cached" else None,
            row_type=WireType[case.row_type],
            row_fetch=RowFetch[case.row_fetch],
        )
    for name, rows in partition.num_rows.items():  # the batches read low rows most
        known = rng.permutation(int(case.popular * rows))
        popular[name] = np.array([(row, rng.random()) for row in known], POPULAR_ROW)
    split = Partition(partition.num_rows, hot, case.partition)
    return Placement(split, placements, popular_rows=popular)


def table_configs(case: Case) -> list[Any]:
    def config(table: reference.PlainTable) -> Any:
        given: dict[str, Any] = {
            "name": table.name,
            "num_embeddings": table.num_rows,
            "embedding_dim": table.dim,
            "feature_names": list(table.features),
        }
        if case.output != "bags":
            return EmbeddingConfig(**given)
        pooling = PoolingType.MEAN if table.is_mean else PoolingType.SUM
        return EmbeddingBagConfig(**given, pooling=pooling)

    return [config(table) for table in case.tables()]


def make_constraints(case: Case, placement: Placement) -> Any:
    """What the planner may choose."""
    if not case.is_torchrecs:
        return placement_constraints(placement, device=torch.device(case.device).type)
    plan = case.placement.removeprefix("torchrec ")
    if plan != "column_wise":  # the batch decides what an expert replicates
        tier = TorchrecTier[case.torchrec_tier]
        asked, device = TorchrecTables(TorchrecPlan(plan), tier), torch.device(case.device).type
        return torchrec_constraints(table_configs(case), asked, batch_size=20, device=device)
    constraints = ParameterConstraints(
        sharding_types=[ShardingType.COLUMN_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
        min_partition=4,
    )
    return {table.name: constraints for table in case.tables()}


class Training:
    """A case's model on these ranks."""

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, torch.device(case.device)
        self.placement = make_placement(case)
        spec = OptimizerSpec(OptimizerKind[case.optimizer], learning_rate=RATE, eps=EPS)
        given = (spec, WireType[case.wire], Levels[case.levels])
        meta, tables, late = torch.device("meta"), case.tables(), None
        embeddings: Any
        sharder: Any
        if case.is_torchrecs:
            embeddings = EmbeddingBagCollection(
                table_configs(case), is_weighted=case.is_weighted, device=meta
            )
            # A piece of columns has 4 at least, see ``make_constraints``.
            codecs = wire_codecs(WireType[case.wire])
            sharder = EmbeddingBagCollectionSharder(
                fused_params(spec), qcomm_codecs_registry=codecs
            )
        elif case.output == "bags":
            embeddings = HotColdEmbeddingBagCollection(
                table_configs(case), self.placement, is_weighted=case.is_weighted, device=meta
            )
            sharder = HotColdSharder(*given)
        else:
            is_packed = case.output == "packed"
            layout = PackedLayout if is_packed else SequenceLayout
            embeddings = HotColdEmbeddingCollection(
                table_configs(case), self.placement, device=meta, layout=layout
            )
            sharder = HotColdSequenceSharder(*given)
            if is_packed:
                dims = [t.dim for t in tables for name in t.features if name.endswith("_0")]
                late = LateLinear(dims, LATE)
        self.router: Any = getattr(embeddings, "router", None)
        model = model_of(case, embeddings, late)
        precision = Precision[case.precision]
        set_up_dense_layers(model, self.device, precision, is_compiled=case.is_compiled)
        for name, parameter in model.named_parameters():
            if "layers." in name:
                parameter.data = parameter.data.to(self.device)
                if dist.get_rank() > 0:  # all ranks begin with the weights of the first
                    parameter.data += 1
        self.model: DistributedModelParallel = shard_task(
            ClickTask(model, case.num_ranks, case.label_weights),
            sharder,
            make_constraints(case, self.placement),
            device=case.device,
            data_parallel=case.pipeline != "look_ahead",
            seed=SEED,
        )
        compress_dense(ddp_modules(self.model), WireType[case.wire])
        self.optimizer: CombinedOptimizer = make_optimizer(self.model, spec, DENSE[case.dense])
        self.hot_set = None
        if case.adapt:
            self.hot_set = AdaptiveHotSet(self.model, self.optimizer, decay=0.5, max_rows=MAX_MOVED)
        self.decisions: list[HotSetDecision] = []
        self._pipeline: Pipeline | None = None
        self._assign = self._make_assign()

    def _make_assign(self) -> Callable[..., Any] | None:
        """The rank of each sample of a global batch, from its ids, lengths and shares."""
        tables = self.case.tables()
        names = list(draw_samples(self.case, 0)[0].ids)
        if self.case.order == "by_tokens":
            work = ByTokens(tuple(names), SampleWork(1, {names[0]: 3}, {}))
            return lambda ids, lengths, shares: work(lengths, shares.size)
        if self.case.order == "by_owner":
            table_of = {name: table.name for table in tables for name in table.features}
            schema = Schema(
                dense=("dense",),
                features=tuple(Feature(name, table_of[name]) for name in names),
                tables=tuple(Table(table.name, table.num_rows) for table in tables),
            )
            return by_owner(schema, self.placement)
        return None

    def batch(self, step: int) -> Batch:
        """This rank's share."""
        case, rank = self.case, dist.get_rank()
        samples, shares = draw_samples(case, step)
        total = len(samples.labels)
        rank_of = np.repeat(np.arange(case.num_ranks), shares)
        if self._assign is not None and step < 1000:
            ids = np.concatenate([bag for found in samples.ids.values() for bag in found])
            rank_of = self._assign(ids, samples.lengths(), shares)
        mine = np.flatnonzero(rank_of == rank)
        own = samples.select(mine) if mine.size else Samples.padding(samples)
        is_known = case.batches == "known_hot" and case.is_all_hot(step)
        sparse: Any = own.features()
        if case.route_in_loader:
            sparse = self.router(sparse)
        batch = Batch(own.dense, sparse, own.labels, own.of_samples, total, is_known)
        return batch.to(self.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipeline is not None:
            self._pipeline.close()

    def train(self, case: Case | None = None) -> list[float]:
        """The global loss of every step, and of every batch that was evaluated.

        The pipeline stays open between the steps of several cases.
        """
        self.case = case or self.case
        if self.case.pipeline == "in_line":
            return self._train(self._step_in_line, lambda: None, lambda: None)
        pipeline = self.pipeline()
        return self._train(
            lambda batches, _: pipeline.progress(batches)[0], pipeline.start, pipeline.flush
        )

    def pipeline(self) -> Pipeline:
        if self._pipeline is not None:
            return self._pipeline
        spec = PipelineSpec(
            PipelineKind[self.case.pipeline],
            WireType[self.case.wire],
            depth=self.case.depth,
            window=self.case.window,
            micro_batches=self.case.micro_batches,
        )
        self._pipeline = make_pipeline(
            spec, self.model, self.optimizer, self.device, self.case.clip or None
        )
        return self._pipeline

    def _train(self, step_on: Callable[..., Any], start: Any, flush: Any) -> list[float]:
        losses: list[torch.Tensor] = []

        def run(steps: list[int]) -> None:
            start()
            batches = iter([self.batch(step) for step in steps])
            for step in steps:
                set_learning_rates(self.optimizer, self.case.rate_factor, step)
                losses.append(step_on(batches, step).detach().clone())
            flush()

        for segment in self.case.segments():
            run(list(segment))
            if self.hot_set is not None:
                self.decisions.append(self.hot_set.adapt())
                check_replicas(self.model)
            if self.case.evaluate:
                self.model.eval()
                with torch.no_grad():
                    run([1000 + segment[0], 1000 + segment[-1]])
                self.model.train()
        total = torch.stack(losses)
        dist.all_reduce(total)
        return (total / self.case.num_ranks).tolist()

    def _step_in_line(self, batches: Iterator[Batch], step: int) -> torch.Tensor:
        if not self.model.training:
            loss: torch.Tensor = self.model(next(batches))[0]
            return loss
        self.optimizer.zero_grad()
        loss = self.model(next(batches))[0]
        if self.case.evaluate:  # which disturbs nothing, here too
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(2000 + step))
            self.model.train()
        loss.backward()
        if not (self.case.skip and step == 2):
            if self.case.clip:
                layers = dense_parameters(self.model).values()
                torch.nn.utils.clip_grad_norm_(layers, self.case.clip)
            self.optimizer.step()
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole tables and the dense layers."""
        check_replicas(self.model)
        layers = {name: value.clone() for name, value in layers_of(self.model).items()}
        return gather_tables(self.model) | layers


Result = tuple[list[float], dict[str, torch.Tensor]]


@dataclass
class Found:
    """What came of some cases on a rank.

    Args:
        failures: What differs, with the case.
        num_cases: Cases that were compared with the unsplit model.
        num_twins: Those that were compared bit for bit.
        worst: The greatest difference of a loss or a weight, of those in fp32.
        num_moved: Rows that became hot.
        num_rounded: Cases in 16 bits that differed from fp32.
        seconds: Of this rank's processor.
    """

    failures: list[str] = field(default_factory=list)
    num_cases: int = 0
    num_twins: int = 0
    worst: float = 0.0
    num_moved: int = 0
    num_rounded: int = 0
    seconds: float = 0.0

    def compare(self, case: Case) -> None:
        """Train a case, the unsplit model and the twin; a collective."""
        try:
            differences = [*self._differences(case)]
        except Exception as error:
            error.add_note(f"{case!r}")
            raise
        self.num_cases += 1
        self.failures += [f"{case!r}: {text}" for text in differences]

    def _differences(self, case: Case) -> Iterator[str]:
        losses, weights = with_slots(case, self._train)
        yield from self.from_unsplit((losses, weights), reference.train(case), case.is_rounded)
        if case.twin:
            self.num_twins += 1
            yield from other_bits((losses, weights), with_slots(case.other(), self._train))

    def from_unsplit(self, found: Result, unsplit: Result, is_rounded: bool) -> Iterator[str]:
        """What differs from the unsplit model, of which a rounded one is only near."""
        (losses, weights), (expected_losses, expected) = found, unsplit
        off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
        if is_rounded:
            if not off <= IN_HALF:
                yield f"losses {losses}, expected about {expected_losses}"
            is_other = any(not torch.equal(weights[name], expected[name]) for name in expected)
            self.num_rounded += is_other
            return
        if not off <= TOLERANCE:
            yield f"losses {losses}, expected {expected_losses}"
        if set(weights) != set(expected):
            yield f"weights {sorted(weights)}, expected {sorted(expected)}"
        for name, weight in expected.items():
            worst = float((weights[name] - weight).abs().max())
            if not worst <= TOLERANCE:
                yield f"{name} differs by {worst}"
            off = max(off, worst)
        self.worst = max(self.worst, off)

    def _train(self, case: Case) -> Result:
        with Training(case) as training:
            losses = training.train()
            found = training.decisions
            assert all(0 <= one.hot_share <= one.best_share <= 1 for one in found), found
            moved = [decision.num_moved for decision in found]
            assert max(moved, default=0) <= MAX_MOVED
            assert gather(moved) == [moved] * case.num_ranks  # all ranks decide alike
            self.num_moved += sum(moved)
            return losses, training.weights()


def other_bits(found: Result, expected: Result) -> Iterator[str]:
    """What differs in any bit."""
    (losses, weights), (expected_losses, other) = found, expected
    changed = [name for name, one in weights.items() if not torch.equal(one, other[name])]
    if losses != expected_losses or changed:
        yield f"losses {losses}, but {expected_losses} and other bits in {changed}"


def with_slots(case: Case, run: Callable[[Case], T]) -> T:
    """Run a case, with as many more slots as errors say it needs."""
    while True:
        try:
            return run(case)
        except ValueError as error:
            said = re.search(r"expected at least (\d+) slots .* got (\d+)\.", str(error))
            if said is None:
                raise
            more = min(1.0, case.slots * int(said[1]) / int(said[2]))
            assert more > case.slots, case
            case = replace(case, slots=more)


def run_cases(cases: list[Case], folder: Path | None = None) -> Found:
    """On a rank: what came of the cases, which are for these ranks.

    The one in training stands in a file of the folder.
    """
    torch.set_num_threads(1)
    found = Found()
    for case in cases:
        if folder is not None:
            (folder / f"{dist.get_rank()}.txt").write_text(f"{case!r}")
        if len(set(case.hosts)) > 1:
            pretend_hosts(case.hosts)
        found.compare(case)
    found.seconds = time.process_time()
    return found
