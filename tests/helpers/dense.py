"""Models of dense layers, their batches and optimizers, for tests of the dense layers' training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.models.plain import SEQUENCE_KINDS, Architecture
from hotrec.models.zoo import build_architecture
from hotrec.runtime.ranks import rank
from hotrec.train.dense_sync import dense_parameters
from hotrec.types import ModelKind

NUM_DENSE, NUM_FEATURES, NUM_ROWS, DIM = 5, 3, 11, 8

Optimizers = Mapping[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05),
}


# The kinds whose layers read pooled features.
POOLED_KINDS = [kind for kind in ModelKind if kind.name not in SEQUENCE_KINDS]
_SEQUENCES: dict[str, Any] = {
    "side": [],
    "context": [],
    "num_layers": 2,
    "num_heads": 2,
    "max_length": 2,
    "dropout": 0.0,
}
# What the layers of each kind take besides the sizes that all share.
ARGS: dict[ModelKind, dict[str, Any]] = {
    ModelKind.deepfm: {"deep_layer_sizes": [6, 5]},
    ModelKind.din: {"attention_layer_sizes": [6]},
    ModelKind.mmoe: {"num_experts": 3, "expert_layer_sizes": [6, 5]},
    ModelKind.two_tower: {"tower_layer_sizes": [6, 5]},
    ModelKind.hstu: {**_SEQUENCES, "attention_dim": 4, "linear_dim": 3},
    ModelKind.sasrec: _SEQUENCES,
    ModelKind.own: {"hidden": 6},
}


class OwnLayers(nn.Module):
    """A model that a user might write, with a weight that no layer holds."""

    def __init__(
        self,
        dense: Sequence[str],
        features: Sequence[str],
        embedding_dim: int,
        labels: Sequence[str],
        hidden: int,
    ) -> None:
        super().__init__()
        num_inputs = len(dense) + len(features) * embedding_dim
        self.first, self.last = nn.Linear(num_inputs, hidden), nn.Linear(hidden, len(labels))
        self.scale = nn.Parameter(torch.ones(num_inputs))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        inputs = torch.cat((dense, pooled.flatten(1)), dim=1) * self.scale
        return self.last(torch.relu(self.first(inputs)))


def shape_of(
    kind: ModelKind,
    num_dense: int,
    features: Sequence[tuple[str, str]],
    dim: int,
    *,
    dense_layer_sizes: Sequence[int],
    over_layer_sizes: Sequence[int],
    pooling: str = "sum",
    **keys: Any,
) -> Architecture:
    """A small model on features by name and table: the item's, places of a sequence, another."""
    args = dict(ARGS.get(kind, {}))
    if kind is ModelKind.din:
        (query, _), *places = features[: max(2, len(features) - 1)]
        args["attention"] = [(query, [name for name, _ in places])]
    if kind in (ModelKind.hstu, ModelKind.sasrec):
        args["history"] = {features[1][0]: features[0][0]}
    if kind is ModelKind.two_tower:
        args["item_columns"] = [features[0][0]]
    return Architecture(
        kind=kind.name,
        embedding_dim=dim,
        pooling=pooling,
        dense_layer_sizes=dense_layer_sizes,
        over_layer_sizes=over_layer_sizes,
        cross_num_layers=2,
        cross_low_rank_dim=3,
        dense=[f"d{column}" for column in range(num_dense)],
        features=features,
        target=f"{__name__}.OwnLayers" if kind is ModelKind.own else "",
        args=args,
        **keys,
    )


class Clicks(nn.Module):
    """A click model on frozen tables, the stand-in for sharded ones."""

    def __init__(self, kind: ModelKind, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        names = [f"f{number}" for number in range(NUM_FEATURES)]
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=[name]
            )
            for name in names
        ]
        shape = shape_of(
            kind,
            NUM_DENSE,
            [(name, f"t_{name}") for name in names],
            DIM,
            dense_layer_sizes=[16, DIM],
            over_layer_sizes=[16, 12, 1],
        )
        bags = EmbeddingBagCollection(tables=tables)
        self.model = build_architecture(shape, bags, seed, torch.device("cpu"))
        self.model.embedding_bag_collection.requires_grad_(False)
        self._names = names

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, N + F): dense values, then one id per feature."""
        ids = inputs[:, NUM_DENSE:].long()
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        sparse = KeyedJaggedTensor(self._names, ids.t().flatten(), lengths=lengths)
        return self.model(inputs[:, :NUM_DENSE].contiguous(), sparse)


class Oddities(nn.Module):
    """What cannot be put off: tied, frozen, directly used and normalising parameters; reuse."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = NUM_DENSE + NUM_FEATURES
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.first.weight
        self.norm = nn.LayerNorm(width)
        self.twice = nn.Linear(width, width)
        self.half_frozen = nn.Linear(width, width)
        assert self.half_frozen.bias is not None
        self.half_frozen.bias.requires_grad_(False)
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
        self.top = nn.Sequential(nn.Linear(width, 4, bias=False), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(inputs * self.scale))
        x = torch.relu(self.twice(torch.relu(self.twice(x.unsqueeze(1))))).squeeze(1)
        x = self.parametrized(self.half_frozen(torch.tanh(self.tied(x))))
        return self.top(x)


class Branches(nn.Module):
    """The rank decides which branch it uses; one is used by nobody."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        width = NUM_DENSE + NUM_FEATURES
        self.bottom = nn.Linear(width, width)
        self.even = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.odd = nn.Sequential(nn.LayerNorm(width))
        self.nobody = nn.Linear(width, width)
        self.top = nn.Linear(width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.bottom(inputs)
        return self.top(self.odd(x) if rank() % 2 else self.even(x))


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    "dlrm": lambda seed: Clicks(ModelKind.dlrm, seed),
    "mmoe": lambda seed: Clicks(ModelKind.mmoe, seed),
    "dcnv2": lambda seed: Clicks(ModelKind.dcnv2, seed),
    "oddities": Oddities,
}


def make_inputs(rank: int, step: int, part: int = 0, size: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    dense = torch.randn(size, NUM_DENSE, generator=generator)
    ids = torch.randint(0, NUM_ROWS, (size, NUM_FEATURES), generator=generator)
    return torch.cat([dense, ids.float()], dim=1)


def loss_of(model: nn.Module, inputs: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Of targets that follow from the inputs, over ``num_samples`` in all parts of the batch."""
    targets = (inputs[:, 0] > inputs[:, 1]).float()
    losses = F.binary_cross_entropy_with_logits(model(inputs).squeeze(-1), targets, reduction="sum")
    return losses / num_samples


def make_optimizer(model: nn.Module, name: str) -> Any:
    return KeyedOptimizerWrapper(dense_parameters(model), OPTIMIZERS[name])


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05 / (1 + step)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
