"""The collection before and after sharding on one rank, against TorchRec's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard, use_hot_cold
from hotrec.embedding.initialize import initial_rows, initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.tables import gather_tables, sharded_collections
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import hot_cold_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import make_plan
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Partition

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
CPU = torch.device("cpu")


def bag(name: str, num_rows: int, features: list[str], dim: int = 4, **kwargs: Any) -> Any:
    return EmbeddingBagConfig(
        name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=features, **kwargs
    )


def some_tables(pooling: PoolingType = MEAN) -> list[EmbeddingBagConfig]:
    return [
        bag("t", 12, ["a", "b"], pooling=pooling),
        bag("u", 5, ["c"], dim=8, pooling=SUM),
        bag("v", 9, ["a"], pooling=SUM),  # "a" is read from two tables
    ]


NUM_ROWS = {"t": 12, "u": 5, "v": 9}
PARTITIONS = {
    "all_cold": Partition(NUM_ROWS),
    "all_hot": Partition(NUM_ROWS, {name: np.arange(rows) for name, rows in NUM_ROWS.items()}),
    "mixed": Partition(NUM_ROWS, {"t": np.array([11, 0, 5]), "u": np.array([4, 3, 0, 1, 2])}),
}


def some_features(
    *, is_weighted: bool = False, is_empty: bool = False, batch_size: int = 6
) -> KeyedJaggedTensor:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 4, (3, batch_size)) * (not is_empty)
    values = np.concatenate(
        [rng.integers(rows, size=n) for rows, n in zip((9, 12, 5), lengths.sum(1), strict=True)]
    )
    return KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths).view(-1),
        weights=torch.from_numpy(rng.uniform(-1, 2, values.size)).float() if is_weighted else None,
        stride=batch_size,
    )


def gradients(collection: HotColdEmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """Gradient of each unsplit table from its two halves; cold slots of hot rows must get none."""
    found = {}
    for dim, group in collection.router.groups.items():
        embeddings: Any = collection.rows[f"dim{dim}"].embeddings
        for table in group.tables:
            hot = torch.from_numpy(collection.partition.hot(table))
            total = torch.zeros(NUM_ROWS[table], dim)
            if table in group.cold_tables:
                total += embeddings[table].weight.grad
                assert not total[hot].any()
            if table in group.hot_tables:
                total[hot] += embeddings[f"{table}_hot"].weight.grad
            found[table] = total
    return found


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("partition", list(PARTITIONS))
def test_unsharded_equals_embedding_bag_collection(partition: str, is_weighted: bool) -> None:
    # Unsharded, TorchRec has no weighted mean.
    tables = some_tables(SUM if is_weighted else MEAN)
    plain = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    collection = use_hot_cold(plain, PARTITIONS[partition])
    assert isinstance(collection, HotColdEmbeddingBagCollection)
    features = some_features(is_weighted=is_weighted)
    expected, routed_input = plain(features), collection.router(features)
    for found in (collection(features), collection(routed_input)):
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-6)
    grad = torch.randn(expected.values().shape, generator=torch.Generator().manual_seed(1))
    expected.values().backward(grad)
    collection(features).values().backward(grad)
    for table, found_grad in gradients(collection).items():
        weight: Any = plain.embedding_bags[table].weight
        torch.testing.assert_close(found_grad, weight.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("partition", list(PARTITIONS))
@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_a_batch_without_ids(partition: str, batch_size: int) -> None:
    collection = HotColdEmbeddingBagCollection(some_tables(), PARTITIONS[partition])
    out = collection(some_features(is_empty=True, batch_size=batch_size)).values()
    assert torch.equal(out, torch.zeros(batch_size, 20))


def test_weights_that_the_collection_was_not_built_for_are_unused() -> None:
    """As EmbeddingBagCollection does; also when a loader worker has routed."""
    collection = HotColdEmbeddingBagCollection(some_tables(), PARTITIONS["mixed"])
    expected = collection(some_features()).values()
    features = some_features(is_weighted=True)
    assert torch.equal(collection(features).values(), expected)
    assert torch.equal(collection(collection.router(features)).values(), expected)


def test_weights_that_are_missing_are_asked_for() -> None:
    collection = HotColdEmbeddingBagCollection(some_tables(), PARTITIONS["mixed"], is_weighted=True)
    with pytest.raises(ValueError, match=r"^features weights: expected per-sample weights"):
        collection(some_features())
    with pytest.raises(ValueError, match=r"^features weights: expected per-sample weights"):
        collection(collection.router(some_features()))


def test_features_routed_for_another_partition_are_refused() -> None:
    """Else rows would be mixed up without a word: the numbers of hot rows are the same."""
    collection = HotColdEmbeddingBagCollection(some_tables(), PARTITIONS["mixed"])
    partition = Partition(NUM_ROWS, {"t": np.array([1, 2, 3]), "u": np.arange(5)})
    other = HotColdEmbeddingBagCollection(some_tables(), partition)
    with pytest.raises(ValueError, match="expected"):
        collection(other.router(some_features()))


@pytest.mark.parametrize(
    ("tables", "num_rows", "message"),
    [
        ([bag("t", 5, ["a"])], {"t": 6}, r"^partition table t: expected 5 rows, got 6\."),
        ([bag("t", 5, ["a"])], {"u": 5}, r"^partition table t: expected 5 rows, got None\."),
        (
            [bag("t", 5, ["a"], data_type=DataType.FP16)],
            {"t": 5},
            r"^table t data_type: expected FP32, got FP16\.",
        ),
        (
            [bag("t", 5, ["a"]), bag("t_hot", 5, ["b"])],
            {"t": 5, "t_hot": 5},
            r"^table t_hot: expected no table of this name, since t has hot rows\.",
        ),
    ],
)
def test_tables_that_cannot_be_split_are_refused(
    tables: list[EmbeddingBagConfig], num_rows: dict[str, int], message: str
) -> None:
    hot = {"t": np.array([1])} if "t" in num_rows else {}
    with pytest.raises(ValueError, match=message):
        HotColdEmbeddingBagCollection(tables, Partition(num_rows, hot))


def test_a_name_that_only_looks_hot_is_fine_without_hot_rows() -> None:
    tables = [bag("t", 5, ["a"]), bag("t_hot", 5, ["b"])]
    partition = Partition({"t": 5, "t_hot": 5}, {"t_hot": np.array([1])})
    collection = HotColdEmbeddingBagCollection(tables, partition)
    assert collection.router.groups[4].keys == ["t_hot_hot", "t", "t_hot"]


class Model(nn.Module):
    """Collections at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.first = EmbeddingBagCollection(tables=[bag("t", 12, ["a"])])
        self.more = nn.ModuleList(
            [nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[bag("u", 5, ["c"])])})]
        )
        self.out = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        deep: Any = self.more[0]
        pooled = [self.first(features).values(), deep["ebc"](features).values()]
        return self.out(torch.cat(pooled, dim=1))


