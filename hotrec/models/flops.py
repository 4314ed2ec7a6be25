"""Floating-point operations and parameters of the dense layers, from their sizes or counted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from hotrec.models.hstu import Hstu
from hotrec.models.interaction import padded_vectors
from hotrec.models.plain import Architecture
from hotrec.models.sasrec import Sasrec
from hotrec.types import ModelKind


class DenseWork(NamedTuple):
    """The work of the dense layers.

    Args:
        flops: The operations per sample, forward and backward.
        bottom_frac: The fraction of them in the bottom layers, which read no embedding.
        num_dense_values: The number of parameters.
    """

    flops: float
    bottom_frac: float
    num_dense_values: int


def dense_flops(shape: Architecture) -> DenseWork:
    """Count the multiplications and additions of matrix products, which dominate.

    The model is a DLRM or DCNv2. A product of (m, k) and (k, n) takes 2 m k n. Backward takes it
    twice, for the gradients of both factors, but for the first layer, whose input needs none.
    DLRM's interaction multiplies the F + 1 vectors of a sample, and some zeros, with one another
    (Naumov et al. 2019, section 2), and in backward once, see ``hotrec.models.interaction``;
    DCNv2's cross layer x0 * (W V x + b) + x has V (r, n) and W (n, r) for n = (F + 1) D (Wang et
    al. 2021, section 3.4).
    """
    dim, num_columns = shape.embedding_dim, len(shape.features)
    num_vectors, num_inputs = num_columns + 1, num_bottom_inputs(len(shape.dense))
    bottom_flops, bottom_values = _layers(num_inputs, shape.dense_layer_sizes, is_first=True)
    if shape.kind == ModelKind.dcnv2.name:
        width = num_vectors * dim
        rank, num_layers = shape.cross_low_rank_dim, shape.cross_num_layers
        cross_flops = 3 * 2 * 2 * width * rank * num_layers
        cross_values = (2 * width * rank + width) * num_layers
    else:
        width = dim + num_vectors * (num_vectors - 1) // 2
        padded = padded_vectors(num_columns)
        cross_flops = 2 * dim * (padded * padded + num_columns * padded + num_columns)
        cross_values = 0
    over_sizes = [*shape.over_layer_sizes[:-1], len(shape.labels)]
    over_flops, over_values = _layers(width, over_sizes, is_first=False)
    flops = bottom_flops + cross_flops + over_flops
    return DenseWork(flops, bottom_flops / flops, bottom_values + cross_values + over_values)


def count_work(shape: Architecture, layers: Any, num_samples: int, rows: Any) -> DenseWork:
    """The same for any layers, counted by PyTorch in forward and backward.

    Args:
        shape: Their architecture.
        layers: The layers, of ``hotrec.models.zoo.make_checked_layers``.
        num_samples: Number of samples to count.
        rows: Their rows, of ``hotrec.models.zoo.zero_rows``.
    """
    with FlopCounterMode(display=False) as counter:
        layers(torch.zeros(num_samples, len(shape.dense)), rows).sum().backward()
    flops = counter.get_total_flops() / num_samples
    bottom_flops = 0.0
    if shape.has_bottom:
        num_inputs = num_bottom_inputs(len(shape.dense))
        bottom_flops, _ = _layers(num_inputs, shape.dense_layer_sizes, is_first=True)
    num_values = sum(parameter.numel() for parameter in layers.parameters())
    return DenseWork(flops, bottom_flops / flops if flops else 0.0, num_values)


class SequenceWork(NamedTuple):
    """The operations of layers over sequences for a sample, forward and backward.

    Args:
        fixed: Those of a sample.
        per_position: Those of each position of its history.
        per_pair: Those of each pair of positions, also of those that do not see one another, which
            are computed as well.
    """

    fixed: float
    per_position: float
    per_pair: float

    def flops(self, num_positions: float) -> float:
        """The operations for a history of this length, at least 1 and cut at its maximum."""
        return self.fixed + num_positions * (self.per_position + num_positions * self.per_pair)


def count_sequence_work(layers: Hstu | Sasrec) -> SequenceWork:
    """Count the operations of matrix products at three lengths, on which they depend as a square.

    Padding is as much work as a position: a sample takes that of the longest one that is computed
    with it, see ``last_output``.

    Raises:
        ValueError: If histories have fewer than three positions at most.
    """
    if layers.tokens.max_length < 3:
        raise ValueError(
            "model.max_length: expected at least 3 positions to count the work by their number, "
            f"got {layers.tokens.max_length}. Raise it."
        )
    one, two, three = (_sequence_flops(layers, length) for length in (1, 2, 3))
    per_pair = (three - 2 * two + one) / 2
    per_position = two - one - 3 * per_pair
    return SequenceWork(one - per_position - per_pair, per_position, per_pair)


def _sequence_flops(layers: Hstu | Sasrec, length: int) -> float:
    """The operations for one sample with a history of this length."""
    columns, dim = layers.tokens.columns, layers.tokens.positions.size(1)
    candidate = columns.history.values()
    numbers = dict.fromkeys((*columns.context, *columns.others, *candidate), 1)
    numbers |= dict.fromkeys((*columns.history, *columns.side), length)
    rows = {
        name: (torch.zeros(number, dim, requires_grad=True), torch.tensor([number]))
        for name, number in numbers.items()
    }
    layers = deepcopy(layers).eval()  # neither gradients nor random numbers of the caller's
    num_dense = 0 if layers.score is None else layers.score.num_dense
    with FlopCounterMode(display=False) as counter:
        layers(torch.zeros(1, num_dense), rows).sum().backward()
    return counter.get_total_flops()


def num_bottom_inputs(num_dense: int) -> int:
    """Inputs of the bottom MLP: the dense columns, or a column of ones if there are none."""
    return max(num_dense, 1)


def _layers(num_inputs: int, sizes: Sequence[int], *, is_first: bool) -> tuple[float, int]:
    """Operations per sample, forward and backward, and parameters of linear layers with bias."""
    flops, values = 0.0, 0
    for num_outputs in sizes:
        flops += (2 if is_first else 3) * 2 * num_inputs * num_outputs
        values += num_inputs * num_outputs + num_outputs
        num_inputs, is_first = num_outputs, False
    return flops, values
