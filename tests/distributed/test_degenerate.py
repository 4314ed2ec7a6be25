"""Data with next to nothing in it: counted, planned for and trained as the unsplit model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec
from tests.helpers.ranks import run_ranks

LEARNING_RATE = 0.1
# The bags of each feature in a batch, and the batches of each rank.
Bags = list[list[list[int]]]
NONE: Bags = [[], []]
EMPTY: Bags = [[[]] * 3, [[]] * 3]
# Name -> rows of the two tables, the batches of the first rank, those of the second.
CASES: dict[str, tuple[tuple[int, int], list[Bags], list[Bags]]] = {
    "tables of one row": ((1, 1), [[[[0]] * 3, [[0, 0], [], [0]]]], [[[[0]] * 3, [[]] * 3]]),
    "one sample": ((3, 2), [[[[2]], [[1]]]], [[[[2]], [[]]]]),
    "equal ids": ((5, 4), [[[[2]] * 4, [[3]] * 4]] * 2, [[[[2]] * 4, [[3]] * 4]] * 2),
    "equal counts": (
        (4, 4),
        [[[[0], [1], [2], [3]], [[3], [2], [1], [0]]]],
        [[[[3], [2], [1], [0]], [[0], [1], [2], [3]]]],
    ),
    "a table that nobody reads": (
        (5, 6),
        [[[[0], [1], [4]], [[]] * 3]],
        [[[[1], [1], [2]], [[]] * 3]],
    ),
    "no table that anybody reads": ((5, 6), [EMPTY], [EMPTY]),
    "one row, rarely": (
        (3, 3),
        [[[[], [2], []], [[]] * 3], EMPTY, EMPTY],
        [[[[], [], []], [[]] * 3], EMPTY, EMPTY],
    ),
    "one long bag": ((3, 1), [[[[2] * 40, [], []], [[]] * 3], EMPTY], [EMPTY, EMPTY]),
}


class Rows(Pipelineable):
    """A batch."""

    def __init__(self, bags: Bags) -> None:
        ids = [row for of_feature in bags for bag in of_feature for row in bag]
        lengths = [len(bag) for of_feature in bags for bag in of_feature]
        self.ids = KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor(ids, dtype=torch.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
        )
        self.labels = torch.arange(float(len(bags[0]))) % 2

    def to(self, device: torch.device, non_blocking: bool = False) -> Rows:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> Rows:
        return self


class Model(nn.Module):
    """(batch) -> (loss, loss)."""

    def __init__(self, num_rows: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.bags = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=num, embedding_dim=4, feature_names=[name]
                )
                for name, num in zip("ab", num_rows, strict=True)
            ]
        )
        self.out = nn.Linear(8, 1)

    def forward(self, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.bags(batch.ids)
        logits = self.out(torch.cat([pooled["a"], pooled["b"]], dim=1)).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def unsplit(num_rows: tuple[int, int], by_rank: list[list[Bags]]) -> dict[str, torch.Tensor]:
    """The tables after all steps in one process."""
    model = Model(num_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for of_ranks in zip(*by_rank, strict=True):
        batch = Rows([first + second for first, second in zip(*of_ranks, strict=True)])
        batch.labels = torch.cat([Rows(bags).labels for bags in of_ranks])
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return {name: bag.weight.detach() for name, bag in model.bags.embedding_bags.items()}


def plans_and_trains(folder: str) -> None:
    rule = partial(torch.optim.SGD, lr=LEARNING_RATE)
    for name, (num_rows, *by_rank) in CASES.items():
        mine = [Rows(bags) for bags in by_rank[dist.get_rank()]]
        # A batch without samples counts as nothing, wherever it comes.
        counted = hotrec.profile([Rows(NONE), *mine, Rows(NONE)], Model(num_rows))
        if dist.get_rank() == 0:
            counted.save(Path(folder) / name)
        dist.barrier()
        given: dict[str, Any] = {"embedding_optimizer": rule, "dense_optimizer": rule}
        expected = unsplit(num_rows, by_rank)
        for kind, may_decline in (("auto", True), ("auto", False), ("look_ahead", False)):
            model, optimizer = hotrec.parallelize(
                Model(num_rows),
                hotrec.profile(Path(folder) / name),
                pipeline=kind,
                may_decline=may_decline,
                **given,
            )
            pipeline = hotrec.Pipeline(model, optimizer, torch.device("cpu"))
            data = iter(mine)
            for _ in mine:
                pipeline.progress(data)
            pipeline.close()
            gathered = hotrec.gather_tables(model)
            for table, weight in expected.items():
                np.testing.assert_allclose(
                    gathered[table], weight, rtol=1e-5, atol=1e-7, err_msg=f"{name}, {kind}"
                )


def test_next_to_no_data_is_planned_for_and_trained(tmp_path: Path) -> None:
    run_ranks(plans_and_trains, 2, folder=str(tmp_path), timeout_s=120)


def counts_on_one_rank() -> tuple[Any, ...]:
    """The first rank reads nothing, one way or another."""
    found = set()
    for nothing in ([], [Rows(NONE)], [Rows(NONE)] * 2):
        data = [Rows([[[1], [1]], [[0], []]])] if dist.get_rank() else nothing
        counted = hotrec.profile(data, Model((3, 2)))
        has_locality = bool(counted.locality)
        facts = counted.num_samples, counted.batch_size, tuple(counted.counts["a"]), has_locality
        found.add(facts)
    (of_all,) = found
    return of_all


def test_ranks_without_samples_count_those_of_others() -> None:
    found = run_ranks(counts_on_one_rank, 2, timeout_s=60)
    assert found == [(2, 2, (0, 2, 0), True)] * 2


def refuses_no_data() -> list[str]:
    found = []
    for nothing in ([], [Rows(NONE)], {"a": np.array([], np.int64), "b": np.array([], np.int64)}):
        try:
            hotrec.profile(nothing, Model((3, 2)))
            found.append("nothing")
        except ValueError as error:
            found.append(str(error))
    return found


def test_every_rank_hears_of_loaders_without_samples() -> None:
    found = run_ranks(refuses_no_data, 2, timeout_s=60)
    assert found[0] == found[1]
    assert all("at least one sample" in text for text in found[0])