def test_use_hot_cold_keeps_what_the_model_computes() -> None:
    model = Model()
    expected = model(some_features())
    names = dict(model.named_parameters()).keys()
    changed = use_hot_cold(model, PARTITIONS["mixed"])
    assert changed is model
    assert not any(isinstance(m, EmbeddingBagCollection) for m in model.modules())
    torch.testing.assert_close(model(some_features()), expected, rtol=1e-6, atol=1e-6)
    assert {name for name in names if name.startswith("out")} <= dict(
        model.named_parameters()
    ).keys()


def test_use_hot_cold_keeps_the_mode_and_shared_collections() -> None:
    model = Model().eval()
    model.again = model.first
    use_hot_cold(model, PARTITIONS["mixed"])
    assert not any(module.training for module in model.modules())
    assert model.again is model.first


def test_use_hot_cold_on_the_meta_device() -> None:
    model = EmbeddingBagCollection(tables=some_tables(), device=torch.device("meta"))
    collection = use_hot_cold(model, PARTITIONS["mixed"])
    assert {p.device.type for p in collection.parameters()} == {"meta"}


def test_use_hot_cold_refuses_a_model_without_collections() -> None:
    with pytest.raises(ValueError, match=r"^model Linear: expected an EmbeddingBagCollection"):
        use_hot_cold(nn.Linear(2, 2), PARTITIONS["mixed"])


def shard_here(
    model: nn.Module, partition: Partition, tables: list[Any], spec: OptimizerSpec
) -> Any:
    sharders: Any = [HotColdSharder(spec)]
    machine = Machine(1, 1, "cpu", 0, 1 << 33, 8)
    plan = make_plan(model, sharders, machine, hot_cold_constraints(tables, partition))
    return shard(model, plan, sharders, CPU)


SGD = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.5)


