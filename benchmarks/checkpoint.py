"""Measures checkpoints: seconds to write and to read, and memory beside the tables.

    python benchmarks/checkpoint.py [--gb 6] [--save-ranks 2] [--load-ranks 3] [--folder FOLDER]

Tables of that size together, float32 with a row-wise Adagrad state, 1% of their rows hot, are
trained by nobody, written by some ranks and read by others. Memory is the largest resident
anonymous memory of a rank while it writes or reads, over that before; mapped files are not part of
it. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import shard
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planning.constraints import placement_constraints
from hotrec.planning.machine import Machine
from hotrec.planning.torchrec_plan import make_plan
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier, process_group
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.types import OptimizerKind, Partition, Placement

NUM_TABLES, DIM, HOT_FRAC = 8, 64, 0.01
SPEC = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1)


class NoLoader:
    """A loader without samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def build(num_bytes: float, ranks: Ranks) -> tuple[nn.Module, Any]:
    num_rows = int(num_bytes / NUM_TABLES / (4 * DIM + 4))
    names = [f"t{index}" for index in range(NUM_TABLES)]
    hot = {name: np.arange(0, num_rows, int(1 / HOT_FRAC)) for name in names}
    placement = Placement.alike(Partition(dict.fromkeys(names, num_rows), hot))
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=num_rows, embedding_dim=DIM, feature_names=[name]
        )
        for name in names
    ]
    meta = torch.device("meta")
    model = nn.Sequential(HotColdEmbeddingBagCollection(configs, placement, device=meta))
    size, cpu = ranks.world_size, torch.device("cpu")
    machine = Machine(size, size, "cpu", 1 << 30, 1 << 40, 1024)
    sharders: Any = [HotColdSharder(SPEC)]
    plan = make_plan(model, sharders, machine, placement_constraints(placement))
    sharded = shard(model, plan, sharders, cpu, data_parallel=False)
    return sharded, make_optimizer(sharded, SPEC, SPEC)


@contextmanager
def most_anonymous_bytes() -> Iterator[Callable[[], int]]:
    """The most memory of this process while the block ran, over that at its beginning."""
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
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def run_phase(phase: str, num_bytes: float, folder: Path) -> None:
    torch.set_num_threads(1)
    with process_group(device="cpu") as ranks:
        model, optimizer = build(num_bytes, ranks)
        initialize_embeddings(model, seed=0 if phase == "save" else 1)
        barrier()
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
        beside = all_gather_object(most())
        if ranks.is_first:
            document = {"seconds": seconds, "num_ranks": ranks.world_size, "bytes": max(beside)}
            (folder / f"{phase}.json").write_text(json.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=6.0, help="of all tables with their state")
    parser.add_argument("--save-ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--phase", choices=["save", "load"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.phase:
        run_phase(given.phase, given.gb * 1e9, given.folder)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for phase, num_ranks in (("save", given.save_ranks), ("load", given.load_ranks)):
            words = ["--phase", phase, "--gb", str(given.gb), "--folder", name]
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
            f"{size / 1e9 / of['seconds']:.2f} GB/s, {of['bytes'] / 1e6:.0f} MB beside the tables",
            file=sys.stderr,
        )
    print(json.dumps({"gigabytes": size / 1e9, **found}))


if __name__ == "__main__":
    main()
