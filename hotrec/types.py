"""Value objects that are passed between the stages, and the legend of shapes and units.

Only the standard library and numpy, so that every stage can import them in milliseconds.

Shapes: B batch per rank, F sparse features, N dense features, D embedding dim, K ids in a jagged
batch, U distinct rows, R rows of a table, H hot rows, C cold rows, W ranks.
Units: counts are ``num_*``, sizes ``*_bytes``, times ``*_s`` (seconds), rates ``*_per_s``,
fractions ``*_frac`` (0..1). ``batch`` is per rank, ``global_batch`` over all ranks, ``step`` one
update. Ids: ``raw_id`` (value in the log) -> ``row`` (0..num_rows-1) -> ``hot_slot`` (0..H-1) or
``cold_row`` (the row itself: cold tables keep all their rows, in original ids).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
# Rows of a table, and the probability that a global batch reads each of them.
POPULAR_ROW = np.dtype([("row", np.int64), ("prob", np.float32)])
PopularRows = npt.NDArray[np.void]
# Default fraction of the rows in a device cache: FBGEMM's default.
DEFAULT_LOAD_FRAC = 0.2

# The parts of a step, in order.
STAGES = (
    "route",  # ids -> hot slots and cold rows
    "ids_exchange",  # requesting rows from their owners, and waiting
    "row_lookup",  # reading rows, hot and for others
    "rows_exchange",  # waiting for rows
    "pool",  # bags of rows, forward and backward
    "dense",  # dense layers and loss, forward and backward
    "grads_exchange",  # waiting for gradients of cold rows
    "row_update",  # optimizer of cold rows
    "hot_exchange",  # gradients of replicated rows
    "optimizer",  # of hot rows and dense layers
    "other",  # fixed costs of every step, and the dense layers' gradients
)


@dataclass(frozen=True)
class Table:
    """An embedding table: ``num_rows`` rows, of which row 0 is the out-of-vocabulary row."""

    name: str
    num_rows: int


@dataclass(frozen=True)
class Feature:
    """A categorical column. Several features may read one table."""

    name: str
    table: str
    is_multi_hot: bool = False


@dataclass(frozen=True)
class Schema:
    """The content of a sample.

    Args:
        dense: Dense columns.
        features: Categorical features.
        tables: The tables that they index.
        labels: Names of the labels; a single one is called "label", independent of the log's
            column.
        has_weights: Whether each sample has a weight.
    """

    dense: tuple[str, ...]
    features: tuple[Feature, ...]
    tables: tuple[Table, ...]
    labels: tuple[str, ...] = ("label",)
    has_weights: bool = False

    def __post_init__(self) -> None:
        names = (*self.dense, *self.feature_names)
        tables = [table.name for table in self.tables]
        for kind, found in (("columns", names), ("tables", tables), ("labels", self.labels)):
            if len(set(found)) != len(found):
                raise ValueError(f"schema: expected each of its {kind} once, got {found}.")
        for table in self.tables:
            if not isinstance(table.num_rows, int) or not 0 < table.num_rows < 2**63:
                raise ValueError(
                    f"schema table {table.name}: expected a number of rows, got {table.num_rows!r}."
                )
        for feature in self.features:
            self.table(feature.table)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.features)

    def table(self, name: str) -> Table:
        for table in self.tables:
            if table.name == name:
                return table
        known = [table.name for table in self.tables]
        raise ValueError(f"schema: expected one of the tables {known}, got {name!r}.")

    def features_of(self, table: str) -> tuple[Feature, ...]:
        return tuple(feature for feature in self.features if feature.table == table)

    def to_json(self) -> dict[str, Any]:
        return {
            "dense": list(self.dense),
            "features": [vars(feature) for feature in self.features],
            "tables": [vars(table) for table in self.tables],
            # The form from before there were several: the document of a dataset is part of its
            # hash.
            **({"labels": list(self.labels)} if len(self.labels) > 1 else {}),
            **({"has_weights": True} if self.has_weights else {}),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Schema:
        return Schema(
            dense=tuple(document["dense"]),
            features=tuple(Feature(**feature) for feature in document["features"]),
            tables=tuple(Table(**table) for table in document["tables"]),
            labels=tuple(document.get("labels", ("label",))),
            has_weights=document.get("has_weights", False),
        )


@dataclass(frozen=True)
class Partition:
    """The hot/cold split of the rows of every table.

    Args:
        num_rows: Number of rows by table name.
        hot_rows: The hot rows of each table, int64 (H,), in falling order of access count, ties by
            row number. The position of a row in this array is its ``hot_slot``. A table that is not
            in the mapping, or has an empty array, is all cold.
        policy: Name of the policy that chose the hot rows, for reports.

    Raises:
        ValueError: if a hot row is outside its table or listed twice.
    """

    num_rows: Mapping[str, int]
    hot_rows: Mapping[str, Rows] = field(default_factory=dict)
    policy: str = "custom"

    def __post_init__(self) -> None:
        for table, rows in self.hot_rows.items():
            if table not in self.num_rows:
                raise ValueError(
                    f"partition table {table}: expected one of {sorted(self.num_rows)}, "
                    f"got {table!r}."
                )
            if rows.dtype != np.int64 or rows.ndim != 1:
                raise ValueError(
                    f"partition table {table}: expected an int64 vector of hot rows, "
                    f"got {rows.dtype} of shape {rows.shape}."
                )
            if rows.size == 0:
                continue
            if rows.min() < 0 or rows.max() >= self.num_rows[table]:
                outside = rows[(rows < 0) | (rows >= self.num_rows[table])][0]
                raise ValueError(
                    f"partition table {table}: expected hot rows in 0..{self.num_rows[table] - 1}, "
                    f"got {outside}. Make the partition again from this dataset's profile."
                )
            if np.unique(rows).size != rows.size:
                raise ValueError(
                    f"partition table {table}: expected distinct hot rows, "
                    f"got {rows.size - np.unique(rows).size} repeated."
                )

    def hot(self, table: str) -> Rows:
        """The hot rows of one table, int64 (H,), position = hot slot."""
        return self.hot_rows.get(table, np.empty(0, np.int64))

    def num_hot(self, table: str) -> int:
        return int(self.hot(table).size)

    @property
    def total_hot(self) -> int:
        return sum(self.num_hot(table) for table in self.num_rows)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of which rows are hot, whatever their order; a table without any is none.

        Sizes are in it, so that no name of a table is taken for rows.
        """
        found = hashlib.sha256()
        for table in sorted(table for table in self.hot_rows if self.num_hot(table)):
            found.update(repr((table, self.num_hot(table))).encode())
            found.update(np.sort(self.hot(table)).astype("<i8").tobytes())
        return found.hexdigest()[:16]

    @property
    def total_rows(self) -> int:
        return sum(self.num_rows.values())