class Named(nn.Module):
    """A collection under the names that wrappers use."""

    def __init__(self, name: str, collection: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.ModuleDict({"e": collection}))
        self.out = nn.Linear(20, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        holder: Any = getattr(self, self.name)
        return self.out(holder["e"](features).values())


@pytest.mark.parametrize("where", ["root", "embeddings", "module", "rows"])
def test_sharding_keeps_weights_wherever_the_collection_stands(one_rank: Ranks, where: str) -> None:
    """And each parameter belongs to one optimizer."""
    partition = PARTITIONS["mixed"]
    plain = EmbeddingBagCollection(tables=some_tables())
    start = {name: module.weight.detach().clone() for name, module in plain.embedding_bags.items()}
    collection = use_hot_cold(plain, partition)
    model = collection if where == "root" else Named(where, collection)
    expected = model(some_features())
    sharded = shard_here(model, partition, some_tables(), SGD)
    found = sharded(some_features())
    if where == "root":
        expected, found = expected.values(), found.values()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for table, weight in gather_tables(sharded).items():
        assert torch.equal(weight, start[table])

    initialize_embeddings(sharded, seed=3)
    for config in some_tables():
        rows = torch.arange(config.num_embeddings)
        expected = initial_rows(3, config.name, rows, config.embedding_dim, config.num_embeddings)
        assert torch.equal(gather_tables(sharded)[config.name], expected), config.name
    optimizer = make_optimizer(sharded, SGD, SGD)
    names = [name.split(".", 1)[1] for name in optimizer.params]
    assert sorted(names) == sorted(sharded.state_dict())


def test_other_modules_called_embeddings_are_left_alone(one_rank: Ranks) -> None:
    partition = PARTITIONS["mixed"]
    model = Named("e", HotColdEmbeddingBagCollection(some_tables(), partition))
    model.embeddings = nn.Sequential(nn.Linear(4, 4))
    sharded = shard_here(model, partition, some_tables(), SGD)
    before = sharded.module.embeddings[0].weight.detach().clone()
    initialize_embeddings(sharded, seed=3)
    assert torch.equal(sharded.module.embeddings[0].weight, before)
    assert set(gather_tables(sharded)) == set(NUM_ROWS)


def test_adam_with_cold_rows_on_cpu_is_refused_before_training(one_rank: Ranks) -> None:
    adam = OptimizerSpec(OptimizerKind.adam, learning_rate=0.1)
    for name in ("mixed", "all_cold"):
        partition = PARTITIONS[name]
        collection = HotColdEmbeddingBagCollection(some_tables(), partition)
        with pytest.raises(ValueError, match=r"^optimizer\.kind: .*FBGEMM has no Adam.*got adam"):
            shard_here(Named("e", collection), partition, some_tables(), adam)
    partition = PARTITIONS["all_hot"]
    collection = HotColdEmbeddingBagCollection(some_tables(), partition)
    assert shard_here(Named("e", collection), partition, some_tables(), adam) is not None


def test_features_that_are_routed_bring_no_map_to_the_device(one_rank: Ranks) -> None:
    """It has 4 bytes for every row of all tables."""
    partition = PARTITIONS["mixed"]
    collection = HotColdEmbeddingBagCollection(some_tables(), partition)
    sharded = shard_here(Named("e", collection), partition, some_tables(), SGD)
    [(_, of_rank)] = sharded_collections(sharded)
    of_rank._device, of_rank._device_router = torch.device("meta"), None
    routed = of_rank.route(collection.router(some_features()))
    assert routed.fingerprint == collection.router.fingerprint
    assert of_rank._device_router is None
    moved = collection.router.to(torch.device("meta"))
    pairs = zip(moved.groups.values(), collection.router.groups.values(), strict=True)
    assert {(a._slots.device.type, b._slots.device.type) for a, b in pairs} == {("meta", "cpu")}


def test_a_plan_that_breaks_the_halves_is_refused(one_rank: Ranks) -> None:
    partition = PARTITIONS["mixed"]
    collection = HotColdEmbeddingBagCollection(some_tables(), partition)
    sharders: Any = [HotColdSharder(SGD)]
    model = Named("e", collection)
    constraints = hot_cold_constraints(some_tables(), partition)
    swapped = {**constraints, "t": constraints["t_hot"]}
    plan = make_plan(model, sharders, Machine(1, 1, "cpu", 0, 1 << 33, 8), swapped)
    with pytest.raises(ValueError, match=r"^plan table t: .*'row_wise' or 'table_wise', got"):
        shard(model, plan, sharders, CPU)


@pytest.mark.parametrize("kind", [k for k in OptimizerKind if k is not OptimizerKind.adam])
def test_learning_rate_changes_reach_every_part_at_the_same_step(
    one_rank: Ranks, kind: OptimizerKind
) -> None:
    partition = PARTITIONS["mixed"]
    spec = OptimizerSpec(kind, learning_rate=0.5, eps=1e-3)
    collection = HotColdEmbeddingBagCollection(some_tables(), partition)
    sharded = shard_here(Named("e", collection), partition, some_tables(), spec)
    initialize_embeddings(sharded, seed=3)
    optimizer = make_optimizer(sharded, spec, spec)

    def moved() -> list[bool]:
        before = {n: w.clone() for n, w in gather_tables(sharded).items()}
        layer = sharded.module.out.weight.detach().clone()
        optimizer.zero_grad()
        sharded(some_features()).square().sum().backward()
        optimizer.step()
        after = gather_tables(sharded)
        hot = torch.from_numpy(partition.hot("t"))
        is_hot = torch.zeros(12, dtype=torch.bool).index_fill(0, hot, True)
        changed = (after["t"] != before["t"]).any(1)
        return [
            bool(changed[is_hot].any()),
            bool(changed[~is_hot].any()),
            not torch.equal(sharded.module.out.weight, layer),
        ]

    assert all("lr" in group for group in optimizer.param_groups)
    assert moved() == [True, True, True]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert moved() == [False, False, False]
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    assert moved() == [True, True, True]
