"""Sampled softmax and ranking over ranks: as one process with all samples has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.cli.profile import blocks_of
from hotrec.cli.store import build_config, compose_config, read_config
from hotrec.config.data import (
    ColumnKind,
    ColumnSpec,
    Encoding,
    SplitKind,
    SplitSpec,
    SyntheticSpec,
    TableSpec,
)
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.cost_model.profile import write_profile
from hotrec.data.batch import Batch, BatchItems
from hotrec.data.chunks import Dataset
from hotrec.data.groups import NO_GROUP
from hotrec.data.prepare import prepare
from hotrec.data.synthetic import write_synthetic
from hotrec.models.retrieval import SampledSoftmax
from hotrec.models.task import RetrievalTask
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import all_gather_object
from hotrec.runtime.run_dir import CHECKPOINTS
from hotrec.train.checkpoint import find_latest, open_tensors
from hotrec.train.evaluate import Quality, evaluate
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


def given_batches(
    vectors: np.ndarray,
    ids: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    size: int,
    seen: list[list[int]] | None = None,
) -> Iterator[Batch]:
    """A rank's slices of the samples, padded to whole batches."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for first in range(0, len(ids), size * world_size):
        begin = first + rank * size
        mine = slice(begin, min(begin + size, len(ids), first + size * world_size))
        num = max(mine.stop - mine.start, 0)
        mine = slice(mine.start, mine.start + num)
        missing = max(1 - num, 0)
        of_items = np.r_[ids[mine], [NO_GROUP] * missing].astype(np.int64)
        lists = None if seen is None else [*seen[mine], *[[]] * missing]
        yield Batch(
            torch.from_numpy(np.r_[vectors[mine], np.zeros((missing, 2 * DIM), np.float32)]),
            KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0)),
            torch.from_numpy(np.r_[labels[mine], [0] * missing].astype(np.float32)),
            torch.from_numpy(np.r_[weights[mine], [0] * missing].astype(np.float32)),
            1,
            items=BatchItems(
                torch.from_numpy(of_items),
                torch.zeros(len(of_items)),
                torch.ones(len(of_items), dtype=torch.bool),
                None if lists is None else padded(lists),
            ),
        )


def padded(lists: list[list[int]]) -> torch.Tensor:
    width = max(map(len, lists))
    return torch.tensor([[*ids, *[NO_GROUP] * (width - len(ids))] for ids in lists]).long()


def rank_given_vectors(is_weighted: bool) -> dict[str, Any]:
    """The last rank has no sample in the last batch of each, and no item."""
    rng = np.random.default_rng(5)
    num_items, num_samples = 40, 55
    vectors = rng.normal(size=(num_samples, 2 * DIM)).astype(np.float32)
    ids = rng.integers(-1, 50, num_samples)
    labels = rng.integers(0, 2, num_samples)
    weights = rng.integers(0, 3, num_samples) if is_weighted else np.ones(num_samples, np.int64)
    catalogue = np.sort(rng.choice(50, num_items, replace=False))
    of_items = rng.normal(size=(num_items, 2 * DIM)).astype(np.float32)
    of_items[:, DIM:] = of_items[rng.integers(0, 30, num_items), DIM:]  # some are equal
    order = rng.permutation(num_items)
    ones = np.ones(num_items)
    task = RetrievalTask(Given(), dist.get_world_size())
    optimizer = torch.optim.SGD(task.parameters(), 0.1)
    pipeline = make_pipeline(PipelineSpec(PipelineKind.base), task, optimizer, torch.device("cpu"))
    ranking = Ranking(
        (1, 5, 20), list(given_batches(of_items[order], catalogue[order], ones, ones, 7))
    )
    batches = list(given_batches(vectors, ids, labels, weights, 9))
    quality = evaluate(pipeline, batches, ranking=ranking)
    is_ranked = (labels == 1) & (weights > 0)
    places = find_places(
        torch.from_numpy(vectors[is_ranked, :DIM]),
        torch.from_numpy(ids[is_ranked]),
        torch.from_numpy(of_items[:, DIM:].copy()),
        torch.from_numpy(catalogue),
    )
    of = weights[is_ranked].astype(np.float32) if is_weighted else None
    assert quality.further == measure_ranking(places.numpy(), ranking.ks, of)
    assert quality == evaluate(pipeline, batches, ranking=ranking)
    seen = [rng.integers(0, 50, rng.integers(0, 30)).tolist() for _ in ids]
    batches = list(given_batches(vectors, ids, labels, weights, 9, seen))
    without = evaluate(pipeline, batches, ranking=ranking)
    places = [
        find_places(
            torch.from_numpy(vectors[[sample], :DIM]),
            torch.from_numpy(ids[[sample]]),
            torch.from_numpy(of_items[is_left, DIM:]),
            torch.from_numpy(catalogue[is_left]),
        )
        for sample in np.flatnonzero(is_ranked)
        for is_left in [~np.isin(catalogue, seen[sample]) | (catalogue == ids[sample])]
    ]
    assert without.further == measure_ranking(torch.cat(places).numpy(), ranking.ks, of)
    assert without.further["recall_at"]["5"] > quality.further["recall_at"]["5"]
    return {**quality.further, "without": without.further}


