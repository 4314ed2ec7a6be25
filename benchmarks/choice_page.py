"""The page and the picture of benchmarks/choice_grid.py's files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import matplotlib
import numpy as np

from hotrec.report.pictures import light_grid, report_style, run_color
from hotrec.report.render import markdown_table
from hotrec.report.units import show_count, show_frac, show_seconds

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

T = TypeVar("T")
# What `hotrec train` chooses by itself, among the names of the candidates.
DEFAULT = "default"
BASELINES = ("planner", "hand_tuned")
# Often the same plan as one of these.
TABLE_WISE = "table_wise"
# What is to be reached: (most that is lost, in which share of the cells).
WITHIN, WITHIN_SHARE, WITHIN_ALL = 0.03, 0.95, 0.08
WITHIN_BUSY, WITHIN_BUSY_SHARE = 0.05, 0.90
PREDICTED, PREDICTED_SHARE, HELD_SHARE = 0.15, 0.90, 0.90

HEADER = """# Choices of the defaults

Made by `benchmarks/choice_grid.py`. In each cell the machine is calibrated once; then
`hotrec train`, with its own loader and ranks, trains the defaults (`placement=cost pipeline=auto`)
and every candidate in full, in turn. Hosts are network namespaces with one rank each, every link
shaped to the rate both ways; loopback: all ranks on one host. `hot_cold` is the placement that the
cost model chooses for that pipeline; `planner`, `hand_tuned` and `table_wise` are TorchRec's plans,
the last only where it is another than the first two.

Step: median of a run's steps after the first {warmup_steps}, of rank 0; of several runs their
median. A candidate that took 1.2 times the best in the first repeat, or 1.08 times in the median of
the first two, is not trained again. Cells are repeated more often where the ratios to the best or
to TorchRec's plans are noisy, or show the defaults above what is wanted (`--most-repeats`;
the latter favours the defaults a little). Ratios are of runs of the same repeat, median over the
repeats.
Best: the candidate with the least step; as the least of several noisy figures it is a little too
small. Its plan / best: with the run of the candidate that trained the very plan which the defaults
chose, in place of their own run. Predicted: error of the defaults' prediction, which a trial may
have corrected."""


@dataclass(frozen=True)
class Judged:
    """The result of a cell.

    Args:
        default_s: The step of the defaults.
        best: The fastest candidate, and its step in ``best_s``.
        ratio: The defaults over the best.
        plan_ratio: The same, with the run of the candidate that trained the very plan which the
            defaults chose, where there is one, in place of the defaults' own run: without the
            noise between two runs of one plan.
        baseline_ratios: The defaults over the faster run of each of TorchRec's plans.
        torchrec_ratio: The faster of TorchRec's plans over the best; None if none was trained.
        error_frac: (predicted - measured) / measured of the defaults; None without a prediction.
        is_held: Whether the predicted interval holds the measured step; None without an interval.
        noise_frac: How far the defaults and a candidate of the very same plan differ; None if no
            candidate has it.
    """

    default_s: float
    best: str
    best_s: float
    ratio: float
    plan_ratio: float
    baseline_ratios: Mapping[str, float]
    torchrec_ratio: float | None
    error_frac: float | None
    is_held: bool | None
    noise_frac: float | None


Runs = Sequence[Mapping[str, Any]]


def steps_of(runs: Runs) -> dict[str, dict[int, float]]:
    """Candidate -> repeat -> seconds of a step, of the runs that ended."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.get("step_p50_s"):
            found.setdefault(run["candidate"], {})[run["repeat"]] = run["step_p50_s"]
    return found


