"""A human-readable plan: ``plan.txt``, and the content shared with ``plan_page``.

The input is the prediction document, ``prediction.json``. Its ``world``, ``batch_size``, ``plans``
and ``chosen`` are required; anything else that is missing or null is omitted, or shown as "-".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from hotrec.planner.names import PLANNER, TORCHREC, candidate_name
from hotrec.report.render import (
    Block,
    Column,
    Page,
    Table,
    record_table,
    render_text,
)
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_rate,
    show_ratio,
    show_seconds,
)

PREDICTION_JSON = "prediction.json"
HOT_COLD, ALL_COLD, LOOK_AHEAD = "hot_cold", "all_cold", "look_ahead"
MAX_TABLES_SHOWN = 20
NEEDED = ("world", "batch_size", "plans", "chosen")
NEEDED_OF_PLAN = ("step_s", "stage_s", "sent_bytes", "total_sent_bytes", "samples_per_s")
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
    """A validated prediction document, and the order in which pages show its parts.

    Args:
        document: The content of ``prediction.json``.
        where: The name of the document in error messages.

    Raises:
        ValueError: If a part that every page needs is missing.
    """

    def __init__(self, document: Document, where: str = "prediction") -> None:
        _check_needed(document, NEEDED, where)
        self.document = document
        self.plans: Mapping[str, Mapping[str, Any]] = _with_facts(document)
        self.chosen: str = document["chosen"]
        if self.chosen not in self.plans:
            raise ValueError(
                f"{where} chosen: expected one of the plans {sorted(self.plans)}, got "
                f"{self.chosen!r}. Run `hotrec plan` again."
            )
        for name, plan in self.plans.items():
            _check_needed(plan, NEEDED_OF_PLAN, f"{where} plan {name}")
        by_step = sorted(self.plans, key=lambda name: (self.plans[name]["step_s"], name))
        baselines = [name for name in by_step if self.plans[name]["is_hotrec"] is False]
        self.baseline = baselines[0] if baselines else None
        """The fastest of TorchRec's own plans, if one was predicted."""
        ends = [self.chosen] if self.baseline is None else [self.baseline, self.chosen]
        placed = [name for name in by_step if self.plans[name]["is_hotrec"]]
        self.placed = self.chosen if self.chosen in placed else next(iter(placed), None)
        """The plan whose placement the tables show: the chosen, or the fastest of hotrec's."""
        named: dict[str, str] = {}
        for name in (*ends, *by_step):
            named.setdefault(self.name(name), name)
        self.order = list(named.values())
        """Plans that differ: the baseline, the chosen one, then the others by their step."""
        # A chosen baseline is compared with the fastest of hotrec's plans.
        if self.chosen in baselines and self.placed is not None:
            ends = [self.chosen, self.placed]
        self.compared = list(dict.fromkeys(ends))
        trial = document.get("trial") or {}
        self.trial: Mapping[str, Mapping[str, Any]] = trial.get("plans") or {}
        """The measurements of a trial, by plan."""

    def describe(self) -> str:
        """Such as ``4 ranks on 2 hosts, batch 2,048 per rank, cpu``."""
        batch = f"batch {show_count(self.document['batch_size'])} per rank"
        parts = [describe_world(self.document["world"]), batch, self.document.get("device")]
        return ", ".join(filter(None, parts))

    @property
    def planner(self) -> str | None:
        """The plan of TorchRec's own planner in its fastest pipeline and tier, if predicted."""
        names = [name for name in self.plans if self.plans[name]["torchrec_plan"] == PLANNER]
        return min(names, key=lambda name: self.plans[name]["step_s"], default=None)

    def name(self, plan: str) -> str:
        """Display name of a plan, such as ``hotrec, 1,650 hot rows, look_ahead``."""
        title: str = self.plans[plan]["title"]
        return title

    def label(self, plan: str) -> str:
        """The name of a plan, with a note if it was chosen."""
        return f"{self.name(plan)} (chosen)" if plan == self.chosen else self.name(plan)

    def memory(self, name: str, tier: str) -> list[float]:
        """Bytes of each rank in one of ``TIERS``; empty if not known."""
        return [float(rank[tier]) for rank in self.plans[name].get("memory") or ()]

    def max_memory(self, name: str) -> dict[str, float | None]:
        """Bytes of the fullest rank by tier."""
        return {tier: max(self.memory(name, tier), default=None) for tier in TIERS}

    def pipeline(self, name: str) -> str | None:
        """Such as ``look_ahead, fp16``; None if the plan does not name its pipeline."""
        plan = self.plans[name]
        wire = plan.get("wire") or "fp32"
        kind: str | None = plan.get("pipeline")
        return kind if kind is None or wire == "fp32" else f"{kind}, {wire}"