class Precision(Enum):
    """The precision of the dense layers; rows, pooling, loss and optimizer are always float32.

    The names are those of the configuration.
    """

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class Exchange(Enum):
    """What is sent for lookups in a table: distinct rows, or one pooled vector per bag."""

    ROWS = "rows"
    POOLED = "pooled"


class Sharding(Enum):
    """The place of a table's sharded rows: all ranks in equal shares, or one rank."""

    ROW_WISE = "row_wise"
    TABLE_WISE = "table_wise"


class Tier(Enum):
    """Memory of sharded rows: the device's, the host's, or the host's behind a device cache.

    TorchRec's plans may have rows in HOST, and in HOST_CACHED, which FBGEMM finds in its cache.
    Cold rows of split tables are in DEVICE, or in CACHED, which look-ahead gives slots.
    """

    DEVICE = "device"
    HOST = "host"
    HOST_CACHED = "host_cached"
    CACHED = "cached"


# Enumerations of the configuration, whose YAML shows these names: hence lower case.


class ModelKind(Enum):
    """The models.

    DLRM with dot interaction (Naumov et al. 2019), DCNv2 cross layers (Wang et al. 2021), DeepFM
    (Guo et al. 2017), DIN (Zhou et al. 2018), MMoE (Ma et al. 2018), two towers, HSTU (Zhai et al.
    2024) and SASRec (Kang and McAuley 2018) over sequences, or a class of your own.
    """

    dlrm = "dlrm"
    dcnv2 = "dcnv2"
    deepfm = "deepfm"
    din = "din"
    mmoe = "mmoe"
    two_tower = "two_tower"
    hstu = "hstu"
    sasrec = "sasrec"
    own = "own"


class OptimizerKind(Enum):
    """The update rules, each the same for hot and cold rows."""

    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"
    adam = "adam"


class PipelineKind(Enum):
    """The train pipelines: hotrec's look_ahead, and TorchRec's; auto is replaced by one of them."""

    auto = "auto"
    look_ahead = "look_ahead"
    sparse_dist = "sparse_dist"
    base = "base"
    prefetch = "prefetch"


class WireType(Enum):
    """The type in which rows and gradients travel between ranks, or rows lie in host memory."""

    fp32 = "fp32"
    bf16 = "bf16"


