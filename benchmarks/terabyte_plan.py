"""Predicts training on Criteo 1TB on 8, 64 and 512 GPUs, without running anything.

    python benchmarks/terabyte_plan.py [--profile DIR] [--zipf 1.05] [--costs dgx_h100_infiniband]
                                       [--page benchmarks/results/terabyte_plan.md]

Tables and model are those of MLPerf's recommendation benchmark (DLRM-DCNv2), one id per feature.
Popularity is Zipf's in every table. Its exponents are fitted to a profile, if there is one (of raw
values: `min_count: 1`), or else are those of the first 10,000 lines of day 0. Compared:

    table_wise    TorchRec, each table on one GPU, the tables spread by count and size
    row_wise      TorchRec, every table on all GPUs in equal shares
    uvm_cache     as table_wise, rows in host memory, a fifth of them cached by the GPU
    all_cold      distinct rows are exchanged, none is hot, in GPU memory
    two_levels    the same; a row crosses the network once for all GPUs of a host
    hot_cold      the choice of the search within the memory of the GPUs

The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.terabyte_page import (
    COLUMNS,
    draw_settings,
    render_page,
    setting_rows,
    setting_title,
)
from hotrec.assemble.job import architecture_of
from hotrec.cli.store import build_config, compose_config
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.demand import Floats, TableDemand, coverage, prob_met
from hotrec.cost_model.forms import StepPrediction, Workload
from hotrec.cost_model.memory import memory_by_rank
from hotrec.cost_model.profile import read_profile
from hotrec.cost_model.quantities import (
    TableSharding,
    hot_cold_quantities,
    predict_torchrec,
    torchrec_quantities,
)
from hotrec.cost_model.step import make_step_model
from hotrec.models.flops import DenseWork, dense_flops
from hotrec.planner.search import Limits, search_placement
from hotrec.report.render import markdown_table
from hotrec.report.units import show_count, show_frac
from hotrec.types import (
    Feature,
    Levels,
    PipelineSpec,
    Schema,
    Table,
    TablePlacement,
    Tier,
)

CONF = Path(__file__).parents[1] / "conf"
OUTLINE = yaml.safe_load((CONF / "data/criteo_terabyte.yaml").read_text())["outline"]
# The same tables as `hotrec plan experiment=criteo_terabyte` has without the data.
TABLE_ROWS = tuple(table["num_rows"] for table in OUTLINE["tables"].values())
# Fitted by fit_exponent to the first 10,000 lines of day 0; at most MAX_EXPONENT.
DAY0_EXPONENTS = tuple(table["zipf_exponent"] for table in OUTLINE["tables"].values())
MAX_EXPONENT = 2.0
FLATTER_EXPONENT = 1.05
NUM_DENSE = OUTLINE["num_dense"]
GLOBAL_BATCH = 65_536
RANKS_PER_HOST = 8
# Ranks and samples per rank: MLPerf's global batch divided, then a batch that grows with the ranks.
SETTINGS = ((8, 8192), (64, 1024), (512, 128), (64, 8192), (512, 8192))
# Of a memory, left to activations, messages and libraries.
RESERVED_FRAC = 0.15
CACHE_LOAD_FRAC = 0.2
NUM_HEAD, NUM_GROUPS = 128, 384


@dataclass(frozen=True)
class Case:
    """A plan in a setting, predicted.

    Args:
        prediction: of its step.
        memory: bytes of each rank.
        fits: into GPU and host memory.
    """

    prediction: StepPrediction
    memory: Sequence[Mapping[str, float]]
    fits: bool


@dataclass(frozen=True)
class Setting:
    """Ranks and a batch, with every plan.

    Args:
        cases: by name of the plan.
        hot_rows: of hot_cold, over all tables.
        coverage_frac: lookups that hit them.
        tiers: rows that are not hot, by the memory they live in.
    """

    world: World
    batch_size: int
    cases: Mapping[str, Case]
    hot_rows: int
    coverage_frac: float
    tiers: Mapping[str, int]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", type=Path, default=None, help="fit the exponents to it")
    parser.add_argument("--zipf", type=float, default=None, help="one exponent for all tables")
    parser.add_argument("--costs", default="dgx_h100_infiniband", choices=sorted(BUILTIN))
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.profile is not None and options.zipf is not None:
        parser.error("--zipf: expected no --profile, got both")
    if options.zipf is not None and not 0 <= options.zipf <= MAX_EXPONENT:
        parser.error(f"--zipf: expected 0..{MAX_EXPONENT:g}, got {options.zipf:g}")
    return options


def zipf_groups(num_rows: int, exponent: float) -> tuple[Floats, Floats]:
    """Rows and probability of a row of each group, p_k ~ k^-exponent, k = 1..num_rows.

    The head's rows are groups of their own; beyond it groups grow geometrically and take the mean
    of k^-exponent, by its integral from half a rank before to half a rank after.
    """
    head = np.arange(1, min(num_rows, NUM_HEAD) + 1, dtype=np.float64)
    rows, weights = np.ones(head.size), head**-exponent
    if num_rows > NUM_HEAD:
        edges = np.unique(np.round(np.geomspace(NUM_HEAD, num_rows, NUM_GROUPS + 1))) + 0.5
        low, high = edges[:-1], edges[1:]
        if abs(exponent - 1) < 1e-9:
            integral = np.log(high / low)
        else:
            integral = (high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent)
        rows = np.concatenate([rows, high - low])
        weights = np.concatenate([weights, integral / (high - low)])
    return rows, weights / float(weights @ rows)


def fit_exponent(num_rows: int, num_lookups: int, num_distinct: int) -> float:
    """The exponent at which as many distinct rows are expected as were counted, by bisection.

    Args:
        num_rows: of the table that is planned for.
        num_lookups: counted.
        num_distinct: rows among them.

    Returns:
        In 0..MAX_EXPONENT; 0 if every row was seen, so that the skew is unknown.
    """
    low, high = 0.0, MAX_EXPONENT
    for _ in range(40):
        middle = (low + high) / 2
        rows, probs = zipf_groups(num_rows, middle)
        if float(rows @ prob_met(probs, num_lookups)) > num_distinct:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def read_exponents(path: Path) -> tuple[float, ...]:
    """Fit the exponent of each of the tables C1..C26 to a profile.

    Raises:
        ValueError: if the profile is of other tables.
    """
    counts = read_profile(path)[0].counts
    names = [f"C{i + 1}" for i in range(len(TABLE_ROWS))]
    if set(counts) != set(names):
        raise ValueError(
            f"profile {path}: expected the tables C1..C{len(names)}, got {sorted(counts)}. "
            "Profile Criteo's data."
        )
    return tuple(
        fit_exponent(rows, int(counts[name].sum()), int(np.count_nonzero(counts[name])))
        for name, rows in zip(names, TABLE_ROWS, strict=True)
    )


def build_demands(
    exponents: Sequence[float],
    world: World,
    batch_size: int,
    dim: int,
    table_rows: Sequence[int] = TABLE_ROWS,
) -> list[TableDemand]:
    """One id per sample from each table; rows with their state of full Adagrad."""
    demands = []
    for i, (num_rows, exponent) in enumerate(zip(table_rows, exponents, strict=True)):
        rows, probs = zipf_groups(num_rows, exponent)
        of_rank, of_host, of_any = (
            prob_met(probs, batch_size * num_ranks)
            for num_ranks in (1, world.ranks_per_host, world.num_ranks)
        )
        demands.append(
            TableDemand(
                name=f"C{i + 1}",
                num_rows=num_rows,
                dim=dim,
                row_bytes=8 * dim,
                lookups_per_sample=1.0,
                num_columns=1,
                rows_G=rows.astype(np.int64),
                probs_G=probs,
                by_rank_G=of_rank,
                by_any_G=of_any,
                by_host_G=of_host if world.has_levels else None,
                by_host_both_G=of_host * of_any if world.has_levels else None,
            )
        )
    return demands


def spread_tables(demands: Sequence[TableDemand], world: World, tier: Tier) -> dict[str, Any]:
    """Each table on one rank, the largest first, on the rank with fewest tables, then bytes.

    With one id per sample every table is as much work, so the count is what is to be even.
    """
    loads = [(0, 0.0, rank) for rank in range(world.num_ranks)]
    shardings = {}
    for demand in sorted(demands, key=lambda d: -d.num_rows):
        count, num_bytes, rank = min(loads)
        loads[rank] = (count + 1, num_bytes + demand.num_rows * demand.row_bytes, rank)
        cached = CACHE_LOAD_FRAC if tier is Tier.HOST_CACHED else None
        shardings[demand.name] = TableSharding("table_wise", (rank,), tier, cached)
    return shardings


def dense_work() -> tuple[int, DenseWork]:
    """The dimension of the tables, and the work of the dense layers."""
    model = build_config(compose_config("config", ["experiment=criteo_terabyte"])).model
    tables = [Table(f"t{number}", rows) for number, rows in enumerate(TABLE_ROWS)]
    features = tuple(Feature(table.name, table.name) for table in tables)
    dense = tuple(f"d{number}" for number in range(NUM_DENSE))
    shape = architecture_of(model, Schema(dense, features, tuple(tables)))
    return shape.embedding_dim, dense_flops(shape)


def predict_setting(
    costs: Costs, exponents: Sequence[float], num_ranks: int, batch_size: int
) -> Setting:
    """Every plan for a number of ranks and a batch per rank."""
    world = World(num_ranks, RANKS_PER_HOST)
    dim, work = dense_work()
    workload = Workload(
        batch_size=batch_size,
        dense_flops=work.flops,
        bottom_frac=work.bottom_frac,
        num_dense_values=work.num_dense_values,
    )
    demands = build_demands(exponents, world, batch_size, dim)
    keep = 1 - RESERVED_FRAC
    limits = Limits(
        device_bytes=keep * costs.device_bytes,
        host_bytes=keep * costs.host_bytes / RANKS_PER_HOST,
        # With one id per feature a pooled vector is a row: there is nothing to save.
        may_pool=False,
    )
    step_model = make_step_model(costs, world, workload)
    every_rank = tuple(range(num_ranks))
    predicted: dict[str, tuple[StepPrediction, list[dict[str, float]]]] = {}
    for name, shardings in (
        ("table_wise", spread_tables(demands, world, Tier.DEVICE)),
        ("row_wise", {d.name: TableSharding("row_wise", every_rank) for d in demands}),
        ("uvm_cache", spread_tables(demands, world, Tier.HOST_CACHED)),
    ):
        per_rank = torchrec_quantities(demands, shardings, world, batch_size)
        memory = memory_by_rank(demands, {}, shardings, world, costs.device)
        predicted[name] = (predict_torchrec(step_model, per_rank), memory)
    cold = {d.name: TablePlacement() for d in demands}
    quantities = hot_cold_quantities(demands, {}, cold, world, batch_size)
    memory = memory_by_rank(demands, {}, cold, world, costs.device)
    predicted["all_cold"] = (step_model.predict(quantities), memory)
    in_two_levels = PipelineSpec(levels=Levels.two)
    two_levels = make_step_model(costs, world, workload, pipeline=in_two_levels)
    predicted["two_levels"] = (two_levels.predict(quantities), memory)
    choice = search_placement(demands, costs, world, workload, limits)
    memory = memory_by_rank(demands, choice.num_hot, choice.tables, world, costs.device)
    predicted["hot_cold"] = (choice.prediction, memory)
    tiers: dict[str, int] = {}
    for demand in demands:
        placed = choice.tables[demand.name]
        where = f"in {placed.tier.value.replace('_', ' ')} memory"
        rest = demand.num_rows - choice.num_hot[demand.name]
        tiers[where] = tiers.get(where, 0) + rest
    return Setting(
        world=world,
        batch_size=batch_size,
        cases={
            name: Case(prediction, memory, _fits(memory, limits))
            for name, (prediction, memory) in predicted.items()
        },
        hot_rows=sum(choice.num_hot.values()),
        coverage_frac=float(np.mean([coverage(d, choice.num_hot[d.name]) for d in demands])),
        tiers=tiers,
    )


def _fits(memory: Sequence[Mapping[str, float]], limits: Limits) -> bool:
    return all(
        rank["device_bytes"] <= limits.device_bytes and rank["host_bytes"] <= limits.host_bytes
        for rank in memory
    )


def setting_document(setting: Setting) -> dict[str, Any]:
    """A setting in the form of a prediction document, for the picture and for programs."""
    samples = setting.batch_size * setting.world.num_ranks
    plans = {
        name: {
            "hot_rows": setting.hot_rows if name == "hot_cold" else 0,
            "step_s": case.prediction.step_s,
            "stage_s": dict(case.prediction.stage_s),
            "hidden_s": dict(case.prediction.hidden_s),
            "sent_bytes": dict(case.prediction.sent_bytes),
            "total_sent_bytes": case.prediction.total_sent_bytes,
            "samples_per_s": samples / case.prediction.step_s,
            "device_bytes": max(rank["device_bytes"] for rank in case.memory),
            "host_bytes": max(rank["host_bytes"] for rank in case.memory),
            "fits": case.fits,
        }
        for name, case in setting.cases.items()
    }
    fitting = {name: plan for name, plan in plans.items() if plan["fits"]}
    return {
        "world": {
            "num_ranks": setting.world.num_ranks,
            "ranks_per_host": setting.world.ranks_per_host,
        },
        "batch_size": setting.batch_size,
        "chosen": min(fitting, key=lambda name: float(fitting[name]["step_s"]), default="hot_cold"),
        "plans": plans,
        "hot_rows": setting.hot_rows,
        "coverage_frac": setting.coverage_frac,
        "tiers": dict(setting.tiers),
    }


def describe_facts(
    options: argparse.Namespace, exponents: Sequence[float], costs: Costs, arguments: Sequence[str]
) -> dict[str, Any]:
    """The values that the assumptions mention."""
    dim, work = dense_work()
    if options.zipf is not None:
        zipf = f"one exponent of {options.zipf:g} for all"
    elif options.profile is not None:
        zipf = "exponents fitted to the number of distinct rows in a profile of Criteo's log"
    else:
        zipf = (
            "exponents fitted to the number of distinct values in the first 10,000 lines of day 0, "
            "which are minutes of one day: over 24 days popularity drifts and more rows are read"
        )
    return {
        "command": " ".join(["python benchmarks/terabyte_plan.py", *arguments]),
        "costs": costs.name,
        "overlap": show_frac(costs.overlap),
        "num_tables": len(TABLE_ROWS),
        "num_rows": show_count(sum(TABLE_ROWS)),
        "dim": dim,
        "row_bytes": 8 * dim,
        "zipf": zipf,
        "exponents": ", ".join(f"{exponent:.2f}" for exponent in exponents),
        "flops": work.flops,
        "num_dense": show_count(work.num_dense_values),
        "reserved": show_frac(RESERVED_FRAC),
        "cache": show_frac(CACHE_LOAD_FRAC),
    }


def predict_settings(costs: Costs, exponents: Sequence[float]) -> list[dict[str, Any]]:
    """Predict one setting after the other, with its table on stderr."""
    documents = []
    for num_ranks, batch_size in SETTINGS:
        document = setting_document(predict_setting(costs, exponents, num_ranks, batch_size))
        documents.append(document)
        print(setting_title(document), file=sys.stderr)
        print(markdown_table(COLUMNS, setting_rows(document)), file=sys.stderr)
    return documents


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    costs = BUILTIN[options.costs]
    exponents: Sequence[float] = DAY0_EXPONENTS
    if options.profile is not None:
        exponents = read_exponents(options.profile)
    elif options.zipf is not None:
        exponents = [options.zipf] * len(TABLE_ROWS)
    documents = predict_settings(costs, exponents)
    if options.page is not None:
        words = sys.argv[1:] if arguments is None else arguments
        picture = options.page.with_suffix(".png")
        facts = describe_facts(options, exponents, costs, words)
        facts |= {"picture": picture.name, "flatter": f"{FLATTER_EXPONENT:g}"}
        options.page.parent.mkdir(parents=True, exist_ok=True)
        draw_settings(documents, picture)
        flatter = predict_settings(costs, [FLATTER_EXPONENT] * len(TABLE_ROWS))
        page = render_page(documents, flatter, costs, facts)
        options.page.write_text(page, encoding="utf-8")
    print(json.dumps({"exponents": list(exponents), "settings": documents}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
