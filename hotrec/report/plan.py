"""A plan for people: ``plan.txt``, and ``plan.html`` with its figure.

The input is the prediction document, ``prediction.json``. Its ``world``, ``batch_size``, ``plans``
and ``chosen`` are required; anything else that is missing or null is left out, or shown as "-".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from hotrec.report.render import (
    Column,
    Page,
    Passage,
    Picture,
    Table,
    Tile,
    record_table,
    render_html,
    render_text,
    write_file,
)
from hotrec.report.style import (
    CONNECTOR_COLOR,
    INK,
    RUN_COLORS,
    SOFT_INK,
    annotate,
    light_grid,
    report_style,
    stack_bars,
    stage_look,
    to_svg,
)
from hotrec.report.units import (
    DASH,
    show_bytes,
    show_change,
    show_count,
    show_frac,
    show_known,
    show_rate,
    show_ratio,
    show_seconds,
)
from hotrec.types import STAGES

PLAN_HTML, PREDICTION_JSON = "plan.html", "prediction.json"
HOT_COLD, LOOK_AHEAD, BASELINE_PREFIX = "hot_cold", "look_ahead", "torchrec"
MAX_TABLES_SHOWN, MAX_RANKS_SHOWN, MAX_PLANS_DRAWN = 20, 16, 6
NEEDED = ("world", "batch_size", "plans", "chosen")
NEEDED_OF_PLAN = ("step_s", "stage_s", "sent_bytes", "total_sent_bytes", "samples_per_s")
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
TIER_COLORS = {"device": RUN_COLORS[0], "host": RUN_COLORS[4]}
BASELINE_TIER_COLORS = {"device": "#7fb8d8", "host": "#f2cf7f"}
ROW_MARKS = (
    ("hot_rows", "hot, on every rank", RUN_COLORS[1], "o"),
    ("device_rows", "device", RUN_COLORS[0], "s"),
    ("cached_rows", "cached by the device", RUN_COLORS[2], "^"),
    ("host_rows", "host", RUN_COLORS[4], "D"),
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
SUMMED = [key for _, key, show in TABLE_COLUMNS if show in (show_count, show_bytes)]

Document = Mapping[str, Any]


class Prediction:
    """A prediction document that was checked, and the order in which pages show its parts.

    Args:
        document: The content of ``prediction.json``.
        where: The name of the document in error messages.

    Raises:
        ValueError: If a part that every page needs is missing.
    """

    def __init__(self, document: Document, where: str = "prediction") -> None:
        _check_needed(document, NEEDED, where)
        self.document = document
        self.plans: Mapping[str, Mapping[str, Any]] = document["plans"]
        self.chosen: str = document["chosen"]
        if self.chosen not in self.plans:
            raise ValueError(
                f"{where} chosen: expected one of the plans {sorted(self.plans)}, got "
                f"{self.chosen!r}. Run `hotrec plan` again."
            )
        for name, plan in self.plans.items():
            _check_needed(plan, NEEDED_OF_PLAN, f"{where} plan {name}")
        by_step = sorted(self.plans, key=lambda name: (self.plans[name]["step_s"], name))
        own = [name for name in by_step if name.startswith(BASELINE_PREFIX)]
        self.baseline = own[0] if own else None
        """The fastest of TorchRec's own plans, if one was predicted."""
        ends = [self.chosen] if self.baseline is None else [self.baseline, self.chosen]
        self.order = list(dict.fromkeys([*ends, *by_step]))
        """All plans: the baseline, the chosen one, then the others by their step."""
        # Where the baseline was chosen, it is compared with what it was chosen over.
        if self.chosen == self.baseline and HOT_COLD in self.plans:
            ends = [self.chosen, HOT_COLD]
        self.compared = list(dict.fromkeys(ends))
        self.varied = HOT_COLD if HOT_COLD in self.plans else self.chosen
        """The plan on which the sensitivity is based."""
        self.tables = sorted(
            document.get("tables") or (), key=lambda table: (-table["num_rows"], table["name"])
        )

    def describe(self) -> str:
        """Such as ``4 ranks on 2 hosts, batch 2,048 per rank, cpu``."""
        world, device = self.document["world"], self.document.get("device")
        ranks = int(world["num_ranks"])
        hosts = ranks // int(world["ranks_per_host"])
        parts = [
            f"{show_count(ranks)} rank{'s' * (ranks != 1)} on "
            f"{show_count(hosts)} host{'s' * (hosts != 1)}",
            f"batch {show_count(self.document['batch_size'])} per rank",
        ]
        return ", ".join([*parts, *([device] if device else [])])

    def stages(self, names: Iterable[str]) -> list[str]:
        """The stages in which one of the named plans spends time or sends bytes."""
        shown = [self.plans[name][part] for name in names for part in ("stage_s", "sent_bytes")]
        stages = dict.fromkeys(stage for plan in self.plans.values() for stage in plan["stage_s"])
        return [stage for stage in stages if any(part.get(stage) for part in shown)]

    def memory(self, name: str) -> dict[str, list[float]]:
        """Bytes of each rank, for the tiers that a plan uses."""
        ranks = self.plans[name].get("memory") or ()
        tiers = {t: [float(rank[f"{t}_bytes"]) for rank in ranks] for t in ("device", "host")}
        return {tier: sizes for tier, sizes in tiers.items() if any(sizes)}

    def pipelines(self) -> dict[str, str]:
        """Such as ``look_ahead, fp16`` for each plan; empty if no plan names its pipeline."""
        texts = {}
        for name, plan in self.plans.items():
            wire = plan.get("wire") or "fp32"
            suffix = "" if wire == "fp32" else f", {wire}"
            texts[name] = f"{plan['pipeline']}{suffix}" if plan.get("pipeline") else DASH
        return texts if set(texts.values()) != {DASH} else {}


