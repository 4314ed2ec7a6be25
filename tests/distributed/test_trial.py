"""A trial on real ranks: pipelines that only sleep, so that the fastest is known."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotrec.planner.trial import Trial
from hotrec.runs.trial import (
    BUILD_S,
    MIN_ROUNDS,
    NUM_WARM,
    Candidate,
    _Contender,
    run_trial,
    run_turns,
    trial_seconds,
)
from hotrec.runtime.ranks import all_gather_object
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks

SLEEPS_S = {"slow": 0.03, "fast": 0.005, "slower": 0.06}
# Rank 1 alone is slow with this candidate, and all ranks wait for it.
UNEVEN = "uneven"


class SleepingPipeline:
    """Sleeps in each step, in the first ones longer; counts how many pipelines are held at once."""

    held = 0
    most_held = 0

    def __init__(self, seconds: float, first_s: float) -> None:
        self._sleeps_s = itertools.chain([first_s] * 2 * NUM_WARM, itertools.repeat(seconds))
        SleepingPipeline.held += 1
        SleepingPipeline.most_held = max(SleepingPipeline.held, SleepingPipeline.most_held)

    def progress(self, batches: Iterator[int]) -> None:
        next(batches)
        time.sleep(next(self._sleeps_s))

    def drain(self) -> None:
        pass

    def close(self) -> None:
        SleepingPipeline.held -= 1


def sleeping(
    sleeps_s: Mapping[str, float],
    num_bytes: float = 0.0,
    first_s: Mapping[str, float] | None = None,
) -> dict[str, Candidate]:
    def candidate(seconds: float, first_s: float) -> Candidate:
        def build() -> tuple[Any, Any]:
            pipeline = SleepingPipeline(seconds, first_s)
            return SimpleNamespace(pipeline=lambda: pipeline), range(3)

        return Candidate(build, (0.0, num_bytes), num_ahead=1, step_s=seconds)

    return {name: candidate(s, (first_s or sleeps_s)[name]) for name, s in sleeps_s.items()}


def try_sleeping(num_bytes: float) -> tuple[Trial, list[Trial], int]:
    ranks = this_rank()
    sleeps_s = {**SLEEPS_S, UNEVEN: 0.04 if ranks.rank == 1 else 0.001}
    SleepingPipeline.held = SleepingPipeline.most_held = 0
    before = torch.random.get_rng_state()
    trial = run_trial(sleeping(sleeps_s, num_bytes), ranks, limit_s=60)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert SleepingPipeline.held == 0
    return trial, all_gather_object(trial), SleepingPipeline.most_held


@pytest.mark.parametrize(("num_bytes", "most_held"), [(1.0, 2), (1e18, 1)])
def test_the_fastest_is_found_on_every_rank(num_bytes: float, most_held: int) -> None:
    """At once, but for those that are dropped when built, or one by one where they do not fit."""
    for trial, of_ranks, held in run_ranks(try_sleeping, 2, num_bytes=num_bytes):
        assert held == most_held
        assert [other.block_s for other in of_ranks] == [trial.block_s] * 2
        assert trial.chosen == "fast"
        assert trial.open_candidates == ["fast"]
        assert set(trial.block_s) == {*SLEEPS_S, UNEVEN}
        assert trial.step_s(UNEVEN) > 0.04  # the slowest rank's
        # Clearly slower ones have their first steps only, where others are held meanwhile.
        rounds = 1 if most_held > 1 else MIN_ROUNDS
        assert len(trial.block_s["slower"]) == rounds


def try_long() -> Trial:
    candidates = sleeping({"a": 0.11, "b": 0.12, "c": 0.1, "d": 0.1})
    return run_trial(candidates, this_rank(), limit_s=0.1)


def test_two_candidates_are_tried_however_short_the_time() -> None:
    for trial in run_ranks(try_long, 2):
        assert set(trial.block_s) == {"a", "b"}
        assert min(map(len, trial.block_s.values())) > 1


def take_turns(num_bytes: float) -> Trial:
    sleeps_s = {"fast": 0.005, "slow": 0.03, "as fast": 0.005}
    return run_turns(sleeping(sleeps_s, num_bytes), this_rank(), limit_s=5.0)


@pytest.mark.parametrize(("num_bytes", "took_turns"), [(1.0, True), (1e18, False)])
def test_plans_that_are_compared_all_take_all_turns(num_bytes: float, took_turns: bool) -> None:
    """However slow one of them is, and after the fastest is known."""
    for trial in run_ranks(take_turns, 2, num_bytes=num_bytes):
        assert trial.took_turns is took_turns
        assert [*trial.block_s] == ["fast", "slow", "as fast"]
        (rounds,) = {len(blocks) for blocks in trial.block_s.values()}
        assert rounds > MIN_ROUNDS if took_turns else rounds == MIN_ROUNDS
        assert trial.ratio("slow", "fast")[1] > 2


def try_slow_start() -> Trial:
    first_s = {"starts slowly": 0.018, "b": 0.01}
    return run_trial(
        sleeping({**first_s, "starts slowly": 0.008}, first_s=first_s), this_rank(), limit_s=3.0
    )


def test_slow_first_steps_of_a_process_drop_no_candidate() -> None:
    for trial in run_ranks(try_slow_start, 2):
        assert len(trial.block_s["starts slowly"]) > 1
        assert max(trial.block_s["starts slowly"]) < 0.018


def try_after_slow_ones() -> Trial:
    # A block of "slow" takes 6 steps. Three of them would leave no time for the last candidate.
    return run_trial(sleeping({"a": 0.02, "slow": 0.3, "b": 0.01}), this_rank(), limit_s=6.0)


def test_the_time_of_those_dropped_is_left_to_others() -> None:
    for trial in run_ranks(try_after_slow_ones, 2):
        assert trial.chosen == "b"
        assert set(trial.block_s) == {"a", "slow", "b"}


class Cycle(SleepingPipeline):
    """Holds its batches and itself, as TorchRec's pipelines do."""

    def progress(self, batches: Iterator[int]) -> None:
        self._itself, self._batches = self, batches
        super().progress(batches)


