"""TorchRec's DLRM, its hot rows replicated, its cold rows sharded; for python or torchrun."""

import numpy as np
import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.data.batch import Batch
from hotrec.models.task import ClickTask
from hotrec.runtime.ranks import Ranks, process_group

NUM_ROWS = {"user": 100_000, "item": 20_000, "city": 500}
NUM_HOT, DIM, B, NUM_STEPS = 2_000, 16, 256, 30


def random_batch(rng: np.random.Generator, world_size: int) -> Batch:
    """One rank's share of a global batch: skewed ids, labels that follow from one of them."""
    ids = [(rng.random(B) ** 6 * rows).astype(np.int64) for rows in NUM_ROWS.values()]
    lengths = torch.ones(len(ids) * B, dtype=torch.int64)
    sparse = KeyedJaggedTensor(list(NUM_ROWS), torch.tensor(np.concatenate(ids)), lengths=lengths)
    labels = torch.from_numpy((ids[1] % 3 == 0).astype(np.float32))
    return Batch(torch.rand(B, 4), sparse, labels, torch.ones(B), B * world_size)


def main(ranks: Ranks) -> None:
    """Swap the collection, plan, shard, train a few steps."""
    torch.manual_seed(0)  # the same start on every rank
    tables = [EmbeddingBagConfig(n, DIM, name=t, feature_names=[t]) for t, n in NUM_ROWS.items()]
    model = DLRM(EmbeddingBagCollection(tables), 4, [32, DIM], [32, 1], ranks.device)
    hot_rows = {t: np.arange(min(n, NUM_HOT)) for t, n in NUM_ROWS.items()}
    partition = hotrec.Partition(NUM_ROWS, hot_rows)
    spec = hotrec.OptimizerSpec(hotrec.OptimizerKind.rowwise_adagrad, learning_rate=0.1)
    world, local = ranks.world_size, ranks.local_world_size
    machine = hotrec.Machine(world, local, ranks.device.type, 8 << 30, 8 << 30, B)

    task = ClickTask(hotrec.use_hot_cold(model, partition), world)
    router = model.sparse_arch.embedding_bag_collection.router
    sharders = [hotrec.HotColdSharder(spec)]
    rules = hotrec.hot_cold_constraints(tables, partition)
    plan = hotrec.make_plan(task, sharders, machine, rules)
    sharded = hotrec.shard(task, plan, sharders, ranks.device)
    optimizer = hotrec.make_optimizer(sharded, spec, spec)
    pipeline = TrainPipelineSparseDist(sharded, optimizer, ranks.device)
    rng = np.random.default_rng(ranks.rank)
    batches = [random_batch(rng, world) for _ in range(NUM_STEPS)]
    stream, routed = iter(batches), router(batches[0].sparse)
    losses = [float(pipeline.progress(stream)[0]) for _ in batches]
    if ranks.is_first:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"hot fraction of lookups {routed.num_hot_lookups() / routed.num_lookups:.3f}")


if __name__ == "__main__":
    with process_group() as ranks:
        main(ranks)
