"""Layers over the vectors of features, against TorchRec's or their formula in plain torch."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet

from hotrec.assemble.job import architecture_of
from hotrec.config.groups import DinConfig, TwoTowerConfig
from hotrec.models.interaction import CrossNet, DotInteraction
from hotrec.models.plain import Attention, DeepFm, MixtureOfExperts, TwoTower, make_layers
from hotrec.types import Feature, Schema, Table

DIM = 8
# Two sequences, of two places and of one, and a feature named almost as one of them.
NAMES = ("item", "seen_1", "seen_2", "shop", "shops_1", "seen_1_ago")
SCHEMA = Schema(("age", "price"), tuple(Feature(n, "t") for n in NAMES), (Table("t", 5),))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def outcome(
    arch: torch.nn.Module, dense: torch.Tensor, sparse: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    """Output and both gradients of a sum weighted by ``weight``."""
    dense, sparse = dense.detach().requires_grad_(), sparse.detach().requires_grad_()
    out = arch(dense_features=dense, sparse_features=sparse)
    (out * weight).sum().backward()
    assert dense.grad is not None
    return [out, dense.grad, torch.zeros_like(sparse) if sparse.grad is None else sparse.grad]


@pytest.mark.parametrize("num_features", [0, 1, 7])
@pytest.mark.parametrize("num_samples", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dots_same_as_torchrecs(num_features: int, num_samples: int, dtype: torch.dtype) -> None:
    sizes = (DIM, num_samples), (num_samples, DIM, num_features)
    dense, sparse = draw(*sizes[0], dtype=dtype).t(), draw(*sizes[1], dtype=dtype).transpose(1, 2)
    weight = draw(num_samples, DIM + num_features * (num_features + 1) // 2, dtype=dtype)
    expected = outcome(InteractionArch(num_features), dense, sparse, weight)
    got = outcome(DotInteraction(num_features), dense, sparse, weight)
    rtol = 1e-6 if dtype == torch.float32 else 1e-13
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize("num_samples", [0, 1, 5])
def test_cross_net_same_as_torchrecs(num_samples: int) -> None:
    torch.manual_seed(0)
    plain, ours = LowRankCrossNet(12, 3, 4), CrossNet(12, 3, 4)
    with torch.no_grad():
        for bias in plain.bias:
            bias.normal_()
    ours.load_state_dict(plain.state_dict())
    x = draw(num_samples, 12)
    results = []
    for net in (plain, ours):
        out = net(x)
        out.square().sum().backward()
        results.append([out, *(parameter.grad for parameter in net.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_deepfm_adds_the_products_of_all_pairs() -> None:
    vectors = draw(5, 4, DIM)
    found = DeepFm(4 * DIM, [6], "cpu")(vectors)
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
    torch.testing.assert_close(layers(vectors), torch.cat((*kept, *sums), dim=1))
    # A sequence without ids has no part in gradients.
    layers(vectors * 0)[:, 4 * DIM :].square().sum().backward()
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
