"""Compares hot rows that follow the data with a fixed hot set, if popularity changes with time.

    python benchmarks/drift.py [--every 20] [--batch 512] [--output benchmarks/results/drift]
    python benchmarks/drift.py --moves [--hot-rows 1000000] [--rounds 5]

The first form trains on logs in order of time with two ranks: KuaiRand's days, and synthetic clicks
in which half of all rows swap their popularity at known times. Both runs of a log start with the
hot rows of its first eighth, and one keeps them. The page has the share of hot lookups in each
interval of ``--every`` steps, that of the best hot rows for the interval in hindsight, and the
largest difference between the losses of the two runs.

The second form measures how long training pauses while rows move between replica and shard. It
starts its own two ranks; under ``benchmarks/on_hosts.sh 1gbit 2 benchmarks/drift.py --moves`` it
uses those of the hosts. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
LOGS = {
    "synthetic": [
        "data=synthetic",
        "data.synthetic.drift_frac=0.5",
        "data.synthetic.num_periods=4",
        "data.synthetic.num_train=800000",
        "data.synthetic.num_valid=8192",
        "data.synthetic.num_test=8192",
    ],
    "kuairand": ["data=kuairand"],
}
ROWS_PER_CHUNK = {
    "synthetic": "data.synthetic.rows_per_chunk",
    "kuairand": "data.source.rows_per_chunk",
}
NUM_RANKS, HOT_FRAC, FIRST_FRAC = 2, 0.05, 0.125
MOVED = (1_000, 10_000, 100_000, 1_000_000)


def run_hotrec(*words: str, cwd: Path) -> dict[str, Any]:
    """The last line of a command."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hotrec", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, check=True)
    document: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return document


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fixed_shares(dataset: Path, partition: Path) -> list[float]:
    """The share of hot lookups in each chunk, which is an interval."""
    from hotrec.data.chunks import Dataset
    from hotrec.planner.partition import read_placement

    data, hot = Dataset.open(dataset), read_placement(partition)[0].partition
    table_of = {feature.name: feature.table for feature in data.schema.features}
    is_hot = {}
    for table in data.schema.tables:
        is_hot[table.name] = np.zeros(table.num_rows, np.bool_)
        is_hot[table.name][hot.hot(table.name)] = True
    shares = []
    for rows in data.row_blocks("train"):
        num_hot = sum(int(is_hot[table_of[name]][ids].sum()) for name, ids in rows.items())
        shares.append(num_hot / sum(ids.size for ids in rows.values()))
    return shares


def follow(log: str, folder: Path, every: int, batch_size: int) -> dict[str, Any]:
    """Train a log with fixed and with adaptive hot rows."""
    interval = every * batch_size * NUM_RANKS
    words = [
        *LOGS[log],
        f"{ROWS_PER_CHUNK[log]}={interval}",
        f"paths.dataset={folder}/{log}/dataset",
    ]
    words += [f"paths.profile={folder}/{log}/profile", f"paths.costs={folder}/costs"]
    run_hotrec("prepare", *words, cwd=ROOT)
    run_hotrec("profile", *words, f"profile.heldout_frac={1 - FIRST_FRAC}", cwd=ROOT)
    words += ["placement=fraction", f"placement.hot_frac={HOT_FRAC}", "order=time"]
    words += ["pipeline=look_ahead", f"trainer.batch_size={batch_size}", "plan.trial=false"]
    words += ["trainer.num_workers=0", "trainer.log_every_steps=1", "trainer.eval_splits=[]"]
    words += [f"launch.num_ranks={NUM_RANKS}"]
    runs = {}
    for name, steps in (("fixed", 0), ("adaptive", every)):
        words_of_run = [f"placement.adapt_every_steps={steps}", f"run_name={log}-{name}"]
        runs[name] = Path(run_hotrec("train", *words, *words_of_run, cwd=ROOT)["run_dir"])
    decisions = read_lines(runs["adaptive"] / "hot_set.jsonl")
    losses = {
        name: np.array([line["loss"] for line in read_lines(run / "metrics.jsonl")])
        for name, run in runs.items()
    }
    summary = {name: json.loads((run / "summary.json").read_text()) for name, run in runs.items()}
    return {
        "log": log,
        "interval": interval,
        "fixed": fixed_shares(folder / log / "dataset", runs["fixed"] / "partition")[
            : len(decisions)
        ],
        "adaptive": [line["hot_share"] for line in decisions],
        "best": [line["best_share"] for line in decisions],
        "num_moved": [line["num_moved"] for line in decisions],
        "pause_s": [line["pause_s"] for line in decisions],
        "step_s": {name: found["step_p50_s"] for name, found in summary.items()},
        "hot_rows": summary["adaptive"]["hot_rows"],
        "total_rows": summary["adaptive"]["total_rows"],
        "loss_difference": float(np.abs(losses["fixed"] - losses["adaptive"]).max()),
        "num_steps": int(losses["fixed"].size),
    }


