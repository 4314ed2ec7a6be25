"""Models beside DLRM and DCNv2: their layers, their work, and classes that do not fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from hotrec.assemble.job import architecture_of
from hotrec.config.groups import (
    DinConfig,
    HstuConfig,
    MmoeConfig,
    OwnModelConfig,
    SasrecConfig,
    SequenceConfig,
    TwoTowerConfig,
)
from hotrec.models.plain import Attention, DeepFm, MixtureOfExperts, TwoTower, make_layers
from hotrec.models.shape import ID_FLOPS_PER_DIM, sample_work_of, work_of
from hotrec.models.zoo import make_checked_layers
from hotrec.types import Feature, ModelKind, Schema, Table
from tests.helpers.dense import OwnLayers, shape_of

DIM = 8
SCHEMA = Schema(
    dense=("age", "price"),
    features=(Feature("user", "u"), Feature("item", "i")),
    tables=(Table("i", 5), Table("u", 7)),
)
OWN = OwnModelConfig(
    embedding_dim=DIM, _target_=f"{OwnLayers.__module__}.OwnLayers", args={"hidden": 6}
)


def test_deepfm_adds_the_products_of_all_pairs() -> None:
    vectors = torch.randn(5, 4, DIM)
    found = DeepFm(4 * DIM, [6], "cpu")(vectors)
    assert torch.equal(found[:, :DIM], vectors[:, 0])
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in combinations(range(4), 2)]
    torch.testing.assert_close(found[:, -1], torch.stack(pairs).sum(0))


# Two sequences, of two places and of one, and a feature named almost as one of them.
NAMES = ("item", "seen_1", "seen_2", "shop", "shops_1", "seen_1_ago")


def test_attention_sums_each_sequence_by_weights_of_its_ids() -> None:
    schema = Schema(("age",), tuple(Feature(name, "t") for name in NAMES), (Table("t", 5),))
    model = DinConfig(embedding_dim=DIM, attention={"shops": "shop", "seen": "item"})
    shape = architecture_of(model, schema)
    assert shape.args["attention"] == [("shop", ["shops_1"]), ("item", ["seen_1", "seen_2"])]
    layers = Attention(NAMES, DIM, **shape.args, device="cpu")
    vectors = torch.randn(3, 1 + len(NAMES), DIM)
    vectors[1, 3] = 0  # a sequence of one id
    of = dict(zip(("dense", *NAMES), vectors.unbind(1), strict=True))

    def weighted(number: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat((query, key, query - key, query * key), dim=1)
        return layers.weights[number](inputs) * key

    shops = weighted(0, of["shop"], of["shops_1"])
    seen = sum(weighted(1, of["item"], of[name]) for name in ("seen_1", "seen_2"))
    kept = [of[name] for name in ("dense", "item", "shop", "seen_1_ago")]
    torch.testing.assert_close(layers(vectors), torch.cat((*kept, shops, seen), dim=1))


def test_a_place_without_an_id_has_no_part_in_gradients() -> None:
    layers = Attention(["item", "seen_1"], DIM, [("item", ["seen_1"])], [6], "cpu")
    vectors = torch.randn(4, 3, DIM)
    vectors[:, 2] = 0
    vectors.requires_grad_()
    layers(vectors)[:, 2 * DIM :].square().sum().backward()
    assert vectors.grad is not None
    assert not vectors.grad.any()
    assert not any(parameter.grad.any() for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("sequence", "query", "got"),
    [("itme", "item", "column of kind sequence .*'itme'"), ("seen", "itme", "feature .*'itme'")],
)
def test_attention_to_what_is_not_there_is_refused(sequence: str, query: str, got: str) -> None:
    schema = replace(SCHEMA, features=(*SCHEMA.features, Feature("seen_1", "i")))
    model = DinConfig(embedding_dim=DIM, attention={sequence: query})
    with pytest.raises(ValueError, match=rf"^model\.attention: expected a {got}"):
        architecture_of(model, schema)


SEQUENCES = Schema(
    ("age",),
    (
        Feature("item", "i"),
        Feature("seen", "i", is_multi_hot=True),
        Feature("actions", "a", is_multi_hot=True),
        Feature("user", "u"),
        Feature("shop", "s"),
    ),
    (Table("i", 5), Table("a", 3), Table("u", 7), Table("s", 4)),
)


@pytest.mark.parametrize("kind", [HstuConfig, SasrecConfig])
def test_what_no_role_names_is_read_by_the_last_layers(kind: type[SequenceConfig]) -> None:
    config = kind(embedding_dim=DIM, history={"seen": "item"}, side=["actions"], context=["user"])
    layers: Any = make_layers(architecture_of(config, SEQUENCES))
    assert layers.score.others == ("shop",)
    assert layers.tokens.columns.side == ["actions"]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"history": {"sean": "item"}}, r"history: expected .*kind categorical_list .*'sean'"),
        ({"history": {"shop": "item"}}, r"history: .*categorical_list .*'actions'\], got 'shop'"),
        ({"history": {"seen": "seen"}}, r"history: expected a column of kind categorical .*'seen'"),
        (
            {"history": {"seen": "user"}},
            r"history\.seen: expected .* table i, .* got 'user' of .*u",
        ),
        ({"side": ["user"]}, r"side: expected a column of kind categorical_list .* got 'user'"),
        ({"context": ["actions"]}, r"context: expected a column of kind categorical .*'actions'"),
        ({"context": ["user", "item"]}, r"context: .* another role, got 'item', .* model\.history"),
        ({"context": ["user", "user"]}, r"context: .* another role, got 'user'"),
    ],
)
def test_features_that_do_not_fit_their_role_are_refused(
    roles: dict[str, Any], message: str
) -> None:
    config = SasrecConfig(embedding_dim=DIM, **{"history": {"seen": "item"}, **roles})
    with pytest.raises(ValueError, match=rf"^model\.{message}"):
        architecture_of(config, SEQUENCES)


def test_gates_weigh_the_experts_of_each_label() -> None:
    layers = MixtureOfExperts(3, 2, 4, [5], [1], "cpu")
    inputs = torch.randn(6, 3)
    experts = torch.stack([expert(inputs) for expert in layers.experts])
    for label in range(2):
        weights = torch.softmax(layers.gates[label](inputs), dim=1)
        mixed = torch.einsum("be,ebh->bh", weights, experts)
        expected = layers.towers[label](mixed).squeeze(1)
        torch.testing.assert_close(layers(inputs)[:, label], expected)


def test_towers_read_their_own_columns() -> None:
    model = TwoTowerConfig(embedding_dim=DIM, item_columns=["item", "price"], tower_layer_sizes=[3])
    layers = make_layers(architecture_of(model, SCHEMA))
    assert isinstance(layers, TwoTower)
    # By table: the item's feature is the first.
    dense, pooled = torch.randn(4, 2), torch.randn(4, 2, DIM)
    item = layers.towers["item"](torch.cat((dense[:, 1:], pooled[:, 0]), dim=1))
    user = layers.towers["user"](torch.cat((dense[:, :1], pooled[:, 1]), dim=1))
    torch.testing.assert_close(layers(dense, pooled).squeeze(1), (item * user).sum(1))


@pytest.mark.parametrize("columns", [["item", "itme"], ["age", "price", "user", "item"]])
def test_columns_of_no_tower_are_refused(columns: list[str]) -> None:
    model = TwoTowerConfig(embedding_dim=DIM, item_columns=columns)
    with pytest.raises(ValueError, match=rf"^model\.item_columns: .* got \['{columns[0]}', "):
        make_layers(architecture_of(model, SCHEMA))


def test_work_is_counted_where_there_is_no_formula() -> None:
    # 2 + 2 D inputs -> 6 -> 1, whose first layer also has a gradient to give to the rows.
    num_inputs = 2 + 2 * DIM
    work = work_of(architecture_of(OWN, SCHEMA))
    assert work.flops == 3 * 2 * (num_inputs * 6 + 6)
    assert work.bottom_frac == 0
    assert work.num_dense_values == num_inputs * 6 + 6 + 6 + 1 + num_inputs
    model = MmoeConfig(embedding_dim=DIM, dense_layer_sizes=[4, DIM])
    mmoe = work_of(architecture_of(model, SCHEMA))
    assert mmoe.bottom_frac * mmoe.flops == pytest.approx(2 * 2 * 2 * 4 + 3 * 2 * 4 * DIM)


class Refused(nn.Module):
    """Takes any arguments, and returns what it is told."""

    def __init__(self, returned: Any, **columns: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> Any:
        if self.returned is None:
            raise RuntimeError("no such product\nmore")
        return torch.zeros(self.returned) if isinstance(self.returned, tuple) else self.returned


@pytest.mark.parametrize(
    ("target", "args", "got"),
    [
        ("no_such_package.Model", {}, "No module named 'no_such_package'"),
        ("Model", {}, "got 'Model', whose import fails"),
        (f"{__name__}.NoSuchClass", {}, "NoSuchClass"),
        (f"{__name__}.DIM", {}, "got .*DIM', 8"),
        ("pathlib.Path", {}, r"subclass of torch\.nn\.Module, got pathlib"),
        (f"{__name__}.Refused", {}, "constructor takes .* missing 1 required"),
        (f"{__name__}.Refused", {"returned": (2,)}, r"to logits \(2, 1\), got \(2,\)"),
        (f"{__name__}.Refused", {"returned": "text"}, "got str"),
        (f"{__name__}.Refused", {"returned": None}, "got RuntimeError: no such product. Corr"),
    ],
)
def test_classes_that_do_not_fit_are_refused(target: str, args: dict[str, Any], got: str) -> None:
    shape = replace(architecture_of(OWN, SCHEMA), target=target, args=args)
    with pytest.raises(ValueError, match=rf"^model\._target_: expected .*{got}"):
        make_checked_layers(shape, seed=0)


def test_a_module_that_fails_when_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("import torch\nclass Model(torch.nn.Moduel): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    shape = replace(architecture_of(OWN, SCHEMA), target="broken_model.Model")
    with pytest.raises(ValueError, match=r"'broken_model\.Model', whose import fails: .*Moduel"):
        make_checked_layers(shape, seed=0)
    assert "broken_model" not in sys.modules


@pytest.mark.parametrize("kind", [ModelKind.deepfm, ModelKind.mmoe, ModelKind.own])
def test_seed_decides_the_layers_and_the_callers_generator_goes_on(kind: ModelKind) -> None:
    sizes: Any = {"dense_layer_sizes": [4, DIM], "over_layer_sizes": [4, 1]}
    shape = shape_of(kind, 2, [("a", "a")], DIM, **sizes)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same, other = (
        nn.utils.parameters_to_vector(make_checked_layers(shape, seed).parameters())
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


class SequenceLayers(OwnLayers):
    """Layers that tell their work per id and per pair of ids of a feature."""

    sequence_flops: ClassVar = {"item": (3000.0, 20.0)}


def test_work_of_a_sample_is_that_of_dense_layers_ids_and_attention() -> None:
    names = [(feature.name, feature.table) for feature in SCHEMA.features]
    sizes = {"dense_layer_sizes": [6, DIM], "over_layer_sizes": [5, 1]}
    dlrm, of_id = shape_of(ModelKind.dlrm, 2, names, DIM, **sizes), ID_FLOPS_PER_DIM * DIM
    work = sample_work_of(dlrm)
    assert work.per_sample == round(work_of(dlrm).flops) > 100
    assert (work.per_id, work.per_pair) == ({"user": of_id, "item": of_id}, {})
    own = replace(architecture_of(OWN, SCHEMA), target=f"{__name__}.SequenceLayers")
    work = sample_work_of(own)
    assert work.per_id == {"user": of_id, "item": of_id + 3000}
    assert work.per_pair == {"item": 20}
    assert work.per_sample == round(work_of(own).flops)
