"""The models and the task: sizes, seeds, and a loss whose mean over ranks is the global mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture, make_checked_layers
from hotrec.types import ModelKind
from tests.helpers.dense import shape_of

DIM = 4


def sized(kind: ModelKind, num_dense: int = 3) -> Any:
    sizes: Any = {"dense_layer_sizes": [8, DIM], "over_layer_sizes": [8, 1]}
    return shape_of(kind, num_dense, [("t", "t"), ("u", "u")], DIM, **sizes)


def build(kind: ModelKind, num_dense: int = 3) -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=9, embedding_dim=DIM, feature_names=[name])
        for name in "tu"
    ]
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(tables=tables)
    return build_architecture(sized(kind, num_dense), bags, 1, torch.device("cpu"))


def make_batch(weights: list[float], num_global_samples: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    size = len(weights)
    ids = torch.randint(0, 5, (2 * size,), generator=generator)
    sparse = KeyedJaggedTensor(["t", "u"], ids, lengths=torch.ones(2 * size, dtype=torch.int64))
    return Batch(
        dense=torch.rand(size, 3, generator=generator),
        sparse=sparse,
        labels=torch.randint(0, 2, (size,), generator=generator).float(),
        weights=torch.tensor(weights),
        num_global_samples=num_global_samples,
    )


@pytest.mark.parametrize("kind", [ModelKind.deepfm, ModelKind.mmoe, ModelKind.own])
def test_seed_decides_the_layers_and_the_callers_generator_goes_on(kind: ModelKind) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same, other = (
        nn.utils.parameters_to_vector(make_checked_layers(sized(kind), seed).parameters())
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_loss_of_unequal_shares_is_the_global_mean() -> None:
    """Ranks with 3, 1 and 0 samples (the last with padding): the mean over ranks is the mean."""
    model = build(ModelKind.dlrm)
    task = ClickTask(model, world_size=3)
    shares = [make_batch([1.0] * 3, 4, 0), make_batch([1.0], 4, 1), make_batch([0.0], 4, 2)]
    results = [task(batch) for batch in shares]
    for batch, (loss, (detached, logits_B, labels_B)) in zip(shares, results, strict=True):
        assert torch.equal(loss.detach(), detached)
        assert not logits_B.requires_grad
        assert logits_B.shape == labels_B.shape == batch.labels.shape
    logits, labels = (torch.cat([results[rank][1][at] for rank in (0, 1)]) for at in (1, 2))
    expected = F.binary_cross_entropy_with_logits(logits, labels)
    torch.testing.assert_close(torch.stack([of[1][0] for of in results]).mean(), expected)
    results[2][0].backward()  # padding updates nothing
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_the_loss_of_logits_in_16_bits_is_computed_in_32() -> None:
    batch = make_batch([1.0] * 3, 4, 0)
    logits_B1 = torch.tensor([[9.0], [-0.3], [2.0]], dtype=torch.bfloat16)

    class Fixed(nn.Module):
        def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
            return logits_B1

    loss, (_, logits_B, labels_B) = ClickTask(Fixed(), world_size=4)(batch)
    exact = F.binary_cross_entropy_with_logits(logits_B1[:, 0].double(), labels_B.double())
    torch.testing.assert_close(loss.double(), exact * 3 * 4 / 4, rtol=1e-6, atol=0)
    assert logits_B.dtype is torch.float32
