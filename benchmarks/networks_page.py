"""The page and the picture of benchmarks/networks.sh's files.

    python benchmarks/networks_page.py DIRECTORY

Reads DIRECTORY/<network>-w<ranks>[-g<ranks of a host>]-b<batch>.json, writes networks.md and
networks.png there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from hotrec.bench.page import ids_of
from hotrec.report.pictures import PART_COLORS, light_grid, report_style, run_color
from hotrec.report.render import markdown_table
from hotrec.report.units import show_bytes, show_count, show_frac, show_seconds
from hotrec.runtime.stages import EXPOSED_STAGES

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

NETWORKS = ("250mbit", "1gbit", "10gbit", "loopback")
BASELINES = ("planner", "hand_tuned")
EXACT, HALF = "look_ahead", "look_ahead_bf16"

HEADER = """# Networks

Made by `benchmarks/networks.sh`. Hosts are network namespaces of one machine, one rank in each or
as many as the section says, every link shaped to the rate both ways (two hosts on a veth pair, four
on a bridge); loopback: all ranks on one host. In each network all cases are run in turn in one
`hotrec compare`, in blocks of consecutive steps, on the same batches from the same weights."""

READING = """Step: from when the last rank returned from the step before to when the last rank
returned from this one, within a block, with no barrier in between; the first {skip} of a block's
{steps} steps, which refill the overlap, are left out. Whole: all of a block over its steps, from
the barrier that it begins with, when nothing is under way, to the one at its end, when nothing is:
what a pipeline left for later is in it. It cannot hide traffic in another case's time. Ratios are
baseline / case, of medians of blocks in the same round, median over the rounds; in brackets the
quartiles. Exposed: share of the step in which the main thread waits for other ranks (the stages
{exposed}), mean over the ranks, and the largest rank's. Processor: time that a rank's threads ran
in a step, and its main thread alone, mean over whole blocks and the ranks; what the kernel does for
packets outside of them is not in it. Bytes: sent per rank and step, counted by the senders; wire:
what the kernel says the interface has sent, with headers.

Losses of all exact cases agree in every step of every run to {difference:.1e}. `*_bf16` sends
rows and gradients in 16 bits. `*_semi_sync` is TorchRec's `TrainPipelineSemiSync`, where every
forward reads rows that are one update old; it was measured up to commit 7d8143f, the last with that
case. Both train by other losses than the rest, are left out of that comparison, and stand here for
reference."""


@dataclass(frozen=True)
class Target:
    """What is to be reached.

    Args:
        network: with 2 ranks and a batch of 2,048.
        case: measured.
        what: a baseline's name, or "exposed".
        limit: least speed-up over the baseline, or most exposed share.
    """

    network: str
    case: str
    what: str
    limit: float


TARGETS = (
    Target("250mbit", EXACT, "planner", 3.5),
    Target("250mbit", EXACT, "hand_tuned", 2.0),
    Target("250mbit", HALF, "planner", 6.0),
    Target("250mbit", HALF, "hand_tuned", 3.5),
    Target("1gbit", EXACT, "planner", 4.0),
    Target("1gbit", EXACT, "hand_tuned", 2.5),
    Target("1gbit", EXACT, "exposed", 0.15),
    Target("loopback", EXACT, "planner", 1.3),
    Target("loopback", EXACT, "hand_tuned", 1.0),
)
TARGET_RANKS, TARGET_BATCH = 2, 2048

Cell = tuple[str, int, int]


def read(directory: Path) -> dict[Cell, dict[str, Any]]:
    """The figures of ``hotrec compare`` by network, ranks and batch, in the page's order."""
    found = {}
    for path in directory.glob("*.json"):
        match = re.fullmatch(r"(\w+)-w(\d+)(?:-g(\d+))?-b(\d+)", path.stem)
        if match:
            network = f"{match[1]}, {match[3]} a host" if match[3] else match[1]
            cell = (network, int(match[2]), int(match[4]))
            found[cell] = json.loads(path.read_text())
    return dict(sorted(found.items(), key=lambda item: (item[0][1:], _place(item[0][0]))))


def _place(network: str) -> tuple[int, str]:
    return (NETWORKS.index(network) if network in NETWORKS else len(NETWORKS), network)