class TableOutput(Enum):
    """What a collection returns for the ids of a table.

    ``pooled``: a vector for each bag (``EmbeddingBagCollection``). ``expanded``: a row for each id
    (``EmbeddingCollection``). ``packed``: the distinct rows, and the position of each id's row.
    """

    pooled = "pooled"
    expanded = "expanded"
    packed = "packed"


class Levels(Enum):
    """How unpooled rows travel between hosts of several ranks; auto is replaced by another.

    ``one``: every rank requests its rows from their owners. ``two``: a row crosses the network once
    for all ranks of a host that read it, and is distributed inside the host; on one host, or where
    hosts differ in size, this is one level.
    """

    auto = "auto"
    one = "one"
    two = "two"


class ColdTier(Enum):
    """Memory of the cold rows of split tables.

    ``fused``: the device's. ``cached``: the host's, behind device slots that look_ahead fills.
    """

    fused = "fused"
    cached = "cached"


class TorchrecTier(Enum):
    """TorchRec's compute kernel of unsplit tables; the UVM kernels need CUDA."""

    fused = "fused"
    fused_uvm = "fused_uvm"
    fused_uvm_caching = "fused_uvm_caching"


TIER_OF_KERNEL = {
    TorchrecTier.fused: Tier.DEVICE,
    TorchrecTier.fused_uvm: Tier.HOST,
    TorchrecTier.fused_uvm_caching: Tier.HOST_CACHED,
}


class RowFetch(Enum):
    """How rows behind slots come to the device; auto chooses by costs.

    ``staged``: the host gathers them into pinned memory, which is copied as one. ``mapped``: the
    device reads them in host memory itself, which takes no host core but more of the bus.
    """

    auto = "auto"
    staged = "staged"
    mapped = "mapped"


class TorchrecPlan(Enum):
    """Plans on unsplit tables, the baselines."""

    planner = "planner"
    table_wise = "table_wise"
    hand_tuned = "hand_tuned"


@dataclass(frozen=True)
class PipelineSpec:
    """A train pipeline: how steps overlap, and the type of what travels.

    Args:
        kind: Kind of the pipeline; auto only in a request, never in a plan.
        wire: Type of rows and gradients on the wire.
        depth: 1 if look-ahead exchanges the rows of the next batch in advance, 0 if not.
        window: Further batches whose rows it knows, to choose which rows stay in slots.
        micro_batches: Whether it first computes the samples that need no row of another rank.
        levels: How unpooled rows travel between hosts of several ranks; auto only in a request.
    """

    kind: PipelineKind = PipelineKind.sparse_dist
    wire: WireType = WireType.fp32
    depth: int = 1
    window: int = 32
    micro_batches: bool = False
    levels: Levels = Levels.one

    @property
    def narrow_frac(self) -> float:
        """Bytes of a value on the wire, over those of a float32."""
        return 1.0 if self.wire is WireType.fp32 else 0.5

    @property
    def is_look_ahead(self) -> bool:
        return self.kind is PipelineKind.look_ahead

    @property
    def of_torchrec(self) -> PipelineSpec:
        """The pipeline of unsplit tables where this one trains hot and cold rows."""
        kind = PipelineKind.sparse_dist if self.is_look_ahead else self.kind
        return replace(self, kind=kind, levels=Levels.one)

    @property
    def batches_in_slots(self) -> int:
        """Batches that hold slots at once: the one that is computed, and those to come.

        One more than are requested is known where there is a window, and its rows are fetched.
        """
        return self.depth + 1 + (self.window > 0)

    @property
    def batches_foreseen(self) -> int:
        """Batches after those that hold slots whose rows are known: the others of the window."""
        return max(self.window - 1, 0)

    def with_kind(self, kind: PipelineKind) -> PipelineSpec:
        """The same with another kind."""
        return replace(self, kind=kind)


Numbers = TypeVar("Numbers")  # an int64 tensor or array


