"""A trial: candidates that predictions cannot tell apart train on the run's own first batches."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from hotrec.build import Sharded
from hotrec.data.batch import Batch
from hotrec.planning.trial import FIRST_RATIO, Trial
from hotrec.runtime import watchdog
from hotrec.runtime.memory import read_memory
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier
from hotrec.train.pipelines import Pipeline

logger = logging.getLogger(__name__)

# A trial takes this share of the predicted run, within these bounds in seconds.
SHARE, LEAST_S, MOST_S = 0.01, 5.0, 60.0
# A block of steps takes about so long, and has so many steps.
BLOCK_S, LEAST_STEPS, MOST_STEPS = 0.3, 4, 200
LEAST_ROUNDS = 3
# No further candidate is built after this share of the time.
BUILD_SHARE = 0.5
# First steps compile, allocate and start the loader's workers.
NUM_WARM = 4
# Where steps take longer, loaders keep up anyway, and the pipeline is full after so many steps.
LONG_STEP_S, MOST_SKIPPED = 0.1, 4
# Candidates are held at once if they take at most this share of the free memory.
MEMORY_SHARE = 0.7

Build = Callable[[], tuple[Sharded, Iterable[Batch]]]


@dataclass(frozen=True)
class Candidate:
    """How to build a candidate, and what it takes.

    Args:
        build: Builds the sharded model and the loader of training batches; collective.
        num_bytes: Predicted memory of its tables on the fullest rank: of the device, of the host.
        num_ahead: Batches that the loader and the pipeline hold ahead.
    """

    build: Build
    num_bytes: tuple[float, ...]
    num_ahead: int


def trial_seconds(asked_s: float | None, run_s: float) -> float:
    """Seconds of a trial before a run that is predicted to take ``run_s``."""
    return min(MOST_S, max(LEAST_S, SHARE * run_s)) if asked_s is None else asked_s


def run_trial(candidates: Mapping[str, Candidate], ranks: Ranks, *, limit_s: float) -> Trial:
    """Train the candidates in turn, from the same weights, until the fastest is known; collective.

    They are dropped in the end; random states are those of before. Candidates that do not fit into
    memory together are built one after the other, and trained for three blocks each.

    Args:
        candidates: At least two, the most promising first, equal on every rank.
        ranks: The process group.
        limit_s: Seconds after which no further round begins. There are at least two candidates,
            and three rounds unless they take more than MOST_S.

    Returns:
        The trial, equal on every rank.
    """
    trial = _Rounds(ranks, limit_s)
    is_together = _fits(candidates.values(), ranks)
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        if is_together:
            trial.run_together(candidates)
        else:
            logger.info("trial: the candidates do not fit into memory together; one by one")
            trial.run_alone(candidates)
    gc.collect()
    watchdog.enter(watchdog.MAIN, watchdog.START, None)
    return trial.result()


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
    """The blocks that were measured so far."""

    def __init__(self, ranks: Ranks, limit_s: float) -> None:
        self._ranks = ranks
        self._limit_s = limit_s
        self._start_s = time.perf_counter()
        self._block_s: dict[str, list[float]] = {}
        self._hopeless_s: dict[str, list[float]] = {}

    def result(self) -> Trial:
        return Trial({**self._block_s, **self._hopeless_s}, self._seconds())

    def run_together(self, candidates: Mapping[str, Candidate]) -> None:
        held: dict[str, _Contender] = {}
        with Progress("trial", self._limit_s, unit="s", is_shown=self._ranks.is_first) as bar:
            for name, candidate in candidates.items():
                bar.set_postfix_str(name)
                held[name] = _Contender(candidate, self._ranks)
                if len(held) >= 2 and self._seconds() >= BUILD_SHARE * self._limit_s:
                    break
            # The first steps show who is out of the question, before any round.
            least_s = min(contender.step_s for contender in held.values())
            for name in [n for n, c in held.items() if c.step_s > FIRST_RATIO * least_s]:
                contender = held.pop(name)
                self._hopeless_s[name] = [contender.step_s]
                contender.close()
            for number in itertools.count():
                names = list(held)
                shift = number % len(names)
                for name in (*names[shift:], *names[:shift]):
                    bar.set_postfix_str(name)
                    self._block_s.setdefault(name, []).append(held[name].block())
                so_far = self.result()
                bar.update(max(0.0, min(self._limit_s, so_far.seconds) - bar.n))
                for name in [name for name in names if name not in so_far.open_candidates]:
                    held.pop(name).close()
                is_enough = number + 1 >= LEAST_ROUNDS or so_far.seconds >= MOST_S
                if len(held) == 1 or (is_enough and (so_far.is_decided or self._is_over())):
                    break
        for contender in held.values():
            contender.close()

    def run_alone(self, candidates: Mapping[str, Candidate]) -> None:
        for name, candidate in candidates.items():
            contender = _Contender(candidate, self._ranks)
            self._block_s[name] = [contender.block() for _ in range(LEAST_ROUNDS)]
            contender.close()
            if self._is_over() and len(self._block_s) >= 2:
                return

    def _seconds(self) -> float:
        """Seconds since the start on the slowest rank; collective."""
        return max(all_gather_object(time.perf_counter() - self._start_s))

    def _is_over(self) -> bool:
        return self._seconds() >= self._limit_s


class _Contender:
    """A candidate that was built on this rank, and ran its first steps; collective."""

    def __init__(self, candidate: Candidate, ranks: Ranks) -> None:
        watchdog.enter(watchdog.MAIN, watchdog.FIRST_STEP, None)
        self._ranks = ranks
        sharded, loader = candidate.build()
        self._pipeline: Pipeline = sharded.make_pipeline(ranks.device)
        # The same batches again should an epoch be shorter than a trial.
        self._batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
        # What is held ahead was made while another candidate computed.
        self._num_skipped = candidate.num_ahead + 2
        for _ in range(NUM_WARM):
            self._pipeline.progress(self._batches)
        self.step_s = max(all_gather_object(self._time(NUM_WARM)))
        self._num_steps = max(LEAST_STEPS, min(MOST_STEPS, round(BLOCK_S / self.step_s)))
        if self.step_s > LONG_STEP_S:
            self._num_skipped = min(self._num_skipped, MOST_SKIPPED)

    def block(self) -> float:
        """Seconds per step of consecutive steps on the slowest rank; collective."""
        for _ in range(self._num_skipped):
            self._pipeline.progress(self._batches)
        seconds = self._time(self._num_steps)
        self._drain()
        return max(all_gather_object(seconds))

    def _time(self, num_steps: int) -> float:
        self._synchronize()
        start_s = time.perf_counter()
        for number in range(num_steps):
            watchdog.enter(watchdog.MAIN, watchdog.TRIAL, number)
            self._pipeline.progress(self._batches)
        self._synchronize()
        return (time.perf_counter() - start_s) / num_steps

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def _drain(self) -> None:
        """Wait until nothing of this candidate is in flight on any rank."""
        self._pipeline.drain()
        self._synchronize()
        barrier()

    def close(self) -> None:
        """End the candidate's threads and loader, and free its tables; collective."""
        self._drain()
        self._pipeline.close()
        del self._pipeline, self._batches
        gc.collect()
