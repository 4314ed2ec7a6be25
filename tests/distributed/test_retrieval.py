"""Sampled softmax and ranking over ranks: as one process with all samples has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.cli.store import build_config, compose_config, read_config
from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Encoding,
    SplitKind,
    SplitSpec,
    TableSpec,
)
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.batch import Batch, BatchItems
from hotrec.data.groups import NO_GROUP
from hotrec.data.prepare import prepare
from hotrec.models.retrieval import SampledSoftmax
from hotrec.models.task import RetrievalTask
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import all_gather_object
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.train.checkpoint import find_latest, open_tensors
from hotrec.train.evaluate import evaluate
from hotrec.train.pipelines import make_pipeline
from hotrec.train.ranking import Ranking, find_places, measure_ranking
from hotrec.types import PipelineKind, PipelineSpec
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import delimited_spec

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


COMMON = [
    *("data=synthetic", "model.embedding_dim=8", "model.item_id=c1", "model.temperature=0.5"),
    *("model.loss=sampled_softmax", "trainer.num_workers=0", "trainer.eval_splits=[valid]"),
    *("trainer.eval_ranking=[5,20]", "trainer.log_every_steps=1", "trainer.num_epochs=2"),
    *("trainer.eval_every_steps=20", "trainer.best_by=ndcg_at", "trainer.keep_best=true"),
    # With a small eps Adagrad amplifies rounding: a vector added to all items changes no loss.
    *("optimizer=adagrad", "optimizer.learning_rate=0.1", "optimizer.eps=0.1"),
    *("model=hstu", "+model.history={seen: c1, seen_c2: c2}", "model.side=[]"),
    *("model.context=[c0]", "model.num_layers=1", "model.attention_dim=4"),
    *("model.linear_dim=4", "model.max_length=3"),
    *("placement=all_cold", "pipeline=look_ahead"),
]


def train_case(folder: Path) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """The summary, all losses and the weights of a run."""
    ranks = this_rank()
    words = [*COMMON, f"trainer.batch_size={60 // ranks.world_size}"]
    words += [f"paths.dataset={folder}/dataset"]
    run = folder / f"{ranks.world_size}"
    run.mkdir(exist_ok=True)
    config = build_config(compose_config("config", words))
    summary = run_training(config, run, ranks).summary
    lines = (run / "metrics.jsonl").read_text().splitlines()
    newest = find_latest(run / CHECKPOINTS)
    assert newest is not None
    with open_tensors(newest) as files:
        weights = {name: files.whole(name).numpy() for name in files.shapes if "/" not in name}
    return dict(summary), [json.loads(line)["loss"] for line in lines], weights


def evaluate_trained(folder: Path, name: str) -> dict[str, Any]:
    trained = read_config(folder / name / "config.yaml", Config)
    config = EvaluateConfig(split="valid", num_workers=0)
    return evaluate_run(config, trained, folder / name, this_rank()).quality.further


def write_dataset(folder: Path) -> None:
    """A log in which most clicks are on the item after the newest one of the history."""
    rng = np.random.default_rng(6)
    header, lines = "label,price,c0,c1,c2,seen,seen_c2", []
    for _ in range(1510 + 331):
        seen = rng.integers(0, 40, rng.integers(0, 6)).tolist()
        item, label = int(rng.integers(40)), 0
        if seen and rng.random() < 0.7:
            item, label = (seen[-1] + 1) % 40, 1
        lists = [" ".join(map(str, ids)) for ids in (seen, [other % 10 for other in seen])]
        values = label, f"{rng.normal():.3f}", rng.integers(50), item, item % 10, *lists
        lines.append(",".join(map(str, values)))
    (folder / "log.csv").write_text("\n".join([header, *lines, ""]))
    rows = {"c0": 50, "c1": 40, "c2": 10}
    lists_of = {"seen": "c1", "seen_c2": "c2"}
    spec = delimited_spec(
        [folder / "log.csv"],
        split=SplitSpec(kind=SplitKind.last, valid_frac=331 / 1841, test_frac=0.0),
        columns={
            "label": ColumnSpec(ColumnKind.label),
            "price": ColumnSpec(ColumnKind.dense),
            **dict.fromkeys(rows, ColumnSpec(ColumnKind.categorical)),
            **{n: ColumnSpec(ColumnKind.categorical_list, table=t) for n, t in lists_of.items()},
        },
        tables={name: TableSpec(Encoding.rows, num_rows=num) for name, num in rows.items()},
    )
    prepare(spec, folder / "dataset")


def test_ranks_train_as_one_and_find_more_than_chance(tmp_path: Path) -> None:
    """The last step of an epoch has ten samples."""
    write_dataset(tmp_path)
    (one, losses, weights), (other, of_other, of_weights) = (
        run_ranks(train_case, number, timeout_s=120, folder=tmp_path)[0] for number in (1, 3)
    )
    assert len(losses) == len(of_other) == 52
    # Adagrad amplifies rounding where gradients are small; with SGD all are within 3e-5.
    np.testing.assert_allclose(losses, of_other, rtol=2e-4)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, of_weights[name], atol=5e-4, err_msg=name)
    again = run_ranks(evaluate_trained, 3, folder=tmp_path, name="1")[0]
    for figure in ("recall_at", "ndcg_at"):  # rounding of the vectors may move a place
        assert one[figure] == pytest.approx(other[figure], abs=0.02)
        assert one[figure] == pytest.approx(again[figure], abs=0.02)
    assert one["ranked_samples_frac"] == other["ranked_samples_frac"] > 0.9
    assert one["recall_at"]["5"] > 5 * 5 / 40
    evals = map(json.loads, (tmp_path / "1/eval.jsonl").read_text().splitlines())
    by_step = {line["step"]: line["ndcg_at"]["5"] for line in evals}
    assert one["best_ndcg_at"] == max(by_step.values()) == by_step[one["best_step"]]
