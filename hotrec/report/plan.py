"""A human-readable plan, ``plan.txt``, from the prediction document ``prediction.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hotrec.planner.names import PLANNER
from hotrec.report.render import Block, Column, Page, Table, record_table, render_text
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_interval,
    show_rate,
    show_ratio,
    show_seconds,
)

PREDICTION_JSON = "prediction.json"
MAX_TABLES_SHOWN = 20
NEEDED = ("world", "batch_size", "plans", "chosen")
NEEDED_OF_PLAN = ("title", "step_s", "stage_s", "sent_bytes", "total_sent_bytes", "samples_per_s")
TIERS = ("device_bytes", "host_bytes")
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
EXPECTED: tuple[Column, ...] = (
    ("Lookups that hit a hot row", "coverage_frac", show_frac),
    ("Distinct hot rows per rank and step", "hot_rows", show_count),
    ("Distinct hot rows of all ranks in a step", "union_rows", show_count),
    ("Distinct cold rows per rank and step", "cold_rows", show_count),
    ("Cold rows that some rank reads in the next step too", "urgent_rows", show_count),
    ("Samples whose lookups are all hot", "all_hot_frac", show_frac),
    ("Cold rows found in the device's cache", "cache_hit_frac", show_frac),
    ("Fetched into slots per rank and step", "fetched_bytes", show_bytes),
    ("Written back from slots per rank and step", "returned_bytes", show_bytes),
)

Document = Mapping[str, Any]


def describe_world(world: Document) -> str:
    """Such as ``8 ranks on 1 host``, from ``num_ranks`` and ``ranks_per_host``."""
    ranks = int(world["num_ranks"])
    counts = {"rank": ranks, "host": ranks // int(world["ranks_per_host"])}
    return " on ".join(f"{show_count(n)} {thing}{'s' * (n != 1)}" for thing, n in counts.items())


class RecordedPrediction:
    """A validated prediction document, and the order in which its parts are shown.

    Args:
        document: The content of ``prediction.json``.
        where: The name of the document in error messages.

    Raises:
        ValueError: If a part that is always shown is missing.
    """

    def __init__(self, document: Document, where: str = "prediction") -> None:
        _check_needed(document, NEEDED, where)
        self.document, self.chosen = document, str(document["chosen"])
        self.plans: Mapping[str, Mapping[str, Any]] = document["plans"]
        for name, plan in self.plans.items():
            _check_needed(plan, NEEDED_OF_PLAN, f"{where} plan {name}")
        if self.chosen not in self.plans:
            raise ValueError(
                f"{where} chosen: expected one of the plans {sorted(self.plans)}, got "
                f"{self.chosen!r}. Run `hotrec plan` again."
            )
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

    @property
    def planner(self) -> str | None:
        """The plan of TorchRec's own planner in its fastest pipeline and tier, if predicted."""
        names = (name for name in self.torchrec if self.plans[name]["torchrec_plan"] == PLANNER)
        return next(names, None)

    def name(self, plan: str) -> str:
        """Display name of a plan, such as ``hotrec, 1,650 hot rows, look_ahead``."""
        return str(self.plans[plan]["title"])

    def memory(self, name: str, tier: str) -> list[float]:
        """Bytes of each rank in one of ``TIERS``; empty if not known."""
        return [float(rank[tier]) for rank in self.plans[name].get("memory") or ()]

    def max_memory(self, name: str) -> dict[str, float | None]:
        """Bytes of the fullest rank by tier."""
        return {tier: max(self.memory(name, tier), default=None) for tier in TIERS}


def _check_needed(document: Document, names: Sequence[str], where: str) -> None:
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: expected {', '.join(names)}, got none of {', '.join(missing)}. "
            "Run `hotrec plan` again."
        )


def plan_report_text(document: Document) -> str:
    """The content of ``plan.txt``: the choice and its reason; see ``RecordedPrediction``."""
    prediction, costs = RecordedPrediction(document), document.get("costs") or {}
    about = [describe_world(document["world"])]
    about += [f"batch {show_count(document['batch_size'])} per rank", document.get("device") or ""]
    sections: dict[str, list[Block]] = {
        "What was chosen": [
            f"Chosen: {prediction.name(prediction.chosen)}. {document.get('why') or ''}".strip(),
            *([f"Costs: {costs.get('name')} ({costs.get('origin')})."] if costs else []),
            *([f"Note: {costs['note']}"] if costs.get("note") else []),
            _plans_table(prediction),
            *_between_hosts(document),
        ],
        "Where a step's time and bytes go": [
            "Time: exposed seconds of each stage; they add up to the step. Hidden: seconds of "
            "communication overlapped with computation. Sent: bytes that a rank sends.",
            _stages(prediction),
        ],
        "Tables": _tables(prediction),
        "What a step is expected to read": [
            f"{text}: {show(value)}."
            for text, name, show in EXPECTED
            if (value := (document.get("expected") or {}).get(name)) is not None
        ],
        "Memory and balance of the ranks": _ranks(prediction),
    }
    return render_text(Page(f"hotrec plan: {', '.join(filter(None, about))}", sections))


