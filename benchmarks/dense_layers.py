"""Measures the dense layers on CPU: TorchRec's interactions and hotrec's, and a dense step.

    python benchmarks/dense_layers.py [--batch-size 2048] [--num-features 26] [--dim 64]
        [--repeats 20]

One process, one thread, as a rank on a small host has. The step is that of DLRM without lookups:
bottom layers 256-128-D, dot interaction, top layers 256-128-1, SGD. "rows out" is the time from the
start of backward to the gradients of the looked-up rows, "rest" the remaining backward (with late
updates: the deferred weight gradients), "update" the optimizer. Medians of the thread's processor
time, to reduce the effect of other work on the machine; caches and memory are still shared. The
last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper

from hotrec.bench.machine import machine_facts
from hotrec.models.interaction import CrossNet, DotInteraction
from hotrec.runtime.ranks import process_group
from hotrec.train.dense_sync import DenseSync, dense_parameters

NUM_DENSE, LEARNING_RATE = 13, 0.01
CROSS_LAYERS, CROSS_RANK = 3, 512
Clock = Callable[[str], None]


def medians(run: Callable[[Clock], None], repeats: int) -> dict[str, float]:
    """Median seconds by name; ``clock(name)`` gives the time since the last call that name."""
    totals: dict[str, list[float]] = {}
    for number in range(repeats + 3):
        last = time.thread_time()

        def clock(name: str) -> None:
            nonlocal last
            now = time.thread_time()
            if number >= 3:  # noqa: B023 (called within the round)
                totals.setdefault(name, []).append(now - last)
            last = time.thread_time()

        run(clock)
    return {name: float(np.median(times)) for name, times in totals.items()}


def measure_arch(
    arch: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], repeats: int
) -> dict[str, float]:
    grad = torch.randn_like(arch(*inputs))

    def run(clock: Clock) -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        clock("inputs")
        out = arch(*leaves)
        clock("forward")
        out.backward(grad)
        clock("backward")

    times = medians(run, repeats)
    return {name: times[name] for name in ("forward", "backward")}


class DenseLayers(nn.Module):
    """DLRM's dense layers around an interaction."""

    def __init__(self, interaction: InteractionArch, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        num_pairs = interaction.F * (interaction.F + 1) // 2
        self.bottom = MLP(NUM_DENSE, [256, 128, dim], activation="relu")
        self.interaction = interaction
        self.top = nn.Sequential(MLP(dim + num_pairs, [256, 128]), nn.Linear(128, 1))


def measure_step(
    interaction: InteractionArch, options: argparse.Namespace, *, is_late: bool
) -> dict[str, float]:
    model = DenseLayers(interaction, options.dim)
    optimizer = KeyedOptimizerWrapper(
        dense_parameters(model), lambda params: torch.optim.SGD(params, lr=LEARNING_RATE)
    )
    late = DenseSync(model, optimizer) if is_late else None
    dense = torch.randn(options.batch_size, NUM_DENSE)
    rows = torch.randn(options.batch_size, options.num_features, options.dim)
    labels = torch.rand(options.batch_size).round()

    def run(clock: Clock) -> None:
        leaf = rows.detach().requires_grad_()
        leaf.register_hook(lambda _: clock("backward, rows out"))
        clock("inputs")
        bottom = model.bottom(dense)
        clock("bottom forward")
        pairs = model.interaction(bottom, leaf)
        clock("interaction forward")
        logits = model.top(pairs).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        clock("top forward")
        if late is None:
            loss.backward()
            clock("backward, rest")
            optimizer.step()
            optimizer.zero_grad()
        else:
            with late.backward():
                loss.backward()
            late.finish_backward()
            clock("backward, rest")
            late.step()
            late.flush()
        clock("update")

    times = medians(run, options.repeats)
    times.pop("inputs")
    if late is not None:
        late.close()
    return {**times, "whole": sum(times.values())}


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    size, num_features, dim = options.batch_size, options.num_features, options.dim
    dense, rows = torch.randn(size, dim), torch.randn(size, num_features, dim)
    figures = {}
    for name, dot in (
        ("dot, torchrec", InteractionArch(num_features)),
        ("dot, hotrec", DotInteraction(num_features)),
    ):
        figures[name] = measure_arch(dot, [dense, rows], options.repeats)
    vectors = torch.cat((dense, rows.flatten(1)), dim=1)
    for name, kind in (("cross, torchrec", LowRankCrossNet), ("cross, hotrec", CrossNet)):
        net = kind(vectors.shape[1], CROSS_LAYERS, CROSS_RANK)
        figures[name] = measure_arch(net, [vectors], max(options.repeats // 4, 2))
    for name, interaction, is_late in (
        ("step, torchrec", InteractionArch(num_features), False),
        ("step, hotrec", DotInteraction(num_features), False),
        ("step, hotrec late", DotInteraction(num_features), True),
    ):
        figures[name] = measure_step(interaction, options, is_late=is_late)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--num-features", type=int, default=26)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with process_group(device="cpu"):
        figures = measure(options)
    for name, times in figures.items():
        for part, seconds in times.items():
            print(f"{name:<18}  {part:<20}  {seconds * 1e3:7.2f} ms", file=sys.stderr)
    facts = {"processor": machine_facts()["processor"], "torch": torch.__version__, **vars(options)}
    print(json.dumps({**facts, "seconds": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
