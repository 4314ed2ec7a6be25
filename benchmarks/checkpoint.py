"""Measures checkpoints: seconds to write and to read, and memory besides the tables.

    python benchmarks/checkpoint.py [--gb 6] [--save-ranks 2] [--load-ranks 3] [--folder FOLDER]
        [--slots 0.015 [--steps 100] [--batch 2048]]

Untrained tables of this total size, float32 with a row-wise Adagrad state and 1% hot rows, are
written by some ranks and read by others. Memory is the increase of a rank's resident anonymous
memory while it writes or reads, of the rank with the largest; mapped files are not included. The
last line on stdout is one JSON object.

With --slots all rows are cold, behind slots for that fraction of them, and are trained for some
steps on Zipf 1.05 samples before they are written. The peak of each rank, private or shared memory,
since before the creation of the tables is compared with the prediction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.assemble.torchrec_plan import make_plan
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import TableDemand
from hotrec.cost_model.memory import memory_by_rank
from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.machine import Machine
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier, process_group
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    load_checkpoint,
    save_checkpoint,
)
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import (
    POPULAR_ROW,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Tier,
)

NUM_TABLES, DIM, HOT_FRAC = 8, 64, 0.01
NAMES = [f"t{index}" for index in range(NUM_TABLES)]
ROW_BYTES = 4 * DIM + 4
SPEC = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)
EXPONENT, WINDOW = 1.05, 32
# Scatters the popular rows, and no table has a multiple of it as its number of rows.
PRIME = 2_147_483_647


class NoLoader:
    """A loader without samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Model(nn.Module):
    """A linear layer over the bags of all tables."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings, self.over = embeddings, nn.Linear(NUM_TABLES * DIM, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        logits = self.over(self.embeddings(batch.sparse).values())[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def rows_of(popularity: np.ndarray, num_rows: int) -> np.ndarray:
    """The rows of these ranks by popularity, the first 0."""
    return popularity.astype(np.int64) * (PRIME % num_rows) % num_rows


def make_batches(num_rows: int, given: argparse.Namespace, ranks: Ranks) -> Iterator[Batch]:
    rng = np.random.default_rng(ranks.rank)
    while True:
        # The inverse of Zipf's distribution function, with an integral for the sum.
        draws = rng.random(NUM_TABLES * given.batch)
        popularity = (1 - draws * (1 - num_rows ** (1 - EXPONENT))) ** (1 / (1 - EXPONENT)) - 1
        ids = rows_of(np.minimum(popularity, num_rows - 1), num_rows)
        yield Batch(
            dense=torch.empty(given.batch, 0),
            sparse=KeyedJaggedTensor(
                keys=NAMES,
                values=torch.from_numpy(ids),
                lengths=torch.ones(ids.size, dtype=torch.int32),
            ),
            labels=torch.from_numpy(rng.integers(0, 2, given.batch).astype(np.float32)),
            weights=torch.ones(given.batch),
            num_global_samples=given.batch * ranks.world_size,
        )


def choose_placement(num_rows: int, slots: float, global_batch_size: int) -> Placement:
    sizes = dict.fromkeys(NAMES, num_rows)
    if not slots:
        every = np.arange(0, num_rows, int(1 / HOT_FRAC))
        return Placement.alike(Partition(sizes, dict.fromkeys(NAMES, every)))
    popularity = np.arange(math.ceil(slots * num_rows))
    popular = np.empty(popularity.size, POPULAR_ROW)
    popular["row"] = rows_of(popularity, num_rows)
    # As ``make_batches`` draws them.
    shares = -np.diff(np.arange(1, popularity.size + 2) ** (1 - EXPONENT))
    shares /= 1 - num_rows ** (1 - EXPONENT)
    popular["prob"] = 1 - (1 - shares) ** global_batch_size
    placed = Placement.alike(Partition(sizes), Tier.CACHED, slots)
    return replace(placed, popular_rows=dict.fromkeys(NAMES, popular))


def predict_bytes(placement: Placement, num_rows: int, ranks: Ranks) -> list[float]:
    """Memory of the tables, slots and maps of every rank."""
    nothing = np.empty(0)
    demands = [
        TableDemand(name, num_rows, DIM, ROW_BYTES, 1.0, 1, nothing, nothing, nothing, nothing)
        for name in NAMES
    ]
    world = World(ranks.world_size, ranks.world_size)
    of_ranks = memory_by_rank(demands, {}, placement.tables, world, "cpu")
    return [of_rank["host_bytes"] for of_rank in of_ranks]


def train(
    model: nn.Module, optimizer: Any, num_rows: int, given: argparse.Namespace, ranks: Ranks
) -> float:
    """Median seconds of a step."""
    spec = PipelineSpec(PipelineKind.look_ahead, window=WINDOW)
    pipeline = make_pipeline(spec, model, optimizer, ranks.device)
    steps_s = make_steps(pipeline, make_batches(num_rows, given, ranks), given.steps)
    pipeline.close()
    return float(np.median(steps_s))


def make_steps(pipeline: Pipeline, batches: Iterator[Batch], num_steps: int) -> list[float]:
    """Seconds of each step; the pipeline is drained at the end."""
    own, steps_s = islice(batches, num_steps), []
    pipeline.start()
    for _ in range(num_steps):
        start_s = time.perf_counter()
        pipeline.progress(own)
        steps_s.append(time.perf_counter() - start_s)
    pipeline.flush()
    return steps_s


def build(placement: Placement, num_rows: int, ranks: Ranks) -> tuple[nn.Module, Any]:
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=num_rows, embedding_dim=DIM, feature_names=[name]
        )
        for name in NAMES
    ]
    meta = torch.device("meta")
    model = Model(HotColdEmbeddingBagCollection(configs, placement, device=meta))
    size, cpu = ranks.world_size, torch.device("cpu")
    machine = Machine(size, size, "cpu", 1 << 30, 1 << 40, 1024)
    sharders: Any = [HotColdSharder(SPEC)]
    plan = make_plan(model, sharders, machine, placement_constraints(placement))
    sharded = shard(model, plan, sharders, cpu, data_parallel=False)
    return sharded, make_optimizer(sharded, SPEC, SPEC)


@contextmanager
def most_anonymous_bytes() -> Iterator[Callable[[], int]]:
    """The peak memory of this process during the block, above that at its start."""
    found, is_over = [_anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            found.append(_anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(found) - found[0]
    finally:
        is_over.set()
        thread.join()


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return 1024 * sum(map(int, sizes))


def run_phase(given: argparse.Namespace) -> None:
    phase, folder = given.phase, given.folder
    num_rows = int(given.gb * 1e9 / NUM_TABLES / ROW_BYTES)
    torch.set_num_threads(1)
    with process_group(device="cpu") as ranks, most_anonymous_bytes() as most_of_all:
        start_s = time.perf_counter()
        placement = choose_placement(num_rows, given.slots, given.batch * ranks.world_size)
        model, optimizer = build(placement, num_rows, ranks)
        initialize_embeddings(model, seed=0 if phase == "save" else 1)
        barrier()
        more = {"start_s": time.perf_counter() - start_s}
        if given.slots and phase == "save":
            more["step_s"] = train(model, optimizer, num_rows, given, ranks)
        start_s = time.perf_counter()
        with most_anonymous_bytes() as most:
            if phase == "save":
                checkpoints = Checkpoints(folder / "checkpoints", facts={})
                save_checkpoint(checkpoints, Position(1, 1), model, optimizer, NoLoader())
            else:
                path = folder / "checkpoints" / "step-00000001"
                load_checkpoint(path, model=model, optimizer=optimizer, facts={})
            barrier()
            seconds = time.perf_counter() - start_s
        beside, peaks = all_gather_object(most()), all_gather_object(most_of_all())
        if ranks.is_first:
            document = {"seconds": seconds, "num_ranks": ranks.world_size, "bytes": max(beside)}
            document |= {"peak_bytes": peaks, **more}
            if given.slots:
                document["predicted_bytes"] = predict_bytes(placement, num_rows, ranks)
            (folder / f"{phase}.json").write_text(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=6.0, help="of all tables with their state")
    parser.add_argument("--save-ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--slots", type=float, default=0.0, help="fraction of the rows, all cold")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--phase", choices=["save", "load"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        run_phase(given)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for phase, num_ranks in (("save", given.save_ranks), ("load", given.load_ranks)):
            words = ["--phase", phase, "--gb", str(given.gb), "--folder", name]
            words += ["--slots", str(given.slots), "--steps", str(given.steps)]
            words += ["--batch", str(given.batch)]
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launch += ["--nproc-per-node", str(num_ranks), __file__, *words]
            subprocess.run(launch, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        folder = Path(name)
        found = {
            phase: json.loads((folder / f"{phase}.json").read_text()) for phase in ("save", "load")
        }
        size = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*.safetensors"))
    for phase, of in found.items():
        print(
            f"{phase}: {of['seconds']:.1f} s on {of['num_ranks']} ranks, "
            f"{size / 1e9 / of['seconds']:.2f} GB/s, {of['bytes'] / 1e6:.0f} MB besides the tables",
            file=sys.stderr,
        )
        if "pause_s" in of:
            print(
                f"{phase}: training stood still for {of['pause_s']:.2f} s and, at the end, "
                f"{of['finish_s']:.2f} s; a step took {1e3 * of['step_before_s']:.0f} ms before "
                f"and {1e3 * of['step_meanwhile_s']:.0f} ms in the {of['num_steps_meanwhile']} "
                "steps meanwhile",
                file=sys.stderr,
            )
        for rank, predicted in enumerate(of.get("predicted_bytes", ())):
            print(
                f"{phase}, rank {rank}: peak {of['peak_bytes'][rank] / 1e6:.0f} MB, predicted "
                f"{predicted / 1e6:.0f} MB",
                file=sys.stderr,
            )
    print(json.dumps({"gigabytes": size / 1e9, **found}))


if __name__ == "__main__":
    main()
