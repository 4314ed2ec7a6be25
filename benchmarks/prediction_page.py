"""The page and the picture of benchmarks/prediction_grid.sh's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hotrec.report.render import markdown_table
from hotrec.types import STAGES

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter  # noqa: E402

HEADER = """# Predicted and measured steps

Made by `benchmarks/prediction_grid.sh{option}`. In each network and with each number of ranks the
machine is calibrated first, by the code of `hotrec calibrate`; nothing is fitted to what follows.
Then, for each skew and batch size, the plans are run in turn, in blocks of {blocks}, and compared
with what was predicted before. {pipelines} Calibration makes whole steps of its own, at Zipf 1.05
and at these batch sizes, {calibration}. 26 tables of Criteo-Kaggle-like sizes, the largest
cut to 200,000 rows, D = 64, one id per feature, row-wise Adagrad, DLRM 256-128-64 / 256-128-1.
`hot_cold` is the cost model's choice; the other hot/cold plans have the 1,000 and 20,000 most
looked-up rows hot, or none. Step: p50, from return to return of the last rank; it includes routing.
What is missing below was not run.
"""
PIPELINES = {
    "sparse_dist": "All are run with TorchRec's `TrainPipelineSparseDist`.",
    "look_ahead": "Hot and cold rows are run with `pipeline=look_ahead`, TorchRec's plans with its "
    "`TrainPipelineSparseDist`.",
}
CALIBRATION = {
    "sparse_dist": "on other partitions",
    "look_ahead": "on other partitions, and two with look-ahead without hot rows: at Zipf 1.05 "
    "hot_cold and all_cold are what these two cells were calibrated by",
}
# Files of before there was a choice say nothing of it.
ONLY_PIPELINE = "sparse_dist"


TWINS = ("hot_cold", "all_cold")


def read(directory: Path) -> list[dict[str, Any]]:
    order = {"loopback": 0, "10gbit": 1, "1gbit": 2, "100mbit": 3}
    paths = sorted(
        directory.glob("*-w*.json"), key=lambda p: (order.get(p.stem.split("-")[0], 9), p.stem)
    )
    return [{**json.loads(path.read_text()), "key": path.stem} for path in paths]


def header(documents: Sequence[Mapping[str, Any]]) -> str:
    """What was done.

    Raises:
        SystemExit: if the files are of several pipelines.
    """
    pipelines = {document["key"]: document.get("pipeline", ONLY_PIPELINE) for document in documents}
    found = sorted(set(pipelines.values()))
    if len(found) != 1:
        raise SystemExit(
            f"files of predictions: expected one pipeline, got {pipelines}. Give each a directory."
        )
    blocks: dict[str, list[str]] = {}
    for document in documents:
        blocks.setdefault(_block_words(document), []).append(document["key"])
    words = [f"{how} ({', '.join(keys)})" for how, keys in blocks.items()]
    return HEADER.format(
        option="" if found[0] == ONLY_PIPELINE else f" -p {found[0]}",
        blocks=next(iter(blocks)) if len(blocks) == 1 else " or ".join(words),
        pipelines=PIPELINES[found[0]],
        calibration=CALIBRATION[found[0]],
    )


def _block_words(document: Mapping[str, Any]) -> str:
    if "block" not in document:  # an older file
        return "4 timed steps, with a barrier before each"
    num_steps, num_skipped = document["block"]
    return f"{num_steps} steps, of which the first {num_skipped} are not timed"


def cells(documents: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Any]]:
    for document in documents:
        for cell in document["cells"]:
            yield document, cell


def choice(cell: Mapping[str, Any]) -> tuple[str, str, float]:
    """The plan that prediction chooses, the fastest one, and how much slower the first is.

    Where the cost model makes no row hot, hot_cold is all_cold, run twice; the faster one counts.
    """
    plans = cell["plans"]
    chosen = min(plans, key=lambda name: plans[name]["predicted_s"])
    fastest = min(plans, key=lambda name: plans[name]["measured_s"])
    same = TWINS if is_twin(cell) and chosen in TWINS else (chosen,)
    measured_s = min(plans[name]["measured_s"] for name in same)
    return chosen, fastest, measured_s / plans[fastest]["measured_s"] - 1


def is_twin(cell: Mapping[str, Any]) -> bool:
    """Whether hot_cold and all_cold are one and the same plan."""
    return not cell["plans"]["hot_cold"]["hot_rows"]


def summary(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    errors = np.array([p["error_frac"] for _, c in cells(documents) for p in c["plans"].values()])
    byte_errors = np.array(
        [p["bytes_error_frac"] for _, c in cells(documents) for p in c["plans"].values()]
    )
    slower = np.array([choice(cell)[2] for _, cell in cells(documents)])
    twins = np.array(
        [
            abs(c["plans"]["hot_cold"]["measured_s"] / c["plans"]["all_cold"]["measured_s"] - 1)
            for _, c in cells(documents)
            if is_twin(c)
        ]
    )
    return [
        f"* Step: {errors.size} predictions in {slower.size} cells; error in absolute terms "
        f"{np.median(np.abs(errors)):.1%} in the median, {np.quantile(np.abs(errors), 0.9):.1%} at "
        f"p90, {np.abs(errors).max():.1%} at most; {np.mean(np.abs(errors) <= 0.15):.0%} within "
        "15%.",
        f"* Bytes: {np.median(np.abs(byte_errors)):.2%} in the median, "
        f"{np.abs(byte_errors).max():.2%} at most.",
        "* Choice: the plan with the least predicted step is the fastest of those that were run, "
        f"or within 5% of it, in {np.mean(slower <= 0.05):.0%} of the cells; at worst "
        f"{slower.max():.1%} slower.",
        f"* Noise: in {twins.size} cells hot_cold makes no row hot and so is all_cold, run twice; "
        f"the two differ by {np.median(twins):.1%} in the median and {twins.max():.1%} at most.",
    ]


def steps_table(documents: Sequence[Mapping[str, Any]]) -> str:
    names = list(documents[0]["cells"][0]["plans"])
    rows = []
    for document, cell in cells(documents):
        chosen, fastest, slower = choice(cell)
        rows.append(
            [
                document["key"],
                f"{cell['zipf_exponent']:g}",
                f"{cell['batch_size']:,}",
                *[_step_words(cell["plans"][name]) for name in names],
                f"{chosen}" + ("" if chosen == fastest else f" ({fastest}: {slower:+.0%})"),
            ]
        )
    header = ["network", "Zipf", "B", *names, "chosen (if not fastest)"]
    return markdown_table(header, rows)


def _step_words(plan: Mapping[str, Any]) -> str:
    return (
        f"{1e3 * plan['predicted_s']:.0f} / {1e3 * plan['measured_s']:.0f} "
        f"({plan['error_frac']:+.0%})"
    )


def bytes_table(documents: Sequence[Mapping[str, Any]]) -> str:
    names = list(documents[0]["cells"][0]["plans"])
    rows = [
        [
            document["key"],
            f"{cell['zipf_exponent']:g}",
            f"{cell['batch_size']:,}",
            *[
                f"{p['predicted_bytes'] / 1e6:.2f} / {p['measured_bytes'] / 1e6:.2f} "
                f"({p['bytes_error_frac']:+.1%})"
                for p in (cell["plans"][name] for name in names)
            ],
        ]
        for document, cell in cells(documents)
    ]
    return markdown_table(["network", "Zipf", "B", *names], rows)


def stage_table(documents: Sequence[Mapping[str, Any]], name: str) -> str:
    """Median over the cells of each network of predicted and measured seconds, in ms."""
    rows = []
    for stage in STAGES:
        row = [stage]
        for document in documents:
            plans = [cell["plans"][name] for cell in document["cells"]]
            predicted = np.median([p["predicted_stage_s"].get(stage, 0.0) for p in plans])
            measured = np.median([p["measured_stage_s"].get(stage, 0.0) for p in plans])
            row.append(f"{1e3 * predicted:.1f} / {1e3 * measured:.1f}")
        rows.append(row)
    return markdown_table(["stage", *[d["key"] for d in documents]], rows)


def draw(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(documents)))
    low, high = np.inf, 0.0
    errors, labels = [], []
    for document, colour in zip(documents, colours, strict=True):
        plans = [p for cell in document["cells"] for p in cell["plans"].values()]
        measured = np.array([1e3 * p["measured_s"] for p in plans])
        predicted = np.array([1e3 * p["predicted_s"] for p in plans])
        left.scatter(measured, predicted, s=14, color=colour, label=document["key"])
        low, high = min(low, measured.min()), max(high, measured.max())
        errors.append([100 * p["error_frac"] for p in plans])
        labels.append(document["key"])
    ends = np.array([0.7 * low, 1.4 * high])
    left.plot(ends, ends, color="black", linewidth=0.8)
    left.fill_between(ends, 0.85 * ends, 1.15 * ends, color="grey", alpha=0.2, label="15%")
    left.set(
        xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms",
        xlim=ends, ylim=ends,
    )  # fmt: skip
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    left.legend(fontsize=8, ncols=2)
    right.boxplot(errors, tick_labels=labels, whis=(0, 100))
    right.axhspan(-15, 15, color="grey", alpha=0.2)
    right.axhline(0, color="black", linewidth=0.8)
    right.set_ylabel("error of the predicted step, %")
    right.tick_params(axis="x", rotation=45)
    figure.suptitle("Predicted and measured steps: each plan of each cell")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_page(directory: Path) -> None:
    """Write prediction.md and prediction.png next to the files of ``directory``."""
    documents = read(directory)
    if not documents:
        raise SystemExit(f"{directory}: expected *-w*.json of prediction_grid.sh, got none.")
    draw(documents, directory / "prediction.png")
    machine = documents[0]["machine"]
    calibrated = ", ".join(f"{d['key']} {d['calibrated_s']:.0f} s" for d in documents)
    codes = ", ".join(
        f"{code} ({', '.join(d['key'] for d in documents if d['machine']['code'] == code)})"
        for code in dict.fromkeys(d["machine"]["code"] for d in documents)
    )
    parts = [
        header(documents),
        "\n".join(summary(documents)),
        "![predicted and measured](prediction.png)",
        "## Steps: predicted / measured, ms",
        steps_table(documents),
        "## Bytes sent per rank and step: predicted / counted, MB",
        bytes_table(documents),
        "## Stages of hot_cold: predicted / measured, ms, medians over the cells",
        stage_table(documents, "hot_cold"),
        "## Stages of hand_tuned",
        stage_table(documents, "hand_tuned"),
        "## Machine",
        f"{machine['processor']}, {machine['num_cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, {machine['packages']}; code {codes}. Calibrated: "
        f"{calibrated}. Two hosts are two network namespaces of one machine, a veth pair shaped by "
        "tbf; ranks of a host talk over its loopback. With 4 ranks each core has two of them.",
    ]
    (directory / "prediction.md").write_text("\n\n".join(parts) + "\n")
