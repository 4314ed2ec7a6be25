"""Generated parity cases, run on real ranks against the one-process reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.data.batch import Batch
from hotrec.embedding.collection import (
    HotColdEmbeddingBagCollection,
    HotColdEmbeddingCollection,
)
from hotrec.embedding.convert import check_replicas
from hotrec.embedding.initialize import initial_rows
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSequenceSharder, HotColdSharder
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.routing.router import Router
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    POPULAR_ROW,
    Exchange,
    HotExchange,
    Levels,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    RowFetch,
    Sharding,
    TablePlacement,
    Tier,
    WireType,
)
from tests.distributed.setups import mean_over_ranks, shard_task
from tests.helpers.reference import (
    Bags,
    PlainBags,
    PlainLazyAdam,
    PlainRowWiseAdagrad,
    PlainTable,
    SumsByPlace,
    TinyClickModel,
    mean_loss,
    weights_of_places,
)

NUM_DENSE = 3
NUM_STEPS = 4
SEED = 5
TOLERANCE = 1e-5
PARTITIONS = ("all_hot", "all_cold", "half", "random", "one_table_hot", "one_row")
# What the batches of a case are like: drawn; the same few rows on all ranks in every step; no ids
# at all on any rank in some steps; one sample per rank.
BATCHES = ("drawn", "same_rows", "no_ids", "one_sample")
# Of no grid. The last rank but one, or the second half of the ranks, reads no row in any step. Only
# row 0 of each table is read, which one rank owns. Every second step reads hot rows only, which the
# batch says or does not say.
RARE_BATCHES = ("idle_rank", "idle_half", "first_row", "only_hot", "known_hot")
# Rows of all tables row-wise; table by table row-wise, table-wise or pooled; every table that a
# coin chooses table-wise, the others row-wise; all tables pooled.
PLACEMENTS = ("row_wise", "mixed", "table_wise", "pooled")


@dataclass(frozen=True)
class Case:
    """One model, partition, optimizer and pipeline; ``seed`` draws the tables and the batches.

    The pipeline "in_line" is a loop of forward, backward and step without any.
    """

    seed: int
    partition: str
    optimizer: OptimizerKind
    is_weighted: bool
    is_uniform_dim: bool
    exchange: HotExchange
    route_in_loader: bool
    device: str = "cpu"
    tier: Tier = Tier.DEVICE
    batches: str = "drawn"
    placement: str = "row_wise"
    pipeline: str = "in_line"
    depth: int = 1
    micro_batches: bool = False
    cache_load_frac: float = 0.2
    popular_frac: float = 0.0
    window: int = 0
    row_type: WireType = WireType.fp32
    row_fetch: RowFetch = RowFetch.staged
    levels: Levels = Levels.one
    wire: WireType = WireType.fp32
    is_spread: bool = False
    # The rows are read unpooled, and the model sums them, weighted by their places.
    is_sequence: bool = False
    tables: tuple[PlainTable, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", make_tables(self))

    def rng(self, *salt: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *salt))


def make_cases(num_cases: int, seed: int = 0) -> list[Case]:
    """A seeded grid: every partition with every optimizer, the rest drawn."""
    rng = np.random.default_rng(seed)
    kinds = [OptimizerKind.sgd, OptimizerKind.adagrad, OptimizerKind.rowwise_adagrad]
    cases = []
    for index in range(num_cases):
        partition = PARTITIONS[index % len(PARTITIONS)]
        kind = kinds[(index // len(PARTITIONS)) % len(kinds)]
        placement = str(rng.choice(PLACEMENTS, p=[0.25, 0.45, 0.2, 0.1]))
        if partition == "all_hot" and index % 4 == 0:
            kind, placement = OptimizerKind.adam, "row_wise"
        cases.append(
            Case(
                seed=int(rng.integers(1 << 30)),
                partition=partition,
                optimizer=kind,
                is_weighted=bool(rng.integers(2)),
                is_uniform_dim=bool(rng.integers(2)),
                exchange=HotExchange.dense if index % 5 == 4 else HotExchange.touched_rows,
                route_in_loader=bool(rng.integers(2)),
                # Every partition meets every kind of batch, with different optimizers.
                batches=BATCHES[(index // 2) % len(BATCHES)],
                placement=placement,
            )
        )
    return cases


def make_pipeline_cases(num_cases: int, seed: int = 1) -> list[Case]:
    """The same for pipelines: look-ahead of every depth, in parts or not, and TorchRec's."""
    pipelines = [
        ("look_ahead", 1, False),
        ("look_ahead", 2, False),
        ("look_ahead", 0, True),
        ("look_ahead", 1, True),
        ("sparse_dist", 1, False),
        ("look_ahead", 0, False),
        ("look_ahead", 3, True),
        ("base", 1, False),
    ]
    cases = []
    for index, case in enumerate(make_cases(num_cases, seed)):
        # Steps of 8 and 6 and 3: every pipeline meets every partition and optimizer.
        kind, depth, in_parts = pipelines[(index + index // len(pipelines)) % len(pipelines)]
        placement = case.placement
        if in_parts and placement in ("mixed", "pooled"):
            placement = "table_wise"
        exchange = list(HotExchange)[index % len(HotExchange)]
        changes = {"pipeline": kind, "depth": depth, "micro_batches": in_parts}
        cases.append(replace(case, placement=placement, exchange=exchange, **changes))
    return cases


NUM_LEVEL_CASES = 20  # of each shape of hosts, plain loops and pipelines


def make_level_cases(shape: int) -> list[Case]:
    """Cases in two levels, and rare batches, others for each number of a shape of hosts."""
    first, num_plain = shape * NUM_LEVEL_CASES, NUM_LEVEL_CASES // 4
    drawn = make_cases(first + num_plain, seed=23)[first:]
    drawn += make_pipeline_cases(first + NUM_LEVEL_CASES, seed=29)[first + num_plain :]
    cases = []
    for at, case in enumerate(drawn):
        # Slots need look-ahead and rows that are exchanged.
        has_slots = case.pipeline == "look_ahead" and case.partition != "all_hot"
        if has_slots and at % 4 in (1, 2):
            slots = {"tier": Tier.CACHED, "cache_load_frac": 1.0, "window": at % 2 * 3}
            case = replace(case, placement="row_wise", popular_frac=0.3, **slots)
        cases.append(replace(case, is_spread=at % 4 < 2))
    half = [
        replace(case, partition="half", placement="row_wise")
        for case in drawn
        if case.optimizer is not OptimizerKind.adam  # which needs all rows hot
    ]
    ahead = [case for case in half if case.pipeline == "look_ahead"]
    plain = [case for case in half if case.pipeline != "look_ahead"]
    for of_kind, rare in ((ahead, RARE_BATCHES), (plain, RARE_BATCHES[:-1])):
        cases += [replace(case, batches=b) for case, b in zip(of_kind, rare, strict=False)]
    return [replace(case, levels=Levels.two) for case in cases]


def make_sequence_cases(num_cases: int, seed: int) -> list[Case]:
    """Unpooled tables: plain loops and every pipeline, half of look-ahead's behind slots."""
    drawn = make_cases(num_cases // 4, seed) + make_pipeline_cases(num_cases - num_cases // 4, seed)
    cases = []
    for at, case in enumerate(drawn):
        # No rows are pooled on their owners, and ids have no weights.
        changes: dict[str, Any] = {"is_sequence": True, "is_weighted": False}
        if case.placement != "table_wise":
            changes["placement"] = "row_wise"
            changes["is_spread"] = at % 3 == 0
            if case.pipeline == "look_ahead" and case.partition != "all_hot" and at % 2:
                slots = {"tier": Tier.CACHED, "cache_load_frac": 1.0, "window": at % 4 // 2 * 3}
                changes |= {**slots, "popular_frac": 0.3}
        cases.append(replace(case, **changes))
    return cases


def make_tables(case: Case) -> tuple[PlainTable, ...]:
    rng = case.rng(1)
    tables = []
    for index in range(int(rng.integers(1, 5))):
        features = tuple(f"f{index}_{k}" for k in range(int(rng.integers(1, 3))))
        if index == 1 and rng.integers(2):
            features += ("f0_0",)  # a feature that two tables read
        tables.append(
            PlainTable(
                name=f"t{index}",
                # From fewer rows than ranks, to more than a batch can touch.
                num_rows=int(rng.choice([1, 2, 7, 40, 300])) if index else 40,
                dim=8 if case.is_uniform_dim else int(rng.choice([4, 8])),
                features=features,
                is_mean=bool(rng.integers(2)) and not case.is_sequence,
            )
        )
    return tuple(tables)


def make_partition(case: Case) -> Partition:
    rng = case.rng(2)
    num_rows = {table.name: table.num_rows for table in case.tables}
    hot: dict[str, np.ndarray] = {}
    for index, (name, rows) in enumerate(num_rows.items()):
        num_hot = {
            "all_hot": rows,
            "all_cold": 0,
            "half": (rows + 1) // 2,
            "one_row": 1,
            "one_table_hot": rows if index == 0 else 0,
        }.get(case.partition)
        if num_hot is None:
            num_hot = int(rng.integers(rows + 1))
        hot[name] = rng.permutation(rows)[:num_hot].astype(np.int64)
    return Partition(num_rows, hot, case.partition)


def make_placement(case: Case) -> Placement:
    """The case's partition, and how each table's other rows are served."""
    rng = case.rng(4)
    partition = make_partition(case)
    hot = dict(partition.hot_rows)
    placements = {}
    for name in partition.num_rows:
        is_pooled = case.placement == "pooled" or (
            case.placement == "mixed" and bool(rng.random() < 0.4)
        )
        is_table_wise = case.placement != "row_wise" and bool(rng.random() < 0.6)
        if is_pooled:
            hot.pop(name)
        placements[name] = TablePlacement(
            exchange=Exchange.POOLED if is_pooled else Exchange.ROWS,
            sharding=Sharding.TABLE_WISE if is_pooled or is_table_wise else Sharding.ROW_WISE,
            tier=case.tier,
            cache_load_frac=None if case.tier in (Tier.DEVICE, Tier.HOST) else case.cache_load_frac,
            row_type=case.row_type,
            row_fetch=case.row_fetch,
            is_spread=case.is_spread,
        )
    popular = {
        # The batches read low rows most.
        name: np.array(
            [(row, rng.random()) for row in rng.permutation(int(case.popular_frac * rows))],
            POPULAR_ROW,
        )
        for name, rows in partition.num_rows.items()
    }
    split = Partition(partition.num_rows, hot, case.partition)
    return Placement(split, placements, popular_rows=popular)


def is_all_hot(case: Case, step: int) -> bool:
    """Whether every rank reads hot rows only."""
    return case.batches in ("only_hot", "known_hot") and step % 2 == 1


def make_global_batch(
    case: Case, step: int, world_size: int
) -> tuple[torch.Tensor, list[Bags], torch.Tensor]:
    """Dense features and labels of the global batch, and the bags of each rank.

    Ranks hold unequal shares, and one may hold a single padding sample.
    """
    rng = case.rng(3, step)
    most_samples = 1 if case.batches == "one_sample" else 8
    shares = [int(rng.integers(1, most_samples + 1)) for _ in range(world_size)]
    limits: dict[str, int] = {}
    for table in case.tables:
        for feature in table.features:
            limits[feature] = min(limits.get(feature, 1 << 60), table.num_rows)
    most = 1 if rng.integers(4) == 0 else 4  # sometimes one-hot
    if case.batches == "no_ids" and step % 2 == 0:
        limits = dict.fromkeys(limits, 0)
    if case.batches == "same_rows":
        limits = {feature: min(limit, 2) for feature, limit in limits.items()}
    if case.batches == "first_row":
        limits = dict.fromkeys(limits, 1)
    rows = {feature: np.arange(limit) for feature, limit in limits.items()}
    if is_all_hot(case, step):
        partition = make_placement(case).partition
        for table in case.tables:
            for feature in table.features:
                rows[feature] = np.intersect1d(rows[feature], partition.hot(table.name))
    idle: range | tuple[int, ...] = ()
    if case.batches == "idle_rank":
        idle = (world_size - 2,)
    if case.batches == "idle_half":
        idle = range(world_size // 2, world_size)
    ranks: list[Bags] = []
    for rank, share in enumerate(shares):
        bags: dict[str, list[tuple[list[int], list[float] | None]]] = {}
        for feature, rows_L in rows.items():
            samples: list[tuple[list[int], list[float] | None]] = []
            for _ in range(share):
                length = 1 if most == 1 else int(rng.integers(0, most + 1))
                length = length if rows_L.size and rank not in idle else 0
                # Squared: low rows are read often, so ranks and steps conflict.
                ids = rows_L[(rng.random(length) ** 2 * rows_L.size).astype(int)].tolist()
                weights = rng.uniform(0.5, 2.0, length).astype(np.float32).tolist()
                if case.is_sequence:
                    weights = weights_of_places(length)
                is_weighted = case.is_weighted or case.is_sequence
                samples.append((ids, weights if is_weighted else None))
            bags[feature] = samples
        ranks.append(bags)
    total = sum(shares)
    dense = torch.from_numpy(rng.standard_normal((total, NUM_DENSE)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 2, total).astype(np.float32))
    return dense, ranks, labels


def to_kjt(case: Case, bags: Bags) -> KeyedJaggedTensor:
    ids, lengths, weights = [], [], []
    for samples in bags.values():
        for sample_ids, sample_weights in samples:
            ids += sample_ids
            lengths.append(len(sample_ids))
            weights += sample_weights or []
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=torch.tensor(weights) if case.is_weighted else None,
    )


def padding_batch(case: Case) -> Batch:
    """What a rank without samples holds."""
    features = {feature: None for table in case.tables for feature in table.features}
    empty: Bags = {feature: [([], [] if case.is_weighted else None)] for feature in features}
    return Batch(torch.zeros(1, NUM_DENSE), to_kjt(case, empty), torch.zeros(1), torch.zeros(1), 0)


def rank_batch(case: Case, step: int, rank: int, world_size: int) -> Batch:
    """A rank's share. On step 1 of several ranks, rank 0 is without samples."""
    dense, ranks, labels = make_global_batch(case, step, world_size)
    shares = [len(next(iter(bags.values()))) for bags in ranks]
    begin = sum(shares[:rank])
    total = len(labels)
    is_known_hot = case.batches == "known_hot" and is_all_hot(case, step)
    if step == 1 and world_size > 1:
        total -= shares[0]
        if rank == 0:
            batch = padding_batch(case)
            batch.num_global_samples, batch.is_all_hot = total, is_known_hot
            return batch
    return Batch(
        dense[begin : begin + shares[rank]],
        to_kjt(case, ranks[rank]),
        labels[begin : begin + shares[rank]],
        torch.ones(shares[rank]),
        total,
        is_known_hot,
    )


def spec_of(case: Case) -> OptimizerSpec:
    # Where a gradient is near 0 a first step of Adagrad or Adam multiplies its rounding (1e-8) by
    # learning_rate / eps. With eps 1e-3 that alone can exceed the tolerance: one case in parts
    # differs by 2.4e-5 from the unsplit model, by 8e-7 with 1e-2, and by 6e-8 with SGD.
    return OptimizerSpec(case.optimizer, learning_rate=0.3, eps=1e-2)


def initial_tables(case: Case) -> dict[str, torch.Tensor]:
    return {
        table.name: initial_rows(
            SEED, table.name, torch.arange(table.num_rows), table.dim, table.num_rows
        )
        for table in case.tables
    }


def run_reference(case: Case, world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the unsplit model on the concatenated batches."""
    embeddings = PlainBags(case.tables, initial_tables(case))
    width = sum(table.dim * len(table.features) for table in case.tables)
    model = TinyClickModel(embeddings, NUM_DENSE, width)
    tables = list(embeddings.bags.parameters())
    layers = [*model.hidden.parameters(), *model.out.parameters()]
    spec = spec_of(case)
    lr, eps = spec.learning_rate, spec.eps
    lazy: PlainLazyAdam | None = None
    match case.optimizer:
        case OptimizerKind.sgd:
            optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(tables, lr=lr)]
        case OptimizerKind.adagrad:
            optimizers = [torch.optim.Adagrad(tables, lr=lr, eps=eps)]
        case OptimizerKind.rowwise_adagrad:
            optimizers = [PlainRowWiseAdagrad(tables, lr=lr, eps=eps)]
        case OptimizerKind.adam:
            lazy = PlainLazyAdam(tables, lr, (spec.beta1, spec.beta2), eps)
            optimizers = [lazy]
    optimizers.append(torch.optim.SGD(layers, lr=0.1))
    losses = []
    for step in range(NUM_STEPS):
        dense, ranks, labels = make_global_batch(case, step, world_size)
        if step == 1 and world_size > 1:
            skipped = len(next(iter(ranks[0].values())))
            dense, labels, ranks = dense[skipped:], labels[skipped:], ranks[1:]
        bags = {
            feature: [sample for rank in ranks for sample in rank[feature]] for feature in ranks[0]
        }
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        loss = mean_loss(model(dense, bags), labels)
        loss.backward()
        if lazy is not None:
            for table in case.tables:
                ids = [i for f in table.features for s, _ in bags[f] for i in s]
                weight = embeddings.bags[table.name].weight
                lazy.touched[weight] = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: bag.weight.detach() for name, bag in embeddings.bags.items()}
    weights["hidden"] = model.hidden.weight.detach()
    return losses, weights


def sequence_configs(case: Case) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.num_rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in case.tables
    ]


def output_names(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    """The keys of an unpooled collection's output in the order of the unsplit model's columns."""
    return [name for names in get_embedding_names_by_table(list(tables)) for name in names]


def _make_collection(
    case: Case, placement: Placement
) -> HotColdEmbeddingBagCollection | HotColdEmbeddingCollection:
    meta = torch.device("meta")
    if case.is_sequence:
        return HotColdEmbeddingCollection(sequence_configs(case), placement, device=meta)
    bags = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
            pooling=PoolingType.MEAN if table.is_mean else PoolingType.SUM,
        )
        for table in case.tables
    ]
    return HotColdEmbeddingBagCollection(bags, placement, is_weighted=case.is_weighted, device=meta)


def build_hot_cold(case: Case) -> tuple[DistributedModelParallel, CombinedOptimizer, Router]:
    """The case's model on the ranks of the default process group."""
    world_size, device = dist.get_world_size(), torch.device(case.device)
    placement = make_placement(case)
    embeddings = _make_collection(case, placement)
    width = sum(table.dim * len(table.features) for table in case.tables)
    router = embeddings.router
    columns: nn.Module = embeddings
    if case.is_sequence:
        columns = SumsByPlace(embeddings, output_names(embeddings.tables))
    task = ClickTask(TinyClickModel(columns, NUM_DENSE, width), world_size)
    task.model.hidden.to(device)
    task.model.out.to(device)
    spec = spec_of(case)
    sharder = HotColdSequenceSharder if case.is_sequence else HotColdSharder
    model = shard_task(
        task,
        sharder(spec, case.exchange, case.wire, case.levels),
        placement_constraints(placement, device=device.type),
        device=case.device,
        data_parallel=case.pipeline != "look_ahead",
        seed=SEED,
    )
    optimizer = make_optimizer(model, spec, OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1))
    return model, optimizer, router


def run_hot_cold(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same as ``run_reference`` with hotrec, on the ranks of the default process group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(case.device)
    model, optimizer, router = build_hot_cold(case)
    batches = []
    for step in range(NUM_STEPS):
        batch = rank_batch(case, step, rank, world_size)
        if case.route_in_loader:
            batch.sparse = router(batch.sparse)  # type: ignore[assignment]
        batches.append(batch.to(device))
    losses = [mean_over_ranks(loss) for loss in train_case(case, model, optimizer, batches, device)]
    check_replicas(model)
    return losses, gather_weights(model)


def gather_weights(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """The whole tables, and the first layer."""
    weights = gather_tables(model)
    for name, parameter in model.named_parameters():
        if name.endswith("hidden.weight"):
            weights["hidden"] = parameter.detach().cpu()
    return weights


def train_case(
    case: Case,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    batches: list[Batch],
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """The loss () of every step on this rank."""
    if case.pipeline == "in_line":
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = model(batch)
            loss.backward()
            optimizer.step()
            yield loss
        return
    spec = PipelineSpec(
        PipelineKind[case.pipeline],
        case.wire,
        depth=case.depth,
        window=case.window,
        micro_batches=case.micro_batches,
    )
    pipeline = make_pipeline(spec, model, optimizer, device, hot_exchange=case.exchange)
    pipeline.start()
    iterator = iter(batches)
    for _ in batches:
        loss, _, _ = pipeline.progress(iterator)
        yield loss
    pipeline.drain()
    pipeline.close()


def compare(case: Case, again: Case | None = None) -> str | None:
    """None if hotrec and the reference agree, else what differs.

    With ``again``, that case too must have the same losses and weights, bit for bit.
    """
    losses, weights = run_hot_cold(case)
    expected_losses, expected_weights = run_reference(case, dist.get_world_size())
    worst = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    if not worst <= TOLERANCE:
        return f"{case}: losses {losses}, expected {expected_losses}"
    if set(weights) != set(expected_weights):
        return f"{case}: tables {sorted(weights)}, expected {sorted(expected_weights)}"
    for name, expected in expected_weights.items():
        difference = float((weights[name] - expected).abs().max())
        if not difference <= TOLERANCE:
            return f"{case}: table {name} differs by {difference}"
    if again is None:
        return None
    other_losses, others = run_hot_cold(again)
    changed = [name for name, weight in weights.items() if not torch.equal(weight, others[name])]
    if losses != other_losses or changed:
        return f"{case}: losses {losses}, but {other_losses} and other bits in {changed} of {again}"
    return None


def run_cases(cases: list[Case]) -> list[str]:
    """The failures among the cases, on this rank."""
    return [failure for case in cases if (failure := compare(case)) is not None]


def run_twice(cases: list[Case], **changes: Any) -> list[str]:
    """The same, of cases that must give the same bits again, with these changes."""
    again = [(case, replace(case, **changes)) for case in cases]
    return [failure for case, other in again if (failure := compare(case, other)) is not None]
