"""A TorchRec program in two lines: every choice trains as the unsplit model in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec
from hotrec.embedding.initialize import set_unsplit
from hotrec.embedding.tables import sharded_collections
from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.types import (
    Exchange,
    Levels,
    Partition,
    PipelineKind,
    Placement,
    Sharding,
    TablePlacement,
    TorchrecPlan,
)
from tests.distributed.setups import mean_over_ranks
from tests.helpers.ranks import run_ranks
from tests.unit.planner.situations import torchrec_plan

GLOBAL_BATCH, NUM_DENSE, NUM_STEPS = 24, 3, 6
ROWS = {"user": 90, "item": 40, "tag": 60, "shop": 7}
# Name of a table -> dimension, pooling, features.
PLAIN = {"user": (8, PoolingType.SUM, ["user"]), "item": (4, PoolingType.MEAN, ["seen", "item"])}
WEIGHTED = {"tag": (8, PoolingType.SUM, ["tag"]), "shop": (8, PoolingType.SUM, ["shop"])}
LIMITS = {"user": 90, "seen": 40, "item": 40, "tag": 60, "shop": 7}
EMBEDDING = partial(RowWiseAdagrad, lr=0.2, eps=1e-8)
DENSE = partial(torch.optim.Adagrad, lr=0.05)
LOOK_AHEAD, SPARSE_DIST, BASE = (
    PipelineKind.look_ahead,
    PipelineKind.sparse_dist,
    PipelineKind.base,
)


@dataclass
class TwoSets(Pipelineable):
    """A batch of the caller's, whose features are of two kinds."""

    dense: torch.Tensor
    ids: KeyedJaggedTensor
    weighted: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> TwoSets:
        return TwoSets(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self._parts():
            part.record_stream(stream)

    def pin_memory(self) -> TwoSets:
        return TwoSets(*(part.pin_memory() for part in self._parts()))

    def _parts(self) -> list[Any]:
        return [self.dense, self.ids, self.weighted, self.labels]


class Model(nn.Module):
    """(batch) -> (loss, (loss, logits)), over an unweighted and a weighted collection."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bags = EmbeddingBagCollection(_tables(PLAIN), device=torch.device(device))
        self.weighted = EmbeddingBagCollection(
            _tables(WEIGHTED), is_weighted=True, device=torch.device(device)
        )
        torch.manual_seed(4)
        self.hidden = nn.Linear(NUM_DENSE + 8 + 2 * 4 + 2 * 8, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, batch: TwoSets) -> tuple[torch.Tensor, Any]:
        found, weighted = self.bags(batch.ids), self.weighted(batch.weighted)
        pooled = [found[name] for name in ("user", "seen", "item")]
        pooled += [weighted[name] for name in ("tag", "shop")]
        hidden = torch.tanh(self.hidden(torch.cat([batch.dense, *pooled], dim=1)))
        logits = self.out(hidden).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


def _tables(of: dict[str, Any]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=dim,
            feature_names=features,
            pooling=pooling,
        )
        for name, (dim, pooling, features) in of.items()
    ]


def make_batch(step: int, rank: int, world_size: int) -> TwoSets:
    """A rank's slice of the step's global batch, which is the same at any world size."""
    rng = np.random.default_rng((5, step))
    size = GLOBAL_BATCH // world_size
    mine = slice(rank * size, (rank + 1) * size)
    parts = {}
    for name, limit in LIMITS.items():
        counts = rng.integers(0, 4, GLOBAL_BATCH)
        bags = [(rng.random(n) ** 3 * limit).astype(np.int64) for n in counts]
        weights = [rng.random(n).astype(np.float32) for n in counts]
        parts[name] = (counts[mine], np.concatenate(bags[mine]), np.concatenate(weights[mine]))
    dense = rng.standard_normal((GLOBAL_BATCH, NUM_DENSE)).astype(np.float32)
    labels = rng.integers(0, 2, GLOBAL_BATCH).astype(np.float32)

    def features(names: list[str], *, is_weighted: bool) -> KeyedJaggedTensor:
        lengths, ids, weights = (
            torch.from_numpy(np.concatenate([parts[name][at] for name in names])) for at in range(3)
        )
        return KeyedJaggedTensor(names, ids, weights if is_weighted else None, lengths=lengths)

    return TwoSets(
        torch.from_numpy(dense[mine]),
        features(["user", "seen", "item"], is_weighted=False),
        features(["tag", "shop"], is_weighted=True),
        torch.from_numpy(labels[mine]),
    )


def batches(num: int = NUM_STEPS, first: int = 0) -> list[TwoSets]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [make_batch(step, rank, size) for step in range(first, first + num)]


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and tables of the unsplit model on the global batches, in one process."""
    model = Model()
    tables = [*model.bags.parameters(), *model.weighted.parameters()]
    layers = [*model.hidden.parameters(), *model.out.parameters()]
    optimizers = [EMBEDDING(tables), DENSE(layers)]
    losses = []
    for step in range(NUM_STEPS):
        loss, _ = model(make_batch(step, 0, 1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    bags = [*model.bags.embedding_bags.items(), *model.weighted.embedding_bags.items()]
    return losses, {name: bag.weight.detach() for name, bag in bags}


def train(pipeline: hotrec.Pipeline, data: Iterator[Any]) -> list[float]:
    losses = []
    while True:
        try:
            losses.append(mean_over_ranks(pipeline.progress(data)[0]))
        except StopIteration:
            return losses


def parallelized(hot: Any, **given: Any) -> tuple[Any, Any, hotrec.Pipeline]:
    given = {"embedding_optimizer": EMBEDDING, "dense_optimizer": DENSE} | given
    model, optimizer = hotrec.parallelize(Model(), hot, **given)
    return model, optimizer, hotrec.Pipeline(model, optimizer, torch.device("cpu"))


def some_hot(num: int) -> Partition:
    return Partition(ROWS, {name: np.arange(min(num, rows)) for name, rows in ROWS.items()})


def mixed_placement() -> Placement:
    """Of each exchange and sharding one, with hot rows and without."""
    hot = {name: rows for name, rows in some_hot(9).hot_rows.items() if name in ("user", "tag")}
    return Placement(
        Partition(ROWS, hot),
        {
            "user": TablePlacement(),
            "item": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
            "tag": TablePlacement(sharding=Sharding.TABLE_WISE),
            "shop": TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE),
        },
    )


def choices() -> dict[str, tuple[Callable[[], Any], dict[str, Any]]]:
    """Everything that a program may ask for: what is passed as ``hot``, and how."""

    def counted() -> hotrec.Profile:
        return hotrec.profile(batches(), Model())

    kinds = (LOOK_AHEAD, SPARSE_DIST, BASE)
    asked: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {"auto": (counted, {})}
    for kind in kinds:
        asked[f"counted {kind.name}"] = (
            counted,
            {"pipeline": kind.name, "may_decline": False, "hot_budget_mib": 0.002},
        )
        for name, make in (("some", lambda: some_hot(9)), ("mixed", mixed_placement)):
            asked[f"{name} {kind.name}"] = (make, {"pipeline": kind})
    for plan, kind in itertools.product(TorchrecPlan, (SPARSE_DIST, BASE)):
        choice = hotrec.Choice(torchrec_plan(plan, kind), "asked")
        asked[f"{plan.name} {kind.name}"] = (partial(lambda choice: choice, choice), {})
    asked["off"] = (lambda: "off", {})
    return asked


def check_every_choice() -> dict[str, str]:
    expected, tables = reference()
    found = {}
    for name, (hot, given) in choices().items():
        model, _, pipeline = parallelized(hot(), **given)
        losses = train(pipeline, iter(batches()))
        pipeline.close()
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=name)
        gathered = hotrec.gather_tables(model)
        for table, weight in tables.items():
            np.testing.assert_allclose(
                gathered[table], weight, atol=1e-5, err_msg=f"{name} {table}"
            )
        hotrec.check_replicas(model)
        found[name] = hotrec.choice_of(model).name
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_choice_trains_as_the_unsplit_model(world_size: int) -> None:
    first, *others = run_ranks(check_every_choice, world_size, timeout_s=200)
    assert all(other == first for other in others)
    for kind in ("look_ahead", "sparse_dist", "base"):
        assert first[f"counted {kind}"] == f"hot_cold {kind}"


def train_without_naming_a_backend(folder: str) -> None:
    """As many programs do: torch then has a backend for each kind of device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    expected, _ = reference()
    for kind in (LOOK_AHEAD, SPARSE_DIST):
        _, _, pipeline = parallelized(some_hot(9), pipeline=kind)
        losses = train(pipeline, iter(batches()))
        pipeline.close()
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=kind.name)


def test_a_group_without_a_named_backend_will_do(tmp_path: Path) -> None:
    run_ranks(train_without_naming_a_backend, 2, timeout_s=100, folder=str(tmp_path))


def in_backward() -> tuple[Any, ShardingPlan]:
    """The model with its update rules, and a plan of TorchRec's."""
    model: Any = Model()
    for bags in (model.bags, model.weighted):
        _apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.2})
    plan = {}
    for name, of in (("bags", PLAIN), ("weighted", WEIGHTED)):
        owners = {table: table_wise(rank=at % 2) for at, table in enumerate(of)}
        plan[name] = construct_module_sharding_plan(
            getattr(model, name), owners, local_size=2, world_size=2, device_type="cpu"
        )
    return model, ShardingPlan(plan)


