"""What a TorchRec program may ask for, and what it is told otherwise; one rank."""

from __future__ import annotations

import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.embedding.fused import optimizer_of, rule_of
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.routing.batches import features_of_each
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Partition

ROWS = {"a": 20, "b": 12}
DENSE = partial(torch.optim.Adagrad, lr=0.1)
RULE = partial(RowWiseAdagrad, lr=0.1)


def bags(*names: str, device: str = "cpu", **given: Any) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=ROWS[name], embedding_dim=4, feature_names=[name], **given
        )
        for name in names
    ]
    return EmbeddingBagCollection(tables, device=torch.device(device))


class Model(nn.Module):
    def __init__(self, *collections: nn.Module) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections or [bags("a", "b")])
        self.out = nn.Linear(8, 1)


def features(*names: str, num: int = 2) -> KeyedJaggedTensor:
    ids = torch.arange(num * len(names)) % 12
    return KeyedJaggedTensor(list(names), ids, lengths=torch.ones(ids.numel(), dtype=torch.int64))


def in_backward(model: Model, **rates: float) -> Model:
    for collection in model.collections:
        for name, bag in collection.embedding_bags.items():  # type: ignore[operator, union-attr]
            if name in rates:
                _apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": rates[name]})
    return model


@pytest.mark.parametrize(
    ("make", "hot", "given", "message"),
    [
        (Model, "on", {}, r"hot: expected counts .*, got 'on'\."),
        (Model, Partition(ROWS), {"pipeline": "fast"}, r"pipeline: expected one of .*'fast'"),
        (Model, "off", {"pipeline": "base"}, r"pipeline: expected auto with 'off'"),
        (Model, Partition(ROWS), {"plan": object()}, "plan: expected none with hot rows"),
        (lambda: Model(nn.Linear(1, 1)), Partition(ROWS), {}, "expected an EmbeddingBagCollection"),
        (
            lambda: Model(bags("a"), bags("a")),
            Partition(ROWS),
            {},
            r"tables \['a'\]: expected each",
        ),
        (Model, Partition({"a": 20}), {}, "expected"),
        (Model, hotrec.Partition(ROWS), {"embedding_optimizer": None}, "got neither of embedding_"),
        (lambda: in_backward(Model(), a=0.1), Partition(ROWS), {}, "one rule, got embedding_opt"),
        (
            lambda: in_backward(Model(), a=0.1, b=0.2),
            Partition(ROWS),
            {"embedding_optimizer": None},
            "expected one rule for all tables, got 2",
        ),
        (
            Model,
            Partition(ROWS),
            {"embedding_optimizer": RowWiseAdagrad},
            "expected functools.part",
        ),
        (
            Model,
            Partition(ROWS),
            {"embedding_optimizer": partial(RowWiseAdagrad, eps=1.0)},
            "expected its lr, got none",
        ),
        (
            Model,
            Partition(ROWS),
            {"embedding_optimizer": partial(RowWiseAdagrad, lr=1.0, weight_decay=0.1)},
            "expected lr, eps, beta1 and beta2 alone",
        ),
        (
            lambda: Model(bags("a", device="meta", init_fn=nn.init.ones_)),
            Partition({"a": 20}),
            {},
            "table a init_fn: expected TorchRec's default",
        ),
    ],
)
def test_what_cannot_be_is_an_error(
    one_rank: Ranks, make: Any, hot: Any, given: dict[str, Any], message: str
) -> None:
    asked = {"embedding_optimizer": RULE, "dense_optimizer": DENSE} | given
    with pytest.raises(ValueError, match=message):
        hotrec.parallelize(make(), hot, **asked)


def test_rules_of_the_model_are_kept(one_rank: Ranks) -> None:
    model, optimizer = hotrec.parallelize(
        in_backward(Model(), a=0.3, b=0.3), Partition(ROWS), dense_optimizer=DENSE
    )
    parts = dict(optimizer.optimizers)
    rates = {name: group["lr"] for name, part in parts.items() for group in part.param_groups}
    assert rates == pytest.approx({"fused": 0.3, "dense": 0.1})
    assert hotrec.choice_of(model).num_hot == 0


@pytest.mark.parametrize("kind", OptimizerKind)
def test_a_rule_is_torchrecs_class_and_back(kind: OptimizerKind) -> None:
    spec = OptimizerSpec(kind, 0.5, eps=1e-6, beta1=0.8) if kind is OptimizerKind.adam else None
    spec = spec or OptimizerSpec(kind, 0.5)
    assert rule_of(*optimizer_of(spec)) == spec