def _check_needed(document: Document, names: Sequence[str], where: str) -> None:
    missing = [name for name in names if document.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: expected {', '.join(names)}, got none of {', '.join(missing)}. "
            "Run `hotrec plan` again."
        )


def plan_report_text(document: Document) -> str:
    """What was chosen and why, as text and tables.

    Args:
        document: The content of ``prediction.json``.

    Raises:
        ValueError: If a part that every page needs is missing.
    """
    prediction = Prediction(document)
    return render_text(Page(f"hotrec plan: {prediction.describe()}", _passages(prediction)))


def write_plan_page(document: Document, directory: Path) -> Path:
    """Write ``plan.html`` into a directory.

    Args:
        document: The content of ``prediction.json``.
        directory: The directory, made if it does not exist.

    Returns:
        The path of the page.

    Raises:
        ValueError: If a part that every page needs is missing; then nothing is written.
    """
    prediction = Prediction(document)
    first, *others = _passages(prediction)
    picture = Picture(
        to_svg(draw_plan(prediction), "Predicted time, memory, rows and sensitivity"),
        "Hatched parts are communication that nothing hides. Each table has a mark for each kind "
        "of row it holds.",
    )
    page = Page(
        f"hotrec plan: {prediction.chosen}",
        [first, Passage("picture", "In one picture", [picture]), *others],
        prediction.describe(),
        _tiles(prediction),
        PREDICTION_JSON,
    )
    return write_file(directory / PLAN_HTML, render_html(page))


def _tiles(prediction: Prediction) -> list[Tile]:
    plans, baseline = prediction.plans, prediction.baseline
    chosen = plans[prediction.chosen]

    def against(name: str) -> str:
        if baseline is None or baseline == prediction.chosen:
            return ""
        return f"{show_ratio(chosen[name], plans[baseline][name])} of {baseline}"

    sent = show_bytes(chosen["total_sent_bytes"])
    tiles = [
        Tile(show_seconds(chosen["step_s"]), "predicted step", against("step_s")),
        Tile(show_rate(chosen["samples_per_s"]), "samples, all ranks"),
        Tile(sent, "sent per step and rank", against("total_sent_bytes")),
    ]
    coverage = (prediction.document.get("expected") or {}).get("coverage_frac")
    if coverage is not None and prediction.tables:
        num_hot = sum(table["hot_rows"] for table in prediction.tables)
        frac = num_hot / sum(table["num_rows"] for table in prediction.tables)
        tiles.append(Tile(show_frac(coverage), f"of lookups hit the {show_frac(frac)} hot rows"))
    return tiles