def _with_facts(document: Document) -> dict[str, dict[str, Any]]:
    """The plans of a document; with facts from the label for all_cold and for earlier versions."""
    plans = {}
    tables = sum(int(table["hot_rows"]) for table in document.get("tables") or ())
    for label, plan in document["plans"].items():
        kind, _, rest = label.partition(" ")
        hot_rows = plan.get("hot_rows", tables if kind == HOT_COLD else 0)
        title, pipeline = candidate_name(label, hot_rows), plan.get("pipeline")
        facts = {
            "title": f"{title}, {pipeline}" if kind == ALL_COLD and pipeline else title,
            "is_hotrec": {HOT_COLD: True, TORCHREC: False}.get(kind),
            "torchrec_plan": rest.split(" ")[0] if kind == TORCHREC else None,
        }
        plans[label] = {**facts, **plan}
    return plans


def _check_needed(document: Document, names: Sequence[str], where: str) -> None:
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: expected {', '.join(names)}, got none of {', '.join(missing)}. "
            "Run `hotrec plan` again."
        )


def plan_report_text(document: Document) -> str:
    """The content of ``plan.txt``: the choice and its reason; see ``RecordedPrediction``."""
    prediction = RecordedPrediction(document)
    return render_text(Page(f"hotrec plan: {prediction.describe()}", plan_sections(prediction)))


def plan_sections(prediction: RecordedPrediction) -> dict[str, list[Block]]:
    """All sections of the page by title, in reading order."""
    return {
        "What was chosen": [
            *_choice(prediction),
            _plans_table(prediction),
            *_between_hosts(prediction),
        ],
        "Where a step's time and bytes go": _stages(prediction),
        "Tables": _tables(prediction),
        "What a step is expected to read": _expected(prediction.document),
        "Memory and balance of the ranks": _ranks(prediction),
    }


def _choice(prediction: RecordedPrediction) -> list[str]:
    document, costs = prediction.document, prediction.document.get("costs") or {}
    return [
        f"Chosen: {prediction.name(prediction.chosen)}. {document.get('why') or ''}".strip(),
        *([f"Costs: {costs.get('name')} ({costs.get('origin')})."] if costs else []),
        *([f"Note: {costs['note']}"] if costs.get("note") else []),
    ]


def _plans_table(prediction: RecordedPrediction) -> Table:
    plans, baseline = prediction.plans, prediction.baseline
    base_s = 0.0 if baseline is None else plans[baseline]["step_s"]
    records = [
        {
            **plans[name],
            **prediction.max_memory(name),
            "name": prediction.label(name),
            "ratio": show_ratio(plans[name]["step_s"], base_s),
            "pipeline": prediction.pipeline(name),
            "measured_s": prediction.trial.get(name, {}).get("step_s"),
        }
        for name in prediction.order
    ]
    measured: list[Column] = [("in the trial", "measured_s", show_seconds)]
    between: list[Column] = [("between hosts", "between_hosts_bytes", show_bytes)]
    return record_table(
        records,
        [
            ("plan", "name", str),
            ("step", "step_s", show_seconds),
            ("90% interval", "interval_s", _show_interval),
            *(measured if prediction.trial else []),
            ("of TorchRec's best", "ratio", str),
            ("samples", "samples_per_s", show_rate),
            ("sent", "total_sent_bytes", show_bytes),
            *(between if prediction.document.get("between_hosts_bound_bytes") else []),
            ("device memory", "device_bytes", show_bytes),
            ("host memory", "host_bytes", show_bytes),
            ("pipeline", "pipeline", str),
        ],
    )


def _between_hosts(prediction: RecordedPrediction) -> list[str]:
    """Only with several hosts."""
    bound = prediction.document.get("between_hosts_bound_bytes")
    if not bound:
        return []
    local = int(prediction.document["world"]["ranks_per_host"])
    return [
        "Between hosts: of the bytes that a rank sends, those to ranks of other hosts; a host "
        f"sends {show_count(local)} times as many. The lower bound is {show_bytes(bound)} per "
        "rank: every row that a host reads, its gradient and those of the dense layers once."
    ]


