"""What a TorchRec program may ask for, and what it is told otherwise; one rank."""

from __future__ import annotations

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
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.embedding.fused import optimizer_of, rule_of
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.routing.batches import features_of_each
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Partition, PipelineKind, TorchrecPlan
from tests.unit.planner.situations import torchrec_plan

ROWS = {"a": 20, "b": 12}
DENSE = partial(torch.optim.Adagrad, lr=0.1)
RULE = partial(RowWiseAdagrad, lr=0.1)


def table(name: str, **given: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_embeddings": ROWS[name],
        "embedding_dim": 4,
        "feature_names": [name],
    } | given


def bags(
    *names: str, device: str = "cpu", is_weighted: bool = False, **given: Any
) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(**table(name, **given)) for name in names]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted, device=torch.device(device))


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
        (Model, "off", {"pipeline": "look_ahead"}, r"expected one of TorchRec's with 'off'"),
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
            "expected lr, got none",
        ),
        (
            Model,
            Partition(ROWS),
            {"embedding_optimizer": partial(RowWiseAdagrad, lr=1.0, weight_decay=0.1)},
            "expected only lr, eps, beta1 and beta2",
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


def tied(first: str, second: str) -> Model:
    model = Model(bags("a"), bags("b"))
    model.proj = nn.Linear(4, 20)
    weights = nn.Parameter(torch.zeros(20, 4))
    for path in (first, second):
        model.get_submodule(path).weight = weights
    return model


def frozen(*names: str) -> Model:
    model = Model()
    for name in names:
        model.get_submodule(f"collections.0.embedding_bags.{name}").requires_grad_(False)
    return model


class Derived(EmbeddingBagCollection):
    """A subclass, which TorchRec's sharders pass over."""


CHOICES = [
    Partition(ROWS, {"a": np.arange(3)}),
    hotrec.Choice(torchrec_plan(TorchrecPlan.hand_tuned, PipelineKind.base), ""),
    "off",
]


@pytest.mark.parametrize("hot", CHOICES, ids=["hot", "torchrec", "off"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: frozen("b"), r"table b: expected a trained table, got a frozen"),
        (lambda: frozen("a", "b"), r"table a: expected a trained table"),
        (lambda: in_backward(frozen("b"), a=0.1), r"table b: expected a trained table"),
        (lambda: Model(bags("a", embedding_dim=10)), r"table a embedding_dim: .* of 4, .* got 10"),
        (lambda: Model(bags("a", embedding_dim=2)), r"table a embedding_dim: .* of 4, .* got 2"),
        (
            lambda: Model(bags("a", data_type=DataType.FP16)),
            r"table a weight: expected torch.float32, got torch.float16",
        ),
        (lambda: Model(bags("a")).double(), r"table a weight: expected torch.float32, got .*64"),
        (
            lambda: Model(bags("a", is_weighted=True, pooling=PoolingType.MEAN)),
            r"table a pooling: expected SUM in a weighted collection, .*, got MEAN",
        ),
        (
            lambda: tied("collections.0.embedding_bags.a", "collections.1.embedding_bags.b"),
            r"table a: expected separate weights, got those of .*\.b\.weight,",
        ),
        (
            lambda: tied("collections.0.embedding_bags.a", "proj"),
            r"table a: expected separate weights, got those of proj\.weight,",
        ),
        (
            lambda: Model(Derived([EmbeddingBagConfig(**table("a"))])),
            r"module collections\.0: expected one of the classes .* subclass Derived",
        ),
        (lambda: Model(bags("a"), bags("a")), r"tables \['a'\]: expected each name once"),
        (
            lambda: Model(bags("a", device="meta", init_fn=nn.init.ones_)),
            r"table a init_fn: expected TorchRec's default",
        ),
    ],
)
def test_every_choice_refuses_what_it_would_train_otherwise(
    one_rank: Ranks, make: Any, message: str, hot: Any
) -> None:
    given: Any = {"embedding_optimizer": RULE, "dense_optimizer": DENSE}
    model = make()
    if any(hasattr(p, "_optimizer_classes") for p in model.parameters()):
        given["embedding_optimizer"] = None
    with pytest.raises(ValueError, match=message):
        hotrec.parallelize(model, hot, **given)


