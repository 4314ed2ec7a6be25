"""Which ranks share a host, by rule."""

from __future__ import annotations

import pytest

from hotrec.runtime.hosts import RANKS_PER_HOST, Hosts, find_hosts, gather_hosts


@pytest.mark.parametrize(
    ("host_of_rank", "expected", "why"),
    [
        ("aabb", Hosts(2, 2), "in two levels, on 2 hosts of 2 ranks"),
        ("aaabbb", Hosts(2, 3), "in two levels, on 2 hosts of 3 ranks"),
        ("bbaacc", Hosts(3, 2), "in two levels, on 3 hosts of 2 ranks"),
        ("aaaa", None, "in one level, since all ranks are on one host"),
        ("abcd", None, "in one level, since each host has one rank"),
        ("aaabb", None, "in one level, since hosts have 2 to 3 ranks"),
        ("abab", None, "in one level, since the ranks of a host are not consecutive"),
        ("abba", None, "in one level, since the ranks of a host are not consecutive"),
        ("a", None, "in one level, since all ranks are on one host"),
    ],
)
def test_rules(host_of_rank: str, expected: Hosts | None, why: str) -> None:
    found = find_hosts(host_of_rank)
    assert (found.hosts, found.why) == (expected, why)


@pytest.mark.parametrize(
    ("host_of_rank", "ranks_per_host", "is_regular"),
    [
        ("aabb", 2, True),
        ("aaaa", 4, True),
        ("abcd", 1, True),
        ("aaabb", 3, False),
        ("abab", 2, False),
    ],
)
def test_what_the_planner_is_told(host_of_rank: str, ranks_per_host: int, is_regular: bool) -> None:
    found = find_hosts(host_of_rank)
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
    with pytest.raises(ValueError, match="expected one divisor of the 1 ranks on all of them"):
        gather_hosts()