@dataclass(frozen=True)
class RowShares:
    """The shares of the ranks in the rows of a table that are exchanged.

    Rank (r + shift) mod W owns row r, at place (r + shift) div W of its share: ranks are evenly
    loaded even if ids follow popularity, such as those numbered in the order of their first
    occurrence. The shift depends on the table's name, or the most popular rows of all tables were
    on one rank.

    Args:
        table: The table's name.
        world_size: Number of ranks W.
    """

    table: str
    world_size: int

    @cached_property
    def shift(self) -> int:
        """The rank that owns row 0."""
        return crc32(self.table.encode()) % self.world_size

    def owners(self, rows: Numbers) -> Numbers:
        """The rank that owns each row."""
        found: Any = rows
        return (found + self.shift) % self.world_size

    def places(self, rows: Numbers) -> Numbers:
        """The place of each row in its owner's share."""
        found: Any = rows
        return (found + self.shift) // self.world_size

    def num_places(self, num_rows: int) -> int:
        """The places of a share, the same on every rank; the first and the last may be empty."""
        return -(-(num_rows + self.shift) // self.world_size)

    def rows_of(self, rank: int, num_rows: int) -> range:
        """The rows of a rank, at consecutive places."""
        return range((rank - self.shift) % self.world_size, num_rows, self.world_size)


@dataclass(frozen=True)
class TablePlacement:
    """Where and how the rows of one table that are not hot are served.

    Args:
        exchange: POOLED only for tables without hot rows: the pooled volume does not depend on how
            many rows are hot, so splitting such a table would save nothing.
        tier: Memory of the rows; DEVICE or CACHED.
        cache_load_frac: Fraction of the rows with slots in CACHED, in 0..1; else None.
        row_type: Type of the rows in host memory, in CACHED; else fp32. Slots are fp32.
        row_fetch: How rows in CACHED come to the device; not auto.
    """

    exchange: Exchange = Exchange.ROWS
    tier: Tier = Tier.DEVICE
    cache_load_frac: float | None = None
    row_type: WireType = WireType.fp32
    row_fetch: RowFetch = RowFetch.staged

    @property
    def sharding(self) -> Sharding:
        """Exchanged rows are on all ranks (``RowShares``), a table that is pooled is on one."""
        is_pooled = self.exchange is Exchange.POOLED
        return Sharding.TABLE_WISE if is_pooled else Sharding.ROW_WISE


@dataclass(frozen=True)
class Placement:
    """A partition and what goes with it.

    Args:
        partition: The hot rows.
        tables: Placement of every table.
        popular_rows: Rows of CACHED tables that begin in their owner's slots, of POPULAR_ROW.
    """

    partition: Partition
    tables: Mapping[str, TablePlacement]
    popular_rows: Mapping[str, PopularRows] = field(default_factory=dict)

    @staticmethod
    def alike(
        partition: Partition,
        tier: Tier = Tier.DEVICE,
        cache_load_frac: float | None = None,
        *,
        row_type: WireType = WireType.fp32,
        row_fetch: RowFetch = RowFetch.staged,
    ) -> Placement:
        """All tables alike: cold rows exchanged as rows, in one tier."""
        load_frac = cache_load_frac if tier is Tier.CACHED else None
        table = TablePlacement(
            tier=tier, cache_load_frac=load_frac, row_type=row_type, row_fetch=row_fetch
        )
        return Placement(partition, dict.fromkeys(partition.num_rows, table))

    def with_fetch(self, row_fetch: RowFetch) -> Placement:
        """The same with another way of fetching rows in CACHED."""
        tables = {n: replace(table, row_fetch=row_fetch) for n, table in self.tables.items()}
        return replace(self, tables=tables)

    def __post_init__(self) -> None:
        if set(self.tables) != set(self.partition.num_rows):
            raise ValueError(
                f"placement: expected the tables {sorted(self.partition.num_rows)}, "
                f"got {sorted(self.tables)}."
            )
        for name, table in self.tables.items():
            if table.exchange is Exchange.POOLED and self.partition.num_hot(name):
                raise ValueError(
                    f"placement table {name}: expected no hot rows in a table whose exchange is "
                    f"pooled, got {self.partition.num_hot(name)}."
                )
            if table.tier not in (Tier.DEVICE, Tier.CACHED):
                raise ValueError(
                    f"placement table {name} tier: expected device or cached for cold rows, got "
                    f"{table.tier.value}. Give the rows slots (cached)."
                )
            if table.row_type is not WireType.fp32 and table.tier is not Tier.CACHED:
                raise ValueError(
                    f"placement table {name}: expected fp32 rows in tier {table.tier.value}, got "
                    f"{table.row_type.value}. Set placement.cold_tier=cached, or "
                    "placement.cold_rows=fp32."
                )
            frac = table.cache_load_frac
            if table.tier is Tier.CACHED and (
                table.exchange is Exchange.POOLED or frac is None or not 0 < frac <= 1
            ):
                raise ValueError(
                    f"placement table {name}: expected rows to be exchanged and a cache_load_frac "
                    f"in 0..1 in tier cached, got exchange {table.exchange.value}, cache_load_frac "
                    f"{frac}."
                )
