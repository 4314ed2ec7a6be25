"""Late materialisation: a linear layer of packed rows before they are copied to the ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from hotrec.embedding.packed import PackedJaggedTensor


class LateLinear(nn.Linear):
    """The linear layer of the rows of several features, one after the other, for each id.

    The product with the concatenated rows is a sum over the features, W [i; a] = W_i i + W_a a, so
    each block of columns of W is applied to distinct rows, and the results are copied to the ids
    and added up, from the first feature to the last. Forward and gradients are those of
    ``nn.Linear`` but for the order of additions (and of rounding, below float32), and repeatable
    bit for bit. Parameters are those of ``nn.Linear(sum(dims), out_features)``, so checkpoints fit
    both.

    Memory: float (K, N) for the output and one more during forward, instead of (K, sum of dims) as
    input of ``nn.Linear``, which is kept for backward.

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
        total: torch.Tensor | None = None
        for one, block in zip(features, self.weight.split(self.dims, dim=1), strict=True):
            bias = self.bias if total is None else None
            if not isinstance(one, PackedJaggedTensor):
                term = F.linear(one.values(), block, bias)
            elif one.packed_values().shape[0] < one.reverse_indices().numel():
                term = one.expand(F.linear(one.packed_values(), block, bias))
            else:  # mostly rows of other features of the table
                term = F.linear(one.materialize().values(), block, bias)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total
