"""What-if: the predictions of a sweep side by side, and the cheapest machine among them.

Each job's directory holds ``prediction.json``, a prediction document or ``{"infeasible": why}``,
and ``point.json``: ``overrides`` {key: value} of the job, ``num_ranks``, ``ranks_per_host``,
``batch_size``. A directory with a point and no prediction is a job that ended with an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from hotrec.report.plan import PREDICTION_JSON, Prediction
from hotrec.report.read import parse_object
from hotrec.report.render import (
    Page,
    Passage,
    Picture,
    Tile,
    record_table,
    render_html,
    render_text,
    write_file,
)
from hotrec.report.style import (
    INK,
    SOFT_INK,
    legend_columns,
    light_grid,
    report_style,
    run_color,
    run_line,
    to_svg,
    write_png,
)
from hotrec.report.units import show_bytes, show_count, show_known, show_rate, show_seconds

POINT_JSON = "point.json"
WHAT_IF_HTML, WHAT_IF_JSON, WHAT_IF_PNG = "what_if.html", "what_if.json", "what_if.png"
TITLE = "hotrec plan, what if"
ENDED_WITH_ERROR = "the job ended with an error"
# These have columns of their own.
OF_THE_WORLD = ("plan.world_size", "plan.ranks_per_host", "trainer.batch_size")


@dataclass(frozen=True)
class Point:
    """One job of a sweep; what is not known is None.

    Args:
        name: The name of its directory.
        overrides: The overrides that the job was started with.
        num_ranks: The number of ranks.
        ranks_per_host: The number of ranks on each host.
        batch_size: The batch size per rank.
        chosen: The plan that is predicted to be fastest.
        step_s: The predicted step of that plan.
        samples_per_s: The predicted rate of all ranks.
        sent_bytes: The bytes that a rank sends in a step.
        device_bytes: The device memory of the tables on the fullest rank.
        host_bytes: The host memory of the tables on the fullest rank.
        problem: Why there is no prediction; empty if there is one.
    """

    name: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int | None = None
    ranks_per_host: int | None = None
    batch_size: int | None = None
    chosen: str | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    sent_bytes: float | None = None
    device_bytes: float | None = None
    host_bytes: float | None = None
    problem: str = ""

    @property
    def num_hosts(self) -> int | None:
        if self.num_ranks is None or not self.ranks_per_host:
            return None
        return self.num_ranks // self.ranks_per_host

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def machine(self) -> str:
        """Such as ``8 ranks on 1 host``."""
        counts = {"rank": self.num_ranks, "host": self.num_hosts}
        return " on ".join(
            f"{show_known(show_count, count)} {thing}{'' if count == 1 else 's'}"
            for thing, count in counts.items()
        )


def read_predictions(sweep_dir: Path) -> list[Point]:
    """The jobs of a sweep, ordered by the names of their directories, numbers by value.

    Raises:
        ValueError: If there is none, or a file of one is broken.
    """
    names = (PREDICTION_JSON, POINT_JSON)
    folders = {path.parent for name in names for path in sweep_dir.rglob(name)}
    if not folders:
        raise ValueError(
            f"what-if {sweep_dir}: expected directories with {PREDICTION_JSON}, got none. "
            "Pass the directory of a `hotrec plan --multirun`."
        )
    order = sorted(
        folders, key=lambda path: (not path.name.isdigit(), path.name.zfill(9), str(path))
    )
    return [_read_point(folder, str(folder.relative_to(sweep_dir))) for folder in order]


def _read_point(folder: Path, name: str) -> Point:
    facts, document = _read_json(folder / POINT_JSON), _read_json(folder / PREDICTION_JSON)
    known: dict[str, Any] = {
        "name": name,
        "overrides": {key: str(value) for key, value in (facts.get("overrides") or {}).items()},
        **{key: facts.get(key) for key in ("num_ranks", "ranks_per_host", "batch_size")},
    }
    if known["ranks_per_host"] is None:
        known["ranks_per_host"] = known["num_ranks"]  # all on one host
    if not document:
        return Point(**known, problem=ENDED_WITH_ERROR)
    if "infeasible" in document:
        return Point(**known, problem=str(document["infeasible"]))
    prediction = Prediction(document, where=str(folder / PREDICTION_JSON))
    plan = prediction.plans[prediction.chosen]
    known |= document["world"] | {"batch_size": document["batch_size"]}
    for tier in ("device_bytes", "host_bytes"):
        sizes = (float(rank[tier]) for rank in plan.get("memory") or [])
        known[tier] = max(sizes, default=None)
    return Point(
        **known,
        chosen=prediction.chosen,
        step_s=plan["step_s"],
        samples_per_s=plan["samples_per_s"],
        sent_bytes=plan["total_sent_bytes"],
    )


def _read_json(path: Path) -> dict[str, Any]:
    return parse_object(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}


def varied_keys(points: Sequence[Point]) -> list[str]:
    """Overrides in which the jobs differ, apart from ranks, hosts and batch."""
    keys = dict.fromkeys(key for point in points for key in point.overrides)
    return [
        key
        for key in keys
        if key not in OF_THE_WORLD and len({point.overrides.get(key) for point in points}) > 1
    ]


def find_cheapest(points: Sequence[Point], min_samples_per_s: float | None) -> Point | None:
    """The point with the fewest ranks, then hosts, that fits and is fast enough.

    Args:
        points: The points of a sweep; of equally cheap ones the fastest is chosen.
        min_samples_per_s: The required rate of all ranks; None accepts any point that fits.
    """
    enough = [
        point
        for point in points
        if point.fits
        and point.samples_per_s is not None
        and point.samples_per_s >= (min_samples_per_s or 0.0)
    ]
    return min(
        enough,
        key=lambda p: (p.num_ranks or 0, p.num_hosts or 0, -(p.samples_per_s or 0.0)),
        default=None,
    )


def what_if_text(points: Sequence[Point], min_samples_per_s: float | None = None) -> str:
    """The answer and the table, for a terminal."""
    return render_text(Page(TITLE, _passages(points, min_samples_per_s)))


def write_what_if(
    points: Sequence[Point], directory: Path, min_samples_per_s: float | None = None
) -> Path:
    """Write what_if.html, what_if.json and what_if.png into a directory.

    Args:
        points: The points of a sweep, at least one.
        directory: The directory, made if it does not exist.
        min_samples_per_s: The rate that the cheapest machine must reach; None accepts any.

    Returns:
        The path of the page.
    """
    cheapest = find_cheapest(points, min_samples_per_s)
    figure = draw_what_if(points, cheapest, min_samples_per_s)
    first, *others = _passages(points, min_samples_per_s)
    picture = Picture(
        to_svg(figure, "Samples per second by ranks"),
        "A cross marks a point that does not fit; the ring marks the cheapest machine.",
    )
    tiles = []
    if cheapest is not None:
        tiles = [
            Tile(cheapest.machine, "the cheapest machine"),
            Tile(show_known(show_rate, cheapest.samples_per_s), "samples, all ranks"),
            Tile(show_known(show_seconds, cheapest.step_s), f"predicted step, {cheapest.chosen}"),
            Tile(show_known(show_bytes, cheapest.sent_bytes), "sent per step and rank"),
        ]
    passages = [first, Passage("picture", "Samples per second", [picture]), *others]
    page = Page(TITLE, passages, f"{len(points)} points", tiles, WHAT_IF_JSON)
    document = {
        "min_samples_per_s": min_samples_per_s,
        "cheapest": None if cheapest is None else cheapest.name,
        "points": [
            {**asdict(point), "num_hosts": point.num_hosts, "fits": point.fits} for point in points
        ],
    }
    write_file(directory / WHAT_IF_JSON, json.dumps(document, indent=2) + "\n")
    write_png(figure, directory / WHAT_IF_PNG)
    return write_file(directory / WHAT_IF_HTML, render_html(page))


def _passages(points: Sequence[Point], min_samples_per_s: float | None) -> list[Passage]:
    cheapest, keys = find_cheapest(points, min_samples_per_s), varied_keys(points)
    wanted = "that fits"
    if min_samples_per_s is not None:
        wanted += f" and reaches {show_rate(min_samples_per_s)}"
    if cheapest is not None:
        parts = [cheapest.machine, f"batch {show_known(show_count, cheapest.batch_size)} per rank"]
        parts += [f"{key}={cheapest.overrides[key]}" for key in keys if key in cheapest.overrides]
        rate = show_known(show_rate, cheapest.samples_per_s)
        answer = f"The cheapest machine {wanted}: {', '.join(parts)}: {cheapest.chosen}, {rate} "
        answer += f"(job {cheapest.name})."
    else:
        rates = [point.samples_per_s or 0.0 for point in points if point.fits]
        answer = f"None of the {len(points)} points is a machine {wanted}. "
        answer += f"The fastest reaches {show_rate(max(rates))}." if rates else "None fits at all."
    records = [
        {
            **asdict(point),
            **{f"override {key}": value for key, value in point.overrides.items()},
            "num_hosts": point.num_hosts,
            "fits": "error" if point.problem == ENDED_WITH_ERROR else "yes" if point.fits else "no",
        }
        | ({"fits": "cheapest"} if point is cheapest else {})
        for point in points
    ]
    table = record_table(
        records,
        [
            ("job", "name", str),
            ("ranks", "num_ranks", show_count),
            ("hosts", "num_hosts", show_count),
            ("batch", "batch_size", show_count),
            *((key, f"override {key}", str) for key in keys),
            ("fits", "fits", str),
            ("chosen", "chosen", str),
            ("step", "step_s", show_seconds),
            ("samples", "samples_per_s", show_rate),
            ("sent", "sent_bytes", show_bytes),
            ("device memory", "device_bytes", show_bytes),
            ("host memory", "host_bytes", show_bytes),
        ],
    )
    problems = [f"Job {point.name}: {point.problem}" for point in points if not point.fits]
    passages = [
        Passage("cheapest", "The cheapest machine", [answer]),
        Passage("points", "Every point", [table]),
    ]
    return passages + ([Passage("problems", "What does not fit", problems)] if problems else [])


def draw_what_if(
    points: Sequence[Point], cheapest: Point | None, min_samples_per_s: float | None
) -> Figure:
    """A line for each batch size and setting that was varied; points of unknown ranks left out."""
    shown = [point for point in points if point.num_ranks is not None]
    lines: dict[str, list[Point]] = {}
    for point in shown:
        lines.setdefault(_line_label(point, points), []).append(point)
    with report_style():
        figure = Figure(figsize=(11, 4.6), layout="constrained")
        axes = figure.subplots()
        for position, (label, members) in enumerate(lines.items()):
            _draw_line(axes, label, members, position)
        if cheapest is not None and cheapest.num_ranks is not None:
            rate = cheapest.samples_per_s or 0.0
            ring = dict[str, Any](markersize=15, fillstyle="none", color=INK, label="cheapest")
            axes.plot([cheapest.num_ranks], [rate], "o", **ring)
        if min_samples_per_s is not None:
            axes.axhline(min_samples_per_s, color=INK, linewidth=1, linestyle=(0, (2, 2)))
            note = axes.annotate(
                f"required: {show_rate(min_samples_per_s)}",
                (0.005, min_samples_per_s),
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
                color=SOFT_INK,
            )
            note.set_in_layout(False)
        _set_axes(axes, sorted({point.num_ranks or 0 for point in shown}))
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            figure.legend(handles, labels, loc="outside lower center", ncols=legend_columns(labels))
    return figure


def _line_label(point: Point, points: Sequence[Point]) -> str:
    """The batch, and whatever else was varied apart from ranks and hosts."""
    batch = "batch unknown" if point.batch_size is None else f"batch {show_count(point.batch_size)}"
    parts = [batch]
    if len({p.overrides.get("plan.ranks_per_host") for p in points}) > 1:
        parts.append(f"{point.ranks_per_host} ranks per host")
    # The last part of a dotted key is enough in a figure.
    parts += [
        f"{key.rpartition('.')[2]}={point.overrides[key]}"
        for key in varied_keys(points)
        if key in point.overrides
    ]
    return ", ".join(parts)


def _draw_line(axes: Axes, label: str, members: Sequence[Point], position: int) -> None:
    color = run_color(position)
    fitting = sorted((p.num_ranks or 0, p.samples_per_s or 0.0) for p in members if p.fits)
    axes.plot(
        [num_ranks for num_ranks, _ in fitting],
        [rate for _, rate in fitting],
        color=color,
        linestyle=run_line(position),
        marker="o",
        markersize=5,
        label=label,
    )
    # Crosses stand below the curves; those of several lines at one rank stand side by side.
    missing = [(p.num_ranks or 0) * 1.035**position for p in members if not p.fits]
    (crosses,) = axes.plot(
        missing,
        [0.05] * len(missing),
        "x",
        color=color,
        markersize=7,
        markeredgewidth=2,
        transform=axes.get_xaxis_transform(),
    )
    crosses.set_in_layout(False)


def _set_axes(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    if ranks:
        axes.set_xlim(ranks[0] / 1.25, ranks[-1] * 1.25)
        axes.xaxis.set_major_locator(FixedLocator(list(ranks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    top = axes.get_ylim()[1]
    axes.set_ylim(-0.1 * top, top)
    axes.yaxis.set_major_locator(FixedLocator([t for t in axes.get_yticks() if 0 <= t <= top]))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("ranks (log scale); a cross: does not fit")
    axes.set_title("Predicted samples per second, all ranks")
    light_grid(axes, "both")