def alike(runs: Runs) -> set[str]:
    """The candidates that are another's plan, which the defaults therefore did not predict."""
    predicted = [
        run["predicted"] for run in runs if run["candidate"] == DEFAULT and "predicted" in run
    ]
    names = {f"{TABLE_WISE}-sparse_dist": "", f"{TABLE_WISE}-base": " base"}
    return {
        candidate
        for candidate, pipeline in names.items()
        if predicted and f"torchrec {TABLE_WISE}{pipeline}" not in predicted[0]
    }


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Median over the repeats that both have of ours / theirs; None without such a repeat."""
    ratios = [ours[repeat] / theirs[repeat] for repeat in ours if repeat in theirs]
    return median(ratios) if ratios else None


def judge(document: Mapping[str, Any]) -> Judged | None:
    """Compare the defaults with the candidates; None if one of them has not been run yet."""
    runs = document["runs"]
    wanted = {DEFAULT, *document["settings"]["candidates"]} - alike(runs)
    if not wanted <= {run["candidate"] for run in runs}:
        return None
    steps = steps_of(runs)
    default = steps.pop(DEFAULT, {})
    of_candidates = {
        name: median(found.values()) for name, found in steps.items() if default.keys() & found
    }
    if not of_candidates:
        return None
    best = min(of_candidates, key=of_candidates.__getitem__)
    baselines = {}
    for plan in BASELINES:
        names = [name for name in of_candidates if name.startswith(f"{plan}-")]
        if names:
            baselines[plan] = min(names, key=of_candidates.__getitem__)
    fastest = min(baselines.values(), key=of_candidates.__getitem__, default=None)
    ours = [run for run in runs if run["candidate"] == DEFAULT and run.get("step_p50_s")]
    twins = steps_of_same_plan(runs)
    noise = [abs(default[repeat] / step_s - 1) for repeat, step_s in twins.items()]
    return Judged(
        default_s=median(default.values()),
        best=best,
        best_s=of_candidates[best],
        ratio=_ratio(default, steps[best]),
        plan_ratio=_ratio({**default, **twins}, steps[best]),
        baseline_ratios={plan: _ratio(default, steps[name]) for plan, name in baselines.items()},
        torchrec_ratio=None if fastest is None else _ratio(steps[fastest], steps[best]),
        error_frac=_median([error_frac(run) for run in ours]),
        is_held=_majority([is_held(run) for run in ours]),
        noise_frac=_median(noise),
    )


def steps_of_same_plan(runs: Runs) -> dict[int, float]:
    """Repeat -> step of the candidate whose plan is that of the defaults in this repeat."""
    ended = [run for run in runs if run.get("step_p50_s") and run.get("plan")]
    plans = {run["repeat"]: run["plan"] for run in ended if run["candidate"] == DEFAULT}
    return {
        run["repeat"]: run["step_p50_s"]
        for run in ended
        if run["candidate"] != DEFAULT and plans.get(run["repeat"]) == run["plan"]
    }


def _ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """``paired_ratio``, or that of the medians where no repeat has both."""
    paired = paired_ratio(ours, theirs)
    return median(ours.values()) / median(theirs.values()) if paired is None else paired


def predictions(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A run of each candidate with the median of its steps, since all have one prediction.

    The defaults may have tried plans, which corrects their predictions; candidates have not.
    """
    ended = {run["candidate"]: run for run in document["runs"] if run.get("step_p50_s")}
    return [
        {**ended[name], "step_p50_s": median(steps.values())}
        for name, steps in steps_of(document["runs"]).items()
        if name != DEFAULT
    ]


def error_frac(run: Mapping[str, Any]) -> float | None:
    """(predicted - measured) / measured of a run; None without a prediction."""
    predicted = run.get("predicted_step_s")
    return predicted / run["step_p50_s"] - 1 if predicted and run.get("step_p50_s") else None


def is_held(run: Mapping[str, Any]) -> bool | None:
    """Whether the measured step is in the predicted interval; None without an interval."""
    if run.get("step_low_s") is None or not run.get("step_p50_s"):
        return None
    return bool(run["step_low_s"] <= run["step_p50_s"] <= run["step_high_s"])


def _known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return median(known) if known else None


def _majority(values: Iterable[bool | None]) -> bool | None:
    known = _known(values)
    return 2 * sum(known) > len(known) if known else None


def share(values: Iterable[T | None], holds: Callable[[T], bool]) -> float | None:
    """Share of the known values for which ``holds``; None without any."""
    known = _known(values)
    return sum(map(holds, known)) / len(known) if known else None


def read(directory: Path) -> dict[str, dict[str, Any]]:
    """The cells' documents by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*_w*.json"))}


def summarize(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the verdict; None if not measured."""
    judged = {name: judge(document) for name, document in documents.items()}
    cells = _known(judged.values())
    predicted = [found for document in documents.values() for found in predictions(document)]
    ratio_of = {name: cell.ratio for name, cell in judged.items() if cell is not None}
    return {
        "num_cells": len(cells),
        "num_unfinished": len(judged) - len(cells),
        "within_share": share(ratio_of.values(), lambda ratio: ratio <= 1 + WITHIN),
        "within_busy_share": share(ratio_of.values(), lambda ratio: ratio <= 1 + WITHIN_BUSY),
        "plan_within_share": share(
            [cell.plan_ratio for cell in cells], lambda ratio: ratio <= 1 + WITHIN
        ),
        "worst_plan_ratio": max((cell.plan_ratio for cell in cells), default=None),
        "worst_ratio": max(ratio_of.values(), default=None),
        "worst_cell": max(ratio_of, key=ratio_of.__getitem__, default=None),
        **{
            f"worst_over_{plan}": max(
                (cell.baseline_ratios[plan] for cell in cells if plan in cell.baseline_ratios),
                default=None,
            )
            for plan in BASELINES
        },
        "default_predicted_share": share(
            [cell.error_frac for cell in cells], lambda error: abs(error) <= PREDICTED
        ),
        "default_held_share": share([cell.is_held for cell in cells], bool),
        "warned_share": share(
            [_majority(bool(r.get("cost_note")) for r in d["runs"]) for d in documents.values()],
            bool,
        ),
        "num_predictions": len(_known(map(error_frac, predicted))),
        "predicted_share": share(map(error_frac, predicted), lambda e: abs(e) <= PREDICTED),
        "held_share": share(map(is_held, predicted), bool),
        "run_predicted_share": share(
            [
                error_frac(r)
                for d in documents.values()
                for r in d["runs"]
                if r["candidate"] != DEFAULT
            ],
            lambda error: abs(error) <= PREDICTED,
        ),
        "median_noise_frac": _median([cell.noise_frac for cell in cells]),
        "num_noise": len(_known(cell.noise_frac for cell in cells)),
        "median_trial_s": _median(
            run.get("trial_s") for document in documents.values() for run in document["runs"]
        ),
        "given_trial_s": max((d["settings"]["trial_s"] for d in documents.values()), default=0.0),
        "num_failed_runs": sum("error" in r for d in documents.values() for r in d["runs"]),
    }


