"""A trial: candidates with overlapping predictions are trained on the run's first batches."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
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


def run_trial(candidates: Mapping[str, Candidate], ranks: Ranks, *, limit_s: float) -> Trial:
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

    Returns:
        The trial, equal on every rank.
    """
    trial = _Rounds(ranks, limit_s)
    return trial.run(candidates, trial.choose_together, 2)


def run_turns(candidates: Mapping[str, Candidate], ranks: Ranks, *, limit_s: float) -> Trial:
    """Interleave all candidates until the budget is used up, to compare them; see ``run_trial``.

    Returns:
        The trial, equal on every rank; all candidates have the same number of blocks, at least
        three.
    """
    trial = _Rounds(ranks, limit_s)
    return trial.run(candidates, trial.compare_together, len(candidates))


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


class _Rounds:
    """The blocks measured so far."""

    def __init__(self, ranks: Ranks, limit_s: float) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._start_s = time.perf_counter()
        self._block_s: dict[str, list[float]] = {}
        self._first_s: dict[str, list[float]] = {}  # of candidates without rounds
        self._took_turns = True

    def run(
        self,
        candidates: Mapping[str, Candidate],
        together: Callable[[Mapping[str, Candidate]], None],
        num_needed: int,
    ) -> Trial:
        """Run the candidates together, or alone if they do not fit, at least ``num_needed``."""
        is_together = _fits(candidates.values(), self._ranks)
        devices = [self._ranks.device] if self._ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if is_together:
                together(candidates)
            else:
                logger.info(
                    "trial: the candidates do not fit into memory together; measuring one by one"
                )
                self._run_alone(candidates, num_needed)
        gc.collect()
        watchdog.enter(watchdog.MAIN, watchdog.START, None)
        blocks = {**self._block_s, **self._first_s}
        return Trial(blocks, self._seconds(), took_turns=self._took_turns)

    def compare_together(self, candidates: Mapping[str, Candidate]) -> None:
        """Rounds of all candidates."""
        with Progress("turns", self._limit_s, unit="s", is_shown=self._ranks.is_first) as bar:
            held = {}
            for name, candidate in candidates.items():
                bar.set_postfix_str(candidate.title)
                held[name] = _Contender(candidate, self._ranks)
            for number in itertools.count():
                so_far = self._round(held, number, bar)
                is_over = so_far.seconds + _round_s(held.values()) > self._limit_s
                if number + 1 >= MIN_ROUNDS and is_over:
                    break
        for contender in held.values():
            contender.close()

    def choose_together(self, candidates: Mapping[str, Candidate]) -> None:
        """Rounds of the candidates that may still be fastest."""
        with Progress("trial", self._limit_s, unit="s", is_shown=self._ranks.is_first) as bar:
            held = self._build(candidates, bar)
            self._drop_late(held)
            for number in itertools.count():
                so_far = self._round(held, number, bar)
                for name in [name for name in held if name not in so_far.open_candidates]:
                    held.pop(name).close()
                is_enough = number + 1 >= MIN_ROUNDS or so_far.seconds >= MAX_S
                is_over = so_far.seconds + _round_s(held.values()) > self._limit_s
                if len(held) == 1 or (is_enough and (so_far.is_decided or is_over)):
                    break
        for contender in held.values():
            contender.close()

    def _round(self, held: Mapping[str, _Contender], number: int, bar: Progress) -> Trial:
        """One block of each, in rotating order; returns the measurements so far."""
        for name in in_turn(list(held), number):
            bar.set_postfix_str(held[name].title)
            self._block_s.setdefault(name, []).append(held[name].block())
        so_far = Trial(self._block_s, self._seconds())
        bar.update(max(0.0, min(self._limit_s, so_far.seconds) - bar.n))
        return so_far

    def _build(self, candidates: Mapping[str, Candidate], bar: Progress) -> dict[str, _Contender]:
        """Build two candidates, and more while time allows.

        Drops candidates whose first steps already rule them out.
        """
        held: dict[str, _Contender] = {}
        for num_built, (name, candidate) in enumerate(candidates.items()):
            bar.set_postfix_str(candidate.title)
            if num_built >= 2:
                # Its time is estimated as the average of those before.
                spent_s, rounds_s = self._seconds(), MIN_ROUNDS * _round_s(held.values())
                needed_s = spent_s + spent_s / num_built + rounds_s + rounds_s / len(held)
                if needed_s > self._max_s:
                    break
            held[name] = _Contender(candidate, self._ranks)
            min_s = min(contender.step_s for contender in held.values())
            for other in [n for n, c in held.items() if c.step_s > FIRST_STEPS_RATIO * min_s]:
                self._drop(other, held)
        return held

    def _drop_late(self, held: dict[str, _Contender]) -> None:
        """Drop the slowest if time is short, but keep two."""
        spent_s = self._seconds()
        for name in sorted(held, key=lambda name: held[name].step_s, reverse=True):
            needed_s = spent_s + MIN_ROUNDS * _round_s(held.values())
            if len(held) > 2 and needed_s > self._max_s:
                self._drop(name, held)

    def _drop(self, name: str, held: dict[str, _Contender]) -> None:
        contender = held.pop(name)
        self._first_s[name] = [contender.step_s]
        contender.close()

    def _run_alone(self, candidates: Mapping[str, Candidate], num_needed: int) -> None:
        self._took_turns = False
        for name, candidate in candidates.items():
            contender = _Contender(candidate, self._ranks)
            self._block_s[name] = [contender.block() for _ in range(MIN_ROUNDS)]
            contender.close()
            gc.collect()
            if self._seconds() >= self._limit_s and len(self._block_s) >= num_needed:
                return

    @property
    def _max_s(self) -> float:
        return OVERRUN * self._limit_s

    def _seconds(self) -> float:
        """Seconds since the start on the slowest rank; collective."""
        return max(all_gather_object(time.perf_counter() - self._start_s))


def _round_s(held: Collection[_Contender]) -> float:
    """Expected seconds of a round."""
    return sum(contender.block_s for contender in held)


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