class Watched:
    """A loader that counts the iterators that are under way."""

    under_way = 0

    def __iter__(self) -> Iterator[int]:
        self.under_way += 1
        try:
            yield from range(3)
        finally:
            self.under_way -= 1


def try_cycle() -> list[int]:
    loader = Watched()
    trainable: Any = SimpleNamespace(pipeline=lambda: Cycle(0.001, 0.001))
    gc.disable()
    candidate = Candidate(lambda: (trainable, loader), (0.0, 1.0), num_ahead=1, step_s=0.001)
    contender = _Contender(candidate, this_rank())
    meanwhile = loader.under_way
    contender.close()
    return [meanwhile, loader.under_way]


def test_a_candidate_ends_its_loader_though_a_cycle_holds_it() -> None:
    """Workers of an iterator that is freed in a cycle are waited for for five seconds each."""
    assert run_ranks(try_cycle, 1) == [[1, 0]]


def test_seconds_of_a_trial() -> None:
    made = sleeping({"a": 0.01, "b": 0.01, "c": 9.0}).values()
    asked = [trial_seconds(None, run_s, made)[0] for run_s in (1.0, 1000.0, math.inf)]
    assert asked == [5.0, 10.0, 60.0]
    limit_s, least_s = trial_seconds(0.5, 1000.0, made)
    assert limit_s == 0.5
    # Two of 10 ms a step: 8 first steps, and three blocks of 3 untimed and 12 timed ones.
    assert least_s == pytest.approx(2 * (BUILD_S + (8 + 3 * 15) * 0.01))
    # Long steps: 4 first ones, and three blocks of 2 untimed and 2 timed ones.
    long = sleeping({"a": 0.2, "b": 0.2}).values()
    assert trial_seconds(0.5, 1000.0, long)[1] == pytest.approx(2 * (BUILD_S + (4 + 3 * 4) * 0.2))
