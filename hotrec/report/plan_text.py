"""A plan in words and tables: the passages of ``plan.txt`` and ``plan.html``.

What comes in is the prediction document, ``prediction.json``. Of it, ``world``, ``batch_size``,
``plans`` and ``chosen`` must be there; what else is absent or null is left out, or shown as "-".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hotrec.report.passages import NOTHING, Grid, Passage
from hotrec.report.plan_pipeline import (
    break_even_sentences,
    pipeline_cells,
    proof_sentences,
    stage_sentences,
)
from hotrec.report.units import (
    show_bytes,
    show_count,
    show_frac,
    show_rate,
    show_ratio,
    show_seconds,
)

Document = Mapping[str, Any]

HOT_COLD = "hot_cold"
BASELINE_PREFIX = "torchrec"
MAX_TABLES_SHOWN = 20
MAX_RANKS_SHOWN = 16
NEEDED = ("world", "batch_size", "plans", "chosen")
NEEDED_OF_PLAN = ("step_s", "stage_s", "sent_bytes", "total_sent_bytes", "samples_per_s")


def check_prediction(document: Document, *, where: str = "prediction") -> None:
    """Refuse what is no prediction document.

    Raises:
        ValueError: if a part that every page needs is missing.
    """
    missing = [name for name in NEEDED if document.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: expected {', '.join(NEEDED)}, got none of {', '.join(missing)}. "
            "Run `hotrec plan` again."
        )
    plans = document["plans"]
    if document["chosen"] not in plans:
        raise ValueError(
            f"{where} chosen: expected one of the plans {sorted(plans)}, got "
            f"{document['chosen']!r}. Run `hotrec plan` again."
        )
    for name, plan in plans.items():
        missing = [field for field in NEEDED_OF_PLAN if plan.get(field) is None]
        if missing:
            raise ValueError(
                f"{where} plan {name}: expected {', '.join(NEEDED_OF_PLAN)}, got none of "
                f"{', '.join(missing)}. Run `hotrec plan` again."
            )


def baseline_name(document: Document) -> str | None:
    """The fastest of TorchRec's own plans, "before"; None where none was predicted."""
    plans = document["plans"]
    baselines = [name for name in plans if name.startswith(BASELINE_PREFIX)]
    return min(baselines, key=lambda name: (plans[name]["step_s"], name), default=None)


def compared_plans(document: Document) -> list[str]:
    """Before and after; where TorchRec's plan was chosen, what it was chosen over."""
    before, after = baseline_name(document), document["chosen"]
    if before == after and HOT_COLD in document["plans"]:
        after = HOT_COLD
    return list(dict.fromkeys(name for name in (before, after) if name is not None))


def shown_plans(document: Document) -> list[str]:
    """Every plan: before, after, then the others by their step."""
    plans = document["plans"]
    first = [baseline_name(document), document["chosen"]]
    others = sorted(plans, key=lambda name: (plans[name]["step_s"], name))
    return list(dict.fromkeys(name for name in [*first, *others] if name is not None))


def shown_stages(document: Document, names: Iterable[str]) -> list[str]:
    """Stages in which one of the named plans does or sends something, in the order of a step."""
    plans = document["plans"]
    stages = dict.fromkeys(stage for name in plans for stage in plans[name]["stage_s"])
    chosen = list(names)
    return [
        stage
        for stage in stages
        if any(
            plans[name][part].get(stage) for name in chosen for part in ("stage_s", "sent_bytes")
        )
    ]


def placed_tables(document: Document) -> list[Mapping[str, Any]]:
    """The tables, those with most rows first."""
    tables = document.get("tables") or ()
    return sorted(tables, key=lambda table: (-table["num_rows"], table["name"]))


def describe_world(document: Document) -> str:
    """Such as ``4 ranks on 2 hosts, batch 2,048 per rank, cpu``."""
    ranks = int(document["world"]["num_ranks"])
    hosts = ranks // int(document["world"]["ranks_per_host"])
    words = [
        f"{_several(ranks, 'rank')} on {_several(hosts, 'host')}",
        f"batch {show_count(document['batch_size'])} per rank",
    ]
    return ", ".join([*words, *([document["device"]] if document.get("device") else [])])


def _several(number: int, thing: str) -> str:
    return f"{show_count(number)} {thing}{'' if number == 1 else 's'}"


def plan_passages(document: Document) -> list[Passage]:
    """Every part of the page, in reading order.

    Raises:
        ValueError: as ``check_prediction``.
    """
    check_prediction(document)
    parts = [
        _choice(document),
        _stages(document),
        _tables(document),
        _expected(document),
        _memory(document),
        _sensitivity(document),
    ]
    return [part for part in parts if part is not None]