def verdict(figures: Mapping[str, Any], *, is_busy: bool) -> str:
    """One paragraph: the targets and the results."""
    if not figures["num_cells"]:
        return "No cell is finished."
    num_cells = figures["num_cells"]
    within, least = (WITHIN_BUSY, WITHIN_BUSY_SHARE) if is_busy else (WITHIN, WITHIN_SHARE)
    reached = figures["within_busy_share" if is_busy else "within_share"]
    parts = [
        f"In {num_cells} cells the defaults are within {within:.0%} of the best candidate in "
        f"{_found(reached, reached >= least, f'at least {least:.0%}')}",
        f"at worst they take {_found_times(figures['worst_ratio'], 1 + WITHIN_ALL)} "
        f"(`{figures['worst_cell']}`)",
        *(
            f"against TorchRec's {name} at worst {_found_times(found, 1 + WITHIN)}"
            for plan, name in zip(BASELINES, ("planner", "hand-tuned plan"), strict=True)
            if (found := figures[f"worst_over_{plan}"]) is not None
        ),
    ]
    text = "; ".join(parts) + "."
    found = figures["predicted_share"]
    if is_busy:
        text += (
            f" In {show_frac(figures['warned_share'])} of the cells the plan says that its costs "
            "are not to be trusted"
        )
        text += (
            "."
            if found is None
            else f"; {show_frac(found)} of its predictions, made without a trial, are within "
            f"{PREDICTED:.0%} of the measured step."
        )
    elif found is not None:
        text += (
            f" Of {figures['num_predictions']} predictions, one a candidate, made without a trial, "
            f"{_found(found, found >= PREDICTED_SHARE, f'at least {PREDICTED_SHARE:.0%}')} are "
            f"within {PREDICTED:.0%} of the measured step (if every repeat counts, "
            f"{show_frac(figures['run_predicted_share'])})"
        )
        held = figures["held_share"]
        text += (
            "; no interval was predicted."
            if held is None
            else "; the interval holds the measured step in "
            f"{_found(held, held >= HELD_SHARE, f'at least {HELD_SHARE:.0%}')}."
        )
    if figures["median_noise_frac"] is not None:
        text += (
            f" Noise: in {figures['num_noise']} cells the defaults train the very plan of a "
            f"candidate; the two differ by {figures['median_noise_frac']:.1%} in the median. With "
            f"that candidate's run in place of their own, {show_frac(figures['plan_within_share'])}"
            f" of the cells are within {WITHIN:.0%}, the worst at "
            f"{figures['worst_plan_ratio'] - 1:+.1%}."
        )
    if figures["median_trial_s"] is not None:
        given_s = figures["given_trial_s"]
        text += (
            f" A trial takes {show_seconds(figures['median_trial_s'])} in the median, with "
            f"{show_seconds(given_s)} given, as a run of {show_seconds(100 * given_s)} gives it."
        )
    left_out = [
        f"{figures[key]} {what}"
        for key, what in (
            ("num_unfinished", "cells are not finished"),
            ("num_failed_runs", "runs failed"),
        )
        if figures[key]
    ]
    return f"{text} {' and '.join(left_out)}.".strip() if left_out else text


def _found(value: float, is_reached: bool, wanted: str) -> str:
    return f"{show_frac(value)} (wanted: {wanted}{'' if is_reached else '; **missed**'})"


def _found_times(ratio: float, limit: float) -> str:
    change = f"{abs(ratio - 1):.1%} {'more' if ratio > 1 else 'less'}"
    missed = "" if ratio <= limit else "; **missed**"
    return f"{change} (wanted: at most {limit - 1:.0%} more{missed})"


