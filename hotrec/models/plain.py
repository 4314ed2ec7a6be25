"""The layers of models, and a trained model as a plain PyTorch module, read from an export.

Only needs torch and safetensors, and is copied into every export, as the modules that it imports; a
model of your own also needs the package of its class. ``hotrec.models.encoder`` makes its inputs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from hotrec.models.interaction import CrossLayers, DotPairs, stack_vectors

DESCRIPTION, DENSE_FILE, TABLES_DIR = "model.json", "dense.safetensors", "tables"
FORMAT_VERSION = 2
WEIGHT, SCALE = "weight", "scale"
# The tensors of a table, by the type of its rows.
FORMS = {
    "fp32": {WEIGHT: torch.float32},
    "fp16": {WEIGHT: torch.float16},
    "int8": {WEIGHT: torch.int8, SCALE: torch.float32},
}
OWN = "own"
# Of these kinds the layers read the rows of each feature, not the pooled ones.
SEQUENCE_KINDS = ("hstu", "sasrec")
KINDS = ("dlrm", "dcnv2", "deepfm", "din", "mmoe", "two_tower", *SEQUENCE_KINDS, OWN)
POOLINGS = ("sum", "mean")
_CHECKED_AT_ONCE = 1 << 24
# The rows of a feature in a batch: see PlainModel.forward.
Ids = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# The rows of a feature, float (K, D), sample by sample, and their number in each sample, (B,).
Sequences = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Architecture:
    """The shape of a model, in types of JSON.

    Args:
        kind: "dlrm", "dcnv2", "deepfm", "din", "mmoe", "two_tower", "hstu", "sasrec", or "own" for
            a class of your own.
        embedding_dim: D, of all tables.
        pooling: "sum" or "mean", how the rows of a bag become one vector.
        dense_layer_sizes: Outputs of the layers over the dense columns; the last is D.
        over_layer_sizes: Outputs of the layers over the interactions; the last is 1 for each label.
            Empty for models without them.
        cross_num_layers: Number of DCNv2's cross layers.
        cross_low_rank_dim: Rank of their matrices.
        dense: Names of the N dense columns in their order.
        features: Name and table of the F features, in the order in which they interact.
        labels: Names of the L labels.
        target: Import path of the class; of kind "own".
        args: Further keyword arguments of the layers, which depend on the kind.
    """

    kind: str
    embedding_dim: int
    pooling: str
    dense_layer_sizes: Sequence[int]
    over_layer_sizes: Sequence[int]
    cross_num_layers: int
    cross_low_rank_dim: int
    dense: Sequence[str]
    features: Sequence[Sequence[str]]
    labels: Sequence[str] = ("label",)
    target: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_bottom(self) -> bool:
        """Whether its layers are ``DenseLayers``, whose bottom layers read no embedding."""
        return self.kind not in (OWN, "two_tower", *SEQUENCE_KINDS)

    @property
    def reads_sequences(self) -> bool:
        """Whether its layers read the rows of each feature; a class of your own says so itself.

        Raises:
            ValueError: If that class cannot be imported.
        """
        if self.kind != OWN:
            return self.kind in SEQUENCE_KINDS
        return bool(getattr(import_class(self.target, "model._target_"), "reads_sequences", False))


class TableRows(nn.Module):
    """The rows of a table, and the pooling of bags of them, in float32.

    Args:
        weight_RD: Rows, float32, float16 or int8.
        scale_R: For int8, the factor of each row, float32.
        is_mean: Whether a bag is the mean of its rows; else their sum.
    """

    def __init__(self, weight_RD: torch.Tensor, scale_R: torch.Tensor | None, is_mean: bool):
        super().__init__()
        self.weight: torch.Tensor
        self.scale: torch.Tensor | None
        self.register_buffer(WEIGHT, weight_RD)
        self.register_buffer(SCALE, scale_R)
        self.is_mean = is_mean

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Integers (...) -> float32 (..., D)."""
        rows = F.embedding(ids, self.weight).float()
        if self.scale is None:
            return rows
        return rows * self.scale.index_select(0, ids.flatten()).view(*ids.shape, 1)

    def forward(self, ids: Ids) -> torch.Tensor:
        """Ids as in ``PlainModel.forward`` -> float32 (B, D); an empty bag is 0."""
        if not isinstance(ids, torch.Tensor):
            values_K, offsets = ids
            source, positions_K = self.weight, values_K
            if source.dtype is not torch.float32:
                # Summed in float32, for any type of the stored rows.
                source = self.rows(values_K)
                positions_K = torch.arange(values_K.size(0), device=values_K.device)
            mode = "mean" if self.is_mean else "sum"
            return F.embedding_bag(
                positions_K, source, offsets.to(values_K.dtype), mode=mode, include_last_offset=True
            )
        if ids.dim() == 1:
            return self.rows(ids)
        is_id_BL = ids >= 0
        sums_BD = (self.rows(ids.clamp(min=0)) * is_id_BL.unsqueeze(-1)).sum(1)
        return sums_BD / is_id_BL.sum(1, keepdim=True).clamp(min=1) if self.is_mean else sums_BD

    def unpooled(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids as in ``PlainModel.forward`` -> rows, float32 (K, D), and lengths, (B,)."""
        if not isinstance(ids, torch.Tensor):
            values_K, offsets = ids
            return self.rows(values_K), offsets.diff()
        if ids.dim() == 1:
            return self.rows(ids), torch.ones_like(ids)
        is_id_BL = ids >= 0
        return self.rows(ids[is_id_BL]), is_id_BL.sum(1)


def _layers(
    num_inputs: int, sizes: Sequence[int], *, ends_with_relu: bool, device: str
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, num_outputs in enumerate(sizes):
        layers.append(nn.Linear(num_inputs, num_outputs, device=device))
        if ends_with_relu or index < len(sizes) - 1:
            layers.append(nn.ReLU())
        num_inputs = num_outputs
    return nn.Sequential(*layers)


class DeepFm(nn.Module):
    """DeepFM's deep layers and factorization machine (Guo et al. 2017, equation 2).

    Layers over all vectors, and the sum of the dot products of all pairs of vectors, which is
    ``sum_d ((sum_v x_vd)^2 - sum_v x_vd^2) / 2``, joined as in TorchRec's model. TorchRec's own
    machine also multiplies values of different dimensions.
    """

    def __init__(self, width: int, deep_layer_sizes: Sequence[int], device: str) -> None:
        super().__init__()
        self.deep = _layers(width, deep_layer_sizes, ends_with_relu=True, device=device)

    def forward(self, dense_BD: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """-> (B, D + deep + 1)."""
        vectors_BVD = stack_vectors(dense_BD, pooled_BFD)
        squares_BD = vectors_BVD.sum(1).square() - vectors_BVD.square().sum(1)
        pairs_B1 = squares_BD.sum(1, keepdim=True) / 2
        return torch.cat((vectors_BVD[:, 0], self.deep(vectors_BVD.flatten(1)), pairs_B1), dim=1)


class Attention(nn.Module):
    """DIN's sums of the ids of sequences, by their relevance to a feature (Zhou et al. 2018, 4.3).

    The weight of an id with vector k is the output of layers for ``[q, k, q - k, q * k]``, q being
    the feature's vector; as in the paper it is not a softmax. A place without an id has the vector
    0: its weight multiplies 0 and gets no gradient, so that sums need no mask.

    Args:
        features: Names of the features, in the order of their vectors, after the dense one.
        attention: Features that attend, each with those that are the places of its sequence.
        attention_layer_sizes: Outputs of the layers, without the last, which is the weight.
    """

    def __init__(
        self,
        features: Sequence[str],
        dim: int,
        attention: Sequence[tuple[str, Sequence[str]]],
        attention_layer_sizes: Sequence[int],
        device: str,
    ) -> None:
        super().__init__()
        number_of = {name: number for number, name in enumerate(features, start=1)}
        sequences = [[number_of[name] for name in places] for _, places in attention]
        others = {0, *number_of.values()}.difference(*sequences)
        self.register_buffer("others", torch.tensor(sorted(others)), persistent=False)
        for number, ((query, _), places) in enumerate(zip(attention, sequences, strict=True)):
            read = torch.tensor([number_of[query], *places])
            self.register_buffer(f"read_{number}", read, persistent=False)
        sizes = [*attention_layer_sizes, 1]
        self.weights = nn.ModuleList(
            _layers(4 * dim, sizes, ends_with_relu=False, device=device) for _ in attention
        )
        self.num_outputs = len(others) + len(sequences)

    def forward(self, dense_BD: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """-> vectors without sequences and a sum for each, (B, num_outputs * D)."""
        vectors_BVD = stack_vectors(dense_BD, pooled_BFD)
        outputs = [vectors_BVD.index_select(1, self.get_buffer("others"))]
        for number, layers in enumerate(self.weights):
            read = vectors_BVD.index_select(1, self.get_buffer(f"read_{number}"))
            keys_BPD = read[:, 1:]
            query_BPD = read[:, :1].expand_as(keys_BPD)
            parts = (query_BPD, keys_BPD, query_BPD - keys_BPD, query_BPD * keys_BPD)
            weights_BP1 = layers(torch.cat(parts, dim=2))
            outputs.append((weights_BP1 * keys_BPD).sum(1, keepdim=True))
        return torch.cat(outputs, dim=1).flatten(1)


class MixtureOfExperts(nn.Module):
    """MMoE (Ma et al. 2018): experts that all labels share; a gate and a tower for each label."""

    def __init__(
        self,
        width: int,
        num_labels: int,
        num_experts: int,
        expert_layer_sizes: Sequence[int],
        over_layer_sizes: Sequence[int],
        device: str,
    ) -> None:
        super().__init__()

        def make(num: int, inputs: int, sizes: Sequence[int], *, relu: bool) -> nn.ModuleList:
            made = (_layers(inputs, sizes, ends_with_relu=relu, device=device) for _ in range(num))
            return nn.ModuleList(made)

        self.experts = make(num_experts, width, expert_layer_sizes, relu=True)
        self.gates = make(num_labels, width, [num_experts], relu=False)
        self.towers = make(num_labels, expert_layer_sizes[-1], over_layer_sizes, relu=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, width) -> logits (B, L)."""
        experts_BEH = torch.stack([expert(inputs) for expert in self.experts], dim=1)
        mixed = [
            torch.bmm(gate(inputs).softmax(1).unsqueeze(1), experts_BEH).squeeze(1)
            for gate in self.gates
        ]
        towers = zip(self.towers, mixed, strict=True)
        return torch.cat([tower(mixed_BH) for tower, mixed_BH in towers], dim=1)


class Vectors(nn.Module):
    """No interaction: all vectors side by side."""

    def forward(self, dense_BD: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """-> (B, (1 + F) D)."""
        return stack_vectors(dense_BD, pooled_BFD).flatten(1)


def dense_inputs(dense_BN: torch.Tensor) -> torch.Tensor:
    """The inputs of the bottom layers: the dense columns, or a column of ones, (B, 1)."""
    return dense_BN if dense_BN.size(1) else dense_BN.new_ones(dense_BN.size(0), 1)


# A leaf for the tracer of TorchRec's pipelines, which cannot follow data-dependent branches.
torch.fx.wrap("dense_inputs")


class DenseLayers(nn.Module):
    """Bottom layers over the dense columns, an interaction with the features, and top layers.

    First weights are drawn in the order of TorchRec's ``DLRM`` and ``DLRM_DCN``, so that one seed
    trains the same model.
    """

    def __init__(self, shape: Architecture, device: str) -> None:
        super().__init__()
        kind, dim, num_features = shape.kind, shape.embedding_dim, len(shape.features)
        sizes, width = [*shape.over_layer_sizes[:-1], len(shape.labels)], (1 + num_features) * dim
        width_of_pairs = dim + num_features * (num_features + 1) // 2

        def make_top(width: int) -> nn.Module:
            if kind == "mmoe":
                over: dict[str, Any] = {"over_layer_sizes": shape.over_layer_sizes}
                return MixtureOfExperts(
                    width, len(shape.labels), **shape.args, **over, device=device
                )
            return _layers(width, sizes, ends_with_relu=False, device=device)

        self.bottom = _layers(
            max(len(shape.dense), 1), shape.dense_layer_sizes, ends_with_relu=True, device=device
        )
        self.interaction: nn.Module = Vectors()
        if kind == "dlrm":
            self.interaction, width = DotPairs(num_features), width_of_pairs
        elif kind == "dcnv2":
            make_top(width_of_pairs)  # drawn and not used, as by DLRM_DCN
            sizes_of_cross = shape.cross_num_layers, shape.cross_low_rank_dim
            self.interaction = CrossLayers(width, *sizes_of_cross, device)
        elif kind == "din":
            names = [name for name, _ in shape.features]
            self.interaction = attention = Attention(names, dim, **shape.args, device=device)
            width = attention.num_outputs * dim
        elif kind == "deepfm":
            self.interaction = DeepFm(width, **shape.args, device=device)
            width = dim + shape.args["deep_layer_sizes"][-1] + 1
        self.top = make_top(width)

    def before_rows(self, dense_BN: torch.Tensor) -> torch.Tensor:
        """Dense columns (B, N) -> the output of the bottom layers, (B, D)."""
        dense_BD: torch.Tensor = self.bottom(dense_inputs(dense_BN))
        return dense_BD

    def with_rows(self, dense_BD: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """That and pooled features (B, F, D) -> logits (B, L)."""
        logits: torch.Tensor = self.top(self.interaction(dense_BD, pooled_BFD))
        return logits

    def forward(self, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """Dense columns (B, N) and pooled features (B, F, D) -> logits (B, L)."""
        return self.with_rows(self.before_rows(dense_BN), pooled_BFD)


class TwoTower(nn.Module):
    """A tower of layers over the item's columns, one over the user's; the logit is their product.

    It is a model of the protocol that ``make_layers`` describes.

    Args:
        item_columns: Features and dense columns of the item; all others are the user's.
        tower_layer_sizes: Outputs of the layers of each tower.

    Raises:
        ValueError: If a tower has no column, a column is unknown, or there are several labels.
    """

    def __init__(
        self,
        dense: Sequence[str],
        features: Sequence[str],
        embedding_dim: int,
        labels: Sequence[str],
        item_columns: Sequence[str],
        tower_layer_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.gives_vectors: bool | None = False
        """Whether ``forward`` returns the vectors of user and item, (B, 2, H), for training; None
        for layers whose logit is not their product, as in ``hotrec.models.sequence``."""
        known = {*dense, *features}
        if not set(item_columns) < known or not item_columns:
            raise ValueError(
                f"model.item_columns: expected some, and not all, of the columns {sorted(known)}, "
                f"got {list(item_columns)}. Name those of the item."
            )
        if len(labels) > 1:
            raise ValueError(
                f"model.kind: expected a model of several labels for {list(labels)}, got "
                "two_tower. Choose model=mmoe, or another of several labels."
            )
        self.towers = nn.ModuleDict()
        for tower in ("user", "item"):
            is_mine = [(name in item_columns) == (tower == "item") for name in (*dense, *features)]
            numbers = torch.arange(len(is_mine))[torch.tensor(is_mine)]
            is_dense = numbers < len(dense)
            self.register_buffer(f"{tower}_dense", numbers[is_dense], persistent=False)
            of_pooled = numbers[~is_dense] - len(dense)
            self.register_buffer(f"{tower}_pooled", of_pooled, persistent=False)
            width = int(is_dense.sum()) + embedding_dim * of_pooled.numel()
            self.towers[tower] = _layers(
                width, tower_layer_sizes, ends_with_relu=False, device="cpu"
            )

    def forward(self, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """Dense columns (B, N) and pooled features (B, F, D) -> logits (B, 1)."""
        users_BH = self.user_vectors(dense_BN, pooled_BFD)
        items_BH = self.item_vectors(dense_BN, pooled_BFD)
        if self.gives_vectors:
            return torch.stack((users_BH, items_BH), dim=1)
        return (users_BH * items_BH).sum(1, keepdim=True)

    def user_vectors(self, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """The inputs of ``forward`` -> (B, H); only the user's columns are read."""
        return self._vectors("user", dense_BN, pooled_BFD)

    def item_vectors(self, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """The inputs of ``forward`` -> (B, H); only the item's columns are read."""
        return self._vectors("item", dense_BN, pooled_BFD)

    def _vectors(
        self, tower: str, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor
    ) -> torch.Tensor:
        dense = dense_BN.index_select(1, self.get_buffer(f"{tower}_dense"))
        pooled = pooled_BFD.index_select(1, self.get_buffer(f"{tower}_pooled"))
        vectors: torch.Tensor = self.towers[tower](torch.cat((dense, pooled.flatten(1)), dim=1))
        return vectors


def import_class(path: str, key: str) -> type:
    """A class by its import path.

    Args:
        path: Such as ``my_package.my_model.MyModel``.
        key: The configuration key, for messages.

    Raises:
        ValueError: If nothing with this path can be imported, or it is not a class.
    """
    module, _, name = path.rpartition(".")
    expected = f"{key}: expected the import path of a class, such as my_package.my_module.MyClass"
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{expected}, got {path!r}, whose import fails: {reason}. Correct the path, install "
            "its package, or add its directory to PYTHONPATH."
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"{expected}, got {path!r}, {found!r}. Name the class itself.")
    return found


def make_layers(shape: Architecture, device: str = "cpu") -> nn.Module:
    """The layers of a model: everything except the tables.

    Those of a class of your own are made by ``MyModel(dense=, features=, embedding_dim=, labels=,
    **args)``: the names of the dense columns, of the features and of the labels, D, and the
    arguments of the configuration. ``forward(dense_BN, pooled_BFD)`` takes the dense columns (B, N)
    and the pooled features (B, F, D), float32 and in the order of their names, and returns logits
    (B, L). If the class has an attribute ``reads_sequences`` that is true, features are not pooled:
    ``forward(dense_BN, columns)`` takes their ``Sequences`` by name; a feature of one id has at
    most one in each sample.

    Args:
        shape: The architecture.
        device: "cpu", or "meta" for layers without weights, of those kinds that can.

    Raises:
        ValueError: If the class cannot be imported, or does not take the arguments.
    """
    if shape.has_bottom:
        return DenseLayers(shape, device)
    if shape.kind in SEQUENCE_KINDS:
        return _sequence_layers(shape)
    made = TwoTower if shape.kind == "two_tower" else import_class(shape.target, "model._target_")
    if not issubclass(made, nn.Module):
        raise ValueError(
            f"model._target_: expected a subclass of torch.nn.Module, got {shape.target}. Name the "
            "model's class."
        )
    features = [name for name, _ in shape.features]
    columns = {"dense": list(shape.dense), "features": features, "labels": list(shape.labels)}
    try:
        # A class of your own may name other arguments than ``args``.
        layers: nn.Module = made(**columns, embedding_dim=shape.embedding_dim, **shape.args)
    except TypeError as error:
        raise ValueError(
            f"model._target_: expected a class whose constructor takes dense, features, labels, "
            f"embedding_dim and {sorted(shape.args)}, got {shape.target}: {error}. Correct the "
            "class, or model.args."
        ) from error
    return layers


def _sequence_layers(shape: Architecture) -> nn.Module:
    from hotrec.models.hstu import Hstu
    from hotrec.models.sasrec import Sasrec
    from hotrec.models.sequence import SequenceColumns

    args = dict(shape.args)
    roles = {name: args.pop(name) for name in ("history", "side", "context")}
    taken = {*roles["history"], *roles["history"].values(), *roles["side"], *roles["context"]}
    others = [name for name, _ in shape.features if name not in taken]
    layers: Any = Hstu if shape.kind == "hstu" else Sasrec
    made: nn.Module = layers(
        SequenceColumns(**roles, others=others),
        embedding_dim=shape.embedding_dim,
        num_dense=len(shape.dense),
        num_labels=len(shape.labels),
        over_layer_sizes=shape.over_layer_sizes,
        **args,
    )
    return made


class PlainModel(nn.Module):
    """A trained model; made by ``load_model``.

    Args:
        shape: Its architecture.
        dense: The weights of ``DenseLayers``, by name.
        tables: The rows of each table.
    """

    def __init__(
        self,
        shape: Architecture,
        dense: Mapping[str, torch.Tensor],
        tables: Mapping[str, TableRows],
    ) -> None:
        super().__init__()
        self.shape, self.reads_sequences = shape, shape.reads_sequences
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, but not kept
            self.layers = make_layers(shape, "meta")
        expected = {name for name, _ in self.layers.named_parameters()}
        if expected != set(dense):
            raise ValueError(
                f"weights: expected those of {shape.target or shape.kind}, {sorted(expected)}, got "
                f"{sorted(dense)}. Export the model again."
            )
        # Buffers are not weights: the class makes them.
        self.layers.load_state_dict(dict(dense), strict=False, assign=shape.has_bottom)
        self.tables = nn.ModuleDict(tables)
        self.eval().requires_grad_(False)

    def forward(self, dense_BN: torch.Tensor, ids: Mapping[str, Ids]) -> torch.Tensor:
        """Logits (B,), or (B, L) with several labels; their sigmoid is the predicted rate.

        Args:
            dense_BN: Dense columns, float32 (B, N), transformed as in ``model.json``.
            ids: Rows by feature: integers (B,) for one each; (B, L) with -1 where there is none;
                or the pair of ids (K,) and offsets (B + 1,), bag b being
                ``ids[offsets[b]:offsets[b + 1]]``.

        Raises:
            ValueError: If a feature is missing.
            IndexError: If an id is not a row of its table, on CPU.
        """
        missing = [name for name, _ in self.shape.features if name not in ids]
        if missing:
            raise ValueError(
                f"ids: expected every feature of the model, got none of {missing}. "
                "Give a feature that a sample lacks an empty bag."
            )
        rows: Any
        if self.reads_sequences:
            features = self.shape.features
            unpooled: Any = {name: table.unpooled for name, table in self.tables.items()}
            rows = {name: unpooled[table](ids[name]) for name, table in features}
        else:
            pooled = [self.tables[table](ids[name]) for name, table in self.shape.features]
            rows = torch.stack(pooled, dim=1)
        logits: torch.Tensor = self.layers(dense_BN, rows)
        return logits.squeeze(1)  # of one label


def load_model(
    directory: str | Path, *, allow_code: bool = False, check_values: bool = True
) -> PlainModel:
    """Load a model that ``hotrec export`` wrote, on the CPU, in evaluation mode.

    The tables are mapped from their files, and read as their rows are looked up. Nothing outside
    the directory is read without ``allow_code``.

    Args:
        directory: The exported directory.
        allow_code: Whether the class that ``model.json`` names may be imported, for a model of your
            own. Importing runs its code: allow it for directories that you trust.
        check_values: Whether to read each row once to check that its values are finite. If False,
            rows are not read until they are looked up.

    Returns:
        A plain PyTorch module; see ``PlainModel.forward`` for its inputs.

    Raises:
        ValueError: If the directory has no complete model of this format.
    """
    directory = Path(directory)
    description = read_description(directory)
    shape = Architecture(**description["architecture"])
    if shape.kind == OWN and not allow_code:
        raise ValueError(
            f"{directory / DESCRIPTION}: expected a model of hotrec's own layers, got one of the "
            f"class {shape.target}. Call load_model(..., allow_code=True) if its code may be run."
        )
    dense = _load_dense(file_within(directory, DENSE_FILE), description.get("dense_sha256"))
    tables = _load_tables(directory, description, shape, check_values=check_values)
    try:
        return PlainModel(shape, dense, tables)
    except (LookupError, TypeError, RuntimeError) as error:
        raise _damaged(directory, error) from error


def read_description(directory: Path) -> dict[str, Any]:
    """The content of ``model.json``.

    Raises:
        ValueError: If it is missing, of another version, or not the description of a model.
    """
    try:
        description: dict[str, Any] = json.loads(file_within(directory, DESCRIPTION).read_text())
        version = description["format_version"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version!r} instead of {FORMAT_VERSION}")
        _check_description(description)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if ": expected " in str(error):
            raise
        reason = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(
            f"{directory / DESCRIPTION}: expected the description of an exported model, got "
            f"{reason}. Correct the path, or run `hotrec export`."
        ) from error
    return description


def _check_description(description: Mapping[str, Any]) -> None:
    """Raise an error for an entry of a description that no export writes."""
    shape = Architecture(**description["architecture"])
    for what, found, expected in (
        ("kind", shape.kind, KINDS),
        ("pooling", shape.pooling, POOLINGS),
        ("rows", description["rows"], tuple(FORMS)),
    ):
        if found not in expected:
            raise ValueError(f"a {what} {found!r}, which is none of {', '.join(expected)}")
    names = sorted(table["name"] for table in description["tables"])
    read = sorted({table for _, table in shape.features})
    if names != read:
        raise ValueError(f"tables {names} for features of {read}")


def table_file(table: str) -> str:
    """The file of a table in an exported directory."""
    return f"{TABLES_DIR}/{table}.safetensors"


def file_within(directory: Path, name: str) -> Path:
    """The path of a regular file of a directory, not reached by a link.

    Raises:
        ValueError: If it is a link or outside, so that something else would be read, or not a file.
    """
    path = os.path.realpath(directory / name)
    if path != os.path.join(os.path.realpath(directory), name):
        raise ValueError(
            f"{directory / name}: expected a file in the directory, got one at {path}. Export the "
            "model again."
        )
    if not os.path.isfile(path):
        raise ValueError(
            f"{directory / name}: expected a file, got none. Correct the path, or run `hotrec "
            "export`."
        )
    return directory / name


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped into memory.

    Raises:
        ValueError: If it is not a complete file of safetensors.
    """
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(
        f"{path}: expected a whole exported model, got {type(error).__name__}: {reason:.300}. "
        "Export it again."
    )


def _check_tensors(
    path: Path, held: Mapping[str, torch.Tensor], expected: Mapping[str, Any], *, check_values: bool
) -> None:
    """Check tensors against their types, or types and shapes, by name.

    Raises:
        ValueError: If they are others, or with ``check_values`` not finite.
    """
    found = {
        name: (tensor.dtype, tuple(tensor.shape))[: len(expected.get(name, ()))]
        for name, tensor in held.items()
    }
    if found != expected:
        raise ValueError(
            f"{path}: expected the tensors {dict(expected)}, got {found}. Export the model again."
        )
    for name, tensor in held.items():
        if not check_values or not tensor.is_floating_point():
            continue
        rows = tensor if tensor.dim() else tensor.view(1)
        step = max(1, _CHECKED_AT_ONCE // max(1, rows[:1].numel()))
        for begin in range(0, len(rows), step):
            is_fine = rows[begin : begin + step].isfinite()
            if not is_fine.all():
                row = begin + int((~is_fine).nonzero()[0, 0])
                raise ValueError(
                    f"{path}: expected finite values, got another in {name} of row {row}. Export "
                    "the model again."
                )


def _load_dense(path: Path, sha256: object) -> dict[str, torch.Tensor]:
    """The weights of the layers that belong to a description."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise ValueError(
            f"{path}: expected the layers of this model, with SHA-256 {str(sha256)[:12]}, got "
            f"{found[:12]}. Export the model again."
        )
    held = _load_tensors(path)
    _check_tensors(path, held, dict.fromkeys(held, (torch.float32,)), check_values=True)
    return held


def _load_tables(
    directory: Path, description: Mapping[str, Any], shape: Architecture, *, check_values: bool
) -> dict[str, TableRows]:
    """The tables of an exported model, mapped into memory."""
    tables = {}
    for table in description["tables"]:
        path, num_rows = file_within(directory, table_file(table["name"])), table["num_rows"]
        held = _load_tensors(path)
        sizes = {WEIGHT: (num_rows, shape.embedding_dim), SCALE: (num_rows,)}
        form = {name: (of, sizes[name]) for name, of in FORMS[description["rows"]].items()}
        _check_tensors(path, held, form, check_values=check_values)
        tables[table["name"]] = TableRows(held[WEIGHT], held.get(SCALE), shape.pooling == "mean")
    return tables
