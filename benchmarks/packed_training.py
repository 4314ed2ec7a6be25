"""The memory of a rank that trains on sequences: TorchRec's output, expanded, packed, late.

`benchmarks/packed_memory.py` calls it for its page. Ranks are processes of this host over gloo.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.report.render import markdown_table
from hotrec.report.units import show_bytes
from hotrec.types import Partition

NUM_RANKS, NUM_STEPS, LENGTH, SEED = 2, 3, 1000, 0
# By case: whether TorchRec shards the tables, the output is packed, the layer late.
CASES = {
    "TorchRec's own": (True, False, False),
    "expanded": (False, False, False),
    "packed, materialized": (False, True, False),
    "packed, late": (False, True, True),
}
Shape = tuple[int, int, int]  # ids of a feature, D, N
COLUMNS = ("case", "peak of a rank", "ratio", "loss of the last step")


def memory_of(key: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    [line] = [s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith(key)]
    return 1024 * int(line.split()[1])


class Reader(nn.Module):
    """A linear layer on the rows of all features next to each other, and the mean of its square."""

    def __init__(self, num_rows: Mapping[str, int], dim: int, width: int, case: str) -> None:
        super().__init__()
        _, is_packed, self.is_late = CASES[case]
        tables = [
            EmbeddingConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[name])
            for name, rows in num_rows.items()
        ]
        self.tables = EmbeddingCollection(tables, device=torch.device("meta"))
        if is_packed:
            hotrec.use_packed_jagged_tensor(self.tables)
        self.names = list(num_rows)
        self.layer = hotrec.LateLinear([dim] * len(num_rows), width)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.tables(batch.sparse_features)
        features = [found[name] for name in self.names]
        if self.is_late:
            read = self.layer(features)
        elif isinstance(features[0], hotrec.PackedJaggedTensor):
            read = self.layer.bias
            for one, block in zip(
                features, self.layer.weight.split(self.layer.dims, 1), strict=True
            ):
                read = read + F.linear(one.materialize().values(), block)
        else:
            read = self.layer(features)
        loss = read.square().mean()
        return loss, loss.detach()


def batch_of(num_rows: Mapping[str, int], num_ids: int, rank: int, step: int) -> Batch:
    """One rank's batch: uniformly drawn ids of every feature, at the same positions."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = [torch.randint(rows, (num_ids,), generator=generator) for rows in num_rows.values()]
    lengths = torch.full((len(ids) * (num_ids // LENGTH),), LENGTH)
    features = KeyedJaggedTensor(list(num_rows), torch.cat(ids), lengths=lengths)
    num_samples = num_ids // LENGTH
    return Batch(torch.empty(num_samples, 0), features, torch.zeros(num_samples))


def train(rank: int, case: str, shape: Shape, file: str, rows: Any) -> dict[str, Any]:
    """One rank of a case: the most that it grows by in training, and its loss."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(SEED)
    num_ids, dim, width = shape
    before = memory_of("VmRSS")
    is_torchrecs, _, _ = CASES[case]
    model, optimizer = hotrec.parallelize(
        Reader(rows, dim, width, case),
        "off" if is_torchrecs else Partition(rows),
        embedding_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        dense_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        pipeline="sparse_dist",
        seed=SEED,
    )
    pipeline = hotrec.Pipeline(model, optimizer)
    batches = iter([batch_of(rows, num_ids, rank, step) for step in range(NUM_STEPS)])
    for _ in range(NUM_STEPS):
        loss = pipeline.progress(batches)
    peak = memory_of("VmHWM") - before
    dist.destroy_process_group()
    return {"case": case, "rank": rank, "peak_bytes": peak, "loss": float(loss)}


def measure(case: str, shape: Shape, distinct: Mapping[str, float]) -> dict[str, Any]:
    """A case on ``NUM_RANKS`` ranks: the larger peak, and the mean loss of the last step."""
    num_rows = {name: round(frac * shape[0]) for name, frac in distinct.items()}
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(NUM_RANKS) as pool,
    ):
        given = [(rank, case, shape, f"{folder}/store", num_rows) for rank in range(NUM_RANKS)]
        found = pool.starmap(train, given, chunksize=1)
    return {
        "case": case,
        "peak_bytes": max(of["peak_bytes"] for of in found),
        "loss": sum(of["loss"] for of in found) / NUM_RANKS,
    }


def render(found: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    first = found[0]["peak_bytes"]
    rows = [
        [
            of["case"],
            show_bytes(of["peak_bytes"]),
            f"{first / of['peak_bytes']:.1f}",
            f"{of['loss']:.6g}",
        ]
        for of in found
    ]
    return markdown_table(COLUMNS, rows)
