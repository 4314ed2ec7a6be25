"""Operations and parameters of the dense layers, against the layers themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedTensor

from hotrec.config.groups import Dcnv2Config, DlrmConfig, ModelConfig
from hotrec.models.flops import dense_flops
from hotrec.models.zoo import build_model

SIZES = {"embedding_dim": 8, "dense_layer_sizes": [16, 8], "over_layer_sizes": [12, 6, 1]}
MODELS = {
    "dlrm": DlrmConfig(**SIZES),  # type: ignore[arg-type]
    "dcnv2": Dcnv2Config(**SIZES, cross_num_layers=2, cross_low_rank_dim=3),  # type: ignore[arg-type]
}
NUM_DENSE, NUM_COLUMNS, NUM_SAMPLES = 5, 4, 10
NAMES = [f"f{number}" for number in range(NUM_COLUMNS)]


def built(model: ModelConfig, num_dense: int) -> nn.Module:
    cross = {}
    if isinstance(model, Dcnv2Config):
        cross = {name: getattr(model, name) for name in ("cross_num_layers", "cross_low_rank_dim")}
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=1, embedding_dim=8, feature_names=[n])
        for n in NAMES
    ]
    found = build_model(
        model.kind,
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        num_dense=num_dense,
        dense_layer_sizes=model.dense_layer_sizes,
        over_layer_sizes=model.over_layer_sizes,
        seed=0,
        device=torch.device("cpu"),
        **cross,
    )
    found.sparse_arch.embedding_bag_collection = nn.Identity()  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("num_dense", [NUM_DENSE, 0])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_parameters_and_operations_are_those_of_the_layers(kind: str, num_dense: int) -> None:
    model, layers = MODELS[kind], built(MODELS[kind], num_dense)
    work = dense_flops(model, num_dense, NUM_COLUMNS)
    assert work.num_dense_values == sum(p.numel() for p in layers.parameters())
    values = torch.randn(NUM_SAMPLES, NUM_COLUMNS * 8, requires_grad=True)
    pooled = KeyedTensor(NAMES, [8] * NUM_COLUMNS, values)
    dense = torch.randn(NUM_SAMPLES, num_dense)
    with FlopCounterMode(display=False) as counter:
        layers(dense, pooled).sum().backward()
    assert work.flops * NUM_SAMPLES == counter.get_total_flops()


def test_the_share_of_the_bottom_layers() -> None:
    work = dense_flops(MODELS["dlrm"], NUM_DENSE, NUM_COLUMNS)
    # 5 -> 16 without a gradient of the input, 16 -> 8 with.
    assert work.bottom_frac * work.flops == pytest.approx(2 * 2 * 5 * 16 + 3 * 2 * 16 * 8)
    wider = dense_flops(MODELS["dlrm"], 10 * NUM_DENSE, NUM_COLUMNS)
    assert wider.bottom_frac > work.bottom_frac
