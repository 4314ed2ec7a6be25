"""A human-readable plan, ``plan.txt``, from the prediction document ``prediction.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record
from hotrec.planner.names import PLANNER
from hotrec.report.read import parse_object
from hotrec.report.render import Column, Table, record_table, render
from hotrec.report.units import (
    show_about,
    show_bytes,
    show_count,
    show_frac,
    show_interval,
    show_ratio,
    show_seconds,
)

PREDICTION_JSON = "prediction.json"
MAX_TABLES_SHOWN = 20
# Of a plan on its fullest rank, and of the tables alone.
TIERS = ("device_bytes", "host_bytes")
# The figures of a plan, in plan.txt as in the table of a sweep.
PLAN_COLUMNS: tuple[Column, ...] = (
    ("step", "step_s", show_seconds),
    ("90% interval", "interval_s", show_interval),
    ("in the trial", "measured_s", show_seconds),
    ("of TorchRec's best", "ratio", str),
    ("samples", "samples_per_s", show_about),
    ("sent", "total_sent_bytes", show_bytes),
    ("between hosts", "between_hosts_bytes", show_bytes),
    ("device memory", "device_bytes", show_bytes),
    ("host memory", "host_bytes", show_bytes),
    ("pipeline", "pipeline", str),
    ("on the wire", "wire", str),
)
TABLE_COLUMNS: tuple[Column, ...] = (
    ("table", "name", str),
    ("rows", "num_rows", show_count),
    ("hot", "hot_rows", show_count),
    ("device", "device_rows", show_count),
    ("cached", "cached_rows", show_count),
    ("host", "host_rows", show_count),
    ("exchange", "exchange", str),
    ("sharding", "sharding", str),
    ("lookups hot", "coverage_frac", show_frac),
    ("sent, TorchRec", "sent_bytes_before", show_bytes),
    ("sent, here", "sent_bytes_after", show_bytes),
    ("TorchRec's sharding", "torchrec_sharding", str),
)
STEP_COLUMNS: tuple[Column, ...] = (
    ("time", "stage_s", show_seconds),
    ("hidden", "hidden_s", show_seconds),
    ("sent", "sent_bytes", show_bytes),
)
SUMMED = [key for _, key, show in TABLE_COLUMNS if show in (show_count, show_bytes)]
Document = Mapping[str, Any]


class RecordedPrediction:
    """A prediction document, the content of ``prediction.json``, and the order of its parts."""

    def __init__(self, document: Document) -> None:
        self.document, self.chosen = document, str(document["chosen"])
        self.plans: Mapping[str, Mapping[str, Any]] = document["plans"]
        by_step = sorted(self.plans, key=lambda name: (self.plans[name]["step_s"], name))
        self.torchrec = [name for name in by_step if self.plans[name].get("torchrec_plan")]
        """TorchRec's own plans, the fastest first."""
        ours = [name for name in by_step if self.plans[name].get("is_hotrec")]
        self.placed = self.chosen if self.chosen in ours else next(iter(ours), None)
        """The plan whose placement the tables show: the chosen, or the fastest of hotrec's."""
        self.compared = list(dict.fromkeys([*self.torchrec[:1], self.chosen]))
        if self.chosen in self.torchrec and self.placed is not None:
            self.compared = [self.chosen, self.placed]
        named: dict[str, str] = {}
        for name in (*self.torchrec[:1], self.chosen, *by_step):
            named.setdefault(self.name(name), name)
        self.order = list(named.values())
        """Plans that differ: TorchRec's best, the chosen one, then the others by their step."""
        self.trial: Mapping[str, Mapping[str, Any]] = (document.get("trial") or {}).get("plans", {})
        """The measurements of a trial, by plan."""

    @classmethod
    def read(cls, path: Path) -> RecordedPrediction:
        """Read one from a file.

        Raises:
            FileNotFoundError: If there is none.
            ValueError: If it is not a prediction.
        """
        try:
            return cls(parse_object(read_record(path), str(path)))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: expected a prediction, got {error!r}. Run `hotrec plan` again."
            ) from error

    @property
    def planner(self) -> str | None:
        """The plan of TorchRec's own planner in its fastest pipeline and tier, if predicted."""
        names = (name for name in self.torchrec if self.plans[name]["torchrec_plan"] == PLANNER)
        return next(names, None)

    def name(self, plan: str) -> str:
        """Display name of a plan, such as ``hotrec, 1,650 hot rows, look_ahead``."""
        return str(self.plans[plan]["title"])

    def figures(self, plan: str, baseline: str | None) -> dict[str, Any]:
        """Those of ``PLAN_COLUMNS``, None where unknown, compared with another plan's step."""
        found = self.plans[plan]
        ranks = found.get("memory") or ()
        base_s = 0.0 if baseline is None else self.plans[baseline]["step_s"]
        is_local = not self.document.get("between_hosts_bound_bytes")
        return {
            **{key: found.get(key) for _, key, _ in PLAN_COLUMNS},
            **{tier: max((rank[tier] for rank in ranks), default=None) for tier in TIERS},
            **({"between_hosts_bytes": None} if is_local else {}),
            "measured_s": self.trial.get(plan, {}).get("step_s"),
            "ratio": show_ratio(found["step_s"], base_s) or None,
        }


def plan_report_text(document: Document) -> str:
    """The content of ``plan.txt``: the choice and its reason; see ``RecordedPrediction``."""
    prediction = RecordedPrediction(document)
    records = [
        {
            "name": prediction.name(name) + " (chosen)" * (name == prediction.chosen),
            **prediction.figures(name, next(iter(prediction.torchrec), None)),
        }
        for name in prediction.order
    ]
    placed = prediction.placed
    return render(
        "plan.md.j2",
        document=document,
        chosen=prediction.name(prediction.chosen),
        placed="" if placed in (None, prediction.chosen) else prediction.name(placed),
        plans=record_table(records, [("plan", "name", str), *PLAN_COLUMNS]),
        stages=_stages(prediction),
        tables=_tables(document.get("tables") or ()),
    )


def _stages(prediction: RecordedPrediction) -> Table:
    plans = prediction.plans
    columns: list[Column] = [("stage", "stage", str)]
    records: dict[str, dict[str, Any]] = {
        stage: {"stage": stage} for plan in plans.values() for stage in plan["stage_s"]
    }
    total: dict[str, Any] = {"stage": "step"}
    for what, part, show in STEP_COLUMNS:
        for name in prediction.compared:
            key, values = f"{what}, {prediction.name(name)}", plans[name].get(part) or {}
            columns.append((key, key, show))
            total[key] = sum(values.values()) or None
            for stage, record in records.items():
                record[key] = values.get(stage) or None
    return record_table(records.values(), columns, [total])


def _tables(tables: Sequence[Document]) -> Table | None:
    tables = sorted(tables, key=lambda table: (-table["num_rows"], table["name"]))

    def total(name: str, parts: Sequence[Document]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {k: [part.get(k) for part in parts] for k in SUMMED}
        sums = {key: None if None in found else sum(found) for key, found in columns.items()}
        return {"name": name, **sums}

    rest = tables[MAX_TABLES_SHOWN:]
    totals = [total(f"{len(rest)} more", rest)] if rest else []
    totals.append(total("all tables", tables))
    return record_table(tables[:MAX_TABLES_SHOWN], TABLE_COLUMNS, totals) if tables else None
