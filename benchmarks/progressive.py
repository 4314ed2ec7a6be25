"""Measures the daily AUC of a model trained once, retrained daily, and warm-started daily.

    PYTHONPATH=. python benchmarks/progressive.py [--seeds 0 1 2] [--data kuairand drift]
        [--first-days 7] [--days 15] [--work runs/progressive]
        [--page benchmarks/results/progressive.md]

The log of each data set is split into one file per day. The first days are prepared and trained on;
then each day is appended (`hotrec prepare append=...`), the model is trained until this day in
three ways, and evaluated on the next day. The model that is trained once reads the next day with
its own vocabulary (`hotrec predict`), the others with that of their day. Placements do not affect
the model, so all runs use TorchRec's plan. The last line on stdout is one JSON object, which is
also written next to the page, with a picture.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.quality import LAYERS, count_ranks, hotrec
from hotrec.config.data import SyntheticSpec
from hotrec.data.synthetic import SyntheticLog
from hotrec.report.render import markdown_table
from hotrec.report.style import light_grid, report_style, run_color

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

ONCE, RETRAINED, WARM = "trained once", "retrained each day", "warm start each day"
WAYS = (ONCE, RETRAINED, WARM)
MS_PER_DAY = 86_400_000
KUAIRAND_LOG = Path("samples/kuairand_pure/log_standard_val_test.tsv.zst")
DRIFT = SyntheticSpec(
    [50_000, 10_000, 2_000, 200], num_dense=4, num_train=300_000, drift_frac=0.1, num_periods=15
)

PAGE = """# Training day by day

AUC of each day, predicted by models trained until the day before: once on the first {num_first}
days; on all days until then, from nothing (shuffled); and on the last of them, starting from the
weights of the day before. Made by

```
{command}
```

Ranks: {num_ranks}; mean over the seeds {seeds}, with the standard deviation in brackets. Seconds
are those of training and its evaluation; of a warm start also those of appending the day.

