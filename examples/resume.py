"""Stops a training run and resumes it from a checkpoint; for python or torchrun.

torchrun --nproc-per-node 2 resume.py DIRECTORY 20    # trains 20 steps and saves
torchrun --nproc-per-node 2 resume.py DIRECTORY 40    # resumes there and trains 20 more
"""

import itertools
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
    saved = sorted(directory.glob("step_*"))
    # The hot rows of the run that is resumed, or its state would be of other tables.
    choice = directory / "choice.pt"
    if saved:
        hot = torch.load(choice, weights_only=False)
    else:
        hot = hotrec.profile(Clicks(rank, BATCH_SIZE, 20), model)
    model, optimizer = hotrec.parallelize(
        model,
        hot,
        embedding_optimizer=partial(RowWiseAdagrad, lr=0.1),
        dense_optimizer=partial(torch.optim.Adagrad, lr=0.1),
    )
    first_step = 0
    if saved:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=saved[-1])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = int(saved[-1].name.removeprefix("step_"))
    elif rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(hotrec.choice_of(model), choice)

    pipeline = hotrec.Pipeline(model, optimizer)
    # The pipeline reads ahead, so it gets the batches up to the checkpoint and no more.
    batches = itertools.islice(Clicks(rank, BATCH_SIZE, last_step), first_step, None)
    for step in range(first_step, last_step):
        loss, _, _ = pipeline.progress(batches)
        if rank == 0:
            print(step, float(loss))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=directory / f"step_{last_step:06d}")
    pipeline.close()


if __name__ == "__main__":
    with process_group():
        main(Path(sys.argv[1]), int(sys.argv[2]))