def _show(show: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None else show(value)


def _largest_bytes(plan: Mapping[str, Any], tier: str) -> str:
    memory = plan.get("memory")
    return NOTHING if not memory else show_bytes(max(rank[tier] for rank in memory))


def _choice(document: Document) -> Passage:
    plans, chosen, before = document["plans"], document["chosen"], baseline_name(document)
    step_s = plans[chosen]["step_s"]
    sentences = [f"Chosen: {chosen}. {document.get('why') or ''}".strip()]
    if before is None:
        sentences.append("None of TorchRec's own plans was predicted, so nothing is set against.")
    elif before != chosen:
        before_s = plans[before]["step_s"]
        sentences.append(
            f"A step is predicted to take {show_seconds(step_s)} instead of "
            f"{show_seconds(before_s)} by TorchRec's best plan ({before}): "
            f"{show_ratio(step_s, before_s)} of the time, "
            f"{show_ratio(plans[chosen]['total_sent_bytes'], plans[before]['total_sent_bytes'])}"
            " of the bytes."
        )
    sentences += proof_sentences(document)
    sentences += _costs_sentences(document.get("costs"))
    rows, pipelines = [], pipeline_cells(plans)
    for name in shown_plans(document):
        plan = plans[name]
        rows.append(
            (
                name + (" (chosen)" if name == chosen else ""),
                show_seconds(plan["step_s"]),
                NOTHING if before is None else show_ratio(plan["step_s"], plans[before]["step_s"]),
                show_rate(plan["samples_per_s"]),
                show_bytes(plan["total_sent_bytes"]),
                _largest_bytes(plan, "device_bytes"),
                _largest_bytes(plan, "host_bytes"),
                *pipelines.get(name, ()),
            )
        )
    heads = ["plan", "step", "of TorchRec's", "samples", "sent", "device memory", "host memory"]
    heads += ["pipeline"] if pipelines else []
    return Passage("choice", "What was chosen", tuple(sentences), Grid(tuple(heads), tuple(rows)))


def _costs_sentences(costs: Mapping[str, Any] | None) -> list[str]:
    if not costs:
        return ["Costs: not recorded."]
    sentences = [f"Costs: {costs.get('name')} ({costs.get('origin')})."]
    return sentences + ([f"Note: {costs['note']}"] if costs.get("note") else [])


def _stages(document: Document) -> Passage:
    plans, pair = document["plans"], compared_plans(document)
    heads = ["stage"]
    for what in ("time", "hidden", "sent"):
        heads += [f"{what}, {name}" for name in pair]

    def cells(stage: str | None) -> tuple[str, ...]:
        texts = []
        for part, show in (
            ("stage_s", show_seconds),
            ("hidden_s", show_seconds),
            ("sent_bytes", show_bytes),
        ):
            for name in pair:
                parts = plans[name].get(part)
                if parts is None:
                    texts.append(NOTHING)
                    continue
                value = sum(parts.values()) if stage is None else parts.get(stage, 0.0)
                texts.append(show(value) if value else "0")
        return tuple(texts)

    rows = tuple((stage, *cells(stage)) for stage in shown_stages(document, pair))
    sentence = (
        "Seconds of a stage that nothing hides, they add up to the step; seconds of communication "
        "that travels under computation; bytes that a rank sends."
    )
    return Passage(
        "stages",
        "Where a step's time and bytes go",
        (sentence, *stage_sentences(document)),
        Grid(tuple(heads), rows, (("step", *cells(None)),)),
    )


COUNTED = ("num_rows", "hot_rows", "device_rows", "cached_rows", "host_rows")
SENT = ("sent_bytes_before", "sent_bytes_after")


def _tables(document: Document) -> Passage | None:
    tables = placed_tables(document)
    if not tables:
        return None
    sentences = [
        "Where the rows live: hot ones on every rank, the others on one rank each, in its device's "
        "or its host's memory, where a part may be cached by the device."
    ]
    if document["chosen"] != HOT_COLD and HOT_COLD in document["plans"]:
        sentences.append(f"This is how {HOT_COLD} would place them, which was not chosen.")
    if document.get("device") == "cpu":
        sentences.append('On CPU there is one memory, which "device" stands for.')
    rest = tables[MAX_TABLES_SHOWN:]
    rows = [_table_cells(table) for table in tables[:MAX_TABLES_SHOWN]]
    totals = [_sum_cells(f"{len(rest)} more", rest)] if rest else []
    totals.append(_sum_cells("all tables", tables))
    heads = (
        "table",
        "rows",
        "hot",
        "device",
        "cached",
        "host",
        "exchange",
        "sharding",
        "lookups hot",
        "sent, TorchRec",
        "sent, here",
        "TorchRec's sharding",
    )
    grid = Grid(heads, tuple(rows), tuple(totals))
    return Passage("tables", "Tables", tuple(sentences), grid)


def _table_cells(table: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        table["name"],
        *(_show(show_count, table.get(name)) for name in COUNTED),
        table.get("exchange") or NOTHING,
        table.get("sharding") or NOTHING,
        _show(show_frac, table.get("coverage_frac")),
        *(_show(show_bytes, table.get(name)) for name in SENT),
        table.get("torchrec_sharding") or NOTHING,
    )


def _sum_cells(name: str, tables: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def total(field: str) -> float | None:
        values = [table.get(field) for table in tables]
        known = [value for value in values if value is not None]
        return None if len(known) < len(values) else sum(known)

    return (
        name,
        *(_show(show_count, total(field)) for field in COUNTED),
        *("", "", ""),
        *(_show(show_bytes, total(field)) for field in SENT),
        "",
    )


def _expected(document: Document) -> Passage | None:
    expected = document.get("expected") or {}
    sentences = []
    for name, text, show in (
        ("coverage_frac", "Lookups that hit a hot row", show_frac),
        ("hot_rows", "Distinct hot rows of a rank and step", show_count),
        ("union_rows", "Distinct hot rows of any rank in a step", show_count),
        ("cold_rows", "Distinct cold rows of a rank and step", show_count),
        ("urgent_rows", "Of them some rank reads in the next step too", show_count),
        ("all_hot_frac", "Samples whose lookups are all hot", show_frac),
        ("cache_hit_frac", "Cold rows found in the device's cache", show_frac),
    ):
        if expected.get(name) is not None:
            sentences.append(f"{text}: {show(expected[name])}.")
    for dim, rate in sorted((document.get("break_even") or {}).items(), key=lambda p: int(p[0])):
        sentences.append(
            f"Break-even at D={dim}: "
            + (
                "none, one of the two is faster at every rate."
                if rate is None
                else f"a row pays as a replica from {rate:.3g} lookups per step on, over all ranks."
            )
        )
    sentences += break_even_sentences(document)
    title = "What a step is expected to read"
    return Passage("expected", title, tuple(sentences)) if sentences else None


def rank_spread(values: Sequence[float]) -> list[tuple[str, float]]:
    """Each rank's value, or of many ranks the least, the median and the most."""
    if len(values) <= MAX_RANKS_SHOWN:
        return [(str(rank), value) for rank, value in enumerate(values)]
    ordered = sorted(values)
    return [("least", ordered[0]), ("median", ordered[len(ordered) // 2]), ("most", ordered[-1])]


def memory_of(plan: Mapping[str, Any]) -> dict[str, list[float]]:
    """Bytes of each rank by tier; only tiers that hold something."""
    memory = plan.get("memory") or ()
    tiers = {tier: [float(rank[f"{tier}_bytes"]) for rank in memory] for tier in ("device", "host")}
    return {tier: sizes for tier, sizes in tiers.items() if any(sizes)}


def _memory(document: Document) -> Passage | None:
    plans = document["plans"]
    columns: list[tuple[str, list[tuple[str, float]], Callable[[float], str]]] = []
    for name in compared_plans(document):
        columns += [
            (f"{tier}, {name}", rank_spread(sizes), show_bytes)
            for tier, sizes in memory_of(plans[name]).items()
        ]
    served = (document.get("balance") or {}).get("served_rows")
    sentences = ["Rows, optimizer state, gradients of replicas, caches; no activations."]
    if served:
        columns.append(("cold rows served", rank_spread(served), show_count))
        mean = sum(served) / len(served)
        sentences.append(
            f"A rank serves {show_count(mean)} cold rows per step in the mean, the busiest "
            f"{show_count(max(served))}"
            + (f", {show_ratio(max(served), mean)} of the mean." if mean else ".")
        )
    if not columns:
        return None
    ranks = [label for label, _ in columns[0][1]]
    rows = tuple(
        (rank, *(show(spread[i][1]) for _, spread, show in columns)) for i, rank in enumerate(ranks)
    )
    heads = ("rank", *(head for head, _, _ in columns))
    return Passage("memory", "Memory and balance of the ranks", tuple(sentences), Grid(heads, rows))


def sensitivity_base(document: Document) -> str:
    """The plan whose surroundings were varied."""
    return HOT_COLD if HOT_COLD in document["plans"] else str(document["chosen"])


def _sensitivity(document: Document) -> Passage | None:
    entries = document.get("sensitivity") or ()
    if not entries:
        return None
    base = sensitivity_base(document)
    step_s = document["plans"][base]["step_s"]
    rows, sentences = [], [f"Against {base} as predicted above, {show_seconds(step_s)}."]
    for entry in entries:
        varied = entry.get("step_s")
        rows.append(
            (
                entry["what"],
                _show(show_seconds, varied),
                NOTHING if varied is None else show_ratio(varied, step_s),
                _show(show_rate, entry.get("samples_per_s")),
                _show(show_count, entry.get("hot_rows")),
            )
        )
        if varied is None:
            sentences.append(f"{entry['what']}: {entry.get('why') or 'not predicted.'}")
    heads = ("if", "step", "of it", "samples", "hot rows")
    return Passage("sensitivity", "What if", tuple(sentences), Grid(heads, tuple(rows)))