@pytest.mark.parametrize("is_weighted", [False, True])
def test_any_number_of_ranks_ranks_alike_bit_for_bit(is_weighted: bool) -> None:
    found = [
        of
        for world_size in (1, 2, 3)
        for of in run_ranks(rank_given_vectors, world_size=world_size, is_weighted=is_weighted)
    ]
    assert found == [found[0]] * 6
    assert 0 < found[0]["recall_at"]["5"] < found[0]["recall_at"]["20"] < 1
    assert 0.5 < found[0]["ranked_samples_frac"] < 1


PLACEMENTS = {
    "torchrec": ["placement=torchrec"],
    "look_ahead": ["placement=all_cold", "pipeline=look_ahead"],
    "hot_cold": ["placement=fraction", "placement.hot_frac=0.3", "pipeline=sparse_dist"],
}
# The keys of each model; of hstu and sasrec several features are not read.
MODELS = {
    "two_tower": ["model.tower_layer_sizes=[8]"],
    "hstu": [
        *("+model.history={seen: c1, seen_c2: c2}", "model.side=[seen_c0]", "model.context=[c0]"),
        *("model.num_layers=1", "model.attention_dim=4", "model.linear_dim=4"),
        "model.max_length=3",
    ],
    "sasrec": ["+model.history={seen: c1}", "model.num_layers=1", "model.max_length=3"],
}
NEGATIVES = {
    "in_batch": [],
    "uniform": ["model.negatives=uniform", "model.num_negatives=25"],
}


@dataclass(frozen=True)
class Case:
    """A way to train."""

    model: str
    negatives: str
    placement: str
    numbers: Sequence[int] = (1, 2)  # of ranks
    keys: Sequence[str] = ()
    # Adagrad's. A vector added to all items changes no loss: with a smaller one its rounding is
    # amplified, and weights of different numbers of ranks are not compared.
    eps: float | None = 0.01

    @property
    def name(self) -> str:
        of_eps = "" if self.eps is not None else "-default_eps"
        return f"{self.model}-{self.negatives}-{self.placement}{of_eps}"


CASES = [
    Case("two_tower", "in_batch", "torchrec", keys=["model.item_columns=[c1,c2]"], eps=None),
    Case("two_tower", "in_batch", "look_ahead", keys=["model.item_columns=[c1,c2]"], eps=None),
    Case("two_tower", "uniform", "hot_cold", keys=["model.item_columns=[c1]"], eps=None),
    Case("two_tower", "in_batch", "hot_cold", keys=["model.item_columns=[c1,c2]"]),
    Case("hstu", "in_batch", "look_ahead", (1, 2, 3)),
    Case("hstu", "in_batch", "torchrec"),
    Case("sasrec", "uniform", "hot_cold", (1, 2, 3)),
    Case("sasrec", "in_batch", "hot_cold", keys=["pipeline=base"]),
]


def words_of(folder: Path, of: Case, batch_size: int) -> list[str]:
    log = "dataset" if of.model == "two_tower" else "histories"
    return [
        *("data=synthetic", f"paths.dataset={folder}/{log}", f"paths.profile={folder}/{log}_ids"),
        *(f"model={of.model}", "model.embedding_dim=8"),
        *("model.item_id=c1", "model.loss=sampled_softmax", "model.temperature=0.5"),
        *(
            f"trainer.batch_size={batch_size}",
            "trainer.num_workers=0",
            "trainer.eval_splits=[valid]",
        ),
        *("trainer.eval_ranking=[5,20]", "trainer.log_every_steps=1", "trainer.num_epochs=2"),
        *("trainer.eval_every_steps=20", "trainer.best_by=ndcg_at", "trainer.keep_best=true"),
        *("optimizer=adagrad", "optimizer.learning_rate=0.1"),
        *(() if of.eps is None else [f"optimizer.eps={of.eps}"]),
        *(*MODELS[of.model], *NEGATIVES[of.negatives], *PLACEMENTS[of.placement], *of.keys),
    ]


@dataclass(frozen=True)
class Trained:
    """What a training gave."""

    summary: dict[str, Any]
    losses: list[float]  # of all steps
    evals: list[dict[str, Any]]
    weights: dict[str, np.ndarray]


