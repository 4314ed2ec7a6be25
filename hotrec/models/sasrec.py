"""SASRec (Kang and McAuley 2018, Self-Attentive Sequential Recommendation).

Only needs torch and ``hotrec.models.sequence``, so that it can be copied into an export.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import torch
from torch import nn

from hotrec.models.sequence import (
    JaggedRows,
    SequenceColumns,
    TokenEncoder,
    VectorLayers,
    encoder_layers,
    last_output,
    split_heads,
)


class SasrecSizes(TypedDict):
    """The sizes of the blocks.

    Args:
        num_layers: Number of blocks.
        num_heads: H, a divisor of D.
    """

    num_layers: int
    num_heads: int


class SasrecBlock(nn.Module):
    """Attention, and layers over each token (sections 3.2 and 3.3).

    Both are ``X + Dropout(g(LayerNorm(X)))``. Attention is ``softmax(Q K^T / sqrt(D / H)) V``, its
    linear maps without biases and without one of its output; the layers are ``Linear(ReLU(
    Linear(X)))`` of width D.

    Args:
        dim: D.
        dropout: Probability that a value is dropped in training.
        num_heads: H; the paper's is 1.

    Raises:
        ValueError: If D is no multiple of H.
    """

    def __init__(self, dim: int, dropout: float, *, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(
                f"model.num_heads: expected a divisor of model.embedding_dim, {dim}, got "
                f"{num_heads}. Change one of them."
            )
        self.num_heads = num_heads
        self.alpha = 1 / math.sqrt(dim // num_heads)
        self.attention_norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.token_norm = nn.LayerNorm(dim)
        self.token_layers = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens_BTD: torch.Tensor, sees_BTT: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """Outputs (B, Q, D) of the last Q = ``num_queries`` tokens."""
        normed_BTD = self.attention_norm(tokens_BTD)
        q = split_heads(self.query(normed_BTD[:, -num_queries:]), self.num_heads)
        k = split_heads(self.key(normed_BTD), self.num_heads)
        v = split_heads(self.value(normed_BTD), self.num_heads)
        # Not torch's fused attention, some of whose kernels add gradients in any order.
        scores_BHQT = q @ k.transpose(2, 3) * self.alpha
        is_unseen = sees_BTT[:, None, -num_queries:].logical_not()
        weights_BHQT = scores_BHQT.masked_fill(is_unseen, -math.inf).softmax(3)
        attended = (weights_BHQT @ v).transpose(1, 2).flatten(2)
        outputs_BQD = tokens_BTD[:, -num_queries:] + self.dropout(attended)
        changes = self.token_layers(self.token_norm(outputs_BQD))
        return outputs_BQD + self.dropout(changes)


def _blocks(dim: int, dropout: float, *, num_layers: int, num_heads: int) -> nn.ModuleList:
    return nn.ModuleList(SasrecBlock(dim, dropout, num_heads=num_heads) for _ in range(num_layers))


class Sasrec(VectorLayers):
    """Blocks of attention over context and history, and the product with the candidate.

    As in the paper: items with learned vectors of positions, dropout, blocks in which a token sees
    those up to itself, a last ``LayerNorm`` (of the authors' program), of which the newest token's
    output is the user's vector; the candidate's vector is the one by which it would be in the
    history, and its product with the user's is the score. With one history feature a vector is the
    row itself, as in the paper.

    Beyond the paper: several features of an item, by layers; side columns and context tokens
    (``TokenEncoder``); positions are counted from the newest; several heads; and ``ScoreLayers``
    over vectors, other features and dense columns, whose output is added to the product, unless
    there are no ``over_layer_sizes``. The paper's loss over all positions is not here: as in
    ``hotrec.models.hstu.Hstu`` only the last one's output is computed. Dropout and initial weights
    are as there.

    Args:
        columns: The features.
        embedding_dim: D, of all tables and tokens.
        num_dense: N.
        num_labels: L.
        max_length: Maximum number of positions of a history; older ones are left out.
        dropout: Probability that a value is dropped in training, of tokens and in each block.
        over_layer_sizes: Outputs of the layers over user, item and the rest; the last is 1 for
            each label. Empty for the product alone, of one label.
        sizes: Sizes of the blocks.
    """

    def __init__(
        self,
        columns: SequenceColumns,
        *,
        embedding_dim: int,
        num_dense: int,
        num_labels: int,
        max_length: int,
        dropout: float,
        over_layer_sizes: Sequence[int],
        **sizes: Unpack[SasrecSizes],
    ) -> None:
        super().__init__()
        dim, num_items = embedding_dim, len(columns.history)
        item = encoder_layers(num_items, dim) if num_items > 1 else nn.Identity()
        self.tokens = TokenEncoder(columns, dim, max_length, dropout, item=item)
        self.layers = _blocks(dim, dropout, **sizes)
        self.user_norm = nn.LayerNorm(dim)
        self.add_score(columns, dim, num_dense, num_labels, over_layer_sizes)

    def user_vectors(
        self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]
    ) -> torch.Tensor:
        """Vectors (B, D) of users, from the newest token of their histories.

        An empty history's token is the vector of its position. Dense columns are not read.
        """
        tokens_BTD, is_token_BT = self.tokens(columns)
        num_context = len(self.tokens.context)
        last_BD = last_output(self.layers, tokens_BTD, is_token_BT, num_context)
        vectors_BD: torch.Tensor = self.user_norm(last_BD)
        return vectors_BD

    def item_vectors(self, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """Vectors (B, D) of items, from the candidate's features alone."""
        vectors_BD: torch.Tensor = self.tokens.item(self.tokens.candidate_columns(columns))
        return vectors_BD

    def forward(self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """Dense columns (B, N) and the rows of each feature, as of ``Hstu`` -> as there.

        Raises:
            ValueError: If columns of the history differ in length.
        """
        if self.score is None:
            return self.multiply(dense_BN, columns)
        user_BD, item_BD = self.user_vectors(dense_BN, columns), self.item_vectors(columns)
        products_B1 = (user_BD * item_BD).sum(1, keepdim=True)
        logits_BL: torch.Tensor = self.score(user_BD, item_BD, dense_BN, columns)
        return products_B1 + logits_BL
