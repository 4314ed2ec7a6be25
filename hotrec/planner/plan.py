"""A plan: the planner's decision, as a value. Labels and titles are for people, never parsed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    Exchange,
    Levels,
    PipelineKind,
    PipelineSpec,
    RowFetch,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
    WireType,
)


@dataclass(frozen=True)
class SplitTables:
    """hotrec's plan of the tables: hot rows replicated, the others sharded.

    Args:
        num_hot: The number of hot rows of each table.
        tables: The placement of the other rows of each table.
        is_routed_by_loader: Whether loader workers split the ids; otherwise the ranks do.
        rows: Digest of the hot rows; empty if they are the profile's most accessed rows.
    """

    num_hot: Mapping[str, int]
    tables: Mapping[str, TablePlacement]
    is_routed_by_loader: bool = False
    rows: str = ""

    @property
    def total_hot(self) -> int:
        return sum(self.num_hot.values())

    @property
    def has_slots(self) -> bool:
        """Whether look-ahead fills slots on the device with rows in host memory."""
        return any(table.tier is Tier.CACHED for table in self.tables.values())


@dataclass(frozen=True)
class TorchrecTables:
    """One of TorchRec's own plans of unsplit tables.

    Args:
        plan: Which of TorchRec's plans.
        tier: Memory of the rows.
        cache_load_frac: Cached fraction of the rows in tier fused_uvm_caching.
    """

    plan: TorchrecPlan = TorchrecPlan.planner
    tier: TorchrecTier = TorchrecTier.fused
    cache_load_frac: float = DEFAULT_LOAD_FRAC


@dataclass(frozen=True)
class Plan:
    """How to train a model: the plan of its tables, the pipeline, the loader's workers.

    Args:
        tables: hotrec's split, or one of TorchRec's plans.
        pipeline: The pipeline; its kind is not auto.
        num_workers: Loader workers of a rank; None if batches are made beforehand.
    """

    tables: SplitTables | TorchrecTables
    pipeline: PipelineSpec = PipelineSpec()
    num_workers: int | None = None

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def is_hotrec(self) -> bool:
        """Whether hotrec splits the tables; otherwise TorchRec's own plan shards them unsplit."""
        return isinstance(self.tables, SplitTables)

    @property
    def torchrec_plan(self) -> TorchrecPlan | None:
        """TorchRec's own plan; None with split tables."""
        return self.tables.plan if isinstance(self.tables, TorchrecTables) else None

    @property
    def num_hot(self) -> int:
        """Hot rows of all tables."""
        return self.tables.total_hot if isinstance(self.tables, SplitTables) else 0

    @property
    def label(self) -> str:
        """The key in documents, such as ``hot_cold look_ahead`` or ``torchrec planner base``.

        TorchRec's default tier and pipeline are omitted, and one level.
        """
        kind = self.pipeline.kind
        if isinstance(self.tables, SplitTables):
            levels = " two_levels" if self.pipeline.levels is Levels.two else ""
            return f"hot_cold {kind.value}{levels}"
        words = ["torchrec", self.tables.plan.name]
        if self.tables.tier is not TorchrecTier.fused:
            words.append(self.tables.tier.name)
        if kind in (PipelineKind.prefetch, PipelineKind.base):
            words.append(kind.name)
        return " ".join(words)

    @property
    def title(self) -> str:
        """Such as ``hotrec, 1,650 hot rows, look_ahead`` or ``TorchRec's planner, base``."""
        name, *rest = self.label.split(" ")[1:]
        if isinstance(self.tables, SplitTables):
            hot_rows = f"{self.num_hot:,}" if self.num_hot else "no"
            levels = " in two levels" if rest else ""
            return f"hotrec, {hot_rows} hot rows, {name}{levels}"
        is_planner = self.tables.plan is TorchrecPlan.planner
        name = "planner" if is_planner else f"{name.replace('_', '-')} plan"
        return ", ".join([f"TorchRec's {name}", *rest])

    @cached_property
    def digest(self) -> str:
        """Its identity in trials and predictions."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        document = asdict(self, dict_factory=_plain)
        return {"is_hotrec": self.is_hotrec, **document}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Plan:
        """The plan of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: If the document is not a plan.
        """
        tables = document["tables"]
        if document["is_hotrec"]:
            placed = {name: read_table(table) for name, table in tables["tables"].items()}
            of_tables: SplitTables | TorchrecTables = SplitTables(**{**tables, "tables": placed})
        else:
            kinds = {"plan": TorchrecPlan(tables["plan"]), "tier": TorchrecTier(tables["tier"])}
            of_tables = TorchrecTables(**{**tables, **kinds})
        given = document["pipeline"]
        kinds = {
            "kind": PipelineKind(given["kind"]),
            "wire": WireType(given["wire"]),
            "levels": Levels(given["levels"]),
        }
        return Plan(of_tables, PipelineSpec(**{**given, **kinds}), document["num_workers"])


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value.value if isinstance(value, Enum) else value for name, value in items}


def read_table(document: Mapping[str, Any]) -> TablePlacement:
    """The placement of a table from plain data.

    Raises:
        KeyError, ValueError: If it is not one.
    """
    return TablePlacement(
        Exchange(document["exchange"]),
        Tier(document["tier"]),
        document["cache_load_frac"],
        WireType(document["row_type"]),
        RowFetch(document["row_fetch"]),
    )
