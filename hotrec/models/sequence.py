"""What models of sequences share: columns, tokens, padding, the mask of attention, and logits.

Only needs torch, and no other module of hotrec, so that it can be copied into an export.

Shapes, beside those of ``hotrec.types``: T tokens of a sample, P of them places of its history,
H heads, Q tokens whose output is wanted, which are the last ones.

A batch of histories is padded at its front: the newest position of every sample is in the last
place, so that a place is a position counted from the newest one, and the token whose output is
wanted is the last one of every sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# The rows (K, D) of a feature in the order of the samples, and their number in each sample (B,).
JaggedRows = tuple[torch.Tensor, torch.Tensor]

_POSITION_STD = 0.02
# Classes of lengths that are computed apart on a CPU: the mean class is padded to one more of so
# many parts of the longest sample.
NUM_LENGTHS = 4


@dataclass(frozen=True)
class SequenceColumns:
    """The features of a model of sequences, by their part in it.

    Args:
        history: Features of the history with an id for each position, oldest first, and the
            feature of the candidate that reads the same table.
        side: Features with an id for each position, and none of the candidate, such as its action.
        context: Features that become a token each, before the history.
        others: Features that only the last layers read.

    Raises:
        ValueError: If there is no history.
    """

    history: Mapping[str, str]
    side: Sequence[str] = ()
    context: Sequence[str] = ()
    others: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.history:
            raise ValueError(
                f"columns: expected features of the history, got {dict(self.history)}. Name one, "
                "and the candidate's feature of its table."
            )


def sum_rows(column: JaggedRows) -> torch.Tensor:
    """The sum of each sample's rows, (B, D); 0 without any."""
    rows_KD, lengths_B = column
    offsets = F.pad(lengths_B.cumsum(0), (1, 0))
    numbers_K = torch.arange(rows_KD.size(0), device=rows_KD.device, dtype=offsets.dtype)
    return F.embedding_bag(numbers_K, rows_KD, offsets, mode="sum", include_last_offset=True)


