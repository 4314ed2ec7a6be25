"""Unpooled tables, generated: the unsplit model's losses and weights, and the same bits again."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.types import Levels
from tests.distributed.parity_cases import Case, make_sequence_cases, run_twice
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import sample

NUM_CASES = {1: 28, 2: 40, 3: 36}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sequences_train_the_unsplit_model_and_repeat_bit_for_bit(world_size: int) -> None:
    cases = make_sequence_cases(NUM_CASES[world_size], 40 + world_size)
    for failures in run_ranks(run_twice, world_size, timeout_s=400, cases=sample(cases, 3, 4)):
        assert not failures, "\n".join(failures)


def run_in_two_levels(cases: list[Case]) -> list[str]:
    os.environ[RANKS_PER_HOST] = "2"
    return run_twice(cases)


def test_sequences_on_two_hosts_train_the_unsplit_model() -> None:
    cases = [replace(case, levels=Levels.two) for case in make_sequence_cases(20, 44)]
    for failures in run_ranks(run_in_two_levels, 4, timeout_s=400, cases=sample(cases, 1, 4)):
        assert not failures, "\n".join(failures)
