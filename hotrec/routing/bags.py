"""Where the ids of a batch belong: the bags of its samples and columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bags:
    """Where the ids of a batch belong: bag ``b * F + f`` is sample b of column f.

    Args:
        shape: F, B.
        lengths_F: int64 (F,), ids of each column.
        bag_K: int64, the bag of each id, ids in the features' order (feature-major).
        offsets: int64 (B * F,), where each bag starts when the ids are ordered by bag.
        order_K: int64, the ids in the order of their bags; None if every bag holds one id, where
            a transposition does.
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
        """Values in the features' order -> in the order of the bags."""
        if self.order_K is None:
            return values_K.view(self.shape).t().reshape(-1)
        return values_K.index_select(0, self.order_K)


def find_bags(lengths_FB: torch.Tensor, num_ids: int, *, all_one: bool) -> Bags:
    """Find the bags of a batch.

    Args:
        lengths_FB: int64 (F, B), ids per column and sample.
        num_ids: K, the sum of the lengths.
        all_one: whether every bag holds one id.
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
