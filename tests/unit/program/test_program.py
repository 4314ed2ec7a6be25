"""What a TorchRec program may ask for, and what it is told otherwise; one rank."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.runtime.ranks import Ranks
from hotrec.types import Partition, PipelineKind, TorchrecPlan
from tests.unit.planner.situations import torchrec_plan

MEAN = PoolingType.MEAN
ROWS = {"a": 20, "b": 12}
NO_HOT = Partition(ROWS)
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


def in_backward(model: Model, **rates: float) -> Model:
    for collection in model.collections:
        for name, bag in collection.embedding_bags.items():  # type: ignore[operator, union-attr]
            if name in rates:
                _apply_optimizer_in_backward(RowWiseAdagrad, bag.parameters(), {"lr": rates[name]})
    return model


def given(**others: Any) -> dict[str, Any]:
    return {"embedding_optimizer": RULE, "dense_optimizer": DENSE} | others


@pytest.mark.parametrize(
    ("make", "hot", "options", "said"),
    [
        (Model, "on", {}, "hot: .*'on'"),
        (Model, NO_HOT, {"pipeline": "fast"}, "pipeline: .*'fast'"),
        (Model, "off", {"pipeline": "look_ahead"}, "pipeline.*'off'"),
        (Model, NO_HOT, {"plan": object()}, "plan"),
        (lambda: Model(nn.Linear(1, 1)), NO_HOT, {}, "EmbeddingBagCollection"),
        (Model, Partition({"a": 20}), {}, "expected"),
        (Model, NO_HOT, {"embedding_optimizer": None}, "neither"),
        (lambda: in_backward(Model(), a=0.1), NO_HOT, {}, "embedding_optimizer"),
        (Model, NO_HOT, {"embedding_optimizer": RowWiseAdagrad}, "functools.partial"),
        (Model, NO_HOT, {"embedding_optimizer": partial(RULE, weight_decay=0.1)}, "only lr"),
        (Model, "off", {"embedding_optimizer": partial(torch.optim.Adam, lr=0.1)}, "adam"),
    ],
)
def test_what_cannot_be_is_an_error(
    one_rank: Ranks, make: Any, hot: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        hotrec.parallelize(make(), hot, **given(**options))


def tied(first: str, second: str) -> Model:
    model = Model(bags("a"), bags("b"))
    model.proj = nn.Linear(4, 20)
    weights = nn.Parameter(torch.zeros(20, 4))
    for path in (first, second):
        model.get_submodule(path).weight = weights
    return model


def frozen(name: str) -> Model:
    model = Model()
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
    ("make", "said"),
    [
        (lambda: in_backward(frozen("b"), a=0.1), "table b"),
        (lambda: Model(bags("a", embedding_dim=10)), "table a embedding_dim: .*10"),
        (lambda: Model(bags("a")).double(), "table a weight: .*64"),
        (lambda: Model(bags("a", is_weighted=True, pooling=MEAN)), "table a pooling: .*MEAN"),
        (lambda: tied("collections.0.embedding_bags.a", "proj"), r"table a: .*proj\.weight"),
        (lambda: Model(Derived([EmbeddingBagConfig(**table("a"))])), r"collections\.0: .*Derived"),
        (lambda: Model(bags("a"), bags("a")), r"tables \['a'\]"),
        (lambda: Model(bags("a", device="meta", init_fn=nn.init.ones_)), "table a init_fn"),
    ],
)
def test_every_choice_refuses_what_it_would_train_otherwise(
    one_rank: Ranks, make: Any, said: str, hot: Any
) -> None:
    model = make()
    has_rule = any(hasattr(p, "_optimizer_classes") for p in model.parameters())
    options = given(embedding_optimizer=None) if has_rule else given()
    with pytest.raises(ValueError, match=said):
        hotrec.parallelize(model, hot, **options)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(3), "dense layer norm: expected no running statistics"),
        (None, "pipeline look_ahead: expected trained dense layers"),
    ],
)
def test_look_ahead_is_refused_before_anything_is_sharded(
    one_rank: Ranks, layer: Any, message: str
) -> None:
    model = Model()
    model.norm = layer
    model.out.requires_grad_(layer is not None)
    with pytest.raises(ValueError, match=message):
        hotrec.parallelize(model, NO_HOT, **given(pipeline="look_ahead"))


@pytest.mark.parametrize("hot", CHOICES, ids=["hot", "torchrec", "off"])
def test_weights_and_random_numbers_are_left_as_they_were(one_rank: Ranks, hot: Any) -> None:
    model = Model()
    weights = {name: of.detach().clone() for name, of in model.collections.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = hotrec.parallelize(model, hot, **given())
    assert torch.equal(torch.rand(3), expected)
    for name, table in hotrec.gather_tables(model).items():
        assert torch.equal(table, weights[f"0.embedding_bags.{name}.weight"])


def features(*names: str, ids: Sequence[int] = (1, 1, 3)) -> KeyedJaggedTensor:
    """Samples with an id of each feature."""
    lengths = torch.ones(len(ids) * len(names), dtype=torch.int64)
    return KeyedJaggedTensor(list(names), torch.tensor([*ids] * len(names)), lengths=lengths)


def test_a_profile_is_read_as_it_was_saved(tmp_path: Path) -> None:
    first = hotrec.profile([features("b", "a")] * 2, Model(), num_batches=1)
    first.save(tmp_path / "profile")
    for counted in (first, hotrec.profile(tmp_path / "profile")):
        assert (counted.batch_size, counted.num_samples) == (3, 3)
        for table in ROWS:
            assert np.flatnonzero(counted.counts[table]).tolist() == [1, 3]
            assert counted.counts[table][1] == 2


@pytest.mark.parametrize(
    ("source", "num", "said"),
    [
        ([], None, "one sample"),
        ([features("a")], None, "'b'"),
        ([features("a", "b", ids=[12])], None, "table b .*12"),
        *(([features("a", "b")], num, "profile num_batches") for num in (0, 2.0, math.nan, 10**30)),
    ],
)
def test_what_cannot_be_counted_is_an_error(source: Any, num: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hotrec.profile(source, Model(), num_batches=num)


@pytest.mark.parametrize("hot", ["off", Partition(ROWS, {"a": np.arange(3)})], ids=["off", "hot"])
def test_a_choice_gives_the_same_again_and_is_printed(
    one_rank: Ranks, hot: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = hotrec.parallelize(Model(), hot, batch_size=7, **given())
    choice = pickle.loads(pickle.dumps(hotrec.choice_of(first)))
    assert choice.batch_size == (None if hot == "off" else 7)
    again, _ = hotrec.parallelize(Model(), choice, **given())
    assert hotrec.choice_of(again).plan == choice.plan
    assert capsys.readouterr().err.count(f"hotrec: {choice}\n") == 2
    assert again.state_dict().keys() == first.state_dict().keys()
