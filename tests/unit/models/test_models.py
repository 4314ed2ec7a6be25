"""The models and the task: sizes, seeds, and a loss whose mean over ranks is the global mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.initialize import copy_weights
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture, make_checked_layers
from hotrec.types import ModelKind, Partition
from tests.helpers.dense import POOLED_KINDS, shape_of

DIM = 4
CPU = torch.device("cpu")
PARTITION = Partition({"t": 9, "u": 5}, {"t": np.array([3, 1])})


def tables(*dims: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for (name, rows), dim in zip(PARTITION.num_rows.items(), dims or (DIM, DIM), strict=True)
    ]


def sized(kind: ModelKind, num_dense: int = 3, **given: Any) -> Any:
    sizes: Any = {"dense_layer_sizes": [8, DIM], "over_layer_sizes": [8, 1], **given}
    return shape_of(kind, num_dense, [("t", "t"), ("u", "u")], DIM, **sizes)


def build(kind: ModelKind, embeddings: nn.Module, num_dense: int = 3, **given: Any) -> nn.Module:
    return build_architecture(sized(kind, num_dense, **given), embeddings, 1, CPU)


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


@pytest.mark.parametrize("kind", POOLED_KINDS)
def test_same_model_whatever_holds_the_embeddings(kind: ModelKind) -> None:
    plain = EmbeddingBagCollection(tables=tables())
    split = HotColdEmbeddingBagCollection(tables(), PARTITION)
    with torch.no_grad():
        copy_weights(plain.embedding_bags, split)
    batch = make_batch([1.0] * 6, 6)
    first, second = build(kind, plain), build(kind, split)
    logits = first(batch.dense, batch.sparse)
    assert logits.shape == (6, 1)
    for sparse in (batch.sparse, split.router(batch.sparse)):
        torch.testing.assert_close(logits, second(batch.dense, sparse), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind", [ModelKind.dlrm, ModelKind.dcnv2, ModelKind.deepfm, ModelKind.mmoe]
)
def test_without_dense_columns_the_bottom_layers_read_ones(kind: ModelKind) -> None:
    embeddings = EmbeddingBagCollection(tables=tables())
    without, with_ones = (build(kind, embeddings, num_dense=number) for number in (0, 1))
    batch = make_batch([1.0] * 6, 6)
    logits = without(batch.dense[:, :0], batch.sparse)
    assert torch.equal(logits, with_ones(torch.ones(6, 1), batch.sparse))
    logits.sum().backward()
    assert all(p.grad is not None for p in without.parameters())


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


@pytest.mark.parametrize(
    ("dims", "arguments", "message"),
    [
        ((4, 8), {}, r"embedding_dim: expected .*, got \[4, 8\]"),
        ((4, 4), {"dense_layer_sizes": [8, 5]}, r"dense_layer_sizes: expected .* 4, got 5"),
        ((4, 4), {"over_layer_sizes": [8, 2]}, r"over_layer_sizes: expected .* 1, got 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    dims: tuple[int, int], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{message}"):
        build(ModelKind.dlrm, EmbeddingBagCollection(tables=tables(*dims)), **arguments)


def test_loss_of_unequal_shares_is_the_global_mean() -> None:
    """Ranks with 3, 1 and 0 samples (the last with padding): the mean over ranks is the mean."""
    model = build(ModelKind.dlrm, EmbeddingBagCollection(tables=tables()))
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