def _plans_table(prediction: RecordedPrediction) -> Table:
    plans, theirs = prediction.plans, prediction.torchrec[:1]
    base_s = plans[theirs[0]]["step_s"] if theirs else 0.0
    records = [
        {
            **plans[name],
            **prediction.max_memory(name),
            "name": prediction.name(name) + " (chosen)" * (name == prediction.chosen),
            "ratio": show_ratio(plans[name]["step_s"], base_s),
            "measured_s": prediction.trial.get(name, {}).get("step_s"),
        }
        for name in prediction.order
    ]
    columns: list[Column] = [
        ("plan", "name", str),
        ("step", "step_s", show_seconds),
        ("90% interval", "interval_s", show_interval),
        ("in the trial", "measured_s", show_seconds),
        ("of TorchRec's best", "ratio", str),
        ("samples", "samples_per_s", show_rate),
        ("sent", "total_sent_bytes", show_bytes),
        ("between hosts", "between_hosts_bytes", show_bytes),
        ("device memory", "device_bytes", show_bytes),
        ("host memory", "host_bytes", show_bytes),
        ("pipeline", "pipeline", str),
        ("on the wire", "wire", str),
    ]
    has = {"measured_s": prediction.trial}
    has["between_hosts_bytes"] = prediction.document.get("between_hosts_bound_bytes") or {}
    return record_table(records, [column for column in columns if has.get(column[1], True)])


def _between_hosts(document: Document) -> list[str]:
    """Only with several hosts."""
    bound, local = document.get("between_hosts_bound_bytes"), document["world"]["ranks_per_host"]
    if not bound:
        return []
    return [
        "Between hosts: of the bytes that a rank sends, those to ranks of other hosts; a host "
        f"sends {show_count(local)} times as many. The lower bound is {show_bytes(bound)} per "
        "rank: every row that a host reads, its gradient and those of the dense layers once."
    ]


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


def _tables(prediction: RecordedPrediction) -> list[Block]:
    tables = list(prediction.document.get("tables") or ())
    tables.sort(key=lambda table: (-table["num_rows"], table["name"]))
    if not tables:
        return []
    text = "Where rows are stored: hot rows on every rank, each other row on one rank, in the "
    text += "memory of its device or its host. The device may cache rows of the host."
    if prediction.placed not in (None, prediction.chosen):
        text += f" This is the placement of {prediction.name(prediction.placed)}, "
        text += "which was not chosen."

    def total(name: str, parts: Sequence[Document]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {k: [part.get(k) for part in parts] for k in SUMMED}
        sums = {key: None if None in found else sum(found) for key, found in columns.items()}
        return {"name": name, **sums}

    rest = tables[MAX_TABLES_SHOWN:]
    totals = [total(f"{len(rest)} more", rest)] if rest else []
    totals.append(total("all tables", tables))
    return [text, record_table(tables[:MAX_TABLES_SHOWN], TABLE_COLUMNS, totals)]


def _ranks(prediction: RecordedPrediction) -> list[Block]:
    columns: list[Column] = [("rank with", "which", str)]
    records: list[dict[str, Any]] = [{"which": which} for which in ("least", "mean", "most")]

    def add(heading: str, show: Any, values: Sequence[float]) -> None:
        if any(values):
            columns.append((heading, heading, show))
            found = min(values), fmean(values), max(values)
            for record, value in zip(records, found, strict=True):
                record[heading] = value

    for name in prediction.compared:
        for tier in TIERS:
            heading = f"{tier.removesuffix('_bytes')}, {prediction.name(name)}"
            add(heading, show_bytes, prediction.memory(name, tier))
    balance = prediction.document.get("balance") or {}
    add("cold rows served per step", show_count, balance.get("served_rows") or ())
    note = "Rows, optimizer state, gradients of replicas and caches, without activations."
    return [note, record_table(records, columns)] if len(columns) > 1 else []