def _passages(prediction: Prediction) -> list[Passage]:
    """All parts of the page, in reading order."""
    parts = (_choice, _stages, _tables, _expected, _memory, _sensitivity)
    return [passage for part in parts if (passage := part(prediction)) is not None]


def _choice(prediction: Prediction) -> Passage:
    document, plans, baseline = prediction.document, prediction.plans, prediction.baseline
    chosen = plans[prediction.chosen]
    sentences = [f"Chosen: {prediction.chosen}. {document.get('why') or ''}".strip()]
    if baseline is None:
        sentences.append(
            "None of TorchRec's own plans was predicted, so there is no baseline to compare with."
        )
    elif baseline != prediction.chosen:
        before = plans[baseline]
        times = show_change(chosen["step_s"], before["step_s"])
        text = (
            f"A step is predicted to take {show_seconds(chosen['step_s'])} instead of "
            f"{show_seconds(before['step_s'])} with TorchRec's best plan ({baseline}): {times} time"
        )
        # One rank sends nothing.
        sent_bytes, before_bytes = chosen["total_sent_bytes"], before["total_sent_bytes"]
        if before_bytes:
            text += f" and {show_change(sent_bytes, before_bytes, less='fewer')} bytes"
        sentences.append(f"{text}.")
    costs = document.get("costs")
    if not costs:
        sentences.append("Costs: not recorded.")
    else:
        sentences.append(f"Costs: {costs.get('name')} ({costs.get('origin')}).")
        sentences += [f"Note: {costs['note']}"] if costs.get("note") else []
    header = ["plan", "step", "of TorchRec's", "samples", "sent", "device memory", "host memory"]
    pipelines, rows = prediction.pipelines(), []
    for name in prediction.order:
        plan = plans[name]
        step_s, ranks = plan["step_s"], plan.get("memory") or ()
        fullest = [
            max((rank[tier] for rank in ranks), default=None)
            for tier in ("device_bytes", "host_bytes")
        ]
        rows.append(
            [
                _label(prediction, name),
                show_seconds(step_s),
                DASH if baseline is None else show_ratio(step_s, plans[baseline]["step_s"]),
                show_rate(plan["samples_per_s"]),
                show_bytes(plan["total_sent_bytes"]),
                *(show_known(show_bytes, size) for size in fullest),
                *([pipelines[name]] if pipelines else []),
            ]
        )
    table = Table([*header, *(["pipeline"] if pipelines else [])], rows)
    return Passage("choice", "What was chosen", [*sentences, table])


def _label(prediction: Prediction, name: str) -> str:
    return f"{name} (chosen)" if name == prediction.chosen else name


def _stages(prediction: Prediction) -> Passage:
    plans, compared = prediction.plans, prediction.compared
    parts: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("time", "stage_s", show_seconds),
        ("hidden", "hidden_s", show_seconds),
        ("sent", "sent_bytes", show_bytes),
    )

    def cells(stage: str | None) -> list[str]:
        texts = []
        for values, show in ((plans[n].get(part), s) for _, part, s in parts for n in compared):
            if values is None:
                texts.append(DASH)
                continue
            value = sum(values.values()) if stage is None else values.get(stage, 0.0)
            texts.append(show(value) if value else "0")
        return texts

    sentences = [
        "Time: seconds of each stage that nothing hides; they add up to the step. Hidden: seconds "
        "of communication behind computation. Sent: bytes that a rank sends."
    ]
    for name, plan in plans.items():
        if plan.get("pipeline") == LOOK_AHEAD:
            exposed_s = sum(plan["stage_s"].get(stage, 0.0) for stage in EXCHANGES)
            sentences.append(
                f"{name} is predicted with {prediction.pipelines()[name]}: "
                f"{show_seconds(exposed_s)} of its step ({show_frac(exposed_s / plan['step_s'])}) "
                "is communication that nothing hides. Row lookups and updates run in the "
                "communication thread, where the stages of a run do not show them; here they "
                "count as computation, because they share the cores."
            )
            break  # the same holds for the others
    header = ["stage", *(f"{what}, {name}" for what, _, _ in parts for name in compared)]
    rows = [[stage, *cells(stage)] for stage in prediction.stages(compared)]
    table = Table(header, rows, [["step", *cells(None)]])
    return Passage("stages", "Where a step's time and bytes go", [*sentences, table])


