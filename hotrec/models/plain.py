"""A trained model as a plain PyTorch module, read from the directory that ``hotrec export`` wrote.

Needs torch and safetensors, and nothing else of hotrec, so that it can be copied into a service.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

DESCRIPTION, DENSE_FILE, TABLES_DIR = "model.json", "dense.safetensors", "tables"
FORMAT_VERSION = 1
WEIGHT, SCALE = "weight", "scale"
# The rows of a feature in a batch: see PlainModel.forward.
Ids = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """The shape of a model, in values that JSON has.

    Args:
        kind: "dlrm" or "dcnv2".
        embedding_dim: D, of all tables.
        pooling: "sum" or "mean", how the rows of a bag become one vector.
        dense_layer_sizes: Outputs of the layers over the dense columns; the last is D.
        over_layer_sizes: Outputs of the layers over the interactions; the last is 1.
        cross_num_layers: Number of DCNv2's cross layers.
        cross_low_rank_dim: Rank of their matrices.
        dense: Names of the N dense columns in their order.
        features: Name and table of the F features, in the order in which they interact.
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


class TableRows(nn.Module):
    """The rows of a table, and the pooling of bags of them, in float32.

    Args:
        weight_RD: Rows, float32, float16 or int8.
        scale_R: For int8, what to multiply each row by, float32.
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
        return rows if self.scale is None else rows * self.scale[ids].unsqueeze(-1)

    def forward(self, ids: Ids) -> torch.Tensor:
        """Ids as in ``PlainModel.forward`` -> float32 (B, D); an empty bag is 0."""
        if not isinstance(ids, torch.Tensor):
            values_K, offsets = ids
            source, positions_K = self.weight, values_K
            if source.dtype is not torch.float32:
                # Summed in float32, whatever they are stored in.
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


def _layers(num_inputs: int, sizes: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, num_outputs in enumerate(sizes):
        layers.append(nn.Linear(num_inputs, num_outputs, device="meta"))
        if ends_with_relu or index < len(sizes) - 1:
            layers.append(nn.ReLU())
        num_inputs = num_outputs
    return nn.Sequential(*layers)


class DotPairs(nn.Module):
    """DLRM: the dense vector and the dot products of all pairs of vectors."""

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        self.pairs: torch.Tensor
        first, second = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("pairs", first * num_vectors + second, persistent=False)

    def forward(self, vectors_BVD: torch.Tensor) -> torch.Tensor:
        """(B, V, D) -> (B, D + V (V - 1) / 2); the first vector is the dense one."""
        products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        pairs_BP = products_BVV.flatten(1).index_select(1, self.pairs)
        return torch.cat((vectors_BVD[:, 0], pairs_BP), dim=1)


class CrossLayers(nn.Module):
    """DCNv2: x <- x + x_0 * (W V x + b), with W (N, r) and V (r, N)."""

    def __init__(self, width: int, num_layers: int, rank: int) -> None:
        super().__init__()

        def make(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(torch.empty(shape, device="meta") for _ in range(num_layers))

        self.v, self.w, self.bias = make(rank, width), make(width, rank), make(width)

    def forward(self, vectors_BVD: torch.Tensor) -> torch.Tensor:
        """(B, V, D) -> (B, V D)."""
        x_0 = x = vectors_BVD.flatten(1)
        for v, w, bias in zip(self.v, self.w, self.bias, strict=True):
            x = x + x_0 * F.linear(F.linear(x, v), w, bias)
        return x


class DenseLayers(nn.Module):
    """Everything but the tables; made without weights, for ``load_state_dict(assign=True)``."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        dim, num_vectors = shape.embedding_dim, len(shape.features) + 1
        # Without dense columns the bottom layers read a one.
        self.bottom = _layers(
            max(len(shape.dense), 1), shape.dense_layer_sizes, ends_with_relu=True
        )
        self.interaction: nn.Module
        if shape.kind == "dlrm":
            self.interaction = DotPairs(num_vectors)
            width = dim + num_vectors * (num_vectors - 1) // 2
        else:
            width = num_vectors * dim
            self.interaction = CrossLayers(width, shape.cross_num_layers, shape.cross_low_rank_dim)
        self.top = _layers(width, shape.over_layer_sizes, ends_with_relu=False)

    def forward(self, dense_BN: torch.Tensor, pooled_BFD: torch.Tensor) -> torch.Tensor:
        """Dense columns (B, N) and pooled features (B, F, D) -> logits (B, 1)."""
        inputs = dense_BN if dense_BN.size(1) else dense_BN.new_ones(dense_BN.size(0), 1)
        vectors_BVD = torch.cat((self.bottom(inputs).unsqueeze(1), pooled_BFD), dim=1)
        logits: torch.Tensor = self.top(self.interaction(vectors_BVD))
        return logits


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
        self.shape = shape
        self.layers = DenseLayers(shape)
        self.layers.load_state_dict(dict(dense), assign=True)
        self.tables = nn.ModuleDict(tables)
        self.eval().requires_grad_(False)

    def forward(self, dense_BN: torch.Tensor, ids: Mapping[str, Ids]) -> torch.Tensor:
        """Logits (B,); their sigmoid is the predicted rate of clicks.

        Args:
            dense_BN: Dense columns, float32 (B, N), transformed as ``model.json`` says.
            ids: Rows by feature: integers (B,) for one each; (B, L) with -1 where there is none;
                or the pair of ids (K,) and offsets (B + 1,), bag b being
                ``ids[offsets[b]:offsets[b + 1]]``.

        Raises:
            ValueError: If a feature is missing.
            IndexError: If an id is no row of its table, on CPU.
        """
        missing = [name for name, _ in self.shape.features if name not in ids]
        if missing:
            raise ValueError(
                f"ids: expected every feature of the model, got none of {missing}. "
                "Give a feature that a sample lacks an empty bag."
            )
        pooled = [self.tables[table](ids[name]) for name, table in self.shape.features]
        logits: torch.Tensor = self.layers(dense_BN, torch.stack(pooled, dim=1)).squeeze(-1)
        return logits


