"""Which cores loader workers find."""

from __future__ import annotations

import pytest

from hotrec.runtime.cores import choose_workers, min_cores


@pytest.mark.parametrize(
    ("of_ranks", "ranks_per_host", "expected"),
    [
        ([("a", {0, 1})], 1, 2.0),
        ([("a", {0, 1})] * 2, 2, 2.0),  # two ranks of one host
        ([("a", {0, 1})] * 2, 1, 1.0),  # two containers of one machine
        ([("a", {0}), ("a", {1})], 1, 1.0),  # each with a core of its own
        ([("a", {0}), ("a", {1})], 2, 2.0),  # ranks bound to cores
        ([("a", {0, 1, 2, 3}), ("b", {0, 1})], 1, 2.0),  # two machines
    ],
)
def test_hosts_of_one_kernel_share_its_cores(
    of_ranks: list[tuple[str, set[int]]], ranks_per_host: int, expected: float
) -> None:
    assert min_cores(of_ranks, ranks_per_host) == expected


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "expected"),
    [
        *[("cpu", 2.0, 2, 0), ("cpu", 3.0, 2, 1), ("cpu", 64.0, 2, 1)],
        # A GPU's step is shorter than the making of its batch: as many as there are cores for.
        *[("cuda", 1.0, 8, 1), ("cuda", 8.0, 2, 2), ("cuda", 128.0, 8, 8), ("cuda", 10.5, 2, 3)],
    ],
)
def test_no_worker_takes_a_core_from_a_rank(
    device: str, cores: float, ranks: int, expected: int
) -> None:
    assert choose_workers(device, cores, ranks) == expected
