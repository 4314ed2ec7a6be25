"""Which ranks share a host, by rule."""

from __future__ import annotations

import pytest

from hotrec.runtime.hosts import RANKS_PER_HOST, Hosts, find_hosts, gather_hosts


@pytest.mark.parametrize(
    ("host_of_rank", "expected", "ranks_per_host", "is_regular"),
    [
        ("aabb", Hosts(2, 2), 2, True),
        ("bbaacc", Hosts(3, 2), 2, True),
        ("aaaa", None, 4, True),
        ("abcd", None, 1, True),
        ("aaabb", None, 3, False),
        ("abab", None, 2, False),
        ("a", None, 1, True),
    ],
)
def test_rules(
    host_of_rank: str, expected: Hosts | None, ranks_per_host: int, is_regular: bool
) -> None:
    found = find_hosts(host_of_rank)
    assert found.hosts == expected
    assert (found.ranks_per_host, found.is_regular) == (ranks_per_host, is_regular)


def test_groups() -> None:
    hosts = Hosts(2, 3)
    assert hosts.members == [[0, 1, 2], [3, 4, 5]]
    assert hosts.rails == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("text", ["0", "two", "2"])
def test_a_number_that_does_not_divide_the_ranks_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_PER_HOST, text)
    with pytest.raises(ValueError, match=RANKS_PER_HOST):
        gather_hosts()
