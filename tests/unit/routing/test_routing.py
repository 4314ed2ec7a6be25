"""Routing against a loop over bags: what is read, where it goes, and what is refused."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.pooling import pool_rows
from hotrec.routing.features import Column, RoutedGroup, hot_name
from hotrec.routing.router import Router
from hotrec.routing.sorting import sort_keys
from hotrec.types import Partition

DIM = 4


@dataclass
class Drawn:
    """Columns, partition and a batch: by feature, per sample, its ids; then weights likewise."""

    columns: list[Column]
    partition: Partition
    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None

    @property
    def batch_size(self) -> int:
        return len(next(iter(self.bags.values())))

    def features(self, *, lengths_dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
        ids = [i for samples in self.bags.values() for bag in samples for i in bag]
        weights = None
        if self.weights is not None:
            flat = [w for samples in self.weights.values() for bag in samples for w in bag]
            weights = torch.tensor(flat, dtype=torch.float32)
        return KeyedJaggedTensor(
            keys=list(self.bags),
            values=torch.tensor(ids, dtype=torch.int64),
            lengths=torch.tensor(
                [len(bag) for samples in self.bags.values() for bag in samples],
                dtype=lengths_dtype,
            ),
            weights=weights,
            stride=self.batch_size,
        )

    def weights_of(self, feature: str, sample: int) -> list[float]:
        bag = self.bags[feature][sample]
        return [1.0] * len(bag) if self.weights is None else self.weights[feature][sample]


@st.composite
def drawn_batches(draw: st.DrawFn) -> Drawn:
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    num_tables = draw(st.integers(1, 3))
    batch_size = draw(st.integers(0, 5))
    most = draw(st.sampled_from([0, 1, 1, 4]))  # only empty bags, one id in each, jagged
    is_one_hot = most == 1 and draw(st.booleans())
    kind = draw(st.sampled_from(["all_hot", "all_cold", "mixed"]))
    num_rows = {f"t{t}": int(rng.choice([1, 2, 6, 30])) for t in range(num_tables)}
    hot = {}
    for table, rows in num_rows.items():
        num_hot = {"all_hot": rows, "all_cold": 0}.get(kind, int(rng.integers(rows + 1)))
        hot[table] = rng.permutation(rows)[:num_hot]
    columns, limits = [], {}
    for index, table in enumerate(num_rows):
        features = [f"f{index}_{k}" for k in range(int(rng.integers(1, 3)))]
        if index > 0 and rng.integers(2):
            features.append("f0_0")  # read from two tables
        is_mean = bool(rng.integers(2))
        for feature in features:
            columns.append(Column(f"{feature}@{table}", feature, table, is_mean))
            limits[feature] = min(limits.get(feature, 1 << 40), num_rows[table])
    bags = {
        feature: [
            rng.integers(limit, size=1 if is_one_hot else int(rng.integers(most + 1))).tolist()
            for _ in range(batch_size)
        ]
        for feature, limit in limits.items()
    }
    weights = None
    if draw(st.booleans()):
        weights = {
            feature: [rng.uniform(-2.0, 2.0, len(bag)).tolist() for bag in samples]
            for feature, samples in bags.items()
        }
    return Drawn(columns, Partition(num_rows, hot), bags, weights)


def tables_of(partition: Partition) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        table: torch.randn(rows, DIM, generator=generator)
        for table, rows in partition.num_rows.items()
    }


def rows_read(
    group: RoutedGroup, partition: Partition, tables: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What a lookup of ``group.rows`` returns, (U, DIM), from the unsplit tables."""
    by_table = {hot_name(table): (table, partition.hot(table)) for table in partition.num_rows}
    parts = [torch.empty(0, DIM)]
    for key in group.rows.keys():  # noqa: SIM118 (a KeyedJaggedTensor is no mapping)
        values = group.rows[key].values()
        if key in by_table:
            table, hot = by_table[key]
            values = torch.from_numpy(hot)[values]
        else:
            table = key
        parts.append(tables[table][values])
    return torch.cat(parts)