![AUC by day and seconds]({picture})
"""


@dataclass(frozen=True)
class Day:
    """A file of the log.

    Args:
        path: The file.
        first_ms: Its first time, in milliseconds since 1970.
    """

    path: Path
    first_ms: int


@dataclass(frozen=True)
class Data:
    """A log by day, and the overrides of every command."""

    days: list[Day]
    words: list[str]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", nargs="+", choices=CUT, default=list(CUT))
    parser.add_argument("--first-days", type=int, default=7, help="to train on at first")
    parser.add_argument("--days", type=int, default=15, help="of the log to use")
    parser.add_argument("--work", type=Path, default=Path("runs/progressive"))
    parser.add_argument(
        "--page", type=Path, help="file for the tables, with the figures next to it"
    )
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.first_days < parsed.days:
        parser.error(f"--first-days: expected 1 to {parsed.days - 1}, got {parsed.first_days}")
    return parsed


# Logs, a file a day.


def cut_kuairand(folder: Path) -> Data:
    """KuaiRand-Pure by days of Beijing, where midnight is 16:00 UTC."""
    offset_ms = 8 * 3_600_000
    lines: dict[int, list[bytes]] = {}
    with pa.input_stream(KUAIRAND_LOG, compression="zstd") as stream:
        header, *samples = stream.read().splitlines(keepends=True)
    column = header.rstrip().split(b"\t").index(b"time_ms")
    for line in samples:
        day = (int(line.split(b"\t")[column]) + offset_ms) // MS_PER_DAY
        lines.setdefault(day, []).append(line)
    days = []
    for day, of_day in sorted(lines.items()):
        days.append(Day(folder / f"{np.datetime64(day, 'D')}.tsv", day * MS_PER_DAY - offset_ms))
        days[-1].path.write_bytes(header + b"".join(of_day))
    words = ["experiment=quickstart", "model.embedding_dim=16", "trainer.batch_size=256"]
    return Data(days, words)


def cut_drift(folder: Path) -> Data:
    """A synthetic log whose popular ids change from day to day."""
    tables: dict[int, list[pa.Table]] = {}
    num_seen, per_day = 0, DRIFT.num_train // DRIFT.num_periods
    for _, block in SyntheticLog(DRIFT).blocks():
        day = num_seen // per_day
        columns = {
            "label": pa.array(block.label.astype(np.int8)),
            "time": pa.array(np.full(len(block), day * MS_PER_DAY)),
            **{f"d{n}": pa.array(values) for n, values in enumerate(block.dense.T)},
            **{name: pa.array(ids) for name, ids in block.features.items()},
        }
        tables.setdefault(day, []).append(pa.table(columns))
        num_seen += len(block)
    days = []
    for day, parts in tables.items():
        days.append(Day(folder / f"day-{day:02d}.parquet", day * MS_PER_DAY))
        pq.write_table(pa.concat_tables(parts), days[-1].path)
    features = {f"c{n}": {"kind": "categorical"} for n in range(len(DRIFT.num_rows))}
    dense = {f"d{n}": {"kind": "dense"} for n in range(DRIFT.num_dense)}
    source = {
        "format": "parquet",
        "files": [str(days[0].path)],
        "split": {"kind": "time", "column": "time"},
        "table_defaults": {"min_count": 2},
        "columns": {"label": {"kind": "label"}, **dense, **features},
    }
    config = folder / "conf/data/drift.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(yaml.safe_dump({"source": source}))
    return Data(days, ["--config-dir", str(folder / "conf"), "data=drift", *LAYERS])


CUT = {"kuairand": cut_kuairand, "drift": cut_drift}


# Runs.


def prepare(work: Path, data: Data, files: str, valid: Day) -> float:
    """Prepare or append files, the last of which is for validation; seconds."""
    bounds = {"valid_from": valid.first_ms, "test_from": valid.first_ms + MS_PER_DAY}
    found = hotrec(
        work / f"prepare-{valid.path.stem}",
        [
            *("prepare", *data.words, files, f"paths.dataset={work / 'dataset'}"),
            *(f"data.source.split.{name}={value}" for name, value in bounds.items()),
        ],
    )
    return float(found["elapsed_s"])


def train(work: Path, data: Data, name: str, seed: int, *words: str) -> dict[str, Any]:
    """The figures of a run; its directory is ``work/name-seed``."""
    run_dir = work / f"{name}-{seed}"
    found = hotrec(
        run_dir,
        [
            *("train", *data.words, *words, f"paths.dataset={work / 'dataset'}"),
            *("placement=torchrec", "trainer.eval_splits=[valid]", f"trainer.seed={seed}"),
            f"launch.num_ranks={count_ranks()}",
        ],
    )
    print(f"{run_dir}: AUC {found['auc']:.5f}, {found['elapsed_s']:.1f} s", file=sys.stderr)
    return {"auc": found["auc"], "seconds": found["elapsed_s"], "num_samples": found["num_samples"]}


def predict(work: Path, data: Data, seed: int, day: Day) -> float:
    """The AUC that the once trained model has on a day."""
    name = f"predict-{day.path.stem}-{seed}"
    words = [
        f"run_dir={work / f'first-{seed}'}",
        f"input=[{day.path}]",
        f"output={work / name}-scores",
    ]
    return float(hotrec(work / name, ["predict", *words])["auc"])


def measure(work: Path, data: Data, num_first: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The results of each way of training for each day, by seed."""
    once, daily = work / "once", work / "daily"
    once.mkdir()
    files = ",".join(str(day.path) for day in data.days[: num_first + 1])
    prepare(once, data, f"data.source.files=[{files}]", data.days[num_first])
    first = {seed: train(once, data, "first", seed) for seed in seeds}
    shutil.copytree(once / "dataset", daily / "dataset")
    # All three ways begin with the same run.
    measured = [{"day": data.days[num_first].path.stem, **dict.fromkeys(WAYS, first)}]
    before = {seed: once / f"first-{seed}" for seed in seeds}
    for new, valid in zip(data.days[num_first:], data.days[num_first + 1 :], strict=False):
        append_s = prepare(daily, data, f"append=[{new.path},{valid.path}]", valid)
        found: dict[str, Any] = {ONCE: {}, RETRAINED: {}, WARM: {}}
        for seed in seeds:
            warm = ("order=time", "order.new_only=true", f"trainer.warm_start={before[seed]}")
            name = f"warm-{valid.path.stem}"
            of_warm = train(daily, data, name, seed, *warm)
            before[seed] = daily / f"{name}-{seed}"
            found[WARM][seed] = {**of_warm, "seconds": of_warm["seconds"] + append_s}
            found[RETRAINED][seed] = train(daily, data, f"retrained-{valid.path.stem}", seed)
            found[ONCE][seed] = {"auc": predict(once, data, seed, valid), "seconds": 0.0}
        measured.append({"day": valid.path.stem, **found})
    return measured


