"""Compares the AUC of training variants with exact training over seeds: `hotrec train`, two ranks.

With exactly one GPU, one rank.

    python benchmarks/quality.py [--seeds 0 1 2 3 4] [--variants exact bf16 ...] [--data kuairand]
        [--work runs/quality] [--page benchmarks/results/quality.md] [--max-steps N]

Prepares the data if needed, trains every variant with every seed, seed by seed, and
compares variants of the same seed, which share data, order and initial weights. Finished runs are
not repeated: run the same command to continue, or use another --work to start from scratch. The
last line on stdout is one JSON object, which is also written next to the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quality_page import write_page

EXACT = "exact"

# Overrides of `hotrec train` besides the data's settings. The first one is the reference, with
# TorchRec's pipeline, which is what such small steps on one host get. The second is as exact, and
# differs by the order of additions alone: what it shows is no effect.
# All rows behind slots for half of them.
SLOTS = (
    "pipeline=look_ahead",
    "placement.hot_frac=0",
    "placement.cold_tier=cached",
    "placement.cache_load_frac=0.5",
    "trainer.eval_batch_size=256",
)

VARIANTS: Mapping[str, Sequence[str]] = {
    EXACT: (),
    "look_ahead": ("pipeline=look_ahead",),
    "bf16": ("pipeline.wire=bf16",),
    "look_ahead_bf16": ("pipeline=look_ahead", "pipeline.wire=bf16"),
    "slots_bf16": (*SLOTS, "placement.cold_rows=bf16"),
    "dense_bf16": ("trainer.precision=bf16",),
    "dense_tf32": ("trainer.precision=tf32",),
    # Two blocks of each kind in the epoch; and blocks cut or grown by the validation loss.
    "all_hot": ("order=all_hot",),
    "all_hot_by_loss": ("order=all_hot", "order.start_rate=0.1", "trainer.eval_every_steps=25"),
}

NEED_CUDA = ("dense_tf32",)


def count_ranks() -> int:
    """Two, unless there is only one GPU: NCCL refuses two ranks on one."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


@dataclass(frozen=True)
class Data:
    """A log, and how it is trained on.

    Args:
        what: for the page.
        source: settings that prepare needs, too.
        training: further settings of train, the same for every variant.
    """

    what: str
    source: Sequence[str]
    training: Sequence[str]


LAYERS = (
    "model.embedding_dim=16",
    "model.dense_layer_sizes=[64,16]",
    "model.over_layer_sizes=[128,64,1]",
    "optimizer.learning_rate=0.01",
    "optimizer.dense_learning_rate=0.005",
    "trainer.batch_size=256",
)
DATA: Mapping[str, Data] = {
    "kuairand": Data(
        "KuaiRand-Pure, rows of 16: 199,011 train samples, one epoch, AUC on the last day",
        ("experiment=quickstart", *LAYERS),
        ("placement=fraction", "placement.hot_frac=0.5"),
    ),
    "synthetic": Data(
        "conf/data/synthetic.yaml with 200,000 train samples, one epoch: one-hot and multi-hot "
        "features, clicks by known weights of their rows, drift",
        ("data=synthetic", "data.synthetic.num_train=200000"),
        (*LAYERS, "placement=fraction", "placement.hot_frac=0.1"),
    ),
}
KEPT = ("auc", "log_loss", "num_steps", "hot_lookup_frac", "sent_bytes_total", "loss")
KEPT_IF_THERE = ("all_hot_samples_frac", "elapsed_s")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument(
        "--page", type=Path, help="file for the tables, with the figures next to it"
    )
    parser.add_argument("--max-steps", type=int, help="of each run, to try this out")
    parsed = parser.parse_args(arguments)
    if EXACT not in parsed.variants:
        parser.error(f"--variants: expected {EXACT} among them, got {parsed.variants}")
    return parsed