def plain_torchrec() -> list[float]:
    """The recipe of TorchRec's own examples, and the model's weights, which TorchRec draws anew."""
    model, plan = in_backward()
    bags = [*model.bags.embedding_bags.items(), *model.weighted.embedding_bags.items()]
    weights = {name: bag.weight for name, bag in bags}
    model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
    set_unsplit(model, weights)
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, DENSE)
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    data = iter(batches())
    return [float(pipeline.progress(data)[0]) for _ in range(NUM_STEPS)]


def compare_with_plain() -> tuple[list[float], list[float]]:
    expected = plain_torchrec()
    model, plan = in_backward()
    model, optimizer = hotrec.parallelize(model, "off", dense_optimizer=DENSE, plan=plan)
    pipeline = hotrec.Pipeline(model, optimizer, torch.device("cpu"))
    data = iter(batches())
    found = [float(pipeline.progress(data)[0]) for _ in range(NUM_STEPS)]
    with pytest.raises(StopIteration):
        pipeline.progress(data)
    return found, expected


def test_off_is_plain_torchrec_bit_for_bit() -> None:
    for found, expected in run_ranks(compare_with_plain, 2, timeout_s=60):
        assert found == expected


def use_between_steps() -> None:
    """Evaluation and state in the middle of a stream, against a pipeline that never stops."""
    straight, _, pipeline = parallelized(some_hot(9), pipeline=LOOK_AHEAD)
    expected = train(pipeline, iter(batches()))
    pipeline.close()
    model, optimizer, pipeline = parallelized(some_hot(9), pipeline=LOOK_AHEAD)
    losses, data = [], iter(batches(3))
    losses += [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
    model.eval()
    with torch.no_grad():
        loss, _ = model(batches(1, first=2)[0])  # held by the pipeline, not yet trained on
    model.train()
    state = {name: _copy(value) for name, value in model.state_dict().items()}
    of_optimizer = optimizer.state_dict()["state"]
    assert state
    assert of_optimizer
    losses.append(mean_over_ranks(pipeline.progress(data)[0]))
    assert losses[2] == pytest.approx(mean_over_ranks(loss), rel=1e-6)
    losses += train(pipeline, iter(batches(3, first=3)))  # a new iterator goes on
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    pipeline.close()
    for table, weight in hotrec.gather_tables(straight).items():
        torch.testing.assert_close(hotrec.gather_tables(model)[table], weight)


def _copy(value: Any) -> Any:
    return value.clone() if type(value) is torch.Tensor else value


def test_the_model_is_usable_between_steps() -> None:
    run_ranks(use_between_steps, 2, timeout_s=60)


def initial_tables() -> None:
    """Tables on the device meta start alike whatever is chosen, and as their bounds say."""
    hot = [
        some_hot(9),
        mixed_placement(),
        hotrec.Choice(torchrec_plan(PLANNER, BASE), ""),
        "off",
    ]
    found = []
    for chosen in hot:
        given: Any = {"embedding_optimizer": EMBEDDING, "dense_optimizer": DENSE, "seed": 1}
        model, _ = hotrec.parallelize(Model("meta"), chosen, **given)
        found.append(hotrec.gather_tables(model))
    for table, rows in ROWS.items():
        assert float(found[0][table].abs().max()) <= rows**-0.5
        assert float(found[0][table].abs().max()) > 0.8 * rows**-0.5
        for other in found[1:]:
            assert torch.equal(other[table], found[0][table])


PLANNER = TorchrecPlan.planner


def test_new_tables_do_not_depend_on_the_choice() -> None:
    run_ranks(initial_tables, 2, timeout_s=60)


def counted_on_each_rank() -> tuple[dict[str, list[int]], int, int | None]:
    counted = hotrec.profile(batches(), Model(), num_batches=2)
    counts = {table: counts.tolist() for table, counts in counted.counts.items()}
    return counts, counted.num_samples, counted.batch_size


def test_a_profile_sums_what_the_ranks_read() -> None:
    first, second = run_ranks(counted_on_each_rank, 2, timeout_s=60)
    assert first == second
    counts, num_samples, batch_size = first
    assert (num_samples, batch_size) == (2 * GLOBAL_BATCH, GLOBAL_BATCH // 2)
    expected = {name: np.zeros(rows, np.int64) for name, rows in ROWS.items()}
    for step in range(2):
        batch = make_batch(step, 0, 1)
        for of in (PLAIN, WEIGHTED):
            features = batch.ids if of is PLAIN else batch.weighted
            for name, (_, _, columns) in of.items():
                for column in columns:
                    np.add.at(expected[name], features[column].values().numpy(), 1)
    assert counts == {name: found.tolist() for name, found in expected.items()}


def resumed(hot: Any, kind: PipelineKind, folder: str) -> None:
    """Save after half of the steps as a TorchRec user would, load into a new model, go on."""
    _, _, pipeline = parallelized(hot, pipeline=kind)
    straight = train(pipeline, iter(batches()))
    pipeline.close()
    model, optimizer, pipeline = parallelized(hot, pipeline=kind)
    losses, data = [], iter(batches())
    losses += [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(3)]
    state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    pipeline.close()
    model, optimizer = hotrec.parallelize(
        Model("meta"),
        hotrec.choice_of(model),
        embedding_optimizer=EMBEDDING,
        dense_optimizer=DENSE,
    )
    state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    pipeline = hotrec.Pipeline(model, optimizer)
    losses += train(pipeline, iter(batches(3, first=3)))
    pipeline.close()
    np.testing.assert_allclose(losses, straight, rtol=1e-6)


def resumed_elsewhere(hot: Any, kind: PipelineKind, other: Any, folder: str) -> None:
    """Save, then go on with other hot rows in the other pipeline."""
    _, _, pipeline = parallelized(hot, pipeline=kind)
    straight = train(pipeline, iter(batches()))
    pipeline.close()
    model, optimizer, pipeline = parallelized(hot, pipeline=kind)
    data = iter(batches())
    losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(3)]
    hotrec.save_checkpoint(folder, model, optimizer, 3, state={"seen": 3})
    pipeline.close()
    model, optimizer = hotrec.parallelize(
        Model("meta"),
        other,
        embedding_optimizer=EMBEDDING,
        dense_optimizer=DENSE,
        pipeline=SPARSE_DIST if kind is LOOK_AHEAD else LOOK_AHEAD,
    )
    assert hotrec.load_checkpoint(folder, model, optimizer) == (3, {"seen": 3})
    pipeline = hotrec.Pipeline(model, optimizer)
    losses += train(pipeline, iter(batches(3, first=3)))
    pipeline.close()
    np.testing.assert_allclose(losses, straight, rtol=1e-5)


def resume_all(folder: str) -> None:
    resumed_elsewhere(some_hot(9), LOOK_AHEAD, mixed_placement(), f"{folder}/ahead")
    resumed_elsewhere(mixed_placement(), SPARSE_DIST, some_hot(4), f"{folder}/in_line")

    cases = itertools.product((some_hot(9), mixed_placement()), (LOOK_AHEAD, SPARSE_DIST))
    for number, (hot, kind) in enumerate(cases):
        resumed(hot, kind, f"{folder}/{number}")


def test_checkpoints_of_hotrec_and_of_torch_resume(tmp_path: Path) -> None:
    run_ranks(resume_all, 2, timeout_s=100, folder=str(tmp_path))


def adaptive(hot: Any, kind: PipelineKind) -> tuple[Any, Any, hotrec.AdaptiveHotSet]:
    model, optimizer = hotrec.parallelize(
        Model(), hot, embedding_optimizer=EMBEDDING, dense_optimizer=DENSE, pipeline=kind
    )
    return model, optimizer, hotrec.AdaptiveHotSet(model, optimizer)


def adapt_all(folder: str) -> None:
    """Rows move under every pipeline, also while one iterator follows another, and resume."""
    expected, tables = reference()
    stale = Partition(ROWS, {"user": np.arange(60, 80), "tag": np.arange(50, 60)})
    for kind in (LOOK_AHEAD, SPARSE_DIST, BASE):
        model, optimizer, hot_set = adaptive(stale, kind)
        with pytest.raises(ValueError, match="adapt_every: .* 0"):
            hotrec.Pipeline(model, optimizer, hot_set=hot_set, adapt_every=0)
        pipeline = hotrec.Pipeline(model, optimizer, hot_set=hot_set, adapt_every=2)
        losses = train(pipeline, iter(batches(1)))
        losses += train(pipeline, iter(batches(3, first=1)))
        path = f"{folder}/{kind.name}"
        hotrec.save_checkpoint(path, model, optimizer, 4, hot_set=hot_set)
        pipeline.close()
        hot = {path: c.partition.hot("user").tolist() for path, c in sharded_collections(model)}
        assert min(hot["bags."]) < 60, kind
        model, optimizer, hot_set = adaptive(stale, kind)
        assert hotrec.load_checkpoint(path, model, optimizer, hot_set=hot_set) == (4, {})
        for path, collection in sharded_collections(model):
            assert collection.partition.hot("user").tolist() == hot[path], kind
        pipeline = hotrec.Pipeline(model, optimizer, hot_set=hot_set, adapt_every=2)
        losses += train(pipeline, iter(batches(2, first=4)))
        pipeline.close()
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=str(kind))
        gathered = hotrec.gather_tables(model)
        for table, weight in tables.items():
            np.testing.assert_allclose(
                gathered[table], weight, atol=1e-5, err_msg=f"{kind} {table}"
            )

    refuse_state(hot_set)