def _tables(prediction: Prediction) -> Passage | None:
    tables = prediction.tables
    if not tables:
        return None
    sentences = [
        "Where rows are stored: hot rows on every rank, each other row on one rank, in the memory "
        "of its device or its host. The device may cache rows of the host."
    ]
    if prediction.chosen != HOT_COLD and HOT_COLD in prediction.plans:
        sentences.append(f"This is the placement of {HOT_COLD}, which was not chosen.")
    if prediction.document.get("device") == "cpu":
        sentences.append('On CPU there is only one memory, shown as "device".')

    def total(name: str, parts: Sequence[Document]) -> dict[str, Any]:
        sums: dict[str, Any] = {"name": name}
        for key in SUMMED:
            values = [part.get(key) for part in parts]
            sums[key] = None if None in values else sum(values)
        return sums

    rest = tables[MAX_TABLES_SHOWN:]
    totals = [total(f"{len(rest)} more", rest)] if rest else []
    totals.append(total("all tables", tables))
    table = record_table(tables[:MAX_TABLES_SHOWN], TABLE_COLUMNS, totals)
    return Passage("tables", "Tables", [*sentences, table])


def _expected(prediction: Prediction) -> Passage | None:
    document = prediction.document
    expected, sentences = document.get("expected") or {}, []
    for name, text, show in (
        ("coverage_frac", "Lookups that hit a hot row", show_frac),
        ("hot_rows", "Distinct hot rows per rank and step", show_count),
        ("union_rows", "Distinct hot rows of all ranks in a step", show_count),
        ("cold_rows", "Distinct cold rows per rank and step", show_count),
        ("urgent_rows", "Of these, rows that some rank reads in the next step too", show_count),
        ("all_hot_frac", "Samples whose lookups are all hot", show_frac),
        ("cache_hit_frac", "Cold rows found in the device's cache", show_frac),
    ):
        if expected.get(name) is not None:
            sentences.append(f"{text}: {show(expected[name])}.")
    break_even = document.get("break_even") or {}
    for dim, rate in sorted(break_even.items(), key=lambda pair: int(pair[0])):
        sentences.append(
            f"Break-even at D={dim}: none; one of replicating and sharding is always faster."
            if rate is None
            else f"Break-even at D={dim}: a row pays off as a replica from {rate:.3g} lookups per "
            "step, summed over the ranks."
        )
    if break_even and document.get("pipeline") == LOOK_AHEAD:
        sentences.append(
            "Break-even rates are for sparse_dist; look_ahead hides the exchange of cold rows."
        )
    title = "What a step is expected to read"
    return Passage("expected", title, sentences) if sentences else None


def _rank_spread(values: Sequence[float]) -> dict[str, float]:
    """The value of each rank, or the least, median and most of many ranks."""
    if len(values) <= MAX_RANKS_SHOWN:
        return {str(rank): value for rank, value in enumerate(values)}
    ordered = sorted(values)
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}