def test_look_ahead_is_refused_before_anything_is_sharded(one_rank: Ranks) -> None:
    for layer, message in (
        (nn.BatchNorm1d(3), "dense layer norm: expected no running statistics"),
        (None, "pipeline look_ahead: expected trained dense layers"),
    ):
        model = Model()
        model.norm = layer
        model.out.requires_grad_(layer is not None)
        given: Any = {"embedding_optimizer": RULE, "dense_optimizer": DENSE}
        with pytest.raises(ValueError, match=message):
            hotrec.parallelize(model, Partition(ROWS), pipeline="look_ahead", **given)


@pytest.mark.parametrize("hot", CHOICES, ids=["hot", "torchrec", "off"])
def test_weights_and_random_numbers_are_left_as_they_were(one_rank: Ranks, hot: Any) -> None:
    model = Model()
    weights = {
        name: bag.weight.detach().clone()
        for name, bag in model.collections[0].embedding_bags.items()  # type: ignore[operator, union-attr]
    }
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = hotrec.parallelize(model, hot, embedding_optimizer=RULE, dense_optimizer=DENSE)
    assert torch.equal(torch.rand(3), expected)
    for name, table in hotrec.gather_tables(model).items():
        assert torch.equal(table, weights[name])


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
    for number in (0, -1, 2.0, "3", float("nan"), 10**30):
        with pytest.raises(ValueError, match=rf"^profile num_batches: .* got {number!r}\."):
            hotrec.profile([batch], Model(), num_batches=number)
    of_batches.save(tmp_path / "profile")
    again = hotrec.profile(tmp_path / "profile")
    assert again.batch_size == 3
    for table, counts in of_batches.counts.items():
        assert np.array_equal(again.counts[table], counts)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "expected at least one sample"),
        ({"a": np.array([1])}, "expected the feature 'b'"),
        (
            {"a": np.array([1]), "b": np.array([1, 2])},
            "expected the same number of samples in each",
        ),
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


@pytest.mark.parametrize("hot", ["off", Partition(ROWS, {"a": np.arange(3)})], ids=["off", "hot"])
def test_a_choice_gives_the_same_again_and_is_printed(
    one_rank: Ranks, hot: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given: Any = {"embedding_optimizer": RULE, "dense_optimizer": DENSE}
    first, _ = hotrec.parallelize(Model(), hot, batch_size=7, **given)
    choice = pickle.loads(pickle.dumps(hotrec.choice_of(first)))
    assert choice.batch_size == (None if hot == "off" else 7)
    again, _ = hotrec.parallelize(Model(), choice, **given)
    assert hotrec.choice_of(again).plan == choice.plan
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hotrec: ")]
    assert lines == [f"hotrec: {choice}"] * 2
    assert choice.name in lines[0]
    assert choice.why in lines[0]
    assert again.state_dict().keys() == first.state_dict().keys()


def plan_of_two(model: Model) -> ShardingPlan:
    """Table a replicated, table b on the only rank."""
    kinds = {"a": data_parallel(), "b": table_wise(rank=0, compute_kernel="fused")}
    of_module = construct_module_sharding_plan(
        model.collections[0], kinds, local_size=1, world_size=1, device_type="cpu"
    )
    return ShardingPlan({"collections.0": of_module})


def test_off_takes_a_plan_whose_replicated_tables_follow_their_rule(one_rank: Ranks) -> None:
    model = in_backward(Model(), a=0.3, b=0.2)
    plan = plan_of_two(model)
    _, optimizer = hotrec.parallelize(model, "off", dense_optimizer=DENSE, plan=plan)
    (_, fused), (_, replicated), (_, dense) = optimizer.optimizers
    rates = [group["lr"] for part in (fused, replicated) for group in part.param_groups]
    assert rates == pytest.approx([0.2, 0.3])
    assert list(replicated.params) == ["collections.0.embedding_bags.a.weight"]
    assert {name.split(".")[0] for name in dense.params} == {"out"}
