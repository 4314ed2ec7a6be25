"""Sampled softmax and ranking over ranks: as one process with all samples has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch, BatchItems
from hotrec.data.groups import NO_GROUP
from hotrec.models.retrieval import SampledSoftmax
from hotrec.models.task import RetrievalTask
from hotrec.runtime.ranks import all_gather_object
from hotrec.train.evaluate import evaluate
from hotrec.train.pipelines import make_pipeline
from hotrec.train.ranking import Ranking, find_places, measure_ranking
from hotrec.types import PipelineKind, PipelineSpec
from tests.helpers.ranks import run_ranks

DIM, NUM_ITEMS, TEMPERATURE = 5, 6, 0.7
# The samples of each rank, by the number of ranks; one has none.
SIZES = {1: [12], 2: [5, 7], 3: [7, 0, 5]}


def samples(num_drawn: int) -> dict[str, torch.Tensor]:
    """Twelve samples, of few items: two without one, some negative, some of weight 0 or 2.

    The last ``num_drawn`` are the only candidates, if there are any.
    """
    rng = torch.Generator().manual_seed(num_drawn)
    ids = torch.randint(0, NUM_ITEMS, (12,), generator=rng)
    ids[torch.tensor([2, 5])] = NO_GROUP
    is_candidate = torch.arange(12) >= 12 - num_drawn if num_drawn else ids != NO_GROUP
    rewards = torch.randint(0, 3, (12,), generator=rng).double()
    rewards[2] = 1.0
    rewards[12 - num_drawn :] = 0
    return {
        "users": torch.randn(12, DIM, generator=rng).double(),
        "items": torch.randn(12, DIM, generator=rng).double(),
        "ids": ids,
        "log_q": torch.rand(NUM_ITEMS, generator=rng).log()[ids],
        "is_candidate": is_candidate,
        "rewards": rewards,
    }


def formula(of: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss, sample by sample and candidate by candidate."""
    corrected = of["users"] @ of["items"].t() / TEMPERATURE - of["log_q"].double()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(12):
        item = of["ids"][sample]
        if of["rewards"][sample] == 0 or item == NO_GROUP:
            continue
        others = [
            corrected[sample, other]
            for other in range(12)
            if of["is_candidate"][other] and of["ids"][other] != item
        ]
        own = corrected[sample, sample]
        total = total - of["rewards"][sample] * torch.stack([own, *others]).log_softmax(0)[0]
    return total


def losses_are_the_formula(num_drawn: int) -> None:
    whole = samples(num_drawn)
    leaves = {name: whole[name].requires_grad_() for name in ("users", "items")}
    expected = formula(whole)
    expected.backward()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    ends = np.cumsum([0, *SIZES[world_size]])
    mine = slice(ends[rank], ends[rank + 1])
    for dtype, limit in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
        part = {name: of.detach()[mine] for name, of in whole.items()}
        users, items = (part[name].to(dtype).requires_grad_() for name in leaves)
        facts = BatchItems(part["ids"], part["log_q"], part["is_candidate"])
        rewards = part["rewards"].to(dtype)
        loss = SampledSoftmax(TEMPERATURE)(users, items, facts, rewards)
        loss.backward()
        total = sum(all_gather_object(float(loss.detach())))
        assert total == pytest.approx(float(expected.detach()), rel=max(limit, 1e-9))
        for found, name in ((users, "users"), (items, "items")):
            torch.testing.assert_close(
                found.grad.double(), leaves[name].grad[mine], rtol=limit, atol=limit
            )
    assert float(leaves["items"].grad[2].abs().sum()) == 0  # it has no item


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_are_those_of_one_process(world_size: int) -> None:
    for num_drawn in (0, 4):
        run_ranks(losses_are_the_formula, world_size=world_size, num_drawn=num_drawn)


class Given(nn.Module):
    """Vectors that the dense columns hold."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, dense: torch.Tensor, _: Any) -> torch.Tensor:
        return dense.view(-1, 2, DIM)


def given_batches(*arrays: np.ndarray) -> list[Batch]:
    """A rank's slices of vectors, labels, weights, items and seen ones, padded to whole batches."""
    size, num_ranks = 9, dist.get_world_size()
    missing = -len(arrays[0]) % (size * num_ranks)
    padding = [
        np.full((missing, *of.shape[1:]), at) for of, at in zip(arrays, PADDING, strict=True)
    ]
    whole = [torch.from_numpy(np.concatenate(of)) for of in zip(arrays, padding, strict=True)]
    none = KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0))
    found = []
    for first in range(dist.get_rank() * size, len(whole[0]), num_ranks * size):
        *parts, ids, seen = (of[first : first + size] for of in whole)
        vectors, labels, weights = (part.float() for part in parts)
        items = BatchItems(ids, torch.zeros(size), torch.ones(size, dtype=torch.bool), seen)
        found.append(Batch(vectors, none, labels, weights, 1, items=items))
    return found


PADDING = (0, 0, 0, NO_GROUP, NO_GROUP)


def rank_given_vectors(has_seen: bool) -> Any:
    """The last rank has no sample in the last batch of each, and no item."""
    rng = np.random.default_rng(5)
    vectors = rng.normal(size=(55, 2 * DIM)).astype(np.float32)
    ids, labels, weights = (rng.integers(*limits, 55) for limits in ((-1, 50), (0, 2), (0, 3)))
    seen = np.where(rng.random((55, 20)) < 0.7 * has_seen, rng.integers(0, 50, (55, 20)), NO_GROUP)
    catalogue = np.sort(rng.choice(50, 40, replace=False))
    of_items = rng.normal(size=(40, 2 * DIM)).astype(np.float32)
    of_items[:, DIM:] = of_items[rng.integers(0, 30, 40), DIM:]  # some are equal
    order, ones = rng.permutation(40), np.ones(40)
    items = given_batches(of_items[order], ones, ones, catalogue[order], np.full((40, 1), NO_GROUP))
    ranking = Ranking((1, 5, 20), items)
    task = RetrievalTask(Given(), dist.get_world_size())
    optimizer = torch.optim.SGD(task.parameters(), 0.1)
    pipeline = make_pipeline(PipelineSpec(PipelineKind.base), task, optimizer, torch.device("cpu"))
    quality = evaluate(
        pipeline, given_batches(vectors, labels, weights, ids, seen), ranking=ranking
    )
    is_ranked = (labels == 1) & (weights > 0)
    given = (vectors[is_ranked, :DIM], ids[is_ranked], of_items[:, DIM:].copy(), catalogue)
    places = find_places(*map(torch.from_numpy, (*given, seen[is_ranked])))
    of = weights[is_ranked].astype(np.float32)
    assert quality.further == measure_ranking(places.numpy(), ranking.ks, of)
    return quality.further


def test_any_number_of_ranks_ranks_alike_bit_for_bit() -> None:
    whole, without = (
        [of for num in (1, 2, 3) for of in run_ranks(rank_given_vectors, num, has_seen=has_seen)]
        for has_seen in (False, True)
    )
    assert whole == [whole[0]] * 6
    assert without == [without[0]] * 6
    all_items, fewer = (of[0]["ndcg_at"]["20"] for of in (whole, without))
    assert 0 < all_items < fewer < 1
    assert 0.5 < whole[0]["ranked_samples_frac"] < 1