def refuse_state(hot_set: hotrec.AdaptiveHotSet) -> None:
    state = hot_set.state_dict()
    key = next(name for name in state if name.endswith("user.weight/counts"))
    rows, hot = (key.replace("/counts", part) for part in ("/counted_rows", "/hot_rows"))
    for name, value in (
        (key, torch.full_like(state[key], -1)),
        (key, torch.full(state[key].shape, float("nan"))),
        (key, state[key][1:]),
        (rows, state[rows] + ROWS["user"]),
        (hot, state[hot] - ROWS["user"]),
        (hot, torch.zeros_like(state[hot])),
        (hot, state[hot].double()),
    ):
        with pytest.raises(ValueError, match="rows of table user: expected"):
            hot_set.load_state_dict([{**state, name: value}])


def test_hot_rows_follow_the_batches(tmp_path: Path) -> None:
    run_ranks(adapt_all, 2, timeout_s=100, folder=str(tmp_path))


def adapt_in_two_levels() -> None:
    """On two pretended hosts of two ranks, with a choice that a planner could have made."""
    expected, tables = reference()
    stale = Partition(ROWS, {"user": np.arange(60, 80), "tag": np.arange(50, 60)})
    for kind in (LOOK_AHEAD, SPARSE_DIST, BASE):
        model, _, pipeline = parallelized(stale, pipeline=kind)
        pipeline.close()
        choice = hotrec.choice_of(model)
        spec = replace(choice.plan.pipeline, levels=Levels.two)
        choice = replace(choice, plan=replace(choice.plan, pipeline=spec))
        model, optimizer, hot_set = adaptive(choice, PipelineKind.auto)
        rows = [part for _, of in sharded_collections(model) for part in of.sharded_rows()]
        assert all(part.hosts is not None for part in rows), kind
        pipeline = hotrec.Pipeline(model, optimizer, hot_set=hot_set, adapt_every=2)
        losses = train(pipeline, iter(batches()))
        pipeline.close()
        hot = {path: c.partition.hot("user").tolist() for path, c in sharded_collections(model)}
        assert min(hot["bags."]) < 60, kind
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=str(kind))
        gathered = hotrec.gather_tables(model)
        for table, weight in tables.items():
            np.testing.assert_allclose(
                gathered[table], weight, atol=1e-5, err_msg=f"{kind} {table}"
            )


def test_rows_of_a_program_cross_the_network_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_HOST, "2")
    run_ranks(adapt_in_two_levels, 4, timeout_s=150)
