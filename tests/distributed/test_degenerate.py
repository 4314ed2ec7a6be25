"""Data with next to nothing in it: counted, planned for and trained as the unsplit model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.types import PipelineKind
from tests.distributed.programs import Batch, Choice, Model, Program, refused, table
from tests.distributed.setups import gather
from tests.helpers.ranks import run_ranks

# The bags of each feature in a batch, and the batches of each rank.
Bags = list[list[list[int]]]
NONE: Bags = [[], []]
EMPTY: Bags = [[[]] * 3, [[]] * 3]
# Name -> rows of the two tables, the batches of the first rank, those of the second.
CASES: dict[str, tuple[tuple[int, int], list[Bags], list[Bags]]] = {
    "tables of one row": ((1, 1), [[[[0]] * 3, [[0, 0], [], [0]]]], [[[[0]] * 3, [[]] * 3]]),
    "one sample": ((3, 2), [[[[2]], [[1]]]], [[[[2]], [[]]]]),
    "equal ids": ((5, 4), [[[[2]] * 4, [[3]] * 4]] * 2, [[[[2]] * 4, [[3]] * 4]] * 2),
    "equal counts": ((2, 2), [[[[0], [1]], [[1], [0]]]], [[[[1], [0]], [[0], [1]]]]),
    "a table that nobody reads": ((5, 6), [[[[0], [1], [4]], [[]] * 3]], [[[[1]] * 3, [[]] * 3]]),
    "no table that anybody reads": ((5, 6), [EMPTY], [EMPTY]),
    "one row, rarely": ((3, 3), [[[[], [2], []], [[]] * 3], EMPTY], [EMPTY, EMPTY]),
    "one long bag": ((3, 1), [[[[2] * 40, [], []], [[]] * 3], EMPTY], [EMPTY, EMPTY]),
}


def batch_of(bags: Bags) -> Batch:
    ids = [row for of_feature in bags for bag in of_feature for row in bag]
    lengths = [len(bag) for of_feature in bags for bag in of_feature]
    features = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    num = len(bags[0])
    return Batch(torch.ones(num, 2), features, torch.arange(float(num)) % 2)


def model_of(num_rows: tuple[int, int]) -> Model:
    named = zip(("user", "item"), num_rows, strict=True)
    return Model([table(name, num_embeddings=num) for name, num in named])


def plans_and_trains() -> None:
    for num_rows, *by_rank in CASES.values():
        make = partial(model_of, num_rows)
        mine = [batch_of(bags) for bags in by_rank[dist.get_rank()]]
        pairs = [[a + b for a, b in zip(*of, strict=True)] for of in zip(*by_rank, strict=True)]
        # A batch without samples counts as nothing, wherever it comes.
        counted = hotrec.profile([batch_of(NONE), *mine, batch_of(NONE)], make())
        for kind, may_decline in (("auto", True), ("auto", False), ("look_ahead", False)):
            choice = Choice(kind, PipelineKind[kind], counted)
            program = Program(choice, make, may_decline=may_decline)
            with program.pipeline():
                program.go(iter(mine))
            everything = [batch_of(pair) for pair in pairs]
            for batch, of in zip(everything, zip(*by_rank, strict=True), strict=True):
                batch.labels = torch.cat([batch_of(bags).labels for bags in of])
            program.check(everything)


def test_next_to_no_data_is_planned_for_and_trained() -> None:
    run_ranks(plans_and_trains, 2)


def counts_nothing() -> None:
    """On the first rank, one way or another, or on all."""
    nothing: list[Any] = [[], [batch_of(NONE)], [batch_of(NONE)] * 2]
    for none in nothing:
        data = [batch_of([[[1], [1]], [[0], []]])] if dist.get_rank() else none
        counted = hotrec.profile(data, model_of((3, 2)))
        facts = counted.num_samples, counted.batch_size, counted.counts["user"].tolist()
        assert facts == (2, 2, [0, 2, 0])
        assert counted.locality
        assert len(set(gather(str(counted.locality)))) == 1
    for none in nothing:
        with refused(".*", "at least one sample"):
            hotrec.profile(none, model_of((3, 2)))


def test_ranks_without_samples_count_those_of_others_and_hear_if_nobody_has_any() -> None:
    run_ranks(counts_nothing, 2)
