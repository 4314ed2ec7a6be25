"""What a TorchRec program may ask for, and what it is told otherwise; one rank."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
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
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import LAMB
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import hotrec
from hotrec.cli.profile import blocks_of
from hotrec.cost_model.profile import read_profile, write_profile
from hotrec.cost_model.reuse import LogReuse
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.embedding.fused import optimizer_of, rule_of
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.routing.batches import features_of_each
from hotrec.runtime.ranks import Ranks
from hotrec.types import OptimizerKind, Partition, PipelineKind, TorchrecPlan
from tests.unit.data.logs import SCHEMA, write_dataset
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


def test_rules_of_the_model_are_kept(one_rank: Ranks) -> None:
    model, optimizer = hotrec.parallelize(
        in_backward(Model(), a=0.3, b=0.3), Partition(ROWS), dense_optimizer=DENSE
    )
    parts = dict(optimizer.optimizers)
    rates = {name: group["lr"] for name, part in parts.items() for group in part.param_groups}
    assert rates == pytest.approx({"fused": 0.3, "dense": 0.1})
    assert hotrec.choice_of(model).num_hot == 0


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


def test_layers_without_weights_need_a_way_to_make_some(one_rank: Ranks) -> None:
    model = Model()
    model.scale = nn.Module()
    model.scale.factor = nn.Parameter(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match=r"dense layer scale: expected reset_parameters\(\)"):
        hotrec.parallelize(model, Partition(ROWS), embedding_optimizer=RULE, dense_optimizer=DENSE)


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


def test_a_collection_stays_one_wherever_it_is_held(one_rank: Ranks) -> None:
    for hot in CHOICES:
        model = Model()
        model.again = nn.ModuleList([model.collections[0]])
        sharded, optimizer = hotrec.parallelize(
            model, hot, embedding_optimizer=RULE, dense_optimizer=DENSE
        )
        assert sharded.module.again[0] is sharded.module.collections[0]
        names = [name for _, part in optimizer.optimizers for name in part.params]
        assert not [name for name in names if "again" in name]


def test_public_names_are_listed() -> None:
    assert dir(hotrec) == sorted(hotrec.__all__)


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


def test_a_log_has_the_reuse_that_its_loader_has(tmp_path: Path) -> None:
    """Of `hotrec profile` and of ``hotrec.profile``, on the same batches."""
    write_dataset(tmp_path / "dataset", {"train": 90})
    dataset = Dataset.open(tmp_path / "dataset")
    of_table = {
        table.name: [feature.name for feature in SCHEMA.features_of(table.name)]
        for table in SCHEMA.tables
    }
    model = Model(
        EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=one.name,
                    num_embeddings=one.num_rows,
                    embedding_dim=4,
                    feature_names=of_table[one.name],
                )
                for one in SCHEMA.tables
            ]
        )
    )
    options: Any = {"batch_size": 8, "rank": 0, "world_size": 1, "epochs": 1, "shuffle": False}
    loader = make_loader(tmp_path / "dataset", "train", **options)
    of_loader = hotrec.profile((batch.sparse for batch in loader), model)
    of_log, _ = write_profile(
        blocks_of(dataset, "train"),
        SCHEMA,
        tmp_path / "profile",
        dataset_hash="d",
        reuse=LogReuse(SCHEMA, 90, batch_size=8),
    )
    assert len(of_loader.reuse["t_b"].read_frac) == 4  # 12 batches, none with 16 before it
    assert {name: replace(of, is_of_log=False) for name, of in of_log.reuse.items()} == dict(
        of_loader.reuse
    )
    assert of_log.shuffled_reuse.keys() == of_log.reuse.keys()
    assert of_log.shuffled_reuse != of_log.reuse
    read, _ = read_profile(tmp_path / "profile")
    assert (read.reuse, read.shuffled_reuse) == (of_log.reuse, of_log.shuffled_reuse)


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


def test_other_models_have_no_pipeline() -> None:
    with pytest.raises(ValueError, match=r"expected the result of hotrec\.parallelize"):
        hotrec.Pipeline(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]))


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


def test_off_names_what_the_dense_optimizer_trains(
    one_rank: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    model = in_backward(Model(), b=0.1)
    table = model.collections[0].embedding_bags["a"]  # type: ignore[operator, index]
    _apply_optimizer_in_backward(LAMB, table.parameters(), {"lr": 0.1})
    with caplog.at_level(logging.WARNING, "hotrec"):
        _, optimizer = hotrec.parallelize(
            model, "off", dense_optimizer=DENSE, plan=plan_of_two(model)
        )
    [message] = [
        record.getMessage() for record in caplog.records if record.name.startswith("hotrec")
    ]
    assert "only fused kernels support: ['collections.0.embedding_bags.a.weight']" in message
    _, dense = optimizer.optimizers[1]
    assert {name.split(".")[0] for name in dense.params} == {"collections", "out"}


@pytest.mark.parametrize("hot", CHOICES, ids=["hot", "torchrec", "off"])
def test_adam_needs_cuda(one_rank: Ranks, hot: Any) -> None:
    with pytest.raises(ValueError, match="expected sgd, adagrad or rowwise_adagrad .* got adam"):
        hotrec.parallelize(
            Model(),
            hot,
            embedding_optimizer=partial(torch.optim.Adam, lr=0.1),
            dense_optimizer=DENSE,
        )


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