def pad_front(
    rows_KD: torch.Tensor, lengths_B: torch.Tensor, max_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last rows of each sample, behind zeros.

    There are as many places as the longest sample has rows, at least one; on a device whose values
    the host would have to wait for, always ``max_length``.

    Args:
        rows_KD: Rows in the order of the samples.
        lengths_B: Number of rows of each sample.
        max_length: Maximum number of rows of a sample that are kept.

    Returns:
        The rows, (B, P, D), and which places have one, bool (B, P). In backward each row takes the
        gradient of its place, and rows without a place 0, in no order of additions.
    """
    num_samples, num_places = lengths_B.size(0), max_length
    if lengths_B.is_cpu:
        longest = int(lengths_B.max()) if num_samples else 0
        num_places = min(max_length, max(longest, 1))
    device, num_slots = rows_KD.device, num_samples * num_places
    ends_B = lengths_B.cumsum(0)
    samples_K = torch.repeat_interleave(lengths_B, output_size=rows_KD.size(0))
    numbers_K = torch.arange(rows_KD.size(0), device=device)
    places_K = num_places - ends_B[samples_K] + numbers_K
    # Rows without a place go to one more slot, which is cut off.
    slots_K = torch.where(places_K < 0, num_slots, samples_K * num_places + places_K)
    slots_SD = rows_KD.new_zeros(num_slots + 1, rows_KD.size(1)).index_copy(0, slots_K, rows_KD)
    is_row_BP = torch.arange(num_places, device=device) >= num_places - lengths_B.unsqueeze(1)
    return slots_SD[:-1].unflatten(0, (num_samples, num_places)), is_row_BP


def check_lengths(columns: Mapping[str, JaggedRows]) -> None:
    """Check that columns of a history agree in length, without waiting for a device.

    Raises:
        ValueError: If two differ; on a device only if their sums do, and else the device fails.
    """
    (first, (expected_KD, expected_B)), *others = columns.items()
    do = "Give both one id for each position of the history."
    for name, (rows_KD, lengths_B) in others:
        if lengths_B is expected_B:
            continue
        if lengths_B.is_cpu and len(differ := (lengths_B != expected_B).nonzero()):
            sample = int(differ[0, 0])
            raise ValueError(
                f"{name}, sample {sample}: expected {int(expected_B[sample])} ids, as of {first}, "
                f"got {int(lengths_B[sample])}. {do}"
            )
        if rows_KD.size(0) != expected_KD.size(0):
            raise ValueError(
                f"{name}: expected {expected_KD.size(0)} ids, as of {first}, got "
                f"{rows_KD.size(0)}. {do}"
            )
        if lengths_B.is_cuda:
            torch._assert_async(
                (lengths_B == expected_B).all(),
                f"{name}: expected as many ids in each sample as of {first}, got others. {do}",
            )


def attention_mask(is_token_BT: torch.Tensor, num_context: int) -> torch.Tensor:
    """Which tokens each token sees, bool (B, T, T): ``[b, t, s]`` whether t sees s.

    A token sees itself, the tokens before it, and those of the context, which are the first; never
    padding. Padding sees itself too, so that every token sees one.
    """
    numbers_T = torch.arange(is_token_BT.size(1), device=is_token_BT.device)
    before_TT = (numbers_T <= numbers_T.unsqueeze(1)) | (numbers_T < num_context)
    itself_TT = numbers_T == numbers_T.unsqueeze(1)
    return is_token_BT.unsqueeze(1) & before_TT | itself_TT


def split_heads(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(B, T, H * dim) -> (B, H, T, dim)."""
    return values.unflatten(2, (num_heads, -1)).transpose(1, 2)


def last_output(
    layers: nn.ModuleList,
    tokens_BTD: torch.Tensor,
    is_token_BT: torch.Tensor,
    num_context: int,
) -> torch.Tensor:
    """The output of the last layer for the last token, (B, D).

    Nothing reads that layer's other outputs, so that they are not computed. On a CPU, samples of
    similar lengths are computed together, so that less of the work is padding.

    Args:
        layers: Called with tokens, the mask of ``attention_mask`` and Q, they return the outputs
            (B, Q, D).
        tokens_BTD: The tokens: those of the context, padding, the others.
        is_token_BT: Which tokens are not padding.
        num_context: Number of tokens of the context.
    """
    if not tokens_BTD.is_cpu or tokens_BTD.size(0) < 2:
        return _last_output(layers, tokens_BTD, is_token_BT, num_context)
    num_tokens = tokens_BTD.size(1)
    padding_B = num_tokens - is_token_BT.sum(1)
    class_B = padding_B * NUM_LENGTHS // num_tokens
    outputs, order = [], []
    for number in class_B.unique().tolist():
        samples_S = (class_B == number).nonzero()[:, 0]
        # The last token stays, which is padding if a history alone, without a candidate, is empty.
        end = min(num_context + int(padding_B[samples_S].min()), num_tokens - 1)
        kept_T = torch.cat((torch.arange(num_context), torch.arange(end, num_tokens)))
        part_STD, is_token_ST = (
            values.index_select(0, samples_S).index_select(1, kept_T)
            for values in (tokens_BTD, is_token_BT)
        )
        outputs.append(_last_output(layers, part_STD, is_token_ST, num_context))
        order.append(samples_S)
    return torch.cat(outputs).index_select(0, torch.cat(order).argsort())


def _last_output(
    layers: nn.ModuleList, tokens_BTD: torch.Tensor, is_token_BT: torch.Tensor, num_context: int
) -> torch.Tensor:
    sees_BTT = attention_mask(is_token_BT, num_context)
    for layer in layers[:-1]:
        tokens_BTD = layer(tokens_BTD, sees_BTT, tokens_BTD.size(1))
    last_BD: torch.Tensor = layers[-1](tokens_BTD, sees_BTT, 1).squeeze(1)
    return last_BD


class SwishLayerNorm(nn.LayerNorm):
    """x * sigmoid(LayerNorm(x)), the activation of DLRMv4's layers outside of attention."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * super().forward(values).sigmoid()


def encoder_layers(num_columns: int, dim: int) -> nn.Sequential:
    """DLRMv4's layers from concatenated columns to a vector, (..., num_columns * D) -> (..., D)."""
    return nn.Sequential(
        nn.Linear(num_columns * dim, dim),
        SwishLayerNorm(dim),
        nn.Linear(dim, dim),
        nn.LayerNorm(dim),
    )


class TokenEncoder(nn.Module):
    """The tokens of context and history.

    A context feature's token is a linear layer of its own over the sum of its rows. A token of the
    history is the item, by layers that the candidate shares, plus layers over the side columns,
    plus a learned vector of the position, counted from the newest. These vectors are drawn from
    a normal distribution of standard deviation 0.02, as is common, which is small beside normalized
    items; the layers keep torch's initial weights.

    Args:
        columns: The features.
        dim: D.
        max_length: Maximum number of positions; older ones are left out.
        dropout: Probability that a value of a token is dropped in training.
        item: Layers from an item's concatenated columns to its token, (..., D).
    """

    def __init__(
        self,
        columns: SequenceColumns,
        dim: int,
        max_length: int,
        dropout: float,
        item: nn.Module,
    ) -> None:
        super().__init__()
        self.columns = columns
        self.max_length = max_length
        self.item = item
        self.side = encoder_layers(len(columns.side), dim) if columns.side else None
        self.context = nn.ModuleList(nn.Linear(dim, dim) for _ in columns.context)
        self.positions = nn.Parameter(torch.empty(max_length, dim).normal_(std=_POSITION_STD))
        self.dropout = nn.Dropout(dropout)

    def candidate_columns(self, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """The candidates' concatenated columns, (B, history features * D)."""
        return torch.cat([sum_rows(columns[name]) for name in self.columns.history.values()], dim=1)

    def forward(self, columns: Mapping[str, JaggedRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens (B, T, D) of context and history, and which are not padding, bool (B, T).

        Raises:
            ValueError: If columns of the history differ in length.
        """
        of_item, of_side = list(self.columns.history), list(self.columns.side)
        check_lengths({name: columns[name] for name in (*of_item, *of_side)})
        tokens_KD = self.item(torch.cat([columns[name][0] for name in of_item], dim=1))
        if self.side is not None:
            tokens_KD = tokens_KD + self.side(torch.cat([columns[name][0] for name in of_side], 1))
        lengths_B = columns[of_item[0]][1]
        history_BPD, is_token_BP = pad_front(tokens_KD, lengths_B, self.max_length)
        history_BPD = history_BPD + self.positions[-history_BPD.size(1) :]
        context = [
            layer(sum_rows(columns[name])).unsqueeze(1)
            for name, layer in zip(self.columns.context, self.context, strict=True)
        ]
        tokens_BTD = self.dropout(torch.cat((*context, history_BPD), dim=1))
        return tokens_BTD, F.pad(is_token_BP, (len(context), 0), value=True)


class ScoreLayers(nn.Module):
    """Layers from the product of user and item, other features and dense columns to logits.

    Labels share all but the last layer.

    Args:
        others: The other features.
        dim: D.
        num_dense: N.
        num_labels: L.
        over_layer_sizes: Outputs of the layers; the last is 1 for each label.
    """

    def __init__(
        self,
        others: Sequence[str],
        dim: int,
        num_dense: int,
        num_labels: int,
        over_layer_sizes: Sequence[int],
    ) -> None:
        super().__init__()
        self.others, self.num_dense = tuple(others), num_dense
        sizes = [(1 + len(others)) * dim + num_dense, *over_layer_sizes[:-1]]
        self.hidden = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.last = nn.Linear(sizes[-1], num_labels)

    def forward(
        self,
        user_BD: torch.Tensor,
        item_BD: torch.Tensor,
        dense_BN: torch.Tensor,
        columns: Mapping[str, JaggedRows],
    ) -> torch.Tensor:
        """Logits (B, L)."""
        others = [sum_rows(columns[name]) for name in self.others]
        values = torch.cat((user_BD * item_BD, *others, dense_BN), dim=1)
        for layer in self.hidden:
            values = layer(values).relu()
        logits_BL: torch.Tensor = self.last(values)
        return logits_BL


class VectorLayers(nn.Module, ABC):
    """Layers with a vector of the user, from the history, and one of the item.

    Either ``score`` has layers over both, or the logit is their product alone: a model that
    retrieves items, whose user's vector may not depend on the candidate.
    """

    score: ScoreLayers | None
    gives_vectors: bool | None
    """Whether ``forward`` returns the vectors, (B, 2, D), for training; None with ``score``."""

    def add_score(
        self,
        columns: SequenceColumns,
        dim: int,
        num_dense: int,
        num_labels: int,
        over_layer_sizes: Sequence[int],
    ) -> None:
        """Make ``score``, with arguments as of ``ScoreLayers``; no sizes make none.

        Raises:
            ValueError: If there are no sizes, but several labels.
        """
        self.score, self.gives_vectors = None, False
        if over_layer_sizes:
            sizes = dim, num_dense, num_labels, over_layer_sizes
            self.score, self.gives_vectors = ScoreLayers(columns.others, *sizes), None
        elif num_labels > 1:
            raise ValueError(
                f"model.loss: expected cross_entropy for {num_labels} labels, got sampled_softmax, "
                "which is of one. Leave one column of kind label, and prepare the dataset again."
            )

    @abstractmethod
    def user_vectors(
        self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]
    ) -> torch.Tensor:
        """Vectors (B, D) of users without candidates."""

    @abstractmethod
    def item_vectors(self, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """Vectors (B, D) of items, from the candidate's features alone."""

    def multiply(self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """The products of the vectors, (B, 1), or with ``gives_vectors`` both, (B, 2, D)."""
        users_BD, items_BD = self.user_vectors(dense_BN, columns), self.item_vectors(columns)
        if self.gives_vectors:
            return torch.stack((users_BD, items_BD), dim=1)
        return (users_BD * items_BD).sum(1, keepdim=True)
