"""A trial: candidates with overlapping predictions are trained on the run's first batches."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

import torch

from hotrec.assemble.trainable import Trainable
from hotrec.data.batch import Batch
from hotrec.planner.trial import Trial
from hotrec.runtime import watchdog
from hotrec.runtime.memory import read_memory
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier
from hotrec.train.interleave import in_turn, run_block
from hotrec.train.pipelines import Pipeline

logger = logging.getLogger(__name__)

# A trial takes this share of the predicted run, within these bounds in seconds.
SHARE, MIN_S, MAX_S = 0.01, 5.0, 60.0
# It may exceed its seconds by this factor if two candidates or MIN_ROUNDS need that.
OVERRUN = 1.3
# Duration and number of steps of a block. Blocks of one candidate differ by more than the variance
# of their steps: many short blocks are more informative than a few long ones (11 ms per step on two
# cores: as much in 3.5 s as blocks of 0.3 s in 5 s).
BLOCK_S, MIN_STEPS, MAX_STEPS = 0.12, 4, 200
MIN_ROUNDS = 3
# First steps compile, allocate and start the loader's workers.
NUM_WARM = 4
# A candidate whose timed first steps take this much longer than another's is dropped. Those of the
# first candidate of a process took up to 1.8 times as long as its later ones.
FIRST_STEPS_RATIO = 2.0
# If steps take longer, loaders keep up anyway: fewer steps are needed to warm up, to fill the
# pipeline, and in a block, which leaves time for more candidates.
LONG_STEP_S, LONG_STEPS = 0.1, 2
# Assumed before anything is built: workers and first collectives, and the tables' first weights.
BUILD_S, BUILD_BYTES_PER_S = 1.0, 2e8
# Candidates are kept at the same time if they need at most this share of the free memory.
MEMORY_SHARE = 0.7

Build = Callable[[], tuple[Trainable, Iterable[Batch]]]


@dataclass(frozen=True)
class Candidate:
    """How to build a candidate, and its memory and time.

    Args:
        build: Builds the sharded model and the loader of training batches; collective.
        num_bytes: Predicted memory of its tables on the fullest rank: of the device, of the host.
        num_ahead: Batches prefetched by loader and pipeline.
        step_s: Predicted seconds of a step.
        title: Its display name.
    """

    build: Build
    num_bytes: tuple[float, ...]
    num_ahead: int
    step_s: float
    title: str = ""

    @property
    def num_warm(self) -> int:
        """Untimed first steps, and timed ones after them."""
        return NUM_WARM if self.step_s <= LONG_STEP_S else LONG_STEPS

    def block_steps(self, step_s: float) -> tuple[int, int]:
        """Untimed and timed steps of a block, if a step takes ``step_s``.

        Prefetched batches were loaded while another candidate computed.
        """
        if step_s > LONG_STEP_S:
            return LONG_STEPS, LONG_STEPS
        return self.num_ahead + 2, max(MIN_STEPS, min(MAX_STEPS, round(BLOCK_S / step_s)))

    @property
    def min_s(self) -> float:
        """Predicted seconds to build it, and to measure it in MIN_ROUNDS."""
        num_steps = 2 * self.num_warm + MIN_ROUNDS * sum(self.block_steps(self.step_s))
        return BUILD_S + sum(self.num_bytes) / BUILD_BYTES_PER_S + num_steps * self.step_s


def trial_seconds(
    asked_s: float | None, run_s: float, candidates: Iterable[Candidate]
) -> tuple[float, float]:
    """Seconds of a trial before a run that is predicted to take ``run_s``.

    Returns:
        The time budget, after which no further round starts, and the predicted time of the two
        candidates that are always measured.
    """
    limit_s = min(MAX_S, max(MIN_S, SHARE * run_s)) if asked_s is None else asked_s
    return limit_s, sum(candidate.min_s for candidate in itertools.islice(candidates, 2))


def run_trial(
    candidates: Mapping[str, Candidate],
    ranks: Ranks,
    *,
    limit_s: float,
    compares_all: bool = False,
) -> Trial:
    """Interleave training of the candidates until the fastest is known; collective.

    All start from the same weights. They are freed at the end; random states are restored.
    Candidates that do not fit into memory together are built one after the other, and trained for
    three blocks each.

    Args:
        candidates: At least two, the most promising first, equal on every rank.
        ranks: The process group.
        limit_s: Seconds after which no further round begins. There are at least two candidates,
            and three rounds unless they take more than MAX_S; others are built as long as all
            are expected to end within OVERRUN of it.
        compares_all: Whether to measure all candidates in all rounds until the seconds are over,
            to compare them, instead of only those that may still be the fastest.

    Returns:
        The trial, equal on every rank.
    """
    contest = _Contest(ranks, limit_s, compares_all=compares_all)
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    took_turns = _fits(candidates.values(), ranks)
    with torch.random.fork_rng(devices=devices):
        if took_turns:
            contest.interleave(candidates)
        else:
            logger.info("trial: the candidates do not fit into memory together")
            contest.run_alone(candidates)
    gc.collect()
    watchdog.enter(watchdog.MAIN, watchdog.START, None)
    return Trial({**contest.block_s, **contest.first_s}, contest.seconds(), took_turns=took_turns)


def _fits(candidates: Iterable[Candidate], ranks: Ranks) -> bool:
    device_bytes, host_bytes = (
        sum(of) for of in zip(*(c.num_bytes for c in candidates), strict=True)
    )
    free_device = math.inf
    if ranks.device.type == "cuda":
        free_device = torch.cuda.mem_get_info()[0]
    of_rank = read_memory()[1] / ranks.local_world_size
    fits = host_bytes <= MEMORY_SHARE * of_rank and device_bytes <= MEMORY_SHARE * free_device
    return all(all_gather_object(fits))


class _Contest:
    """The blocks measured so far, by candidate, and the candidates that are held."""

    def __init__(self, ranks: Ranks, limit_s: float, *, compares_all: bool) -> None:
        self._ranks, self._limit_s, self._compares_all = ranks, limit_s, compares_all
        self._start_s = time.perf_counter()
        self._held: dict[str, _Contender] = {}
        self.block_s: dict[str, list[float]] = {}
        self.first_s: dict[str, list[float]] = {}  # of candidates without rounds

    def interleave(self, candidates: Mapping[str, Candidate]) -> None:
        """Rounds of all candidates, or of those that may still be fastest."""
        with Progress("trial", self._limit_s, unit="s", is_shown=self._ranks.is_first) as bar:
            for number, (name, candidate) in enumerate(candidates.items()):
                if not (self._compares_all or number < 2 or self._has_time(number)):
                    break
                bar.set_postfix_str(candidate.title)
                self._held[name] = _Contender(candidate, self._ranks)
                self._drop_slow()
            for number in itertools.count(1):
                for name in in_turn(list(self._held), number - 1):
                    bar.set_postfix_str(self._held[name].title)
                    self.block_s.setdefault(name, []).append(self._held[name].block())
                so_far = Trial(self.block_s, self.seconds())
                bar.update(max(0.0, min(self._limit_s, so_far.seconds) - bar.n))
                if self._is_over(so_far, number):
                    break
        for name in list(self._held):
            self._held.pop(name).close()

    def run_alone(self, candidates: Mapping[str, Candidate]) -> None:
        """Blocks of one candidate after the other."""
        for number, (name, candidate) in enumerate(candidates.items()):
            if number >= 2 and not self._compares_all and self.seconds() >= self._limit_s:
                break
            contender = _Contender(candidate, self._ranks)
            self.block_s[name] = [contender.block() for _ in range(MIN_ROUNDS)]
            contender.close()
            gc.collect()

    def _has_time(self, num_built: int) -> bool:
        """Whether one more can be built and measured; its time is the average of those before."""
        spent_s, rounds_s = self.seconds(), MIN_ROUNDS * self._round_s
        needed_s = spent_s + spent_s / num_built + rounds_s + rounds_s / len(self._held)
        return needed_s <= OVERRUN * self._limit_s

    def _drop_slow(self) -> None:
        """Drop candidates whose first steps already rule them out."""
        min_s = min(contender.step_s for contender in self._held.values())
        for name, contender in list(self._held.items()):
            if not self._compares_all and contender.step_s > FIRST_STEPS_RATIO * min_s:
                self.first_s[name] = [contender.step_s]
                self._held.pop(name).close()

    def _is_over(self, so_far: Trial, num_rounds: int) -> bool:
        """Whether to end after a round; drops candidates that are not the fastest."""
        is_enough, has_won = num_rounds >= MIN_ROUNDS, False
        if not self._compares_all:
            for name in [name for name in self._held if name not in so_far.open_candidates]:
                self._held.pop(name).close()
            is_enough |= so_far.seconds >= MAX_S
            has_won = len(self._held) == 1 or (is_enough and so_far.is_decided)
        return has_won or (is_enough and so_far.seconds + self._round_s > self._limit_s)

    @property
    def _round_s(self) -> float:
        """Expected seconds of a round."""
        return sum(contender.block_s for contender in self._held.values())

    def seconds(self) -> float:
        """Seconds since the start on the slowest rank; collective."""
        return max(all_gather_object(time.perf_counter() - self._start_s))


class _Contender:
    """A candidate built on this rank, after its first steps; collective."""

    def __init__(self, candidate: Candidate, ranks: Ranks) -> None:
        watchdog.enter(watchdog.MAIN, watchdog.FIRST_STEP, None)
        self._device = ranks.device
        self._num_steps = 0
        self.title = candidate.title
        trainable, loader = candidate.build()
        self._pipeline: Pipeline = trainable.pipeline()
        self._batches = _repeat(loader)
        # A rough time; the pipeline stays filled, and its next block continues from here.
        self.step_s = self._measure(candidate.num_warm, candidate.num_warm, drains=False)
        self._block_steps = candidate.block_steps(self.step_s)

    @property
    def block_s(self) -> float:
        """Expected seconds of a block, by the first steps."""
        return sum(self._block_steps) * self.step_s

    def block(self) -> float:
        """Seconds per step of consecutive steps on the slowest rank; collective."""
        return self._measure(*self._block_steps)

    def _measure(self, num_skipped: int, num_steps: int, *, drains: bool = True) -> float:
        num_all = num_skipped + num_steps
        block = run_block(self, num_all, num_skipped, self._device, drains=drains)
        return max(all_gather_object(block.mean_step_s))

    def step(self) -> None:
        """One training step."""
        watchdog.enter(watchdog.MAIN, watchdog.TRIAL, self._num_steps)
        self._num_steps += 1
        self._pipeline.progress(self._batches)

    def drain(self) -> None:
        """Wait until nothing of this candidate is in flight on any rank; collective."""
        self._pipeline.drain()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        barrier()

    def close(self) -> None:
        """Stop the candidate's threads and loader; collective."""
        self.drain()
        self._pipeline.close()
        # Now, not with the pipeline: that is freed as a cycle, in which the queues of the loader's
        # workers are closed first, and each would block for five seconds.
        self._batches.close()
        del self._pipeline, self._batches


def _repeat(loader: Iterable[Batch]) -> Generator[Batch, None, None]:
    """The batches of a loader, repeated if an epoch is shorter than the trial."""
    while True:
        yield from loader
