"""The collection of sequences against TorchRec's, unsharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hotrec.embedding.collection import HotColdEmbeddingCollection
from hotrec.embedding.convert import use_hot_cold
from hotrec.types import Partition
from tests.unit.embedding.setups import NUM_ROWS, PARTITIONS, some_features

Output = dict[str, JaggedTensor]


def table(name: str, num_rows: int, features: list[str], dim: int = 4, **kwargs: Any) -> Any:
    return EmbeddingConfig(
        name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=features, **kwargs
    )


def some_tables() -> list[EmbeddingConfig]:
    return [
        table("t", 12, ["b", "a"]),
        table("u", 5, ["c"]),
        table("v", 9, ["a"]),  # "a" is read from two tables
    ]


def with_other_keys(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A payload that no table has is passed to the model and ignored here."""
    lengths = torch.ones(2 * features.stride(), dtype=torch.int64)
    payload = KeyedJaggedTensor(["watch_time", "weight"], 90 * lengths, lengths=lengths)
    return KeyedJaggedTensor.concat([payload, features])


def assert_same(found: Output, expected: Output) -> None:
    assert list(found) == list(expected)
    for name, of_feature in expected.items():
        assert torch.equal(found[name].values(), of_feature.values()), name
        assert torch.equal(found[name].lengths(), of_feature.lengths()), name
        assert found[name].lengths().dtype == of_feature.lengths().dtype
        weights = of_feature.weights_or_none()
        if weights is None:
            assert found[name].weights_or_none() is None
        else:
            assert torch.equal(found[name].weights(), weights)


def gradient(collection: HotColdEmbeddingCollection, name: str) -> torch.Tensor:
    """The gradient of an unsplit table from its two halves."""
    config = next(config for config in collection.embedding_configs() if config.name == name)
    embeddings: Any = collection.rows[f"dim{config.embedding_dim}"].embeddings
    total = torch.zeros(config.num_embeddings, config.embedding_dim)
    hot = torch.from_numpy(collection.partition.hot(name))
    if name in embeddings:
        total += embeddings[name].weight.grad
        assert not total[hot].any()
    if f"{name}_hot" in embeddings:
        total[hot] += embeddings[f"{name}_hot"].weight.grad
    return total


def scores(output: Output, seed: int) -> torch.Tensor:
    """A value with a different gradient for every number of the output."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for of_feature in output.values():
        values = of_feature.values()
        total = total + (values * torch.randn(values.shape, generator=generator)).sum()
    return total


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("partition", list(PARTITIONS))
def test_unsharded_equals_embedding_collection(partition: str, need_indices: bool) -> None:
    plain = EmbeddingCollection(tables=some_tables(), need_indices=need_indices)
    collection = use_hot_cold(plain, PARTITIONS[partition])
    assert isinstance(collection, HotColdEmbeddingCollection)
    features = with_other_keys(some_features())
    assert bool((features["a"].lengths() == 0).any())
    expected, routed = plain(features), collection.router(features)
    for found in (collection(features), collection(routed)):
        assert_same(found, expected)
    scores(expected, 1).backward()
    scores(collection(features), 1).backward()
    for name in NUM_ROWS:
        weight: Any = plain.embeddings[name].weight
        torch.testing.assert_close(gradient(collection, name), weight.grad, rtol=1e-6, atol=1e-6)


def test_initial_weights_come_from_the_tables_own_function() -> None:
    def fill(weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().fill_(7.0)

    tables = [table("t", 12, ["a"], init_fn=fill), table("u", 5, ["c"])]
    collection = HotColdEmbeddingCollection(
        tables, Partition({"t": 12, "u": 5}, {"t": np.array([4]), "u": np.array([2])})
    )
    embeddings: Any = collection.rows["dim4"].embeddings
    for weight in (embeddings["t"].weight, embeddings["t_hot"].weight):
        assert bool((weight == 7).all())
    # By the rows of the whole table, not by the number of hot ones.
    assert embeddings["u_hot"].weight.abs().max() <= 5**-0.5
    with torch.no_grad():
        embeddings["t"].weight.zero_()
    collection.reset_parameters()
    assert bool((embeddings["t"].weight == 7).all())


def test_other_types_of_features_are_refused() -> None:
    collection = HotColdEmbeddingCollection(some_tables(), PARTITIONS["mixed"])
    with pytest.raises(TypeError, match=r"^features: expected a KeyedJaggedTensor, got TensorDict"):
        collection(TensorDict({}))
    variable = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 0, 1]),
        stride_per_key_per_rank=[[1], [2], [1]],
        inverse_indices=(["a", "b", "c"], torch.zeros(3, 2, dtype=torch.int64)),
    )
    with pytest.raises(ValueError, match=r"^features: expected a bag of each feature"):
        collection(variable)