def pool_without_routing(drawn: Drawn, tables: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B, F, DIM) from the definition of a bag."""
    out = torch.zeros(drawn.batch_size, len(drawn.columns), DIM)
    for f, column in enumerate(drawn.columns):
        for b, ids in enumerate(drawn.bags[column.feature]):
            for row, weight in zip(ids, drawn.weights_of(column.feature, b), strict=True):
                scale = weight / len(ids) if column.is_mean else weight
                out[b, f] += scale * tables[column.table][row]
    return out


few = settings(max_examples=80, deadline=None, derandomize=True)


@few
@given(drawn=drawn_batches(), lengths_dtype=st.sampled_from([torch.int32, torch.int64]))
def test_routing_and_pooling_equal_a_loop_over_bags(
    drawn: Drawn, lengths_dtype: torch.dtype
) -> None:
    """Both ways: routing stores the incidence of rows and bags in both orders."""
    router = Router({DIM: drawn.columns}, drawn.partition)
    routed = router(drawn.features(lengths_dtype=lengths_dtype))
    [group] = routed.groups
    assert routed.stride() == drawn.batch_size
    tables = {name: table.requires_grad_() for name, table in tables_of(drawn.partition).items()}
    num_columns = len(drawn.columns)
    pooled = pool_rows(rows_read(group, drawn.partition, tables), group, num_columns)
    expected = pool_without_routing(drawn, tables).view(-1, num_columns * DIM)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-5)
    # Not contiguous, as it comes out of a slice of the interaction layer.
    upstream = torch.randn(num_columns * DIM, drawn.batch_size).t()
    found, wanted = (
        torch.autograd.grad(
            out, list(tables.values()), upstream, allow_unused=True, materialize_grads=True
        )
        if out.requires_grad
        else ()
        for out in (pooled, expected)
    )
    for one, other in zip(found, wanted, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@few
@given(drawn=drawn_batches())
def test_rows_are_distinct_in_range_and_in_their_half(drawn: Drawn) -> None:
    routed = Router({DIM: drawn.columns}, drawn.partition)(drawn.features())
    [group] = routed.groups
    partition = drawn.partition

    read: dict[str, set[int]] = {table: set() for table in partition.num_rows}
    num_lookups, num_hot_lookups = 0, 0
    for column in drawn.columns:
        ids = [row for bag in drawn.bags[column.feature] for row in bag]
        read[column.table].update(ids)
        num_lookups += len(ids)
        num_hot_lookups += int(np.isin(ids, partition.hot(column.table)).sum())
    found: dict[str, list[int]] = {}
    for table in partition.num_rows:
        hot, is_read = partition.hot(table), read[table]
        keys = group.rows.keys()
        assert (hot_name(table) in keys) == (hot.size > 0)
        assert (table in keys) == (hot.size < partition.num_rows[table])
        slots = group.rows[hot_name(table)].values().tolist() if hot.size else []
        cold = group.rows[table].values().tolist() if table in keys else []
        found[table] = hot[slots].tolist() + cold
        assert set(hot[slots].tolist()) == is_read & set(hot.tolist())
        assert set(cold) == is_read - set(hot.tolist())
        assert len(found[table]) == len(is_read)  # each row once
    assert group.rows.stride() == 1
    assert [group.rows.values().numel() for group in routed.groups] == [
        sum(len(rows) for rows in read.values())
    ]
    assert routed.num_lookups == num_lookups
    assert routed.num_hot_lookups() == num_hot_lookups


def one_table_router(rows: np.ndarray | None = None) -> Router:
    columns = [Column("a", "a", "t", False), Column("b", "b", "t", False)]
    hot = np.array([3, 1, 7]) if rows is None else rows
    return Router({DIM: columns}, Partition({"t": 20}, {"t": hot}))


def two_features(
    a: list[int], b: list[int], lengths: list[int], *, keys: tuple[str, ...] = ("a", "b")
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys), values=torch.tensor(a + b), lengths=torch.tensor(lengths), stride=2
    )


@pytest.mark.parametrize(
    ("a", "b", "feature", "found"),
    [
        ([1, 20], [0, 0], "a", 20),
        ([1, 1], [0, -1], "b", -1),
        ([1, 1], [1 << 40, 0], "b", 1 << 40),
    ],
)
def test_id_outside_its_table_is_refused(
    a: list[int], b: list[int], feature: str, found: int
) -> None:
    for lengths in ([1, 1, 1, 1], [2, 0, 0, 2]):  # one-hot and jagged take different paths
        with pytest.raises(ValueError, match=rf"^table t feature {feature}: .*got {found}\."):
            one_table_router()(two_features(a, b, lengths))


@pytest.mark.parametrize("lengths", [[1, 1, 1, 0], [2, 1, 1, 1], [1, 1, 1], [-1, 3, 1, 1]])
def test_features_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="^features lengths"):
        one_table_router()(two_features([1, 1], [2, 2], lengths))
    with pytest.raises(ValueError, match="^features: .*'b'"):
        one_table_router()(two_features([1, 1], [2, 2], [1, 1, 1, 1], keys=("a", "c")))


def test_routed_features_travel() -> None:
    """Pickled into a worker and out of it, moved to a device; weights too."""
    router = one_table_router()
    features = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([7, 3, 3, 19]),
        lengths=torch.tensor([2, 0, 1, 1]),
        weights=torch.tensor([0.5, 2.0, 1.0, 3.0]),
    )
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(router))(features)))
    moved = again.to(torch.device("cpu"), non_blocking=True)
    pools = [
        pool_rows(torch.arange(12.0).view(3, 4), of.groups[0], 2)
        for of in (router(features), again, moved)
    ]
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


READ_ONLY = np.array([7, 1, 3])
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "rows", [np.array([3, 1, 7])[::-1], READ_ONLY, np.array([7, 0, 1, 0, 3, 0])[::2]]
)
def test_hot_rows_come_in_any_memory_layout(rows: np.ndarray) -> None:
    """``np.argsort(counts)[::-1]`` is how one writes "by falling count"."""
    routed = one_table_router(rows)(two_features([7, 3], [3, 19], [1, 1, 1, 1]))
    assert sorted(routed.groups[0].rows["t_hot"].values().tolist()) == [0, 2]


@given(st.lists(st.integers(0, 40), max_size=60), st.booleans())
def test_sort_keys_is_a_stable_sort(keys: list[int], fits: bool) -> None:
    # The larger limit leaves no bits for the position, so torch's sort is used.
    limit = 41 if fits else 1 << 62
    given_keys = torch.tensor(keys, dtype=torch.int64)
    sorted_keys, order = sort_keys(given_keys, limit)
    expected = sorted(range(len(keys)), key=lambda position: keys[position])
    assert order.tolist() == expected
    assert sorted_keys.tolist() == sorted(keys)