def speed_up(case: Mapping[str, Any], baseline: str) -> float | None:
    """Baseline over case, from the median of the steps' ratios; None if it was not run."""
    ratio = case["against"].get(baseline, {}).get("step_ratio")
    return 1 / ratio if ratio else None


def verdicts(documents: Mapping[Cell, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each target: where, what, wanted, found, and whether it is reached."""
    rows = []
    for target in TARGETS:
        document = documents.get((target.network, TARGET_RANKS, TARGET_BATCH))
        case = document["cases"].get(target.case) if document else None
        rows.append([target.network, target.case, *_verdict(target, case)])
    return rows


def _verdict(target: Target, case: Mapping[str, Any] | None) -> list[str]:
    if target.what == "exposed":
        what, wanted = "exposed share of the step", f"at most {show_frac(target.limit)}"
        value = case["exposed_frac"] if case else None
        found = None if value is None else show_frac(value)
        is_reached = value is not None and value <= target.limit
    else:
        what, wanted = f"faster than {target.what}", f"at least {target.limit:g}x"
        value = speed_up(case, target.what) if case else None
        found = None if value is None else f"{value:.2f}x"
        is_reached = value is not None and value >= target.limit
    if found is None:
        return [what, wanted, "-", "not measured"]
    return [what, wanted, found, "yes" if is_reached else "**no**"]


def case_rows(document: Mapping[str, Any]) -> list[list[str]]:
    return [_case_row(name, case, document) for name, case in document["cases"].items()]


def _case_row(name: str, case: Mapping[str, Any], document: Mapping[str, Any]) -> list[str]:
    wire = case["wire_bytes"]
    hot = document["partitions"].get(name, {}).get("num_hot_rows")
    exposed = "-"
    if case["exposed_frac"] is not None:
        exposed = f"{show_frac(case['exposed_frac'])} ({show_frac(case['exposed_frac_most'])})"
    return [
        name,
        document["pipelines"][name],
        "-" if hot is None else show_count(hot),
        show_seconds(case["step_p50_s"]),
        show_seconds(case["step_p90_s"]),
        show_seconds(case["whole_step_s"]),
        *[_ratio_words(case["against"].get(baseline)) for baseline in BASELINES],
        *[_whole_words(case["against"].get(baseline)) for baseline in BASELINES],
        "-" if case["exposed_s"] is None else show_seconds(case["exposed_s"]),
        exposed,
        f"{show_seconds(case['cpu_s'])} ({show_seconds(case['main_cpu_s'])})",
        show_bytes(case["sent_bytes"]),
        "-" if wire is None else show_bytes(wire),
        f"{case['largest_loss_difference']:.0e}",
    ]


CASE_COLUMNS = (
    "case",
    "pipeline",
    "hot rows",
    "step p50",
    "p90",
    "whole",
    "x planner",
    "x hand-tuned",
    "whole x planner",
    "whole x hand-tuned",
    "exposed",
    "of the step (most)",
    "processor (main)",
    "sent",
    "wire",
    "loss differs",
)


def _ratio_words(against: Mapping[str, Any] | None) -> str:
    if not against or "step_ratio" not in against:
        return "-"
    middle, slow, fast = (
        1 / against[key] for key in ("step_ratio", "step_ratio_p75", "step_ratio_p25")
    )
    return f"{middle:.2f} ({slow:.2f} to {fast:.2f})"


def _whole_words(against: Mapping[str, Any] | None) -> str:
    if not against or "whole_step_ratio" not in against:
        return "-"
    return f"{1 / against['whole_step_ratio']:.2f}"


def stage_table(document: Mapping[str, Any]) -> str:
    cases = {name: case for name, case in document["cases"].items() if case["stage_s"]}
    stages = list(next(iter(cases.values()))["stage_s"])
    rows = [[s, *[show_seconds(case["stage_s"][s]) for case in cases.values()]] for s in stages]
    return markdown_table(["stage", *cases], rows)


def _cell_name(cell: Cell) -> str:
    network, ranks, batch = cell
    return f"{network}, {ranks} ranks, B = {batch:,}"


def draw(documents: Mapping[Cell, Mapping[str, Any]], path: Path) -> None:
    """For each cell the step of every case, the exposed share in another colour."""
    cells = list(documents)
    num_columns = min(4, len(cells))
    num_rows = -(-len(cells) // num_columns)
    with report_style():
        figure, grid = plt.subplots(
            num_rows, num_columns, figsize=(4.2 * num_columns, 2.6 * num_rows),
            constrained_layout=True, squeeze=False,
        )  # fmt: skip
        for axes in grid.flat[len(cells) :]:
            axes.set_visible(False)
        for axes, cell in zip(grid.flat[: len(cells)], cells, strict=True):
            cases = documents[cell]["cases"]
            places = np.arange(len(cases))[::-1]
            steps_ms = np.array([1e3 * case["step_p50_s"] for case in cases.values()])
            shares = np.array([case["exposed_frac"] or 0.0 for case in cases.values()])
            axes.barh(places, steps_ms * (1 - shares), color=run_color(0), label="computing")
            axes.barh(
                places, steps_ms * shares, left=steps_ms * (1 - shares), color=PART_COLORS[2],
                label="waiting for other ranks",
            )  # fmt: skip
            axes.set_yticks(places, list(cases))
            axes.set_xlabel("step p50, ms")
            axes.set_title(_cell_name(cell))
            light_grid(axes, "x")
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def _setting(document: Mapping[str, Any]) -> str:
    apart = document["losses_apart"]
    text = (
        f"{document['rounds']} blocks of {document['block_steps']} steps of each case; code "
        f"{document['machine']['code']}; load average {document['machine']['load_average']:.1f} "
        f"before, {document['machine']['load_average_after']:.1f} after."
    )
    return f"**Losses differ: {', '.join(apart)}.** {text}" if apart else text


def target_parts(documents: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    """The section of targets, if TorchRec's planner was measured in one of their networks."""
    cells = [documents.get((target.network, TARGET_RANKS, TARGET_BATCH)) for target in TARGETS]
    if not any(cell and BASELINES[0] in cell["cases"] for cell in cells):
        return []
    columns = ["network", "case", "what", "wanted", "found", "reached"]
    title = f"## Targets: {TARGET_RANKS} ranks, B = {TARGET_BATCH:,}"
    return [title, markdown_table(columns, verdicts(documents))]


def render(documents: Mapping[Cell, Mapping[str, Any]]) -> str:
    """The whole page, from what ``read`` gives."""
    first = next(iter(documents.values()))
    data, machine = first["data"], first["machine"]
    difference = max(
        case["largest_loss_difference"]
        for document in documents.values()
        for case in document["cases"].values()
        if case["is_exact"]
    )
    parts = [
        HEADER,
        f"{data['num_tables']} tables, {show_count(data['num_rows'])} rows, {ids_of(first)}, "
        f"D = {data['embedding_dim']}, {first['optimizer']}, dense layers of "
        f"{show_bytes(4 * data['num_dense_values'])}, "
        f"{machine['threads_per_rank']} thread per rank, routing: {first['routing']}.",
        *target_parts(documents),
        "![steps of all cases](networks.png)",
        "## How to read the tables",
        READING.format(
            skip=first["block_skip"],
            steps=first["block_steps"],
            exposed=", ".join(EXPOSED_STAGES),
            difference=difference,
        ),
    ]
    for cell, document in documents.items():
        parts += [
            f"## {_cell_name(cell)}",
            _setting(document),
            markdown_table(CASE_COLUMNS, case_rows(document)),
            "Stages of the main thread, medians over the steps, mean over the ranks:",
            stage_table(document),
        ]
    packages = ", ".join(f"{name} {found}" for name, found in machine["packages"].items())
    parts += [
        "## Machine",
        f"{machine['processor']}, {machine['num_cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, {packages}. With more ranks than cores the ranks share them, and "
        "waiting for a rank that has no core counts as exposed.",
    ]
    return "\n\n".join(parts) + "\n"


def write_page(directory: Path) -> None:
    """Write networks.md and networks.png next to the files of ``directory``."""
    documents = read(directory)
    if not documents:
        raise SystemExit(f"{directory}: expected *-w*-b*.json of networks.sh, got none.")
    draw(documents, directory / "networks.png")
    (directory / "networks.md").write_text(render(documents))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write_page(parser.parse_args(arguments).directory)


if __name__ == "__main__":
    main()