def draw(documents: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from hotrec.report.style import light_grid, report_style, run_color, write_png

    with report_style():
        size = (5.2 * len(documents), 3.4)
        figure, found = plt.subplots(1, len(documents), figsize=size, squeeze=False)
        for axes, document in zip(found[0], documents, strict=True):
            at = np.arange(1, len(document["best"]) + 1) * document["interval"] / 1e6
            axes.plot(at, document["best"], label="best of the interval, in hindsight", color="0.6")
            axes.plot(at, document["adaptive"], label="follow the data", color=run_color(0))
            axes.plot(at, document["fixed"], label="of the first eighth", color=run_color(1))
            axes.set_title(document["log"])
            axes.set_xlabel("samples, millions")
            light_grid(axes, "y")
        found[0][0].set_ylabel("share of lookups of hot rows")
        lines, labels = found[0][0].get_legend_handles_labels()
        figure.tight_layout(rect=(0, 0.08, 1, 1))
        figure.legend(lines, labels, title="hot rows", loc="lower center", ncols=len(labels))
        write_png(figure, path)


def page(documents: list[dict[str, Any]]) -> str:
    rows = []
    for document in documents:
        fixed, adaptive, best = (np.array(document[k]) for k in ("fixed", "adaptive", "best"))
        late = slice(adaptive.size // 8, None)  # what the fixed rows were not chosen from
        step_s, of_best = document["step_s"], adaptive[late] / best[late]
        pause = sum(document["pause_s"]) / document["num_steps"]
        rows.append(
            f"| {document['log']} | {document['hot_rows']:,} of {document['total_rows']:,} "
            f"| {fixed[late].mean():.1%} | {adaptive[late].mean():.1%} | {best[late].mean():.1%} "
            f"| {of_best.mean():.1%} | {of_best.min():.1%} "
            f"| {sum(document['num_moved']):,} | {1e3 * step_s['fixed']:.1f} "
            f"| {1e3 * step_s['adaptive']:.1f} | {1e3 * pause:.2f} "
            f"| {document['loss_difference']:.1e} |"
        )
    head = (
        "| log | hot rows | fixed | adaptive | best | adaptive / best | least | rows moved "
        "| step fixed, ms | step adaptive, ms | pause per step, ms | losses differ by |"
    )
    return "\n".join(
        [
            "# Hot rows that follow the data",
            "",
            "Made by `benchmarks/drift.py`: logs in order of time on two ranks, with a decision "
            "every so many steps (`placement.adapt_every_steps`). Shares are of the lookups after "
            "the first eighth of the log, from which the hot rows of both runs were chosen at the "
            "start; best: the best hot rows for each interval in hindsight, as many of each table, "
            "which no method can know. Steps: medians, the ranks share the cores; pause: the time "
            "that training stood still for decisions and moves, spread over all steps.",
            "",
            head,
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
            "![share of hot lookups](drift.png)",
            "",
        ]
    )


def measure_moves(num_hot: int, rounds: int) -> None:
    """Median seconds of moves by their number of rows, of one table on the ranks of the group."""
    import torch

    from benchmarks.checkpoint import DIM, NAMES, build
    from hotrec.embedding.adapt import AdaptiveHotSet
    from hotrec.embedding.initialize import initialize_embeddings
    from hotrec.routing.popularity import CountedRows
    from hotrec.runtime.ranks import all_gather_object, barrier, process_group
    from hotrec.types import Partition, Placement

    torch.set_num_threads(1)
    with process_group(device="cpu") as ranks:
        # One row in 20 is hot.
        hot = np.arange(num_hot // len(NAMES)) * 20
        num_rows = 20 * hot.size
        partition = Partition(dict.fromkeys(NAMES, num_rows), dict.fromkeys(NAMES, hot))
        model, optimizer = build(Placement.alike(partition), num_rows, ranks)
        initialize_embeddings(model, seed=0)
        hot_set = AdaptiveHotSet(model, optimizer, decay=0.0, max_rows=num_hot)
        rng = np.random.default_rng(0)
        document: dict[str, Any] = {"num_ranks": ranks.world_size, "row_bytes": 4 * DIM + 4}
        document["pause_s"] = {}
        for num_moved in (n for n in MOVED if n <= num_hot):
            seconds = []
            for _ in range(rounds):
                for counter in hot_set._all_counters():
                    # As if other rows had been looked up, each by its counter.
                    keys = []
                    for table, size in counter.tables.items():
                        hot = counter.hot_keys[table].numpy() - counter.begins[table]
                        cold = np.setdiff1d(rng.integers(0, size, num_moved), hot)
                        keys.append(cold[: num_moved // len(NAMES)] + counter.begins[table])
                    joined = np.sort(np.concatenate(keys))
                    own = joined[joined % ranks.world_size == ranks.rank]
                    counter.counted = CountedRows(own, np.full(own.size, 1e3))
                barrier()
                start = time.perf_counter()
                decision = hot_set.adapt()
                barrier()
                seconds.append(time.perf_counter() - start)
            moved = all_gather_object(decision.num_moved)[0]
            document["pause_s"][moved] = float(np.median(seconds))
        if ranks.is_first:
            print(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=20, help="steps between decisions")
    parser.add_argument("--batch", type=int, default=512, help="samples of a rank and step")
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "drift")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "drift")
    parser.add_argument("--moves", action="store_true")
    parser.add_argument("--hot-rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.moves and "RANK" in os.environ:
        measure_moves(given.hot_rows, given.rounds)
        return
    if given.moves:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(NUM_RANKS), __file__, "--moves"]
        launch += ["--hot-rows", str(given.hot_rows), "--rounds", str(given.rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(launch, check=True, env=environment)
        return
    documents = []
    for log in given.logs:
        shutil.rmtree(given.work / log, ignore_errors=True)
        documents.append(follow(log, given.work, given.every, given.batch))
    given.output.mkdir(parents=True, exist_ok=True)
    for document in documents:
        (given.output / f"{document['log']}.json").write_text(json.dumps(document, indent=1) + "\n")
    draw(documents, given.output / "drift.png")
    (given.output / "drift.md").write_text(page(documents))
    print(json.dumps({document["log"]: document["num_steps"] for document in documents}))


if __name__ == "__main__":
    main()
