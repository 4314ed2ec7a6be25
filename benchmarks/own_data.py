"""Measures the way from a user's CSV file to a report, with a newcomer's commands and a time limit.

    python benchmarks/own_data.py [--rows 200000] [--limit-s 300] [--folder DIR]

Writes a log with strings, missing values, a list column and dates, runs `hotrec doctor`, `hotrec
init` and the command that init prints, and prints the seconds of each as one line of JSON. Exits
with 1 if a command fails, the model learns nothing, or the total exceeds the limit.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

MIN_AUC = 0.6
NULL = "NULL"


def write_log(path: Path, num_rows: int, seed: int = 0) -> None:
    """Write a month of impressions that depend on user and item, so that a model can learn them."""
    rng = np.random.default_rng(seed)
    num_users, num_items = max(20, num_rows // 20), max(10, num_rows // 50)
    users, items = (_zipf(rng, size, num_rows) for size in (num_users, num_items))
    price = np.exp(rng.normal(3, 1, num_rows))
    taste, appeal = rng.normal(size=num_users), rng.normal(size=num_items)
    logit = taste[users] + appeal[items] - 0.3 * (np.log(price) - 3) - 1.5
    clicked = (rng.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(int)
    seconds = np.sort(rng.integers(0, 30 * 86_400, num_rows))
    lengths = rng.integers(0, 6, num_rows)
    seen = np.split(_zipf(rng, num_items, int(lengths.sum())), np.cumsum(lengths)[:-1])
    countries = rng.choice(["de", "fr", "it", "es", ""], num_rows, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    ages = [NULL if is_missing else age for is_missing, age in zip(
        rng.random(num_rows) < 0.1, rng.integers(18, 80, num_rows), strict=True)]  # fmt: skip
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        names = "shown_at session clicked user_id item_id recent_items country price age"
        writer.writerow(names.split())
        for row in range(num_rows):
            moment = datetime(2024, 5, 1) + timedelta(seconds=int(seconds[row]))
            recent = " ".join(f"i{item}" for item in seen[row])
            writer.writerow(
                [moment, f"s{row}", clicked[row], f"u{users[row]}", f"i{items[row]}", recent]
                + [countries[row], f"{price[row]:.2f}", ages[row]]
            )


def _zipf(rng: np.random.Generator, num_values: int, size: int) -> np.ndarray:
    weights = 1 / np.arange(1, num_values + 1) ** 1.05
    drawn = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(size))
    # Numbered without regard to popularity.
    return rng.permutation(num_values)[np.minimum(drawn, num_values - 1)]


def run(words: list[str], folder: Path) -> tuple[dict[str, Any], float]:
    """A command's figures and seconds."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hotrec", *words], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"hotrec {' '.join(words)}: exit code {done.returncode}")
    return json.loads(done.stdout), time.perf_counter() - start_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        write_log(folder / "events.csv", arguments.rows)
        _, doctor_s = run(["doctor"], folder)
        described, init_s = run(["init", "events.csv"], folder)
        trained, run_s = run(shlex.split(described["next"])[1:], folder)
    total_s = doctor_s + init_s + run_s
    figures = {
        "rows": arguments.rows,
        "command": described["next"],
        "doctor_s": doctor_s,
        "init_s": init_s,
        "run_s": run_s,
        "total_s": total_s,
        "auc": trained["auc"],
    }
    print(json.dumps(figures))
    return int(total_s > arguments.limit_s or trained["auc"] < MIN_AUC)


if __name__ == "__main__":
    sys.exit(main())
