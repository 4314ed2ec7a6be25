"""The bags of a batch: the ids of each sample and column."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bags:
    """The bags of a batch; bag ``b * F + f`` is sample b of column f.

    Args:
        shape: F and B.
        lengths_F: The number of ids of each column, int64 (F,).
        bag_K: The bag of each id in the features' order (feature-major), int64.
        offsets: The start of each bag among the ids ordered by bag, int64 (B * F,).
        order_K: The ids in the order of their bags, int64; None if every bag has one id, where a
            transposition is enough.
    """

    shape: tuple[int, int]
    lengths_F: torch.Tensor
    bag_K: torch.Tensor
    offsets: torch.Tensor
    order_K: torch.Tensor | None

    def per_column(self, values_F: torch.Tensor) -> torch.Tensor:
        """The value of its column for each id, in the features' order."""
        if self.order_K is None:
            return values_F[:, None].expand(self.shape).reshape(-1)
        return torch.repeat_interleave(values_F, self.lengths_F, output_size=self.bag_K.numel())

    def by_bag(self, values_K: torch.Tensor) -> torch.Tensor:
        """Reorder values from the features' order to the order of the bags."""
        if self.order_K is None:
            return values_K.view(self.shape).t().reshape(-1)
        return values_K.index_select(0, self.order_K)


def find_bags(lengths_FB: torch.Tensor, num_ids: int, *, all_one: bool) -> Bags:
    """Find the bags of a batch.

    Args:
        lengths_FB: The number of ids per column and sample, int64 (F, B).
        num_ids: The sum K of the lengths.
        all_one: Whether every bag has one id.
    """
    num_columns, batch_size = lengths_FB.shape
    device = lengths_FB.device
    lengths_F = lengths_FB.sum(1)
    bags = torch.arange(num_columns * batch_size, device=device)
    bag_of_cell = bags.view(batch_size, num_columns).t().reshape(-1)
    if all_one:
        return Bags((num_columns, batch_size), lengths_F, bag_of_cell, bags, None)
    lengths_cell = lengths_FB.reshape(-1)
    begins_cell = lengths_cell.cumsum(0) - lengths_cell
    bag_K = torch.repeat_interleave(bag_of_cell, lengths_cell, output_size=num_ids)
    begins_bag = begins_cell.view(num_columns, batch_size).t().reshape(-1)
    lengths_bag = lengths_FB.t().reshape(-1)
    offsets = lengths_bag.cumsum(0) - lengths_bag
    shift_K = torch.repeat_interleave(begins_bag - offsets, lengths_bag, output_size=num_ids)
    order_K = torch.arange(num_ids, device=device) + shift_K
    return Bags((num_columns, batch_size), lengths_F, bag_K, offsets, order_K)
