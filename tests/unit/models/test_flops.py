"""Operations and parameters of the dense layers, against the layers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from hotrec.models.flops import dense_flops
from hotrec.models.plain import Architecture
from hotrec.models.zoo import build_architecture
from hotrec.types import ModelKind
from tests.helpers.dense import shape_of

NUM_DENSE, NUM_COLUMNS, NUM_SAMPLES = 5, 4, 10
NAMES = [f"f{number}" for number in range(NUM_COLUMNS)]


def shape(kind: ModelKind, num_dense: int) -> Architecture:
    sizes: Any = {"dense_layer_sizes": [16, 8], "over_layer_sizes": [12, 6, 1]}
    return shape_of(kind, num_dense, [(name, name) for name in NAMES], 8, **sizes)


def built(of: Architecture) -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=1, embedding_dim=8, feature_names=[n])
        for n in NAMES
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    found: Any = build_architecture(of, embeddings, 0, torch.device("cpu"))
    found.sparse_arch.embedding_bag_collection = nn.Identity()
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("num_dense", [NUM_DENSE, 0])
@pytest.mark.parametrize("kind", [ModelKind.dlrm, ModelKind.dcnv2])
def test_parameters_and_operations_are_those_of_the_layers(kind: ModelKind, num_dense: int) -> None:
    of = shape(kind, num_dense)
    layers, work = built(of), dense_flops(of)
    assert work.num_dense_values == sum(p.numel() for p in layers.parameters())
    values = torch.randn(NUM_SAMPLES, NUM_COLUMNS * 8, requires_grad=True)
    pooled = KeyedTensor(NAMES, [8] * NUM_COLUMNS, values)
    dense = torch.randn(NUM_SAMPLES, num_dense)
    with FlopCounterMode(display=False) as counter:
        layers(dense, pooled).sum().backward()
    assert work.flops * NUM_SAMPLES == counter.get_total_flops()


def test_the_share_of_the_bottom_layers() -> None:
    work = dense_flops(shape(ModelKind.dlrm, NUM_DENSE))
    # 5 -> 16 without a gradient of the input, 16 -> 8 with.
    assert work.bottom_frac * work.flops == pytest.approx(2 * 2 * 5 * 16 + 3 * 2 * 16 * 8)
    wider = dense_flops(shape(ModelKind.dlrm, 10 * NUM_DENSE))
    assert wider.bottom_frac > work.bottom_frac