def _memory(prediction: Prediction) -> Passage | None:
    columns = {
        f"{tier}, {name}": [show_bytes(size) for size in _rank_spread(sizes).values()]
        for name in prediction.compared
        for tier, sizes in prediction.memory(name).items()
    }
    sentences = ["Rows, optimizer state, gradients of replicas and caches, without activations."]
    served = (prediction.document.get("balance") or {}).get("served_rows")
    if served:
        columns["cold rows served"] = [show_count(n) for n in _rank_spread(served).values()]
        mean, most = sum(served) / len(served), max(served)
        sentences.append(
            f"A rank serves {show_count(mean)} cold rows per step on average; the busiest serves "
            f"{show_count(most)}{f', {show_change(most, mean)}' if mean else ''}."
        )
    if not columns:
        return None
    num_ranks = int(prediction.document["world"]["num_ranks"])
    labels = _rank_spread([0.0] * num_ranks)
    rows = list(zip(labels, *columns.values(), strict=True))
    table = Table(("rank", *columns), rows)
    return Passage("memory", "Memory and balance of the ranks", [*sentences, table])


def _sensitivity(prediction: Prediction) -> Passage | None:
    entries = prediction.document.get("sensitivity") or ()
    if not entries:
        return None
    step_s = prediction.plans[prediction.varied]["step_s"]
    sentences = [f"Compared with {prediction.varied} as predicted above, {show_seconds(step_s)}."]
    sentences += [
        f"{entry['what']}: {entry.get('why') or 'not predicted.'}"
        for entry in entries
        if entry.get("step_s") is None
    ]
    table = record_table(
        entries,
        [
            ("if", "what", str),
            ("step", "step_s", show_seconds),
            ("of the above", "step_s", lambda varied_s: show_ratio(varied_s, step_s)),
            ("samples", "samples_per_s", show_rate),
            ("hot rows", "hot_rows", show_count),
        ],
    )
    return Passage("sensitivity", "What if", [*sentences, table])


def draw_plan(prediction: Prediction) -> Figure:
    """Up to four panels: stages, rows by table, memory by rank, and sensitivity."""
    plans = prediction.order[:MAX_PLANS_DRAWN]
    tables = prediction.tables[:MAX_TABLES_SHOWN]
    entries = prediction.document.get("sensitivity") or []
    lower = [_draw_memory] if any(map(prediction.memory, prediction.compared)) else []
    lower += [_draw_sensitivity] if entries else []
    heights = [1.35 + 0.36 * len(plans)]
    heights += [0.9 + 0.2 * len(tables)] if tables else []
    heights += [max(2.4, 0.9 + 0.3 * len(entries))] if lower else []
    with report_style():
        figure = Figure(
            figsize=(11, sum(heights) + 0.5), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.09)
        )
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        figure.suptitle(prediction.describe(), fontsize=10, color=SOFT_INK)
        draw_stages(parts[0].subplots(), prediction, plans)
        if tables:
            _draw_rows(parts[1].subplots(), tables, len(prediction.tables))
        if lower:
            panels = parts[-1].subplots(1, len(lower), squeeze=False)[0]
            for draw, axes in zip(lower, panels, strict=True):
                draw(axes, prediction)
    return figure


