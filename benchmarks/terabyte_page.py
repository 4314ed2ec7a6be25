"""The page of terabyte_plan.py: tables, picture, assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hotrec.cost_model.costs import Costs
from hotrec.report.plan import RecordedPrediction
from hotrec.report.plan_page import draw_stages
from hotrec.report.render import markdown_table
from hotrec.report.style import report_style, write_png
from hotrec.report.units import show_bytes, show_count, show_frac, show_rate, show_seconds

FLATTER_PLANS = ("table_wise", "all_cold", "hot_cold")
FLATTER_COLUMNS = (
    *("setting", *FLATTER_PLANS, "hot_cold / table_wise"),
    *("hot rows", "lookups hot"),
)
BASELINE = "table_wise"
# Bars longer than so many of the baseline's would leave the others too small to see.
MAX_DRAWN = 4
COLUMNS = ("plan", "step", "samples", "sent", "GPU memory", "host memory", "of table_wise", "fits")


def setting_title(document: Mapping[str, Any]) -> str:
    world, batch = document["world"], document["batch_size"]
    ranks = world["num_ranks"]
    hosts = ranks // world["ranks_per_host"]
    return (
        f"{ranks} GPUs on {hosts} host{'' if hosts == 1 else 's'}, "
        f"{show_count(batch)} samples per GPU, global batch {show_count(ranks * batch)}"
    )


def setting_rows(document: Mapping[str, Any]) -> list[tuple[str, ...]]:
    base_s = document["plans"][BASELINE]["step_s"]
    return [
        (
            name,
            show_seconds(plan["step_s"]),
            show_rate(plan["samples_per_s"]),
            show_bytes(plan["total_sent_bytes"]),
            show_bytes(plan["device_bytes"]),
            show_bytes(plan["host_bytes"]),
            f"{plan['step_s'] / base_s:.2f}x",
            "yes" if plan["fits"] else "no",
        )
        for name, plan in document["plans"].items()
    ]


def draw_settings(documents: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each setting, a bar for each plan, divided by stage."""
    with report_style():
        figure = Figure(figsize=(11, 2.3 * len(documents) + 0.8), layout="constrained")
        panels = figure.subplots(len(documents), 1, squeeze=False)[:, 0]
        for axes, document in zip(panels, documents, strict=True):
            plans = document["plans"]
            most_s = MAX_DRAWN * plans[BASELINE]["step_s"]
            left_out = [name for name, plan in plans.items() if plan["step_s"] > most_s]
            draw_stages(
                axes, RecordedPrediction(document), [name for name in plans if name not in left_out]
            )
            title = setting_title(document)
            for name in left_out:
                title += f" (not drawn: {name}, {show_seconds(plans[name]['step_s'])})"
            axes.set_title(title)
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    write_png(figure, path)


