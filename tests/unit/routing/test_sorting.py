"""Runs of equal keys, found with and without the device's answer."""

from __future__ import annotations

import pytest
import torch

from hotrec.routing.sorting import find_runs


@pytest.mark.parametrize("keys", [[], [7], [1, 1, 1], [0, 0, 3, 5, 5, 5, 9]])
def test_runs_of_sorted_keys(keys: list[int]) -> None:
    sorted_K = torch.tensor(keys, dtype=torch.int64)
    runs = find_runs(sorted_K)
    num = int(runs.num)
    assert runs.keys[:num].tolist() == sorted(set(keys))
    assert runs.begins[:num].tolist() == [keys.index(key) for key in sorted(set(keys))]
    assert runs.keys[:num].index_select(0, runs.run_K).tolist() == keys
