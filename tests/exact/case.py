"""A training that is exact: what is split how, by which pipeline, on which batches.

Every field is a name or a number, so that a case that was printed is the expression that makes it
again: ``pytest tests/exact --case "Case(...)"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

NUM_DENSE = 3
PARTITIONS = ("all_hot", "all_cold", "half", "random", "one_table_hot", "one_row")
# Rows of all tables row-wise; table by table row-wise, table-wise or pooled; every table that a
# coin chooses table-wise, the others row-wise; all tables pooled.
PLACEMENTS = ("row_wise", "mixed", "pooled")
# TorchRec's own plans of unsplit tables, of which its planner, or a coin, cuts some into columns.
TORCHREC_PLANS = tuple(
    f"torchrec {name}" for name in ("planner", "table_wise", "hand_tuned", "column_wise")
)
# What the batches of a case are like: drawn; the same few rows on all ranks in every step; no ids
# at all on any rank in some steps; one sample per rank; other rows are popular some steps later.
BATCHES = ("drawn", "same_rows", "no_ids", "one_sample", "drift")
# Thousands of samples, of which many read the same row: sums that kernels of a device divide.
LARGE = "large"
# The last rank but one, or the second half of the ranks, reads no row in any step. Only row 0 of
# each table is read, which one rank owns. Every second step reads hot rows only, which the batch
# says or does not say.
RARE_BATCHES = ("idle_rank", "idle_half", "first_row", "only_hot", "known_hot")
# With the depth of look-ahead and whether it trains in micro-batches; that of depth 1 is drawn
# twice as often. "in_line" is a loop of forward, backward and step without a pipeline.
PIPELINES = (
    *(("look_ahead", 1, False), ("look_ahead", 1, False), ("look_ahead", 0, False)),
    *(("look_ahead", 0, True), ("look_ahead", 1, True), ("look_ahead", 1, True)),
    *(("sparse_dist", 1, False), ("base", 1, False), ("in_line", 1, False)),
)

CLIP = 0.13  # above the norm of some steps and below that of others
Ids = list[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class PlainTable:
    """What ``EmbeddingBagConfig`` says, without torchrec."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    is_mean: bool


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        hosts: The host of each rank; "001" is three ranks on two hosts.
        seed: Draws the tables and the batches.
        partition: Which rows are hot.
        optimizer: Of the rows.
        placement: How the other rows are served.
        pipeline: What trains; ``depth``, ``micro_batches``, ``window`` are those of look-ahead.
        levels: Whether rows cross the network once per host.
        wire: The type in which rows and gradients travel. In 16 bits a case is only near the
            unsplit model, but repeats bit for bit.
        tier: Where the cold rows are. Behind slots (``cached``) for a share ``slots`` of them at
            least, with a share ``popular`` known beforehand.
        torchrec_tier: Where the rows of TorchRec's own plans are.
        row_type: In which cold rows are kept behind slots.
        output: "bags", "sequences" or "packed".
        is_weighted: Whether ids of bags have weights.
        route_in_loader: Whether ids are routed before the pipeline.
        batches: See ``BATCHES``.
        first: The first step, before which another training made the updates.
        steps: Number of updates.
        order: Which rank gets which sample.
        adapt: Whether the hot rows follow the data.
        evaluate: Whether batches are evaluated between updates.
        skip: Whether a step is left out after its backward pass.
        dense: The optimizer of the dense layers, "sgd" or "adam".
        rates: Whether learning rates are others in every step.
        clip: The greatest norm of the gradients of all dense layers; 0 for any.
        precision: Of the dense layers; in 16 bits as for ``wire``.
        labels: Number of labels.
        is_sample_weighted: Whether samples have weights.
        more_rows: Of each table, than the seed draws.
        model: Whose layers read the output, by the name of its kind; "" for those of the oracle.
        is_compiled: Whether the dense layers are compiled.
        twin: What else must give the same bits: "again", "depth", "no_slots", "one_level" or
            "in_line".
    """

    hosts: str
    seed: int
    partition: str
    optimizer: str
    placement: str = "row_wise"
    pipeline: str = "in_line"
    depth: int = 1
    micro_batches: bool = False
    window: int = 0
    levels: str = "one"
    wire: str = "fp32"
    tier: str = "device"
    slots: float = 0.2
    popular: float = 0.0
    row_type: str = "fp32"
    row_fetch: str = "staged"
    output: str = "bags"
    is_weighted: bool = False
    is_uniform_dim: bool = True
    route_in_loader: bool = False
    batches: str = "drawn"
    first: int = 0
    steps: int = 4
    order: str = "as_read"
    adapt: bool = False
    evaluate: bool = False
    skip: bool = False
    dense: str = "sgd"
    rates: bool = False
    clip: float = 0.0
    precision: str = "fp32"
    labels: int = 1
    is_sample_weighted: bool = False
    more_rows: int = 0
    model: str = ""
    is_compiled: bool = False
    twin: str = ""
    device: str = "cpu"
    torchrec_tier: str = "fused"

    def __repr__(self) -> str:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        usual = {field.name: field.default for field in fields(self)}
        said = [f"{name}={value!r}" for name, value in found.items() if value != usual[name]]
        return f"Case({', '.join(said)})"

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    @property
    def is_torchrecs(self) -> bool:
        """Whether TorchRec trains it by a plan of its own."""
        return self.placement in TORCHREC_PLANS

    @property
    def is_rounded(self) -> bool:
        """Whether it is only near the unsplit model."""
        return {self.wire, self.row_type, self.precision} != {"fp32"}

    @property
    def label_weights(self) -> dict[str, float] | None:
        return {"first": 0.5, "second": 2.0} if self.labels == 2 else None

    def rate_factor(self, step: int) -> float:
        """Of all learning rates."""
        return (1.0, 0.25, 0.5)[step % 3] if self.rates else 1.0

    def rng(self, *salt: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *salt))

    def other(self) -> Case:
        """What must give the same bits."""
        changes: dict[str, dict[str, Any]] = {
            "again": {},
            "depth": {"depth": 1 - self.depth},
            "no_slots": {"tier": "device"},
            "one_level": {"levels": "one"},
            "in_line": {"pipeline": "in_line"},
        }
        return replace(self, twin="", **changes[self.twin])

    def segments(self) -> Iterator[range]:
        """The steps between which hot rows are adapted and batches are evaluated."""
        each = 2 if self.adapt else 5 if self.evaluate else self.steps
        last = self.first + self.steps
        for first in range(self.first, last, each):
            yield range(first, min(first + each, last))

    def is_all_hot(self, step: int) -> bool:
        """Whether every rank reads hot rows only."""
        return self.batches in ("only_hot", "known_hot") and step % 2 == 1

    @cache  # noqa: B019
    def tables(self) -> list[PlainTable]:
        rng = self.rng(1)
        tables = []
        for index in range(int(rng.integers(1, 5))):
            features = [f"f{index}_{k}" for k in range(int(rng.integers(1, 3)))]
            is_shared = index == 1 and bool(rng.integers(2))
            if is_shared and self.order == "as_read":
                features.append("f0_0")  # a feature that two tables read
            tables.append(
                PlainTable(
                    name=f"t{index}",
                    # From fewer rows than ranks, to more than a batch can touch.
                    num_rows=self.more_rows
                    + (int(rng.choice([1, 2, 7, 40, 300])) if index else 40),
                    dim=8 if self.is_uniform_dim else int(rng.choice([4, 8])),
                    features=tuple(features),
                    is_mean=bool(rng.integers(2)) and self.output == "bags",
                )
            )
        return tables

    @cache  # noqa: B019
    def hot_rows(self) -> dict[str, npt.NDArray[np.int64]]:
        """The replicated rows of each table."""
        rng = self.rng(2)
        hot = {}
        for index, table in enumerate(self.tables()):
            rows = table.num_rows
            num_hot = {
                "all_hot": rows,
                "all_cold": 0,
                "half": (rows + 1) // 2,
                "one_row": 1,
                "one_table_hot": rows if index == 0 else 0,
            }.get(self.partition, int(rng.integers(rows + 1)))
            hot[table.name] = rng.permutation(rows)[:num_hot].astype(np.int64)
        return hot


@dataclass(frozen=True)
class Samples:
    """Some samples of a step."""

    dense: torch.Tensor
    labels: torch.Tensor
    ids: dict[str, Ids]
    weights: dict[str, list[npt.NDArray[np.float32]]] | None
    of_samples: torch.Tensor  # their weights

    @classmethod
    def padding(cls, like: Samples) -> Samples:
        """One sample without ids, which a rank without samples holds."""
        none = {name: [np.empty(0, np.int64)] for name in like.ids}
        no_weights = {name: [np.empty(0, np.float32)] for name in like.ids}
        weights = None if like.weights is None else no_weights
        nothing = torch.zeros(1)
        labels = torch.zeros_like(like.labels[:1])
        return cls(torch.zeros(1, NUM_DENSE), labels, none, weights, nothing)

    def select(self, chosen: npt.NDArray[np.int64]) -> Samples:
        def of(lists: dict[str, list[Any]]) -> dict[str, list[Any]]:
            return {name: [found[at] for at in chosen] for name, found in lists.items()}

        weights = None if self.weights is None else of(self.weights)
        dense, labels = self.dense[chosen], self.labels[chosen]
        return Samples(dense, labels, of(self.ids), weights, self.of_samples[chosen])

    def lengths(self) -> npt.NDArray[np.int32]:
        """Feature by feature, int32 (F * S,)."""
        return np.array([len(s) for found in self.ids.values() for s in found], np.int32)

    def features(self) -> KeyedJaggedTensor:
        joined = None
        if self.weights is not None:
            joined = torch.from_numpy(np.concatenate([w for f in self.weights.values() for w in f]))
        return KeyedJaggedTensor(
            keys=list(self.ids),
            values=torch.from_numpy(np.concatenate([s for f in self.ids.values() for s in f])),
            lengths=torch.from_numpy(self.lengths()),
            weights=joined,
        )


@lru_cache(100)
def draw_samples(case: Case, step: int) -> tuple[Samples, npt.NDArray[np.int64]]:
    """The samples of a global batch, and how many each rank has.

    Ranks hold unequal shares. On step 1 of several ranks, rank 0 is without samples.
    """
    rng, num_ranks = case.rng(3, step), case.num_ranks
    shares = rng.integers(1, 2 if case.batches == "one_sample" else 9, num_ranks)
    if case.batches == LARGE:
        shares[:] = 6000
    if step == 1 and num_ranks > 1:
        shares[0] = 0
    rank_of = np.repeat(np.arange(num_ranks), shares)
    idle = {
        "idle_rank": [num_ranks - 2],
        "idle_half": list(range(num_ranks // 2, num_ranks)),
    }.get(case.batches, [])
    limits: dict[str, int] = {}
    hot: dict[str, npt.NDArray[np.int64]] = {}
    for table in case.tables():
        for name in table.features:
            limits[name] = min(limits.get(name, 1 << 60), table.num_rows)
            rows = case.hot_rows()[table.name]
            hot[name] = np.intersect1d(hot.get(name, rows), rows)
    most, power = 1 if rng.integers(4) == 0 else 4, 5 if case.batches == LARGE else 2
    ids: dict[str, Ids] = {}
    lengths_S = _draw_lengths(rng, most, rank_of.size)
    for name, limit in limits.items():
        if case.output != "packed" or not name.endswith("_0"):  # which a layer reads together
            lengths_S = _draw_lengths(rng, most, rank_of.size)
        rows_L = np.arange(limit)
        if case.batches == "no_ids" and step % 2 == 0:
            rows_L = rows_L[:0]
        if case.batches in ("same_rows", "first_row"):
            rows_L = rows_L[: 2 if case.batches == "same_rows" else 1]
        if case.is_all_hot(step):
            rows_L = hot[name][hot[name] < limit]
        shift = step * (limit // 7) if case.batches == "drift" else 0
        ids[name] = []
        for rank, length in zip(rank_of, lengths_S, strict=True):
            num = int(length) if rows_L.size and rank not in idle else 0
            # Squared: low rows are read often, so ranks and steps conflict.
            places = (rng.random(num) ** power * rows_L.size).astype(np.int64)
            ids[name].append((rows_L[places] + shift) % limit)
    if case.output == "packed":
        _level(ids)
    dense = torch.from_numpy(rng.standard_normal((rank_of.size, NUM_DENSE)).astype(np.float32))
    shape = rank_of.size if case.labels == 1 else (rank_of.size, case.labels)
    labels = torch.from_numpy(rng.integers(0, 2, shape).astype(np.float32))
    weights = None
    if case.is_weighted:
        weights = {
            name: [rng.uniform(0.5, 2.0, len(sample)).astype(np.float32) for sample in found]
            for name, found in ids.items()
        }
    of_samples = torch.ones(rank_of.size)
    if case.is_sample_weighted:
        of_samples = torch.from_numpy(rng.choice([0, 0.5, 1, 3], rank_of.size).astype(np.float32))
    return Samples(dense, labels, ids, weights, of_samples), shares.astype(np.int64)


def _draw_lengths(rng: np.random.Generator, most: int, num: int) -> npt.NDArray[np.int64]:
    return np.ones(num, np.int64) if most == 1 else rng.integers(0, most + 1, num)


def _level(ids: dict[str, Ids]) -> None:
    """Have the first features of all tables as many ids in each sample, as a layer needs."""
    first = [found for name, found in ids.items() if name.endswith("_0")]
    for at in range(len(first[0])):
        least = min(len(found[at]) for found in first)
        for found in first:
            found[at] = found[at][:least]


# Of cold rows.
TIERS = ("device", "device", "device", "cached")


def deal_to(num: int, rng: np.random.Generator, *values: Any) -> list[Any]:
    """So many values, each as often as the others."""
    places = np.resize(rng.permutation(len(values)), num)
    return [values[at] for at in rng.permutation(places)]


def draw_cases(
    hosts: str, num: int, seed: int = 0, tiers: Sequence[str] = TIERS, **given: Any
) -> list[Case]:
    """Cases in which every value of every field occurs as often; ``given`` fields are these."""
    rng = np.random.default_rng([seed, len(hosts), *map(int, hosts)])
    deal = partial(deal_to, num, rng)
    is_rare = deal(True, False, False, False)
    rare = deal(*RARE_BATCHES)
    dealt = {
        "seed": [int(rng.integers(1 << 30)) for _ in range(num)],
        "partition": deal(*PARTITIONS),
        "optimizer": deal(*["sgd", "adagrad", "rowwise_adagrad"] * 3, "adam"),
        "placement": deal(*PLACEMENTS, "row_wise", "row_wise", "mixed"),
        "pipeline": deal(*PIPELINES, *PIPELINES[-3:]),
        "window": deal(0, 0, 1, 3),
        "levels": deal("one", *["two"] * 3) if len(set(hosts)) > 1 else deal("one"),
        "wire": deal(*["fp32"] * 7, "bf16"),
        "tier": deal(*tiers),
        "slots": deal(0.02, 0.6, 1.0),
        "popular": deal(0.0, 0.3, 0.5),
        "row_fetch": deal("staged", "mapped"),
        "output": deal("bags", "bags", "sequences", "packed"),
        "is_weighted": deal(True, False),
        "is_uniform_dim": deal(True, False),
        "route_in_loader": deal(True, False),
        "batches": [rare[at] if is_rare[at] else kind for at, kind in enumerate(deal(*BATCHES))],
        "order": deal(*["as_read"] * 6, "by_owner", "by_tokens"),
        "adapt": deal(False, False, True),
        "evaluate": deal(True, False, False, False),
        "skip": deal(True, *[False] * 11),
        "twin": deal("again", "other", "other", "other", "", ""),
        "rates": deal(True, False),
        "clip": deal(0.0, 0.0, CLIP),
        "precision": deal(*["fp32"] * 9, "bf16"),
        "labels": deal(1, 1, 2),
        "is_sample_weighted": deal(True, False, False),
    }
    dealt["depth"] = [depth for _, depth, _ in dealt["pipeline"]]
    dealt["micro_batches"] = [is_cut for _, _, is_cut in dealt["pipeline"]]
    dealt["pipeline"] = [kind for kind, _, _ in dealt["pipeline"]]
    drawn = ({name: values[at] for name, values in dealt.items()} | given for at in range(num))
    return [fit(Case(hosts=hosts, **found)) for found in drawn]


def fit(case: Case) -> Case:
    """The case with what its other fields do not allow put right."""

    def put(**more: Any) -> None:
        nonlocal case
        case = replace(case, **more)

    if case.skip:  # cold rows are trained in the backward pass
        put(pipeline="in_line", partition="all_hot", micro_batches=False, depth=1)
    if case.optimizer == "adam" and case.device == "cpu":  # where FBGEMM has none
        put(placement="row_wise")
    if case.is_torchrecs and case.output == "bags":
        put(partition="all_cold", tier="device", levels="one", micro_batches=False, depth=1)
        put(route_in_loader=False, twin="")
        if case.pipeline == "look_ahead":
            put(pipeline="sparse_dist")
        # FBGEMM has a sum for each row of each piece of columns.
        if case.placement == "torchrec column_wise" and case.optimizer == "rowwise_adagrad":
            put(placement="torchrec table_wise")
    is_ahead = case.pipeline == "look_ahead"
    if case.output != "bags":  # no rows are pooled on their owners
        put(is_weighted=False, placement="row_wise")
    if case.tier == "cached" and (not is_ahead or case.partition == "all_hot"):
        put(tier="device")
    if case.tier == "cached":
        put(steps=10)
    if (
        case.partition == "all_hot"
        or case.tier == "cached"
        or (case.placement in ("mixed", "pooled") and case.micro_batches)
    ):
        put(placement="row_wise")
    # The first table, whatever its rows are, has to have hot and cold ones.
    if case.partition not in ("half", "one_row") or case.placement in ("mixed", "pooled"):
        put(adapt=False)
    if case.adapt:  # counted by the ranks
        put(route_in_loader=False, order="as_read", steps=8, batches="drift")
    is_exchanged = case.partition != "all_hot" and case.placement == "row_wise"
    is_owned = is_exchanged or case.order != "by_owner"
    if case.num_ranks == 1 or not is_owned or case.output == "packed":
        put(order="as_read")
    if case.num_ranks == 1 or case.skip:
        put(wire="fp32")
    if case.order != "as_read" and case.batches in RARE_BATCHES[:2]:
        put(batches="drawn")
    if case.device != "cpu":  # whose kernels may add up in other orders
        put(twin="")
    if case.twin == "other":
        is_plain = case.num_ranks == 1 and is_ahead and not case.micro_batches
        is_plain = is_plain and case.placement == "row_wise"
        if case.tier == "cached":
            put(twin="no_slots")
        elif case.levels == "two" and case.hosts in ("001", "0101", "0000", "0001"):
            put(twin="one_level")
        elif case.pipeline in ("base", "sparse_dist") or (is_plain and not case.adapt):
            put(twin="in_line")
        elif is_ahead and not case.micro_batches:  # whose parts depend on it
            put(twin="depth")
        else:
            put(twin="")
    return case