def flatter_rows(documents: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Steps of the main plans, a row for each setting."""
    rows = []
    for document in documents:
        steps = [document["plans"][name]["step_s"] for name in FLATTER_PLANS]
        rows.append(
            (
                setting_title(document),
                *(show_seconds(step_s) for step_s in steps),
                f"{steps[-1] / steps[0]:.2f}x",
                show_count(document["hot_rows"]),
                show_frac(document["coverage_frac"]),
            )
        )
    return rows


def sources_text(costs: Costs) -> str:
    """The sources of the numbers of the costs, a line each."""
    lines = [
        f"* {name}: {show_seconds(link.latency_s)}, {show_bytes(link.bytes_per_s)}/s; {link.source}"
        for name, link in (("inside a host", costs.intra), ("between hosts", costs.inter))
        if link is not None
    ]
    by_source: dict[str, list[str]] = {}
    for name, line in costs.kernels.items():
        by_source.setdefault(line.source, []).append(name)
    lines += [f"* {', '.join(names)}: {source}" for source, names in by_source.items()]
    return "\n".join(lines)


ASSUMPTIONS = """\
Nothing here was run: no such machine was at hand. The seconds are as good as the costs below, which
are not measured; bytes and rows follow from popularity and batch alone.

* **Costs**: the built-in set `{costs}`, sources at the end. Kernels are straight lines. Overlap:
  {overlap} of the computation that a message travels under hides it.
* **Tables**: {num_tables}, {num_rows} rows, D = {dim}, as in MLPerf's DLRM-DCNv2 benchmark, but one
  id per feature (the click log as it is; MLPerf's multi-hot version pools up to 100). FP32 weights
  and full Adagrad, {row_bytes} bytes a row; a replica has a gradient buffer too.
* **Popularity**: Zipf in each table, {zipf}. Exponents of C1..C26: {exponents}. Lookups are taken
  as independent; the same popularity holds for the whole run.
* **Dense layers**: {flops:.3g} operations a sample, both ways, {num_dense} parameters, all-reduced.
* **Memory**: {reserved} of each memory is left to activations, messages and libraries. `fits` says
  whether the tables leave that much. A host's memory is shared evenly by its GPUs.
* **TorchRec's plans** are the plain ones. table_wise gives work to at most as many GPUs as there
  are tables; column-wise shards, a mix, and its planner's choice lie between the two. Row-wise
  shards are taken to be equally busy. uvm_cache keeps {cache} of the rows in the GPU's cache, the
  most looked-up ones (LFU at rest); its prefetching is not modelled.
* **Exchange**: the planner may not pool. With one id per feature a pooled vector is a row.
* **What replication can save**: a cold row that a GPU reads costs it 2 x 4 D bytes, there and back,
  and its owner a lookup and an update. As a replica it costs as much in an all-reduce, or W - 1
  times 4 D in a gather. So replicas save waiting in forward and work of busy owners, not bytes;
  where the links are fast enough that rows travel under the dense layers, that is little.
* **Routing** of ids (hot, cold, duplicates) is inside the step.
* **Balance**: the steps of all_cold and hot_cold are those of the mean rank. Their rows are dealt
  out by number, and a popular cold row makes its owner busier than the mean.
"""


def _hot_words(document: Mapping[str, Any]) -> str:
    tiers = ", ".join(f"{show_count(n)} {name}" for name, n in document["tiers"].items() if n)
    if not document["hot_rows"]:
        return f"The planner makes no row hot: {tiers}."
    return (
        f"hot_cold replicates {show_count(document['hot_rows'])} rows, which take "
        f"{show_frac(document['coverage_frac'])} of the lookups; of the others: {tiers}."
    )


def _summary(documents: Sequence[Mapping[str, Any]]) -> str:
    num_hot = sum(document["hot_rows"] > 0 for document in documents)
    ratios = [d["plans"]["hot_cold"]["step_s"] / d["plans"][BASELINE]["step_s"] for d in documents]
    return (
        f"The planner's choice takes {', '.join(f'{ratio:.2f}x' for ratio in ratios)} of the step "
        f"of TorchRec's table-wise plan in the {len(documents)} settings below; it makes rows hot "
        f"in {num_hot} of them. Where it makes none hot, it is all_cold: each rank asks once for "
        "each distinct row."
    )


def render_page(
    documents: Sequence[Mapping[str, Any]],
    flatter: Sequence[Mapping[str, Any]],
    costs: Costs,
    facts: Mapping[str, Any],
) -> str:
    """The page, in Markdown."""
    parts = [
        "# Criteo 1TB on 8, 64 and 512 GPUs, predicted",
        f"Made by `{facts['command']}`. On paper: see the assumptions.",
        _summary(documents),
        f"![Predicted steps by stage]({facts['picture']})",
    ]
    for document in documents:
        parts += [
            f"## {setting_title(document)}",
            markdown_table(COLUMNS, setting_rows(document)),
            f"{_hot_words(document)} Fastest of those that fit: {document['chosen']}.",
        ]
    parts += [
        "Time is the predicted step; `sent` is per GPU and step, in the mean over GPUs; memory is "
        "of tables on the fullest GPU; `of table_wise` compares steps.",
        f"## If popularity were flatter: exponent {facts['flatter']} in every table",
        markdown_table(FLATTER_COLUMNS, flatter_rows(flatter)),
        "## Assumptions",
        ASSUMPTIONS.format(**facts).strip(),
        f"## Costs: {costs.name}",
        sources_text(costs),
    ]
    return "\n\n".join(parts) + "\n"