def hotrec(run_dir: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """The last line of a command's stdout; its stderr is kept in the run directory.

    Raises:
        RuntimeError: if the command fails.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    errors = run_dir / "stderr.txt"
    command = [sys.executable, "-m", "hotrec", *arguments]
    # One thread per rank: the ranks share the machine, and the order of additions stays.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HOTREC_RUN_DIR": str(run_dir)}
    with errors.open("w") as stderr:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
    if ended.returncode:
        raise RuntimeError(
            f"{' '.join(arguments)}: expected exit code 0, got {ended.returncode}. "
            f"{errors} ends with:\n{''.join(errors.read_text().splitlines(True)[-15:])}"
        )
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def paths(work: Path, name: str) -> list[str]:
    of_data = work / name
    return [f"paths.{what}={of_data / what}" for what in ("dataset", "partition")]


def prepare(work: Path, name: str, data: Data) -> None:
    """Create the dataset unless it exists."""
    if not (work / name / "dataset").exists():
        hotrec(work / name / "prepare_run", ["prepare", *data.source, *paths(work, name)])


def train(
    work: Path, name: str, data: Data, variant: str, seed: int, max_steps: int | None
) -> dict[str, Any]:
    """The figures of a run, of an earlier one with the same settings if there is one."""
    run_dir = work / name / f"{variant}-{seed}"
    settings = [*data.source, *data.training, *VARIANTS[variant], f"trainer.seed={seed}"]
    if max_steps is not None:
        settings.append(f"trainer.max_steps={max_steps}")
    kept = run_dir / "result.json"
    if kept.exists():
        earlier: dict[str, Any] = json.loads(kept.read_text())
        if earlier["settings"] == settings:
            return earlier
        raise ValueError(
            f"{kept}: expected a run of {settings}, got one of {earlier['settings']}. "
            "Choose another --work."
        )
    options = [
        f"launch.num_ranks={count_ranks()}",
        f"run_name={variant}-{seed}",
        "trainer.resume=none",
    ]
    begin = time.monotonic()
    found = hotrec(run_dir, ["train", *settings, *paths(work, name), *options])
    print(
        f"{name} {variant} seed {seed}: AUC {found['auc']:.5f}, {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    result = {key: found[key] for key in KEPT} | {key: found.get(key) for key in KEPT_IF_THERE}
    result["settings"] = settings
    kept.write_text(json.dumps(result))
    return result


def compare(of_data: Mapping[str, Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """By variant: AUC of each seed, and its difference to exact training with the same seed."""
    exact = np.array([of_data[EXACT][str(seed)]["auc"] for seed in seeds])
    compared = {}
    for variant, runs in of_data.items():
        auc = np.array([runs[str(seed)]["auc"] for seed in seeds])
        compared[variant] = {
            "auc": auc.tolist(),
            "mean": float(auc.mean()),
            "std": float(auc.std(ddof=1)) if auc.size > 1 else None,
        }
        difference = auc - exact
        if variant != EXACT:
            compared[variant]["difference"] = {
                "of_seeds": difference.tolist(),
                "mean": float(difference.mean()),
                "std": float(difference.std(ddof=1)) if auc.size > 1 else None,
                "min": float(difference.min()),
                "max": float(difference.max()),
            }
    return compared


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    has_cuda = torch.cuda.is_available()
    not_run = {
        variant: "no CUDA device"
        for variant in parsed.variants
        if variant in NEED_CUDA and not has_cuda
    }
    for variant, why in not_run.items():
        print(f"{variant}: not run: {why}", file=sys.stderr, flush=True)
    parsed.variants = [variant for variant in parsed.variants if variant not in not_run]
    runs: dict[str, dict[str, dict[str, Any]]] = {}
    for name in parsed.data:
        data = DATA[name]
        prepare(parsed.work, name, data)
        runs[name] = {variant: {} for variant in parsed.variants}
        # Seed by seed: what is there after an interruption compares whole seeds.
        for seed in parsed.seeds:
            for variant in parsed.variants:
                runs[name][variant][str(seed)] = train(
                    parsed.work, name, data, variant, seed, parsed.max_steps
                )
    document = {
        "seeds": parsed.seeds,
        "num_ranks": count_ranks(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "not_run": not_run,
        "max_steps": parsed.max_steps,
        "data": {
            name: {
                "what": DATA[name].what,
                "settings": [*DATA[name].source, *DATA[name].training],
                "compared": compare(of_data, parsed.seeds),
                "runs": of_data,
            }
            for name, of_data in runs.items()
        },
        "variants": {variant: list(VARIANTS[variant]) for variant in parsed.variants},
    }
    if parsed.page:
        write_page(parsed.page, document)
        parsed.page.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
