"""Which ranks share a host, by rule."""

from __future__ import annotations

import pytest

from hotrec.runtime.hosts import RANKS_PER_HOST, Hosts, find_hosts, gather_hosts


@pytest.mark.parametrize(
    ("hosts", "expected", "why"),
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
def test_rules(hosts: str, expected: Hosts | None, why: str) -> None:
    found = find_hosts(hosts)
    assert (found.hosts, found.why) == (expected, why)


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
