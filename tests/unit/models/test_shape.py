"""Roles of features, the work of layers, and classes that do not fit."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotrec.assemble.job import architecture_of
from hotrec.config.groups import DinConfig, OwnModelConfig, SasrecConfig, TwoTowerConfig
from hotrec.models.plain import make_layers
from hotrec.models.shape import work_of
from hotrec.models.zoo import make_checked_layers
from hotrec.types import Feature, ModelKind, Schema, Table
from tests.helpers.dense import OwnLayers, shape_of

DIM = 8
SCHEMA = Schema(
    ("age", "price"), (Feature("user", "u"), Feature("item", "i")), (Table("i", 5), Table("u", 7))
)
OWN = OwnModelConfig(
    embedding_dim=DIM, _target_=f"{OwnLayers.__module__}.OwnLayers", args={"hidden": 6}
)
SEQUENCES = Schema(
    ("age",),
    (
        *(Feature("item", "i"), Feature("user", "u"), Feature("shop", "s")),
        *(Feature("seen", "i", is_multi_hot=True), Feature("actions", "a", is_multi_hot=True)),
    ),
    (Table("i", 5), Table("a", 3), Table("u", 7), Table("s", 4)),
)


@pytest.mark.parametrize(
    ("make", "roles", "key", "got"),
    [
        (SasrecConfig, {"history": {"sean": "item"}}, "history", "'sean'"),
        (SasrecConfig, {"history": {"seen": "user"}}, r"history\.seen", "'user' of .*u"),
        (SasrecConfig, {"context": ["user", "item"]}, "context", "'item'"),
        (DinConfig, {"attention": {"itme": "item"}}, "attention", "'itme'"),
        (TwoTowerConfig, {"item_columns": ["item", "itme"]}, "item_columns", "'itme'"),
    ],
)
def test_features_that_do_not_fit_their_role_are_refused(
    make: Any, roles: dict[str, Any], key: str, got: str
) -> None:
    given = {"history": {"seen": "item"}} if make is SasrecConfig else {}
    with pytest.raises(ValueError, match=rf"^model\.{key}: .*{got}"):
        make_layers(architecture_of(make(embedding_dim=DIM, **(given | roles)), SEQUENCES))


@pytest.mark.parametrize("num_dense", [5, 0])
@pytest.mark.parametrize("kind", [ModelKind.dlrm, ModelKind.dcnv2])
def test_work_is_that_of_the_layers(kind: ModelKind, num_dense: int) -> None:
    names = [f"f{number}" for number in range(4)]
    sizes: Any = {"dense_layer_sizes": [16, DIM], "over_layer_sizes": [12, 6, 1]}
    work = work_of(shape_of(kind, num_dense, [(name, name) for name in names], DIM, **sizes))
    num_inputs, width = max(num_dense, 1), 5 * DIM
    # num_dense -> 16 without a gradient of the input, 16 -> 8 with.
    bottom = 2 * 2 * num_inputs * 16 + 3 * 2 * 16 * DIM
    # A product of 8 vectors, the gradients of 4 of them and of the dense one; or two cross layers.
    inner, values = 2 * DIM * (8 * 8 + 4 * 8 + 4), 0
    if kind is ModelKind.dcnv2:
        inner, values = 3 * 2 * 2 * width * 3 * 2, (2 * width * 3 + width) * 2
    inputs = width if values else DIM + 10
    top = 3 * 2 * (inputs * 12 + 12 * 6 + 6)
    assert work.flops == bottom + inner + top
    assert work.bottom_frac * work.flops == pytest.approx(bottom)
    linear = ((num_inputs, 16), (16, DIM), (inputs, 12), (12, 6), (6, 1))
    assert work.num_dense_values == values + sum((m + 1) * n for m, n in linear)


class Refused(nn.Module):
    """Takes any arguments, and returns what it is told."""

    def __init__(self, returned: Any, **columns: Any) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> Any:
        if self.returned is None:
            raise RuntimeError("no such product")
        return torch.zeros(self.returned) if isinstance(self.returned, tuple) else self.returned


@pytest.mark.parametrize(
    ("target", "args", "got"),
    [
        ("no_such_package.Model", {}, "No module named 'no_such_package'"),
        ("broken_model.Model", {}, "broken_model.Model.*Moduel"),
        ("pathlib.Path", {}, "pathlib"),
        (f"{__name__}.Refused", {}, "missing 1 required"),
        (f"{__name__}.Refused", {"returned": (2,)}, r"\(2,\)"),
        (f"{__name__}.Refused", {"returned": None}, "RuntimeError: no such product"),
    ],
)
def test_classes_that_do_not_fit_are_refused(
    target: str, args: dict[str, Any], got: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_model.py").write_text("import torch\nclass Model(torch.nn.Moduel): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    shape = replace(architecture_of(OWN, SCHEMA), target=target, args=args)
    with pytest.raises(ValueError, match=rf"^model\._target_: .*{got}"):
        make_checked_layers(shape, seed=0)
    assert "broken_model" not in sys.modules
