"""Sequences whose distinct rows are exchanged once, before they are read; for torchrun."""

import os

import torch
import torch.distributed as dist
from plays import FEATURES, NUM_ROWS, Listener, Plays
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import hotrec

DIM, BATCH_SIZE, NUM_BATCHES, LEARNING_RATE = 32, 256, 40, 0.05


def main() -> None:
    """Build, shard, train."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(
            name=name, num_embeddings=n, embedding_dim=DIM, feature_names=FEATURES[name]
        )
        for name, n in NUM_ROWS.items()
    ]
    model = Listener(EmbeddingCollection(tables, device=torch.device("meta")), device)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": LEARNING_RATE})
    loader = DataLoader(Plays(dist.get_rank(), BATCH_SIZE, NUM_BATCHES), batch_size=None)
    hot = os.environ.get("HOT") or hotrec.profile(loader, model, num_batches=20)
    model, optimizer = hotrec.parallelize(
        model, hot, dense_optimizer=lambda p: torch.optim.Adagrad(p, lr=LEARNING_RATE)
    )
    pipeline = hotrec.Pipeline(model, optimizer, device)
    batches = iter(loader)
    for step in range(NUM_BATCHES):
        loss, _ = pipeline.progress(batches)
        if dist.get_rank() == 0:
            print(step, float(loss))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
