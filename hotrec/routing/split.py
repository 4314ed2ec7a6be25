"""Splits a routed batch by samples; both parts read from the same looked-up rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from hotrec.routing.features import RoutedFeatures, RoutedGroup, RoutedRows, RoutedSequences


def samples_reading(routed: RoutedFeatures, rows_of_group: list[torch.Tensor]) -> torch.Tensor:
    """Find the samples, bool (B,), that read one of the chosen rows, bool (U,) of each group."""
    device = routed.groups[0].positions_K.device
    found_B = torch.zeros(routed.batch_size, dtype=torch.bool, device=device)
    for group, is_named_U in zip(routed.groups, rows_of_group, strict=True):
        sample_K = _sample_of_ids(group, routed.batch_size)
        found_B[sample_K[is_named_U.index_select(0, group.positions_K)]] = True
    return found_B


def select_samples(
    routed: RoutedFeatures, samples: torch.Tensor, num_hot_rows: list[int]
) -> RoutedFeatures:
    """Select some samples int64 (B',), ascending; ``rows`` stay the whole batch's.

    ``num_hot_rows`` are the hot ones among the U rows of each group.
    """
    place_B = torch.full((routed.batch_size,), -1, device=samples.device)
    place_B[samples] = torch.arange(samples.numel(), device=samples.device)
    groups: list[RoutedRows] = []
    for group, num_hot in zip(routed.groups, num_hot_rows, strict=True):
        if isinstance(group, RoutedSequences):
            part: RoutedRows = _select_sequences(group, samples, place_B)
        else:
            assert isinstance(group, RoutedGroup), type(group)
            part = _select_bags(group, routed.batch_size, samples, place_B)
        groups.append(replace(part, num_hot_lookups=(part.positions_K < num_hot).sum()))
    return replace(routed, groups=groups, batch_size=samples.numel())


def _lengths(group: RoutedGroup) -> torch.Tensor:
    """The number of ids in each bag."""
    end = group.bag_offsets.new_full((1,), group.positions_K.numel())
    return torch.cat([group.bag_offsets, end]).diff()


def _sample_of_ids(group: RoutedRows, batch_size: int) -> torch.Tensor:
    """int64 (K,), in the order of ``positions_K``."""
    samples = torch.arange(batch_size, device=group.positions_K.device)
    if isinstance(group, RoutedSequences):
        samples, lengths = samples.repeat(group.lengths_FB.shape[0]), group.lengths_FB.reshape(-1)
    else:
        assert isinstance(group, RoutedGroup), type(group)
        lengths = _lengths(group).view(batch_size, -1).sum(1)
    return torch.repeat_interleave(samples, lengths, output_size=group.positions_K.numel())


def _select_bags(
    group: RoutedGroup, batch_size: int, samples: torch.Tensor, place_B: torch.Tensor
) -> RoutedGroup:
    num_columns = group.bag_offsets.numel() // batch_size
    lengths_BF = _lengths(group).view(batch_size, num_columns).index_select(0, samples)
    lengths_bag = lengths_BF.reshape(-1)
    by_bag_K = (place_B.index_select(0, _sample_of_ids(group, batch_size)) >= 0).nonzero()[:, 0]
    place_K = place_B.index_select(0, group.bags_K // num_columns)
    by_row_K = (place_K >= 0).nonzero()[:, 0]
    column_K = group.bags_K.index_select(0, by_row_K) % num_columns
    return replace(
        group,
        positions_K=group.positions_K.index_select(0, by_bag_K),
        bag_offsets=lengths_bag.cumsum(0) - lengths_bag,
        bags_K=place_K.index_select(0, by_row_K) * num_columns + column_K,
        # The first kept id at or after the row's first one.
        row_offsets_U=torch.searchsorted(by_row_K, group.row_offsets_U),
        scales_K=None if group.scales_K is None else group.scales_K[by_bag_K],
        row_scales_K=None if group.row_scales_K is None else group.row_scales_K[by_row_K],
    )


def _select_sequences(
    group: RoutedSequences, samples: torch.Tensor, place_B: torch.Tensor
) -> RoutedSequences:
    sample_K = _sample_of_ids(group, place_B.numel())
    is_kept_K = place_B.index_select(0, sample_K) >= 0
    kept = is_kept_K.nonzero()[:, 0]
    place_K = is_kept_K.cumsum(0) - 1  # of a kept id among the kept ones
    by_row_K = is_kept_K.index_select(0, group.by_row_K).nonzero()[:, 0]
    lengths_FB = group.lengths_FB.index_select(1, samples)
    return replace(
        group,
        positions_K=group.positions_K.index_select(0, kept),
        row_offsets_U=torch.searchsorted(by_row_K, group.row_offsets_U),
        by_row_K=place_K.index_select(0, group.by_row_K.index_select(0, by_row_K)),
        lengths_FB=lengths_FB,
        ids_K=None if group.ids_K is None else group.ids_K.index_select(0, kept),
        num_ids_F=lengths_FB.sum(1).tolist(),
        is_part=True,
    )
