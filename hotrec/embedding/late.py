"""Late materialisation: a linear layer of packed rows before they are copied to the ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from hotrec.embedding.packed import AddRows, PackedJaggedTensor


class LateLinear(nn.Linear):
    """The linear layer of the rows of several features, one after the other, for each id.

    The product with the concatenated rows is a sum over the features, W [i; a] = W_i i + W_a a, so
    each block of columns of W is applied to distinct rows, and each id adds up the results of its
    rows, from the first feature to the last. Forward and gradients are those of
    ``nn.Linear`` but for the order of additions (and of rounding, below float32), and repeatable
    bit for bit. Parameters are those of ``nn.Linear(sum(dims), out_features)``, so checkpoints fit
    both.

    Expanded features, as of an unsharded model, are concatenated. Packed ones need no memory of
    float (K, sum of dims), which ``nn.Linear`` keeps for backward.

    Args:
        dims: The dimension of each feature's rows.
        out_features: N.
        bias: Whether there is one.
        device: Of the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        dims: Sequence[int],
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(sum(dims), out_features, bias, device, dtype)
        self.dims = list(dims)

    def forward(self, features: Sequence[JaggedTensor]) -> torch.Tensor:  # type: ignore[override]
        """Apply the layer.

        Args:
            features: Packed or expanded, in the order of ``dims``, with ids at the same positions.

        Returns:
            Float (K, N).

        Raises:
            ValueError: if the features do not have as many ids each, or not these dimensions.
        """
        found = [
            (one.reverse_indices().numel(), one.packed_values().shape[1])
            if isinstance(one, PackedJaggedTensor)
            else tuple(one.values().shape)
            for one in features
        ]
        expected = [(found[0][0], dim) for dim in self.dims] if found else []
        if found != expected or len(found) != len(self.dims):
            raise ValueError(
                f"features of LateLinear: expected dimensions {self.dims} with as many ids each, "
                f"got (ids, dimension) {found}. Pass features whose sequences have equal lengths."
            )
        if not any(isinstance(one, PackedJaggedTensor) for one in features):
            return super().forward(torch.cat([one.values() for one in features], dim=1))
        num_ids, begin = found[0][0], 0
        terms: list[torch.Tensor] = []
        row_of: list[torch.Tensor] = []
        for one, block in zip(features, self.weight.split(self.dims, dim=1), strict=True):
            bias = None if terms else self.bias
            if isinstance(one, PackedJaggedTensor) and one.packed_values().shape[0] < num_ids:
                values, index_K = one.packed_values(), one.reverse_indices()
            else:  # packed: mostly rows of other features of the table
                is_packed = isinstance(one, PackedJaggedTensor)
                values = one.materialize().values() if is_packed else one.values()
                index_K = torch.arange(num_ids, device=values.device)
            terms.append(F.linear(values, block, bias))
            row_of.append(index_K + begin)
            begin += values.shape[0]
        total: torch.Tensor = AddRows.apply(torch.cat(terms), torch.stack(row_of, dim=1))
        return total
