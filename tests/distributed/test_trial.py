"""A trial on real ranks, of pipelines that take the time of an injected clock."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hotrec.planner.trial import Trial
from hotrec.runs import trial as trials
from hotrec.runs.trial import MIN_ROUNDS, NUM_WARM, Candidate, run_trial, trial_seconds
from hotrec.runtime.ranks import all_gather_object
from hotrec.train import interleave
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks


class Clock:
    """Stands in for the module ``time`` on a rank, whose steps move it on."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = thread_time = perf_counter


class TimedPipeline:
    """Takes so long in each step, in the first ones longer; holds itself, as TorchRec's do."""

    held = most_held = 0

    def __init__(self, clock: Clock, seconds: float, first_s: float) -> None:
        self._clock, self._itself = clock, self
        self._steps_s = itertools.chain([first_s] * 2 * NUM_WARM, itertools.repeat(seconds))
        TimedPipeline.held += 1
        TimedPipeline.most_held = max(TimedPipeline.held, TimedPipeline.most_held)

    def progress(self, batches: Iterator[int]) -> None:
        self._batches = batches
        next(batches)
        self._clock.now_s += next(self._steps_s)

    def drain(self) -> None:
        pass

    def close(self) -> None:
        TimedPipeline.held -= 1


class Loader:
    """Counts the iterators that are under way."""

    under_way = 0

    def __iter__(self) -> Iterator[int]:
        Loader.under_way += 1
        try:
            yield from range(3)
        finally:
            Loader.under_way -= 1


def candidates(
    clock: Clock,
    steps_s: Mapping[str, float],
    num_bytes: float = 0.0,
    first_s: Mapping[str, float] | None = None,
) -> dict[str, Candidate]:
    def candidate(seconds: float, first_s: float) -> Candidate:
        def build() -> tuple[Any, Any]:
            # The workers of a dropped one have ended, though it is in a cycle with its batches:
            # those that are freed with a cycle are waited for for five seconds each.
            assert Loader.under_way == TimedPipeline.held
            pipeline = TimedPipeline(clock, seconds, first_s)
            return SimpleNamespace(pipeline=lambda: pipeline), Loader()

        return Candidate(build, (0.0, num_bytes), num_ahead=1, step_s=seconds)

    return {name: candidate(s, (first_s or steps_s)[name]) for name, s in steps_s.items()}


def tried(
    steps_s: Mapping[str, float | tuple[float, float]],
    limit_s: float,
    *,
    compares_all: bool = False,
    **given: Any,
) -> tuple[Trial, int]:
    """The trial, equal on all ranks, and how many candidates were held at once."""
    clock, ranks = Clock(), this_rank()
    mine = {n: s[ranks.rank] if isinstance(s, tuple) else s for n, s in steps_s.items()}
    before = torch.random.get_rng_state()
    gc.disable()
    with mock.patch.object(trials, "time", clock), mock.patch.object(interleave, "time", clock):
        made = candidates(clock, mine, **given)
        trial = run_trial(made, ranks, limit_s=limit_s, compares_all=compares_all)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert TimedPipeline.held == 0
    assert [other.block_s for other in all_gather_object(trial)] == [trial.block_s] * 2
    return trial, TimedPipeline.most_held


def on_two(**given: Any) -> tuple[Trial, int]:
    found: tuple[Trial, int] = run_ranks(tried, 2, **given)[0]
    return found


@pytest.mark.parametrize(("num_bytes", "most_held"), [(1.0, 2), (1e18, 1)])
def test_the_fastest_is_found_on_every_rank(num_bytes: float, most_held: int) -> None:
    """At once, but for those that are dropped when built, or one by one where they do not fit."""
    steps_s = {"slow": 0.03, "fast": 0.005, "slower": 0.06, "uneven": (0.001, 0.04)}
    trial, held = on_two(steps_s=steps_s, limit_s=60, num_bytes=num_bytes)
    assert held == most_held
    assert trial.chosen == "fast"
    assert trial.open_candidates == ["fast"]
    expected = {n: max(s) if isinstance(s, tuple) else s for n, s in steps_s.items()}
    assert {name: trial.step_s(name) for name in trial.block_s} == pytest.approx(expected)
    # Clearly slower ones have their first steps only, where others are held meanwhile.
    assert len(trial.block_s["slower"]) == (1 if most_held > 1 else MIN_ROUNDS)


def test_two_candidates_are_tried_however_short_the_time() -> None:
    trial, _ = on_two(steps_s={"a": 0.11, "b": 0.12, "c": 0.1, "d": 0.1}, limit_s=0.1)
    assert set(trial.block_s) == {"a", "b"}
    assert min(map(len, trial.block_s.values())) > 1


@pytest.mark.parametrize(("num_bytes", "took_turns"), [(1.0, True), (1e18, False)])
def test_plans_that_are_compared_all_take_all_turns(num_bytes: float, took_turns: bool) -> None:
    """However slow one of them is, and after the fastest is known."""
    steps_s = {"fast": 0.005, "slow": 0.03, "as fast": 0.005}
    trial, _ = on_two(steps_s=steps_s, limit_s=5.0, compares_all=True, num_bytes=num_bytes)
    assert trial.took_turns is took_turns
    assert [*trial.block_s] == [*steps_s]
    (rounds,) = {len(blocks) for blocks in trial.block_s.values()}
    assert rounds > MIN_ROUNDS if took_turns else rounds == MIN_ROUNDS
    assert trial.ratio("slow", "fast")[1] == pytest.approx(6, rel=0.1)


def test_slow_first_steps_of_a_process_drop_no_candidate() -> None:
    first_s = {"starts slowly": 0.018, "b": 0.01}
    trial, _ = on_two(steps_s={"starts slowly": 0.008, "b": 0.01}, limit_s=3.0, first_s=first_s)
    assert trial.chosen == "starts slowly"


def test_the_time_of_those_dropped_is_left_to_others() -> None:
    # A block of "slow" takes 6 steps. Three of them would leave no time for the last candidate.
    trial, _ = on_two(steps_s={"a": 0.02, "slow": 0.3, "b": 0.01}, limit_s=6.0)
    assert trial.chosen == "b"
    assert set(trial.block_s) == {"a", "slow", "b"}


def test_a_trial_takes_a_share_of_the_run_within_bounds() -> None:
    made = candidates(Clock(), {"a": 0.01, "b": 0.01, "c": 9.0}).values()
    asked = [trial_seconds(None, run_s, made)[0] for run_s in (1.0, 1000.0, math.inf)]
    assert asked == [5.0, 10.0, 60.0]
    limit_s, least_s = trial_seconds(0.5, 1000.0, made)  # 2 are built, and tried in three blocks
    assert (limit_s, least_s) == (0.5, pytest.approx(2 * (trials.BUILD_S + (8 + 3 * 15) * 0.01)))
