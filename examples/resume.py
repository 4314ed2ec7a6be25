"""Stops a training run and resumes it from a checkpoint; for python or torchrun.

torchrun --nproc-per-node 2 resume.py DIRECTORY 20    # trains 20 steps and saves
torchrun --nproc-per-node 3 resume.py DIRECTORY 40    # goes on there, on other ranks if need be
"""

import itertools
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from clicks import NUM_DENSE, NUM_ROWS, Clicks
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import hotrec
from hotrec.runtime.ranks import process_group

DIM, BATCH_SIZE = 16, 256


def main(directory: Path, last_step: int) -> None:
    """Train up to a step, from the newest checkpoint in the directory if there is one."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=n, embedding_dim=DIM, feature_names=[name])
        for name, n in NUM_ROWS.items()
    ]
    model = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables, device=torch.device("meta")),
            NUM_DENSE,
            [32, DIM],
            [32, 1],
        )
    )
    hot = hotrec.profile(Clicks(rank, BATCH_SIZE, 20), model)
    model, optimizer = hotrec.parallelize(
        model,
        hot,
        embedding_optimizer=partial(RowWiseAdagrad, lr=0.1),
        dense_optimizer=partial(torch.optim.Adagrad, lr=0.1),
    )
    first_step, _ = hotrec.load_checkpoint(directory, model, optimizer)

    pipeline = hotrec.Pipeline(model, optimizer)
    # The pipeline reads ahead, so it gets the batches up to the checkpoint and no more.
    batches = itertools.islice(Clicks(rank, BATCH_SIZE, last_step), first_step, None)
    for step in range(first_step, last_step):
        loss, _, _ = pipeline.progress(batches)
        if rank == 0:
            print(step, float(loss))
    hotrec.save_checkpoint(directory, model, optimizer, last_step)
    pipeline.close()


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        sys.exit("usage: resume.py DIRECTORY STEPS, such as resume.py runs/mine 20")
    with process_group():
        main(Path(sys.argv[1]), int(sys.argv[2]))