def cell_rows(documents: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """A row of text for every cell: steps in ms, what was chosen, ratios, prediction, trial."""
    rows = []
    for document in documents.values():
        runs = document["runs"]
        steps = {n: median(found.values()) for n, found in steps_of(runs).items()}
        settings, cell = document["settings"], judge(document)
        row = [
            settings["data"],
            show_count(settings["batch_size"]),
            settings["network"],
            str(settings["num_ranks"]),
            *(f"{1e3 * steps[n]:.1f}" if n in steps else "-" for n in names),
        ]
        ours = [run for run in runs if run["candidate"] == DEFAULT and "error" not in run]
        chosen = sorted({f"{r.get('chosen', '?')}, {r['pipeline']}" for r in ours})
        row += ["; ".join(chosen) or "-", "-" if cell is None else cell.best]
        row += ["-"] * 2 if cell is None else [f"{cell.ratio:.3f}", f"{cell.plan_ratio:.3f}"]
        row += ["-" if cell is None or cell.error_frac is None else f"{cell.error_frac:+.0%}"]
        row += [_trial_words(ours)]
        row += [str(len({run["repeat"] for run in runs}))]
        rows.append(row)
    return rows


def _trial_words(runs: Runs) -> str:
    seconds = _median(run.get("trial_s") for run in runs)
    return "-" if seconds is None else show_seconds(seconds)


def draw(documents: Mapping[str, Mapping[str, Any]], path: Path, *, is_busy: bool) -> None:
    """Chosen / best of every cell, sorted, and the faster of TorchRec's plans / best."""
    cells = sorted(_known(judge(d) for d in documents.values()), key=lambda c: c.ratio)
    places = np.arange(1, len(cells) + 1)
    with report_style():
        figure, axes = plt.subplots(figsize=(8, 4), constrained_layout=True)
        theirs = [np.nan if c.torchrec_ratio is None else c.torchrec_ratio for c in cells]
        axes.scatter(places, theirs, color=run_color(1), marker="x", label="TorchRec's best plan")
        axes.scatter(places, [c.ratio for c in cells], color=run_color(0), label="the defaults")
        # Beside their lines, which are close together.
        for limit, place in ((WITHIN_BUSY if is_busy else WITHIN, "top"), (WITHIN_ALL, "bottom")):
            axes.axhline(1 + limit, linestyle="--", linewidth=0.8, color="gray")
            text = f" {limit:.0%} more"
            right = axes.get_yaxis_transform()
            axes.text(1, 1 + limit, text, transform=right, va=place, color="gray", size=8)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("cells, by the ratio of the defaults")
        axes.set_ylabel("step / best candidate's step")
        figure.legend(loc="outside upper left", ncols=2)
        light_grid(axes, "y")
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def render(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page, from what ``read`` gives."""
    first = next(iter(documents.values()))
    settings = first["settings"]
    found = {run["candidate"] for document in documents.values() for run in document["runs"]}
    names = [DEFAULT, *sorted(found - {DEFAULT})]
    columns = ["data", "B", "network", "ranks", *(f"{name}, ms" for name in names)]
    columns += [
        "chosen",
        "best",
        "default / best",
        "its plan / best",
        "predicted",
        "trial",
        "repeats",
    ]
    parts = [
        HEADER.format(warmup_steps=settings["warmup_steps"]),
        verdict(summarize(documents), is_busy=settings["busy"]),
        "![the defaults and TorchRec's best plan over the best candidate](choice.png)",
        markdown_table(columns, cell_rows(documents, names)),
    ]
    if settings["busy"]:
        parts.insert(1, "One core was kept busy by another process during calibration.")
    errors = [
        f"* `{name}`, {run['candidate']}: {run['error']}"
        for name, document in documents.items()
        for run in document["runs"]
        if "error" in run
    ]
    if errors:
        parts += ["## Runs that failed", "\n".join(errors)]
    load = [run["load_average"] for d in documents.values() for run in d["runs"]]
    made_on = Counter(_machine_text(document["machine"]) for document in documents.values())
    parts += [
        "## Machines",
        "\n".join(
            f"* {number} {'cell' if number == 1 else 'cells'}: {text}"
            for text, number in made_on.most_common()
        ),
        f"The load average before a run was {median(load) if load else 0:.1f} in the median. With "
        "more ranks than cores the ranks share them.",
    ]
    return "\n\n".join(parts) + "\n"


def _machine_text(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['processor']}, {machine['num_cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, {packages}; code {machine['code']}"
    )


def write_page(directory: Path) -> dict[str, Any]:
    """Write choice.md and choice.png next to the cells of ``directory``; returns the figures."""
    documents = read(directory)
    if not documents:
        raise SystemExit(f"{directory}: expected files of choice_grid.py, got none.")
    is_busy = next(iter(documents.values()))["settings"]["busy"]
    draw(documents, directory / "choice.png", is_busy=is_busy)
    (directory / "choice.md").write_text(render(documents))
    return summarize(documents)
