"""Layers over the vectors of features, against TorchRec's or their formula in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

from hotrec.assemble.job import architecture_of
from hotrec.config.groups import DinConfig, TwoTowerConfig
from hotrec.models.interaction import CrossLayers, DotPairs
from hotrec.models.plain import Attention, DeepFm, MixtureOfExperts, TwoTower, make_layers
from hotrec.types import Feature, Schema, Table

DIM = 8
# Two sequences, of two places and of one, and a feature named almost as one of them.
NAMES = ("item", "seen_1", "seen_2", "shop", "shops_1", "seen_1_ago")
SCHEMA = Schema(("age", "price"), tuple(Feature(n, "t") for n in NAMES), (Table("t", 5),))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


class Cross(nn.Module):
    """TorchRec's cross layers over the same vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LowRankCrossNet(8 * DIM, 3, 4)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat((dense.unsqueeze(1), sparse), dim=1).flatten(1))


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
@pytest.mark.parametrize("num_samples", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_interactions_are_torchrecs(name: str, num_samples: int, dtype: torch.dtype) -> None:
    makes: dict[str, list[Callable[[], nn.Module]]] = {
        "dlrm": [lambda: InteractionArch(7), lambda: DotPairs(7)],
        "dcnv2": [Cross, lambda: CrossLayers(8 * DIM, 3, 4)],
    }
    results = []
    for make in makes[name]:
        torch.manual_seed(0)
        layers = make().to(dtype)
        for parameter in layers.parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter)
        dense = draw(DIM, num_samples, dtype=dtype).t().requires_grad_()
        sparse = draw(num_samples, DIM, 7, dtype=dtype).transpose(1, 2).requires_grad_()
        out = layers(dense, sparse)
        (out * draw(*out.shape, dtype=dtype)).sum().backward()
        # Also the first weights are TorchRec's.
        of_layers = [t for p in layers.parameters() for t in (p.detach(), p.grad)]
        results.append([out, dense.grad, sparse.grad, *of_layers])
    rtol = 1e-5 if dtype == torch.float32 else 1e-13
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=10 * rtol)


def test_deepfm_adds_the_products_of_all_pairs() -> None:
    vectors = draw(5, 4, DIM)
    found = DeepFm(4 * DIM, [6], "cpu")(vectors[:, 0], vectors[:, 1:])
    assert torch.equal(found[:, :DIM], vectors[:, 0])
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i, j in combinations(range(4), 2)]
    torch.testing.assert_close(found[:, -1], torch.stack(pairs).sum(0))


def test_attention_sums_each_sequence_by_weights_of_its_ids() -> None:
    model = DinConfig(embedding_dim=DIM, attention={"shops": "shop", "seen": "item"})
    layers = Attention(NAMES, DIM, **architecture_of(model, SCHEMA).args, device="cpu")
    vectors = draw(3, 1 + len(NAMES), DIM)
    vectors[1, 3] = 0  # a sequence of one id
    vectors.requires_grad_()
    of = dict(zip(("dense", *NAMES), vectors.unbind(1), strict=True))

    def weighted(number: int, query: str, key: str) -> torch.Tensor:
        q, k = of[query], of[key]
        return layers.weights[number](torch.cat((q, k, q - k, q * k), dim=1)) * k

    sums = [weighted(0, "shop", "shops_1")]
    sums.append(weighted(1, "item", "seen_1") + weighted(1, "item", "seen_2"))
    kept = [of[name] for name in ("dense", "item", "shop", "seen_1_ago")]
    torch.testing.assert_close(
        layers(vectors[:, 0], vectors[:, 1:]), torch.cat((*kept, *sums), dim=1)
    )
    # A sequence without ids has no part in gradients.
    none = vectors * 0
    layers(none[:, 0], none[:, 1:])[:, 4 * DIM :].square().sum().backward()
    assert not any(of.grad.any() for of in (vectors, *layers.parameters()))


def test_gates_weigh_the_experts_of_each_label() -> None:
    layers, inputs = MixtureOfExperts(3, 2, 4, [5], [1], "cpu"), draw(6, 3)
    experts = torch.stack([expert(inputs) for expert in layers.experts])
    for label in range(2):
        weights = torch.softmax(layers.gates[label](inputs), dim=1)
        expected = layers.towers[label](torch.einsum("be,ebh->bh", weights, experts)).squeeze(1)
        torch.testing.assert_close(layers(inputs)[:, label], expected)


def test_towers_read_their_own_columns() -> None:
    schema = Schema(("age", "price"), (Feature("user", "u"), Feature("item", "i")),
                    (Table("i", 5), Table("u", 7)))  # fmt: skip
    model = TwoTowerConfig(embedding_dim=DIM, item_columns=["item", "price"], tower_layer_sizes=[3])
    layers = make_layers(architecture_of(model, schema))
    assert isinstance(layers, TwoTower)
    # By table: the item's feature is the first.
    dense, pooled = draw(4, 2), draw(4, 2, DIM)
    item = layers.towers["item"](torch.cat((dense[:, 1:], pooled[:, 0]), dim=1))
    user = layers.towers["user"](torch.cat((dense[:, :1], pooled[:, 1]), dim=1))
    torch.testing.assert_close(layers(dense, pooled).squeeze(1), (item * user).sum(1))