def load_model(directory: str | Path) -> PlainModel:
    """Load a model that ``hotrec export`` wrote, on the CPU, in evaluation mode.

    The tables are mapped from their files, and read as their rows are looked up.

    Args:
        directory: The exported directory.

    Returns:
        A module of PyTorch alone; see ``PlainModel.forward`` for what it takes.

    Raises:
        ValueError: If the directory holds no whole model of this format.
    """
    directory = Path(directory)
    description = read_description(directory)
    try:
        shape = Architecture(**description["architecture"])
        tables = {
            table["name"]: _load_table(directory / table["file"], table, shape)
            for table in description["tables"]
        }
        return PlainModel(shape, load_file(directory / DENSE_FILE), tables)
    except (SafetensorError, OSError, LookupError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{directory}: expected a whole exported model, got {type(error).__name__}: {reason}. "
            "Export it again."
        ) from error


def read_description(directory: Path) -> dict[str, Any]:
    """The content of ``model.json``.

    Raises:
        ValueError: If it is missing, or of another version.
    """
    path = directory / DESCRIPTION
    try:
        description: dict[str, Any] = json.loads(path.read_text())
        version = description["format_version"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{path}: expected the description of an exported model, got {error!r}. Correct the "
            "path, or run `hotrec export`."
        ) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: expected format version {FORMAT_VERSION}, got {version!r}. Export the model "
            "with this version of hotrec."
        )
    return description


def _load_table(path: Path, table: Mapping[str, Any], shape: Architecture) -> TableRows:
    held = load_file(path)
    weight_RD = held[WEIGHT]
    expected = (table["num_rows"], shape.embedding_dim)
    if tuple(weight_RD.shape) != expected:
        raise ValueError(
            f"{path}: expected rows of shape {expected}, got {tuple(weight_RD.shape)}. Export the "
            "model again."
        )
    return TableRows(weight_RD, held.get(SCALE), shape.pooling == "mean")
