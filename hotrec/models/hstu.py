"""HSTU (Zhai et al. 2024, Actions Speak Louder than Words), a ranking model as MLPerf's DLRMv4.

Only needs torch and ``hotrec.models.sequence``, so that it can be copied into an export.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
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

# As DLRMv4: outputs of attention, divided by the number of tokens, may be as small.
_EPS = 1e-6


class StuSizes(TypedDict):
    """The sizes of the layers of attention.

    Args:
        num_layers: Number of layers.
        num_heads: H.
        attention_dim: Dimension of a head's queries and keys.
        linear_dim: Dimension of a head's values and gates.
    """

    num_layers: int
    num_heads: int
    attention_dim: int
    linear_dim: int


class StuLayer(nn.Module):
    """A sequential transduction unit (equations 1 to 3), without relative attention biases.

    With X the tokens, of which a token sees some::

        U, V, Q, K = SiLU(Linear(LayerNorm(X)))
        A = sum over heads' seen tokens of SiLU(Q K^T / sqrt(attention_dim)) / max_tokens V
        X + Linear([U, A, LayerNorm(A) * U])

    The last linear layer has no bias and also reads U and A, as in DLRMv4; with zero weights for
    them it is the paper's. SiLU is applied to all four, as in the paper; its authors' later
    program, which DLRMv4 uses, applies it to U alone. The first linear layer is in two, of queries
    and gates and of values and keys, since one token's queries are enough in the last layer.

    Args:
        dim: D.
        max_tokens: Divisor of the scores, the same in every batch.
        dropout: Probability that an input of the last linear layer is dropped in training.
        num_heads: H.
        attention_dim: Dimension of a head's queries and keys.
        linear_dim: Dimension of a head's values and gates.
    """

    def __init__(
        self,
        dim: int,
        max_tokens: int,
        dropout: float,
        *,
        num_heads: int,
        attention_dim: int,
        linear_dim: int,
    ) -> None:
        super().__init__()
        self.num_heads, self.max_tokens = num_heads, max_tokens
        self.dims = linear_dim * num_heads, attention_dim * num_heads
        self.alpha = 1 / math.sqrt(attention_dim)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self.uq = nn.Linear(dim, sum(self.dims))
        self.vk = nn.Linear(dim, sum(self.dims))
        self.attention_norm = nn.LayerNorm(self.dims[0], eps=_EPS)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(3 * self.dims[0], dim, bias=False)

    def forward(
        self, tokens_BTD: torch.Tensor, sees_BTT: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """Outputs (B, Q, D) of the last Q = ``num_queries`` tokens."""
        normed_BTD = self.norm(tokens_BTD)
        u, q = F.silu(self.uq(normed_BTD[:, -num_queries:])).split(self.dims, dim=2)
        v, k = F.silu(self.vk(normed_BTD)).split(self.dims, dim=2)
        q, v, k = (split_heads(part, self.num_heads) for part in (q, v, k))
        scores_BHQT = F.silu(q @ k.transpose(2, 3) * self.alpha) / self.max_tokens
        scores_BHQT = scores_BHQT * sees_BTT[:, None, -num_queries:]
        attended = (scores_BHQT @ v).transpose(1, 2).flatten(2)
        gated = self.attention_norm(attended) * u
        joined = self.dropout(torch.cat((u, attended, gated), dim=2))
        return tokens_BTD[:, -num_queries:] + self.output(joined)


def _stu_layers(
    dim: int, max_tokens: int, dropout: float, *, num_layers: int, **sizes: int
) -> nn.ModuleList:
    return nn.ModuleList(StuLayer(dim, max_tokens, dropout, **sizes) for _ in range(num_layers))


class Hstu(VectorLayers):
    """Attention over context, history and candidate, and layers over its output for the candidate.

    The tokens are those of ``TokenEncoder`` and the candidate, the last one: the item by the same
    layers, and a learned vector in place of position and side columns. A token of the history sees
    the context and the tokens up to itself, the context the context (in DLRMv4 the history as
    well), the candidate all tokens. The user's vector is ``LayerNorm`` of the last layer's output
    for the candidate, which alone is computed; the item's vector has layers of its own over the
    candidate's columns. Both are multiplied, and read by layers with the other features and dense
    columns (``ScoreLayers``).

    Without ``over_layer_sizes`` it retrieves items: the candidate is no token, the newest token's
    output is the user's vector, and the logit is the product.

    Weights are torch's initial ones of linear and normalizing layers, as in hotrec's other models,
    for learned vectors see ``TokenEncoder``.

    Dropout draws from torch's generator: in training, ranks drop other values than one process
    with all samples would, and a different number of ranks others again. Only with 0 is training
    independent of how samples are spread over ranks.

    Args:
        columns: The features.
        embedding_dim: D, of all tables and tokens.
        num_dense: N.
        num_labels: L.
        max_length: Maximum number of positions of a history; older ones are left out.
        dropout: Probability that a value is dropped in training, of tokens and in each layer.
        over_layer_sizes: Outputs of the layers over user, item and the rest; the last is 1 for
            each label. Empty for the product alone, of one label.
        sizes: Sizes of the layers of attention.
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
        **sizes: Unpack[StuSizes],
    ) -> None:
        super().__init__()
        dim, num_items = embedding_dim, len(columns.history)
        self.tokens = TokenEncoder(
            columns, dim, max_length, dropout, item=encoder_layers(num_items, dim)
        )
        self.candidate: nn.Parameter | None = None
        if over_layer_sizes:
            self.candidate = nn.Parameter(torch.empty(dim).normal_(std=0.02))
        max_tokens = len(columns.context) + max_length + 1
        self.layers = _stu_layers(dim, max_tokens, dropout, **sizes)
        self.user_norm = nn.LayerNorm(dim)
        self.item_tower = encoder_layers(num_items, dim)
        self.add_score(columns, dim, num_dense, num_labels, over_layer_sizes)

    def _vectors(self, tokens_BTD: torch.Tensor, is_token_BT: torch.Tensor) -> torch.Tensor:
        num_context = len(self.tokens.context)
        last_BD = last_output(self.layers, tokens_BTD, is_token_BT, num_context)
        vectors_BD: torch.Tensor = self.user_norm(last_BD)
        return vectors_BD

    def user_vectors(
        self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]
    ) -> torch.Tensor:
        """Vectors (B, D) of users without candidates, from the newest token of their histories.

        They are for retrieval, by their products with ``item_vectors``; with ``score``, ``forward``
        does not use them. An empty history's token is the vector of its position. Dense columns are
        not read.
        """
        return self._vectors(*self.tokens(columns))

    def item_vectors(self, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """Vectors (B, D) of items, from the candidate's features alone."""
        vectors_BD: torch.Tensor = self.item_tower(self.tokens.candidate_columns(columns))
        return vectors_BD

    def forward(self, dense_BN: torch.Tensor, columns: Mapping[str, JaggedRows]) -> torch.Tensor:
        """Dense columns (B, N) and the rows of each feature -> logits (B, L), or see ``multiply``.

        Args:
            dense_BN: Dense columns.
            columns: For each feature its rows (K, D) in the order of the samples, and their number
                in each sample, integers (B,).

        Raises:
            ValueError: If columns of the history differ in length.
        """
        if self.score is None or self.candidate is None:
            return self.multiply(dense_BN, columns)
        tokens_BTD, is_token_BT = self.tokens(columns)
        candidate_BD = self.tokens.item(self.tokens.candidate_columns(columns)) + self.candidate
        candidate_BD = self.tokens.dropout(candidate_BD)
        user_BD = self._vectors(
            torch.cat((tokens_BTD, candidate_BD.unsqueeze(1)), dim=1),
            F.pad(is_token_BT, (0, 1), value=True),
        )
        logits_BL: torch.Tensor = self.score(user_BD, self.item_vectors(columns), dense_BN, columns)
        return logits_BL