def test_features_are_found_by_their_names() -> None:
    first, second = features("a", "x"), features("b")
    batch = {"deep": [first], "other": (second, 3)}
    assert features_of_each(batch, [{"b"}, {"a"}, {"a"}]) == [second, first, first]
    assert features_of_each([first], [{"anything"}]) == [first]  # the collection says what lacks
    with pytest.raises(ValueError, match=r"expected the features \['a'\] in one .* in 2 of 2"):
        features_of_each([first, features("a")], [{"a"}])
    with pytest.raises(ValueError, match="in 0 of 0"):
        features_of_each([torch.ones(1)], [{"a"}])


def test_a_profile_of_arrays_is_that_of_batches(tmp_path: Path) -> None:
    ids = {"a": np.array([1, 1, 3]), "b": (np.array([0, 2]), np.array([0, 2, 0]))}
    found = hotrec.profile(ids, Model())
    batch = KeyedJaggedTensor(
        ["b", "a"],
        torch.tensor([0, 2, 1, 1, 3]),
        lengths=torch.tensor([0, 2, 0, 1, 1, 1]),
    )
    of_batches = hotrec.profile([batch, batch], Model(), num_batches=1)
    for counted in (found, of_batches):
        assert counted.num_samples == 3
        assert np.flatnonzero(counted.counts["a"]).tolist() == [1, 3]
        assert counted.counts["a"][1] == 2
        assert np.flatnonzero(counted.counts["b"]).tolist() == [0, 2]
    assert (found.batch_size, of_batches.batch_size) == (None, 3)
    of_batches.save(tmp_path / "profile")
    again = hotrec.profile(tmp_path / "profile")
    assert again.batch_size == 3
    for table, counts in of_batches.counts.items():
        assert np.array_equal(again.counts[table], counts)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "expected a batch or more to count"),
        ({"a": np.array([1])}, "expected the feature 'b'"),
        ({"a": np.array([1]), "b": np.array([1, 2])}, "expected as many samples in each"),
        ([features("a")], "expected 'b' among the batch's features"),
        (
            {"a": np.array([20]), "b": np.array([0])},
            r"expected a row of table a in 0\.\.19, got 20",
        ),
    ],
)
def test_what_cannot_be_counted_is_an_error(source: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hotrec.profile(source, Model())
    with pytest.raises(ValueError, match="profile model: expected the model"):
        hotrec.profile(source)


def test_other_models_have_no_pipeline() -> None:
    with pytest.raises(ValueError, match=r"expected the one that hotrec\.parallelize returned"):
        hotrec.Pipeline(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]))


@pytest.mark.parametrize("hot", ["off", Partition(ROWS, {"a": np.arange(3)})], ids=["off", "hot"])
def test_a_choice_gives_the_same_again(one_rank: Ranks, hot: Any) -> None:
    given: Any = {"embedding_optimizer": RULE, "dense_optimizer": DENSE}
    first, _ = hotrec.parallelize(Model(), hot, batch_size=7, **given)
    choice = pickle.loads(pickle.dumps(hotrec.choice_of(first)))
    assert choice.batch_size == (None if hot == "off" else 7)
    again, _ = hotrec.parallelize(Model(), choice, **given)
    assert hotrec.choice_of(again).name == choice.name
    assert again.state_dict().keys() == first.state_dict().keys()


def test_off_takes_a_plan_and_names_what_the_dense_optimizer_trains(
    one_rank: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    kinds = {"a": data_parallel(), "b": table_wise(rank=0, compute_kernel="fused")}
    of_module = construct_module_sharding_plan(
        model.collections[0], kinds, local_size=1, world_size=1, device_type="cpu"
    )
    with caplog.at_level(logging.WARNING, "hotrec"):
        _, optimizer = hotrec.parallelize(
            model,
            "off",
            embedding_optimizer=RULE,
            dense_optimizer=DENSE,
            plan=ShardingPlan({"collections.0": of_module}),
        )
    [message] = [
        record.getMessage() for record in caplog.records if record.name.startswith("hotrec")
    ]
    assert "replicated ones: ['collections.0.embedding_bags.a.weight']" in message
    _, dense = optimizer.optimizers[1]
    assert {name.split(".")[0] for name in dense.params} == {"collections", "out"}


def test_other_sharded_modules_stay_torchrecs(one_rank: Ranks) -> None:
    unpooled = EmbeddingCollection(
        tables=[
            EmbeddingConfig(name="seq", num_embeddings=8, embedding_dim=4, feature_names=["seq"])
        ]
    )
    hot = Partition(ROWS, {"a": np.arange(3)})
    model, optimizer = hotrec.parallelize(
        Model(bags("a", "b"), unpooled), hot, embedding_optimizer=RULE, dense_optimizer=DENSE
    )
    kinds = {type(m).__name__ for m in model.module.collections}
    assert kinds == {"ShardedHotColdEmbeddingBagCollection", "ShardedEmbeddingCollection"}
    assert "dense" in dict(optimizer.optimizers)
    layers = dict(dict(optimizer.optimizers)["dense"].params)
    assert all("out" in name for name in layers)
