"""Floating-point operations and parameters of the dense layers, counted."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from hotrec.models.hstu import Hstu
from hotrec.models.plain import Architecture
from hotrec.models.sasrec import Sasrec


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


def count_flops(run: Callable[[], torch.Tensor]) -> float:
    """Operations of the matrix products, which dominate, in a forward and its backward.

    A product of (m, k) and (k, n) takes 2 m k n, and twice that in backward, for the gradients of
    both factors, but for a first layer, whose input needs none.
    """
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    return counter.get_total_flops()


def count_work(shape: Architecture, layers: Any, num_samples: int, rows: Any) -> DenseWork:
    """The work of layers.

    Args:
        shape: Their architecture.
        layers: The layers, of ``hotrec.models.zoo.make_checked_layers``.
        num_samples: Number of samples to count.
        rows: Their rows, of ``hotrec.models.zoo.zero_rows``.
    """
    dense = torch.zeros(num_samples, len(shape.dense))
    flops = count_flops(lambda: layers(dense, rows))
    of_bottom = count_flops(lambda: layers.before_rows(dense)) if shape.has_bottom else 0.0
    num_values = sum(parameter.numel() for parameter in layers.parameters())
    return DenseWork(flops / num_samples, of_bottom / flops if flops else 0.0, num_values)


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
    return count_flops(lambda: layers(torch.zeros(1, num_dense), rows))
