"""Predicted against measured: a table for each run that has both, and one picture of them all."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hotrec.report.page import build_figure, build_missing
from hotrec.report.read import Run
from hotrec.report.style import INK, light_grid, report_style, to_svg
from hotrec.report.units import NOT_RECORDED, show_bytes, show_error, show_seconds

PREDICTED_COLOR, MEASURED_COLOR = "#88CCEE", "#332288"
CAPTION = (
    "Measured are medians over the steps from the one named on: of each stage the mean over the "
    "ranks, beside it the slowest rank. An error is predicted minus measured, in percent of the "
    "measured step. The measured stages are medians one by one, so they need not add up to the "
    "median step."
)


def has_both(run: Run) -> bool:
    """Whether the run was predicted and ran long enough to be compared."""
    return bool(run.predicted_stage_s and run.measured_stage_s)


def build_predicted(runs: Sequence[Run]) -> str:
    """The section's HTML: picture, tables, and for the other runs why they have none."""
    shown = [run for run in runs if has_both(run)]
    parts = []
    if shown:
        svg = to_svg(draw_predicted(shown), "Predicted and measured seconds by stage")
        parts.append(build_figure(svg, CAPTION, ""))
    parts += [f"<h3>{escape(run.name)}</h3>{build_table(run)}" for run in shown]
    parts += [build_missing(_why_not(run)) for run in runs if not has_both(run)]
    return "\n".join(parts)


def _why_not(run: Run) -> str:
    if not run.predicted_stage_s:
        return f"{run.name}, prediction: {NOT_RECORDED}."
    first = run.number("compared_from_step")
    if first is None:
        return f"{run.name}, measured stages: {NOT_RECORDED}."
    return (
        f"{run.name}: no step was measured from step {first:.0f} on, from which runs are compared "
        "with their prediction; those before warm up."
    )


def build_table(run: Run) -> str:
    """A row per stage, then the step and the bytes."""
    step_s = run.number("measured_step_s")
    rows = [
        _row(
            stage.replace("_", " "),
            run.predicted_stage_s.get(stage),
            run.measured_stage_s.get(stage),
            run.slowest_rank_stage_s.get(stage),
            step_s,
        )
        for stage in _stages([run])
    ]
    whole = _row("Step", run.number("predicted_step_s"), step_s, None, step_s)
    sent = _sent_row(run)
    first = run.number("compared_from_step")
    measured = "Measured" if first is None else f"Measured from step {first:.0f}"
    heads = ("Stage", "Predicted", measured, "Slowest rank", "Error", "Error, of the step")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"<tfoot>{whole}{sent}</tfoot></table></div>"
    )


def _stages(runs: Sequence[Run]) -> list[str]:
    return list(
        dict.fromkeys(
            stage for run in runs for stage in (*run.predicted_stage_s, *run.measured_stage_s)
        )
    )


def _row(
    name: str,
    predicted_s: float | None,
    measured_s: float | None,
    slowest_s: float | None,
    step_s: float | None,
) -> str:
    texts = [None if s is None else show_seconds(s) for s in (predicted_s, measured_s, slowest_s)]
    if predicted_s is None or measured_s is None:
        texts += [None, None]
    else:
        error_s = predicted_s - measured_s
        texts.append(_signed(error_s, show_seconds(abs(error_s))))
        texts.append(show_error(error_s / step_s) if step_s else None)
    return f"<tr><td>{escape(name)}</td>{_cells(texts)}</tr>"


def _sent_row(run: Run) -> str:
    predicted, measured = run.number("predicted_sent_bytes"), run.number("sent_bytes_total")
    frac = run.number("sent_bytes_error_frac")
    texts = [None if value is None else show_bytes(value) for value in (predicted, measured)]
    if predicted is None or measured is None:
        texts += [None, None, None]
    else:
        error = predicted - measured
        texts += [None, _signed(error, show_bytes(abs(error)))]
        texts.append(None if frac is None else f"{show_error(frac)} of the bytes")
    return f"<tr><td>Bytes sent, per step and rank</td>{_cells(texts)}</tr>"


def _signed(value: float, text: str) -> str:
    return f"{'-' if value < 0 else '+'}{text}"


def _cells(texts: Sequence[str | None]) -> str:
    return "".join("<td></td>" if text is None else f"<td>{escape(text)}</td>" for text in texts)


def draw_predicted(runs: Sequence[Run]) -> Figure:
    """Two bars a stage, predicted and measured; the runs below one another on one scale.

    Args:
        runs: with both, see ``has_both``.
    """
    stages = _stages(runs)
    most_s = max(
        seconds
        for run in runs
        for seconds in (*run.predicted_stage_s.values(), *run.slowest_rank_stage_s.values())
    )
    with report_style():
        figure = Figure(figsize=(11, 0.6 + 2.7 * len(runs)), layout="constrained")
        grid = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
        for axes, run in zip(grid, runs, strict=True):
            _draw_run(axes, run, stages)
            axes.set_ylim(0, most_s * 1.12 or 1.0)
        slowest, *handles = grid[0].get_legend_handles_labels()[0]  # lines come before bars
        figure.legend(handles=[*handles, slowest], loc="outside upper right", ncols=3)
    return figure


def _draw_run(axes: Axes, run: Run, stages: Sequence[str]) -> None:
    places = range(len(stages))
    predicted = [run.predicted_stage_s.get(stage, 0.0) for stage in stages]
    measured = [run.measured_stage_s.get(stage, 0.0) for stage in stages]
    bars: dict[str, float] = {"width": 0.36, "linewidth": 0.8}
    axes.bar(
        [place - 0.19 for place in places],
        predicted,
        color=PREDICTED_COLOR,
        edgecolor=INK,
        hatch="//",
        label="predicted",
        **bars,  # type: ignore[arg-type]
    )
    axes.bar(
        [place + 0.19 for place in places],
        measured,
        color=MEASURED_COLOR,
        edgecolor=INK,
        label="measured, mean over the ranks",
        **bars,  # type: ignore[arg-type]
    )
    slowest = [run.slowest_rank_stage_s.get(stage) for stage in stages]
    marked = [(place + 0.19, s) for place, s in zip(places, slowest, strict=True) if s is not None]
    axes.plot(
        [place for place, _ in marked],
        [s for _, s in marked],
        linestyle="",
        marker="_",
        markersize=12,
        markeredgewidth=1.6,
        color=INK,
        label="slowest rank",
    )
    axes.set_title(_title(run))
    axes.set_xticks(places, [stage.replace("_", "\n") for stage in stages])
    axes.tick_params(axis="x", labelcolor=INK)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    light_grid(axes, "y")


def _title(run: Run) -> str:
    predicted, measured = run.number("predicted_step_s"), run.number("measured_step_s")
    error = run.number("step_error_frac")
    if predicted is None or measured is None or error is None:
        return run.name
    return (
        f"{run.name}: step predicted {show_seconds(predicted)}, measured {show_seconds(measured)}, "
        f"error {show_error(error)}"
    )
