"""Predicts which exchange pays on hosts of several GPUs, on paper: levels and hot rows.

    python benchmarks/clusters.py [--page benchmarks/results/clusters.md]

Tables are the 26 of `hotrec bench` (criteo_like), one id per feature, rows of 512 bytes, popularity
of Zipf's law. Of each cluster and batch four candidates are predicted, with look-ahead and without:
one level, one level with hot rows, two levels, two levels with hot rows. The hot rows are the
fastest of sets by popularity (those that a host is expected to read at least so often in a step).
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from benchmarks.terabyte_plan import build_demands
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import World
from hotrec.cost_model.forms import Workload
from hotrec.cost_model.quantities import hot_cold_quantities
from hotrec.cost_model.step import make_model
from hotrec.report.render import markdown_table
from hotrec.report.units import show_count, show_seconds
from hotrec.types import Levels, PipelineKind, PipelineSpec, TablePlacement

CONF = Path(__file__).parents[1] / "conf/bench/criteo_like_b2048.yaml"
TABLE_ROWS = tuple(yaml.safe_load(CONF.read_text())["table_rows"])
DIM = 128
CLUSTERS = {
    "aws_p5": (8, "8 H100, 32 x 100 Gbit/s"),
    "dgx_h100_infiniband": (8, "8 H100, 8 x 400 Gbit/s"),
    "aws_p4d": (8, "8 A100, 4 x 100 Gbit/s"),
    "gcp_a2": (8, "8 A100, 100 Gbit/s"),
    "aws_g4dn": (4, "4 T4, 50 Gbit/s"),
    "aws_g6": (4, "4 L4, 40 Gbit/s"),
}
KINDS = (PipelineKind.look_ahead, PipelineKind.sparse_dist)
# Expected lookups of a host and step from which a row is hot.
THRESHOLDS = (50.0, 20.0, 10.0, 5.0, 3.0, 2.0, 1.5, 1.0, 0.5)
# A difference that a prediction cannot claim.
TIE = 0.02


@dataclass(frozen=True)
class Candidate:
    """The fastest set of hot rows of one candidate."""

    step_s: float
    num_hot: int


@dataclass(frozen=True)
class Cell:
    """A cluster, a number of hosts and a batch, in one pipeline."""

    cluster: str
    num_hosts: int
    batch_size: int
    pipeline: str
    candidates: Mapping[str, Candidate]

    @property
    def fastest(self) -> str:
        """The candidate to choose: of those within TIE of the least, the first."""
        least = min(of.step_s for of in self.candidates.values())
        return next(n for n, of in self.candidates.items() if of.step_s <= (1 + TIE) * least)


def predict_cell(
    cluster: str, num_hosts: int, batch_size: int, kind: PipelineKind, exponent: float
) -> Cell:
    """The four candidates of a cell."""
    costs, ranks = BUILTIN[cluster], CLUSTERS[cluster][0]
    world = World(num_hosts * ranks, ranks)
    exponents = [exponent] * len(TABLE_ROWS)
    demands = build_demands(exponents, world, batch_size, DIM, TABLE_ROWS)
    workload = Workload(batch_size, 5e6, 0.3, 2_000_000)
    tables = {demand.name: TablePlacement() for demand in demands}
    sets: list[dict[str, int]] = [{}]
    for least in THRESHOLDS:
        per_host = batch_size * ranks
        sets.append({d.name: int(d.rows_G[d.probs_G * per_host >= least].sum()) for d in demands})
    found: dict[str, Candidate] = {}
    for levels in (Levels.one, Levels.two):
        spec = PipelineSpec(kind, levels=levels)
        predicted = []
        for num_hot in sets:
            quantities = hot_cold_quantities(demands, num_hot, tables, world, batch_size)
            model = make_model(costs, world, workload, pipeline=spec, at=quantities)
            step_s = model.predict(quantities).step_s
            predicted.append(Candidate(step_s, sum(num_hot.values())))
        found[f"{levels.value} level{'s' if levels is Levels.two else ''}"] = predicted[0]
        best = min(predicted[1:], key=lambda candidate: candidate.step_s)
        found[f"{levels.value}, hot rows"] = best
    return Cell(cluster, num_hosts, batch_size, kind.value, found)


def all_cells(exponent: float) -> Iterator[Cell]:
    for kind in KINDS:
        for cluster in CLUSTERS:
            for num_hosts in (2, 8, 64):
                for batch_size in (2048, 8192):
                    yield predict_cell(cluster, num_hosts, batch_size, kind, exponent)


def render(cells: Sequence[Cell], exponent: float) -> str:
    """The page."""
    text = [
        "# Hosts of several GPUs, predicted",
        "",
        "Made by `python benchmarks/clusters.py --page benchmarks/results/clusters.md`. On paper: "
        "nothing of this was run on a GPU.",
        "",
        f"The 26 tables of `hotrec bench` (4.95 million rows of 512 bytes), Zipf {exponent:g}, one "
        "id per feature, fp32. Sources of each cluster's figures are in "
        "`hotrec/cost_model/builtin.py`. In brackets: how many rows are hot in the fastest of ten "
        "sets by popularity. Bold: the choice, of candidates within 2% the first.",
    ]
    for kind in KINDS:
        rows = []
        for cell in cells:
            if cell.pipeline != kind.value:
                continue
            shown = []
            for name, of in cell.candidates.items():
                hot = f" ({show_count(of.num_hot)})" if of.num_hot else ""
                text_of = f"{show_seconds(of.step_s)}{hot}"
                shown.append(f"**{text_of}**" if name == cell.fastest else text_of)
            about = CLUSTERS[cell.cluster][1]
            rows.append([about, str(cell.num_hosts), f"{cell.batch_size:,}", *shown])
        columns = ["host", "hosts", "batch of a GPU", *cells[0].candidates]
        text += ["", f"## {kind.value}", "", markdown_table(columns, rows)]
    text += ["", "## Reading", "", *reading(cells)]
    return "\n".join([*text, ""])


def reading(cells: Sequence[Cell]) -> Iterator[str]:
    """What the tables say, in lines."""
    for kind in KINDS:
        of_kind = [cell for cell in cells if cell.pipeline == kind.value]
        chosen = [cell.fastest for cell in of_kind]
        counts = [f"{name} in {chosen.count(name)}" for name in of_kind[0].candidates]
        gains = {}
        for cluster, (_, about) in CLUSTERS.items():
            steps = [cell.candidates for cell in of_kind if cell.cluster == cluster]
            ratios = [of["two levels"].step_s / of["one level"].step_s for of in steps]
            gains[about] = f"{min(ratios):.2f} to {max(ratios):.2f} on {about}"
        yield f"* {kind.value}: the choice is {', '.join(counts)} of {len(of_kind)}."
        yield f"  Two levels take, of the step in one level, {'; '.join(gains.values())}."
    yield "* With two levels, hot rows never save bytes: a row that every host reads crosses as"
    yield "  often as a replica's sum. They save requests and the slower all_to_all, and cost an"
    yield "  exchange that the next step waits for."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the popularity")
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(arguments)
    cells = list(all_cells(options.zipf))
    page = render(cells, options.zipf)
    if options.page is not None:
        options.page.write_text(page)
    print(page)
    print(json.dumps([{**asdict(cell), "fastest": cell.fastest} for cell in cells]))


if __name__ == "__main__":
    main()
