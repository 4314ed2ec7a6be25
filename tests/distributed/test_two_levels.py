"""Rows that cross the network once per host, on ranks that pretend hosts."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.types import Levels, WireType
from tests.distributed.parity_cases import (
    Case,
    make_cases,
    make_level_cases,
    run_hot_cold,
    run_twice,
)
from tests.distributed.test_look_ahead import different
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole, sample

# Number of hosts and of ranks of each, and which of make_level_cases.
SHAPES = [(2, 2, 0), *only_whole((3, 2, 1), (2, 3, 2))]


def check_all(what: str, shape: int, ranks_per_host: int) -> list[str]:
    """What differs on this rank."""
    torch.set_num_threads(1)
    os.environ[RANKS_PER_HOST] = str(ranks_per_host)
    match what:
        case "the unsplit model, twice":
            return run_twice(sample(make_level_cases(shape), first=2, every=3))
        case "every depth":
            return compare_depths(6)
        case _:
            return compare_half(half_cases())


def compare_depths(num_cases: int) -> list[str]:
    """Cases in which the depth of look-ahead, or a repetition, changes a bit of the weights."""
    found = []
    for case in make_cases(num_cases, seed=7):
        case = replace(case, placement="row_wise", levels=Levels.two)
        ahead = replace(case, pipeline="look_ahead")
        for first, *others in (
            (case, case),
            tuple(replace(ahead, depth=depth) for depth in (0, 1, 3, 3)),
        ):
            _, expected = run_hot_cold(first)
            for other in others:
                _, weights = run_hot_cold(other)
                found += [f"{other}: {name}" for name in different(expected, weights)]
    return found


def half_cases() -> list[Case]:
    """From no row to some of each table hot, and messages that are empty on some ranks or all."""
    kinds = ("drawn", "idle_rank", "no_ids", "only_hot")
    cases = zip(make_cases(1 + len(kinds), seed=31)[1:], kinds, strict=True)
    return [
        replace(case, placement="row_wise", batches=kind, levels=Levels.two) for case, kind in cases
    ]


def compare_half(cases: list[Case]) -> list[str]:
    """Cases in which 16 bits between hosts change losses too much, not at all, or by chance."""
    found = []
    for case in cases:
        for wire, kind in product((WireType.fp16, WireType.bf16), ("look_ahead", "sparse_dist")):
            half = replace(case, wire=wire, pipeline=kind)
            expected, exact = run_hot_cold(replace(half, wire=WireType.fp32))
            losses, weights = run_hot_cold(half)
            again, _ = run_hot_cold(half)
            off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            if off > 0.02 or losses != again or not different(exact, weights):
                found.append(f"{half}: losses {losses}, {again}, in fp32 {expected}")
    return found


@pytest.mark.parametrize("what", ["the unsplit model, twice", "every depth", "16 bits"])
@pytest.mark.parametrize(("num_hosts", "ranks_per_host", "shape"), SHAPES)
def test_it_trains_the_same(what: str, num_hosts: int, ranks_per_host: int, shape: int) -> None:
    check = partial(check_all, what, shape, ranks_per_host)
    for found in run_ranks(check, num_hosts * ranks_per_host, timeout_s=280):
        assert not found, "\n".join(found)
