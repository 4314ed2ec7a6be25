"""Stage 8: the losses of 200 steps on the GPU and on the CPU, from the same weights and batches.

Hot and cold rows with row-wise Adagrad, on the GPU with look-ahead, on the CPU without. Rounding
differs and grows during training; a bug in a kernel, a stream or an exchange makes the curves
diverge.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

from benchmarks.gpu_day.record import OK, Parts, Summary, Table
from benchmarks.gpu_day.stage import Day, bench_config, free_memory, main
from hotrec.bench.cases import build_runner, split_case
from hotrec.bench.job import subject_of
from hotrec.bench.samples import ZipfTables
from hotrec.planner.policies import choose_fraction
from hotrec.runtime.ranks import process_group
from hotrec.types import PipelineKind, PipelineSpec, Placement

ON = {"GPU": ("cuda", PipelineKind.look_ahead), "CPU": ("cpu", PipelineKind.sparse_dist)}
PICTURE = "picture"
# The largest difference of a step's losses that rounding explains. Assumed.
MOST = 1e-2
# No difference, where the axis is logarithmic.
LEAST = 1e-9


def train(device: str, pipeline: PipelineKind, day: Day) -> dict[str, Any]:
    """The loss of every step."""
    num_steps = day.pick(200, 20)
    config = bench_config(
        f"plans={day.pick('criteo_like_b2048', 'smoke')}",
        "optimizer=rowwise_adagrad", "optimizer.learning_rate=0.02",
    )  # fmt: skip
    samples = ZipfTables(config.plans.table_rows, exponent=1.05, num_dense=13, seed=0)
    batches = samples.batches(
        num_steps + 4, batch_size=config.plans.batch_size, rank=0, world_size=1
    )
    placed = Placement.alike(choose_fraction(samples.count(10000), hot_frac=0.02))
    case = split_case(device, placed, PipelineSpec(pipeline), is_routed_by_loader=True)
    subject = subject_of(config, samples.schema)
    with process_group(device=device) as ranks:
        runner = build_runner(subject, case, batches, ranks, samples)
        for _ in range(num_steps - 1):
            runner.step()
        runner.drain()
        runner.pipeline.close()
        losses = torch.stack([loss.detach() for loss in runner.losses]).tolist()
    del runner
    free_memory()
    return {"losses": losses, "batch_size": config.plans.batch_size}


def draw(losses: dict[str, list[float]], path: Path) -> dict[str, Any]:
    """A picture of both curves, and of their difference below."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), height_ratios=(2, 1))
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        above.plot(range(1, len(values) + 1), values, style, label=name)
    above.set_ylabel("loss")
    above.legend()
    apart = np.maximum(differences(losses), LEAST)
    below.semilogy(range(1, len(apart) + 1), apart)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return {"file": path.name}


def differences(losses: dict[str, list[float]]) -> np.ndarray:
    """Of the two losses of each step; infinite where one is no number."""
    first, second = (np.asarray(values) for values in losses.values())
    return np.nan_to_num(np.abs(first - second), nan=np.inf)


def losses_of(parts: Parts) -> dict[str, list[float]]:
    """By device, if both have been trained on."""
    found = {name: parts[name]["losses"] for name in ON if parts.get(name, {}).get("status") == OK}
    return found if len(found) == len(ON) else {}


def summarize(parts: Parts) -> Summary:
    losses = losses_of(parts)
    if not losses:
        return Summary("Nothing to compare.", [])
    apart = differences(losses)
    worst, num_steps = int(apart.argmax()), len(apart)
    shown = {*range(0, num_steps, max(1, num_steps // 10)), worst, num_steps - 1}
    rows = [
        [str(at + 1), *[f"{of[at]:.6f}" for of in losses.values()], f"{apart[at]:.1e}"]
        for at in sorted(shown)
    ]
    picture = parts.get(PICTURE, {}).get("file")
    note = f"Batches of {parts['GPU']['batch_size']}."
    return Summary(
        f"Losses of {num_steps} steps on the GPU and the CPU differ by at most "
        f"{apart[worst]:.1e}, in step {worst + 1}; the loss fell from {losses['GPU'][0]:.3f} to "
        f"{np.mean(losses['GPU'][-10:]):.3f}.",
        [
            Table(
                "Losses", ["step", *losses, "difference"], rows,
                note + (f"\n\n![losses and their difference]({picture})" if picture else ""),
            )
        ],
        bool(apart[worst] <= MOST),
    )  # fmt: skip


def run(day: Day) -> None:
    for name, (device, pipeline) in ON.items():
        day.record.part(name, lambda d=device, p=pipeline: train(d, p, day))
    losses = losses_of(day.record.parts)
    if losses:
        path = day.document.with_suffix(".png")
        day.record.part(PICTURE, lambda: draw(losses, path))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