# The page.


def spread(of_seeds: Mapping[Any, Mapping[str, float]], name: str) -> tuple[float, float]:
    """Mean and standard deviation over the seeds, 0 for one."""
    values = [found[name] for found in of_seeds.values()]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def rows_of(measured: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each day: AUC and seconds of each way; mean and sum of those after the first."""
    rows = []
    for of_day in measured:
        aucs = [spread(of_day[way], "auc") for way in WAYS]
        seconds = [spread(of_day[way], "seconds")[0] for way in WAYS]
        row = [f"{mean:.4f} ({deviation:.4f})" for mean, deviation in aucs]
        rows.append([of_day["day"], *row, *(f"{number:.1f}" for number in seconds)])
    later = measured[1:]
    means = [statistics.fmean(spread(day[way], "auc")[0] for day in later) for way in WAYS]
    totals = [sum(spread(day[way], "seconds")[0] for day in later) for way in WAYS]
    aucs_of_all, seconds_of_all = [f"{m:.4f}" for m in means], [f"{s:.1f}" for s in totals]
    return [*rows, ["after the first: mean, sum", *aucs_of_all, *seconds_of_all]]


def draw(path: Path, document: Mapping[str, Any]) -> None:
    """AUC by day of each way on the left, seconds so far on the right; a row for each data set."""
    num_data = len(document["data"])
    with report_style():
        figure, grid = plt.subplots(
            num_data, 2, figsize=(10, 3.5 * num_data), squeeze=False, constrained_layout=True
        )
        for (name, measured), (left, right) in zip(document["data"].items(), grid, strict=True):
            # Without the year.
            days = [str(of_day["day"]).partition("-")[2] for of_day in measured]
            for position, way in enumerate(WAYS):
                style = {"color": run_color(position), "marker": "o", "markersize": 3, "label": way}
                found = [spread(of_day[way], "auc") for of_day in measured]
                means, deviations = np.array(found).T
                left.plot(days, means, **style)
                left.fill_between(
                    days, means - deviations, means + deviations, alpha=0.2, color=style["color"]
                )
                seconds = [spread(of_day[way], "seconds")[0] for of_day in measured]
                right.plot(days, np.cumsum(seconds), **style)
            left.set_title(f"{name}: AUC of the day")
            right.set_title(f"{name}: seconds of training so far")
            for axes in (left, right):
                light_grid(axes, "y")
                axes.tick_params(labelsize=7)
            left.legend()
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page, its figures and its picture; what a person concludes from it is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    draw(picture, document)
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    text = PAGE.format(
        num_first=document["first_days"],
        command=shlex.join(["python", *sys.argv]),
        num_ranks=document["num_ranks"],
        seeds=", ".join(map(str, document["seeds"])),
        picture=picture.name,
    )
    header = ("day", *(f"AUC, {way}" for way in WAYS), *(f"seconds, {way}" for way in WAYS))
    parts = [text]
    for name, measured in document["data"].items():
        parts += [f"## {name}", markdown_table(header, rows_of(measured))]
    heading = "## Conclusion"
    if path.exists() and heading in path.read_text():
        parts.append(heading + path.read_text().split(heading)[1])
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    document: dict[str, Any] = {
        "first_days": parsed.first_days,
        "seeds": parsed.seeds,
        "num_ranks": count_ranks(),
        "data": {},
    }
    for name in parsed.data:
        work = (parsed.work / name).absolute()
        if work.exists():
            raise SystemExit(f"--work: expected no {work}, got one. Choose another directory.")
        (work / "log").mkdir(parents=True)
        data = CUT[name](work / "log")
        data = Data(data.days[: parsed.days], data.words)
        document["data"][name] = measure(work, data, parsed.first_days, parsed.seeds)
        if parsed.page:
            write_page(parsed.page, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
