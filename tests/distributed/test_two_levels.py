"""Rows that cross the network once per host, on ranks that pretend hosts."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.types import Levels, Tier, WireType
from tests.distributed.parity_cases import (
    Case,
    make_cases,
    make_pipeline_cases,
    run_cases,
    run_hot_cold,
)
from tests.distributed.test_look_ahead import different
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole

NUM_CASES = 16  # of each shape, pipelines and plain loops alike


def cases_of(world_size: int) -> list[Case]:
    first = world_size * NUM_CASES
    plain = make_cases(first + NUM_CASES // 4, seed=23)[first:]
    ahead = make_pipeline_cases(first + NUM_CASES, seed=29)[first + NUM_CASES // 4 :]
    cases = [replace(case, levels=Levels.two) for case in plain + ahead]
    # Slots need look-ahead and rows that are exchanged.
    return [
        replace(case, tier=Tier.CACHED, cache_load_frac=1.0, placement="row_wise", popular_frac=0.3)
        if case.pipeline == "look_ahead" and at % 3 == 0
        else case
        for at, case in enumerate(cases)
    ]


def check_all(ranks_per_host: int) -> dict[str, list[str]]:
    """What differs on this rank."""
    torch.set_num_threads(1)
    os.environ[RANKS_PER_HOST] = str(ranks_per_host)
    try:
        return {
            "unsplit model": run_cases(cases_of(dist.get_world_size())),
            "depths": compare_depths(6),
            "16 bits": compare_half(4),
        }
    finally:
        del os.environ[RANKS_PER_HOST]


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


def compare_half(num_cases: int) -> list[str]:
    """Cases in which 16 bits between hosts change losses too much, not at all, or by chance."""
    found = []
    # The first has all rows hot.
    for case in make_cases(num_cases + 1, seed=31)[1:]:
        case = replace(case, placement="row_wise", batches="drawn", levels=Levels.two)
        for wire, kind in product((WireType.fp16, WireType.bf16), ("look_ahead", "sparse_dist")):
            half = replace(case, wire=wire, pipeline=kind)
            expected, exact = run_hot_cold(replace(half, wire=WireType.fp32))
            losses, weights = run_hot_cold(half)
            again, _ = run_hot_cold(half)
            off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
            if off > 0.02 or losses != again or not different(exact, weights):
                found.append(f"{half}: losses {losses}, {again}, in fp32 {expected}")
    return found


SHAPES = [(2, 2), *only_whole((3, 2), (2, 3))]


@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), SHAPES)
def test_it_trains_the_unsplit_model_and_look_ahead_changes_no_bit(
    num_hosts: int, ranks_per_host: int
) -> None:
    size = num_hosts * ranks_per_host
    for found in run_ranks(check_all, size, timeout_s=280, ranks_per_host=ranks_per_host):
        failures = [f"{what}: {line}" for what, lines in found.items() for line in lines]
        assert not failures, "\n".join(failures)