def train_case(folder: Path, of: Case) -> Trained:
    ranks = this_rank()
    config = build_config(compose_config("config", words_of(folder, of, 60 // ranks.world_size)))
    run = folder / f"{of.name}-{ranks.world_size}"
    run.mkdir(exist_ok=True)
    summary = run_training(config, run, ranks).summary
    lines = (run / "metrics.jsonl").read_text().splitlines()
    evals = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    newest = find_latest(run / CHECKPOINTS)
    assert newest is not None
    with open_tensors(newest) as files:
        weights = {name: files.whole(name).numpy() for name in files.shapes if "/" not in name}
    return Trained(dict(summary), [json.loads(line)["loss"] for line in lines], evals, weights)


def evaluate_trained(folder: Path, name: str) -> Quality:
    trained = read_config(folder / name / "config.yaml", Config)
    config = EvaluateConfig(split="valid", num_workers=0)
    return evaluate_run(config, trained, folder / name, this_rank()).quality


def write_histories(path: Path) -> None:
    """A log in which most clicks are on the item after the newest one of the history."""
    rng = np.random.default_rng(6)
    header, lines = "label,price,c0,c1,c2,tags,seen,seen_c2,seen_c0", []
    for _ in range(1510 + 331):
        seen = rng.integers(0, 40, rng.integers(0, 6)).tolist()
        item, label = int(rng.integers(40)), 0
        if seen and rng.random() < 0.7:
            item, label = (seen[-1] + 1) % 40, 1
        lists = [
            *(rng.integers(0, 5, rng.integers(3)), seen, [other % 10 for other in seen]),
            rng.integers(0, 50, len(seen)),
        ]
        texts = [" ".join(map(str, ids)) for ids in lists]
        values = label, f"{rng.normal():.3f}", rng.integers(50), item, item % 10
        lines.append(",".join(map(str, (*values, *texts))))
    (path / "log.csv").write_text("\n".join([header, *lines, ""]))
    rows = {"c0": 50, "c1": 40, "c2": 10, "tags": 5}
    lists = {"seen": "c1", "seen_c2": "c2", "seen_c0": "c0", "tags": "tags"}
    spec = delimited_spec(
        [path / "log.csv"],
        split=SplitSpec(kind=SplitKind.last, valid_frac=331 / 1841, test_frac=0.0),
        columns={
            "label": ColumnSpec(ColumnKind.label),
            "price": ColumnSpec(ColumnKind.dense),
            **{f"c{number}": ColumnSpec(ColumnKind.categorical) for number in range(3)},
            **{
                name: ColumnSpec(ColumnKind.categorical_list, table=table)
                for name, table in lists.items()
            },
        },
        tables={name: TableSpec(Encoding.rows, num_rows=num) for name, num in rows.items()},
    )
    prepare(spec, path / "histories")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("retrieval")
    spec = SyntheticSpec([50, 40, 10], num_dense=2, num_train=1510, num_valid=331, num_test=0)
    write_synthetic(spec, path / "dataset")
    write_histories(path)
    for log in ("dataset", "histories"):
        dataset = Dataset.open(path / log)
        blocks = blocks_of(dataset, "train")
        dataset_hash = dataset.artifact.content_hash
        write_profile(blocks, dataset.schema, path / f"{log}_ids", dataset_hash=dataset_hash)
    return path


@pytest.mark.parametrize("of", CASES, ids=[of.name for of in CASES])
def test_ranks_train_as_one_and_find_more_than_chance(folder: Path, of: Case) -> None:
    """The last step of an epoch has ten samples."""
    one, *others = (
        run_ranks(train_case, world_size=number, timeout_s=120, folder=folder, of=of)[0]
        for number in of.numbers
    )
    for other in others:
        assert len(one.losses) == len(other.losses) == 52
        np.testing.assert_allclose(one.losses[:26], other.losses[:26], rtol=2e-5)
        # Adagrad amplifies rounding where gradients are small; with SGD all are within 3e-5.
        limit = 2e-5 if of.model == "two_tower" else 2e-4
        np.testing.assert_allclose(one.losses, other.losses, rtol=limit)
        for name, weights in one.weights.items() if of.eps else ():
            np.testing.assert_allclose(weights, other.weights[name], atol=5e-4, err_msg=name)
        # Rounding of the vectors may move a place.
        for figure in ("recall_at", "ndcg_at"):
            for k in ("5", "20"):
                found = other.summary[figure][k]
                assert one.summary[figure][k] == pytest.approx(found, abs=0.02)
        assert one.summary["ranked_samples_frac"] == other.summary["ranked_samples_frac"] > 0.9
    chance = 5 / 40
    assert one.summary["recall_at"]["5"] > (2 if of.model == "two_tower" else 5) * chance
    by_step = {line["step"]: line["ndcg_at"]["5"] for line in one.evals}
    best_step = one.summary["best_step"]
    assert one.summary["best_ndcg_at"] == max(by_step.values()) == by_step[best_step]
    if of.placement == "torchrec":
        again = run_ranks(evaluate_trained, world_size=3, folder=folder, name=f"{of.name}-1")[0]
        assert again.further["recall_at"] == pytest.approx(one.summary["recall_at"], abs=0.02)