def draw_stages(axes: Axes, prediction: Prediction, names: Sequence[str]) -> None:
    """Draw a stacked bar of stages for each of the named plans, with its step and bytes."""
    plans, baseline = prediction.plans, prediction.baseline
    parts = [plans[name]["stage_s"] for name in names]
    looks: dict[str, dict[str, str]] = {}
    for stage in sorted(
        prediction.stages(names), key=lambda s: STAGES.index(s) if s in STAGES else len(STAGES)
    ):
        if any(part.get(stage) for part in parts):
            looks[stage] = stage_look(stage)
    ends = stack_bars(axes, parts, looks)
    for position, name in enumerate(names):
        plan = plans[name]
        text = f"{show_seconds(plan['step_s'])}, {show_bytes(plan['total_sent_bytes'])} sent"
        if baseline is not None and name != baseline:
            text += f", {show_ratio(plan['step_s'], plans[baseline]['step_s'])} of the time"
        weight = "bold" if name == prediction.chosen else "normal"
        annotate(axes, ends[position], position, text, fontweight=weight)
    axes.set_xlim(0, max(ends) * 1.42 or 1.0)
    pipelines = prediction.pipelines()
    labels = [f"{_label(prediction, n)}\n{pipelines.get(n, '')}".rstrip(f"\n{DASH}") for n in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_title("Predicted time of a step (hatched: communication that nothing hides)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_major_formatter(lambda s, _: f"{s * 1e3:g} ms" if s < 1 else f"{s:g} s")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.14), ncols=6, handlelength=1.6)


def _draw_rows(axes: Axes, tables: Sequence[Document], num_tables: int) -> None:
    for i, (name, label, color, marker) in enumerate(ROW_MARKS):
        # Marks of equal counts would otherwise cover one another.
        shift = (i - 1.5) * 0.12
        points = [(table[name], y + shift) for y, table in enumerate(tables) if table.get(name)]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker, color=color, markersize=4.5, label=label, alpha=0.9)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.7), high * 1.6)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: show_count(value))
    labels = [f"{table['name']}  ({show_count(table['num_rows'])})" for table in tables]
    axes.set_yticks(range(len(tables)), labels)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=8)
    axes.set_ylim(len(tables) - 0.4, -0.6)
    shown = f" of the {len(tables)} largest tables" if num_tables > len(tables) else " by table"
    axes.set_title(f"Rows{shown}, by where they are stored (log scale)")
    light_grid(axes, "both")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_memory(axes: Axes, prediction: Prediction) -> None:
    names = prediction.compared
    width, handles, labels = 0.8 / len(names), [], []
    for position, name in enumerate(names):
        colors = BASELINE_TIER_COLORS if name == prediction.baseline else TIER_COLORS
        bottoms: list[float] = []
        for tier, sizes in prediction.memory(name).items():
            spread = _rank_spread(sizes)
            labels, heights = list(spread), list(spread.values())
            bottoms = bottoms or [0.0] * len(heights)
            places = [i + (position - (len(names) - 1) / 2) * width for i in range(len(heights))]
            look: dict[str, Any] = {"color": colors[tier], "edgecolor": "white"}
            axes.bar(places, heights, width * 0.92, bottom=bottoms, **look)
            bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
            handles.append(Patch(color=colors[tier], label=f"{tier}, {name}"))
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("rank" if labels[0] == "0" else "ranks, by their memory")
    axes.set_ylim(0, axes.get_ylim()[1] * (1.16 + 0.09 * len(handles)))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.yaxis.set_major_formatter(lambda value, _: show_bytes(value))
    axes.set_title("Memory of tables per rank")
    axes.legend(handles=handles, loc="upper left", ncols=1, fontsize=8)
    light_grid(axes, "y")


def _draw_sensitivity(axes: Axes, prediction: Prediction) -> None:
    """Samples per second, or the step if an entry lacks them, compared with the plan as it is."""
    base, entries = prediction.plans[prediction.varied], prediction.document["sensitivity"]
    predicted = [entry for entry in entries if entry.get("step_s") is not None]
    is_rate = all(entry.get("samples_per_s") for entry in predicted)
    name, show = ("samples_per_s", show_rate) if is_rate else ("step_s", show_seconds)
    known = [1.0, *(entry[name] / base[name] for entry in predicted)]
    for position, entry in enumerate(entries):
        if entry not in predicted:
            text = "does not fit or was not predicted"
            annotate(axes, 1.0, position, text, color=SOFT_INK)
            continue
        ratio = entry[name] / base[name]
        axes.plot([1.0, ratio], [position] * 2, color=CONNECTOR_COLOR, linewidth=1.2, zorder=1)
        axes.plot([ratio], [position], "o", color=RUN_COLORS[0], markersize=6)
        annotate(axes, max(ratio, 1.0), position, f"{show(entry[name])}, {ratio:.2f}x")
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    span = max(max(known) - min(known), 0.1)
    axes.set_xlim(min(known) - 0.08 * span, max(known) + 0.75 * span)
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.set_yticks(range(len(entries)), [entry["what"] for entry in entries])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_title(f"{'Samples per second' if is_rate else 'Time of a step'} if one thing changes")
    axes.set_xlabel(f"1x: {prediction.varied}, {show(base[name])}")
    light_grid(axes, "x")