def _show_interval(interval_s: Sequence[float]) -> str:
    return " to ".join(map(show_seconds, interval_s))


def _stages(prediction: RecordedPrediction) -> list[Block]:
    plans, compared = prediction.plans, prediction.compared
    blocks: list[Block] = [
        "Time: exposed seconds of each stage; they add up to the step. Hidden: seconds of "
        "communication overlapped with computation. Sent: bytes that a rank sends."
    ]
    if any(plan.get("pipeline") == LOOK_AHEAD for plan in plans.values()):
        blocks.append(
            "With look_ahead the remaining exchanges are exposed communication. Row lookups and "
            "updates run in the communication thread; here they count as computation, because "
            "they share the cores."
        )
    columns: list[Column] = [("stage", "stage", str)]
    records: dict[str, dict[str, Any]] = {
        stage: {"stage": stage} for plan in plans.values() for stage in plan["stage_s"]
    }
    total: dict[str, Any] = {"stage": "step"}
    for what, part, show in STEP_COLUMNS:
        for name in compared:
            key, values = f"{what}, {prediction.name(name)}", plans[name].get(part) or {}
            columns.append((key, key, show))
            total[key] = sum(values.values()) or None
            for stage, record in records.items():
                record[key] = values.get(stage) or None
    return [*blocks, record_table(records.values(), columns, [total])]


def _tables(prediction: RecordedPrediction) -> list[Block]:
    document = prediction.document
    tables = sorted(
        document.get("tables") or (), key=lambda table: (-table["num_rows"], table["name"])
    )
    if not tables:
        return []
    blocks: list[Block] = [
        "Where rows are stored: hot rows on every rank, each other row on one rank, in the memory "
        "of its device or its host. The device may cache rows of the host."
    ]
    if prediction.placed not in (None, prediction.chosen):
        blocks.append(
            f"This is the placement of {prediction.name(prediction.placed)}, which was not chosen."
        )

    def total(name: str, parts: Sequence[Document]) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {k: [part.get(k) for part in parts] for k in SUMMED}
        sums = {key: None if None in found else sum(found) for key, found in columns.items()}
        return {"name": name, **sums}

    rest = tables[MAX_TABLES_SHOWN:]
    totals = [total(f"{len(rest)} more", rest)] if rest else []
    totals.append(total("all tables", tables))
    return [*blocks, record_table(tables[:MAX_TABLES_SHOWN], TABLE_COLUMNS, totals)]


def _expected(document: Document) -> list[Block]:
    expected = document.get("expected") or {}
    blocks: list[Block] = [
        f"{text}: {show(expected[name])}."
        for text, name, show in EXPECTED
        if expected.get(name) is not None
    ]
    return blocks


def _ranks(prediction: RecordedPrediction) -> list[Block]:
    columns: dict[str, tuple[Callable[[float], str], Sequence[float]]] = {
        f"{tier.removesuffix('_bytes')}, {prediction.name(name)}": (show_bytes, sizes)
        for name in prediction.compared
        for tier in TIERS
        if any(sizes := prediction.memory(name, tier))
    }
    balance = prediction.document.get("balance") or {}
    if served := balance.get("served_rows"):
        columns["cold rows served per step"] = (show_count, served)
    rows = [
        ["least", *(show(min(values)) for show, values in columns.values())],
        ["mean", *(show(fmean(values)) for show, values in columns.values())],
        ["most", *(show(max(values)) for show, values in columns.values())],
    ]
    note = "Rows, optimizer state, gradients of replicas and caches, without activations."
    return [note, Table(("rank with", *columns), rows), *_balance(balance)] if columns else []


def _balance(balance: Document) -> list[Block]:
    blocks: list[Block] = []
    for key, who in (
        ("most_over_mean", "rank serves"),
        ("rail_most_over_mean", "rail (ranks with one local rank) serves"),
    ):
        most = balance.get(key) or {}
        if None in most.values() or not most:  # no cold row is read, or an earlier version's plan
            continue
        planned, ordered, spread = (most[name] for name in ("planned", "ordered", "spread"))
        blocks.append(
            f"The busiest {who} {planned:.2f} times the mean of the cold rows: {ordered:.2f} if "
            f"rows are stored in the order of their ids, {spread:.2f} if they are spread over "
            "their owners (placement.spread_rows)."
        )
    return blocks
