"""Batches of a program's iterator, each yielded once every rank has one.

Otherwise a rank without another batch, or with an error, would leave the others in a collective
that it never joins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hotrec.program.movable import Movable, check_movable
from hotrec.routing.batches import features_in
from hotrec.runtime.ranks import Group, rank, same_verdict, world_size

# The next item of a rank: a batch, the end, an error of the iterator, or a batch to refuse.
_BATCH, _END, _ERROR, _REFUSED = range(4)

# In place of a batch: an iterator that ended or raised has none.
_NONE = object()


class Agreement:
    """Gathers a few integers of every rank on the CPU, while the model computes.

    A rank that stops alone, inside a step, leaves its error to the others, whose collectives fail.
    """

    def __init__(self) -> None:
        self._group = Group("batches", backend="gloo") if world_size() > 1 else None

    def start(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Start to gather; returns a function that waits for the values of each rank."""
        own = torch.tensor(values)
        if self._group is None:
            return lambda: [own.tolist()]
        found = own.new_empty(world_size(), own.numel())
        work: Any = dist.all_gather_into_tensor(
            found.view(-1), own, group=self._group.group, async_op=True
        )

        def wait() -> list[list[int]]:
            work.wait()
            return found.tolist()

        return wait

    def error_of_all(self, error: BaseException) -> BaseException:
        """The error to raise on this rank, whose step raised this one: that of the first to fail.

        Not a collective.
        """
        return error if self._group is None else self._group.first_error(error)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


@dataclass(eq=False)
class Source:
    """An iterator of the program.

    Args:
        batches: The iterator.
        num_taken: The batches taken since its beginning, but for those that wait.
        waiting: What comes before its next item: batches, each with None, or ``_NONE`` and None or
            the iterator's error.
    """

    batches: Iterator[Any]
    num_taken: int = 0
    waiting: deque[tuple[Any, BaseException | None]] = field(default_factory=deque)

    def next(self) -> tuple[Any, BaseException | None]:
        """The next batch or error, or neither at the end."""
        batch, error = self.waiting.popleft() if self.waiting else (_NONE, None)
        if batch is _NONE and error is None:
            try:
                batch = next(self.batches, _NONE)
            except BaseException as caught:  # of any kind: all ranks must be informed
                trace = caught.__traceback__
                # An interrupt in this frame, not in the iterator's, may have lost a batch.
                if not isinstance(caught, Exception) and (trace is None or trace.tb_next is None):
                    raise
                error = caught
        return batch, error


@dataclass
class Taken:
    """The next item of an iterator: a batch, its end, or its exception.

    Args:
        source: The iterator.
        number: The place of the batch in it.
        batch: The batch before it is moved.
        error: The exception.
        facts: Waits for its state and sizes on every rank.
        factor: Factor of this rank's loss, so that the mean over the ranks is that of all samples;
            None on all ranks if its features failed the check on some rank.
    """

    source: Source
    number: int
    batch: Any
    error: BaseException | None
    facts: Callable[[], list[list[int]]]
    factor: float | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def raise_own_error(self) -> None:
        """Raise the iterator's error, once; one of its batch comes when that is offered again."""
        if self.batch is _NONE:
            if self.source.waiting:
                self.source.waiting.popleft()
            self.raise_error()


class Feed(Iterator[Any]):
    """The batches of iterators, the same number on every rank; a collective per batch.

    In training one batch is prefetched, whose facts the ranks exchange in the background. In
    evaluation none is: a pass that is left midway leaves nothing to the next one.

    Where the batches of some rank end, by the iterator's end or an error, it ends on every rank, so
    that a pipeline computes those before. ``raise_end`` then raises the reason, after which the
    iterator is asked again: nothing is lost, and a new pass over the same object is one.

    Args:
        agreement: Exchanges the facts.
        waiting: Gets the sources of which batches wait, for whoever turns to them next.
        check: Raises if this rank cannot look up a batch's features; returns those that are read.
        is_strict: Whether a batch that fails the check is refused on all ranks; otherwise it is
            yielded without a factor.
        is_ahead: Whether a batch is prefetched.
    """

    def __init__(
        self,
        agreement: Agreement,
        waiting: list[Source],
        check: Callable[[Any], Sequence[Any]],
        *,
        is_strict: bool,
        is_ahead: bool,
    ) -> None:
        self.source = Source(iter(()))
        self._agreement, self._waiting, self._check = agreement, waiting, check
        self._is_strict, self._is_ahead = is_strict, is_ahead
        self._taken: deque[Taken] = deque()
        self.held: deque[Taken] = deque()  # yielded, and not computed yet
        self.num_left = math.inf  # how many to yield until a pause, in which none is held
        self._end: Callable[[], None] | None = None

    @property
    def is_paused(self) -> bool:
        return self.num_left == 0 and not self.held

    @property
    def untrained(self) -> list[int]:
        """The places of the batches that were taken and are not computed."""
        return [taken.number for taken in self._uncomputed if taken.batch is not _NONE]

    @property
    def sources(self) -> list[Source]:
        """Those of the next batches."""
        return [self.source, *(taken.source for taken in self._taken)]

    @property
    def _uncomputed(self) -> list[Taken]:
        return [*self.held, *self._taken]

    def turn_to(self, source: Source) -> None:
        """Go on with an iterator, once the batches taken of the one before are computed."""
        if source is self.source:
            return
        self.source = source
        if self._end is _stop:
            self._end = None
        if self._is_ahead:  # its turn comes before that of the next iterator
            self._taken.append(self._take())

    def close(self) -> None:
        """Leave the batches that are not computed to whoever turns to their iterators next."""
        for taken in reversed(self._uncomputed):
            self._offer_again(taken)
        self.held.clear()
        self._taken.clear()
        self.source = Source(iter(()))  # a loader has workers, and holds its dataset open

    def _offer_again(self, taken: Taken) -> None:
        error = taken.error if taken.batch is _NONE else None
        taken.source.waiting.appendleft((taken.batch, error))
        taken.source.num_taken = taken.number
        self._waiting.append(taken.source)

    def __next__(self) -> Any:
        while self._end is None and self.num_left:
            taken = self._taken.popleft() if self._taken else self._take()
            states, least, most = zip(*taken.facts(), strict=True)
            if _ERROR in states:
                self._offer_again(taken)
                self._end = partial(same_verdict, taken.raise_own_error)
            elif _END in states:
                taken.source.num_taken = 0
                if _BATCH in states or _REFUSED in states:
                    self._end = partial(_raise, _uneven(taken.number, states))
                elif taken.source is self.source:
                    self._end = _stop
            elif _REFUSED in states:
                self._end = partial(same_verdict, taken.raise_error)
            elif not any(most):
                self._end = partial(
                    _raise,
                    ValueError(
                        f"batch {taken.number}: expected a sample on some rank, got none. Skip "
                        "batches that are empty on all ranks."
                    ),
                )
            else:
                try:  # an evaluation weights nothing
                    taken.factor = factor_of(least, most if self._is_ahead else least)
                except ValueError as caught:
                    self._end = partial(_raise, _refused(taken.number, caught))
                    continue
                self.num_left -= 1
                self.held.append(taken)
                if self._is_ahead and not self._taken:
                    self._taken.append(self._take())
                return Movable(taken.batch)
        raise StopIteration

    def raise_end(self) -> NoReturn:
        """Raise why there was no further batch, once; a collective."""
        end, self._end = self._end, None
        assert end is not None
        end()
        raise AssertionError

    def _take(self) -> Taken:
        source = self.source
        batch, error = source.next()
        state = _ERROR if error is not None else _END if batch is _NONE else _BATCH
        number, sizes = source.num_taken, [-1]
        if batch is not _NONE:
            is_refused = True
            try:
                check_movable(batch)
                is_refused = self._is_strict
                sizes = [one.stride() for one in features_in(self._check(batch) or batch)] or sizes
            except Exception as caught:
                if is_refused:
                    state, error = _REFUSED, _refused(number, caught)
            source.num_taken += 1
        facts = self._agreement.start([state, min(sizes), max(sizes)])
        return Taken(source, number, batch, error, facts)


def _raise(error: BaseException) -> None:
    raise error


def _stop() -> None:
    raise StopIteration


def _refused(number: int, why: Exception) -> ValueError:
    error = ValueError(f"batch {number}, which no rank computes: {why}")
    error.__cause__ = why
    return error


def factor_of(sizes: Sequence[int], *others: Sequence[int]) -> float | None:
    """The factor of this rank's mean that makes the mean over the ranks that of all samples.

    Args:
        sizes: Bags of a feature in each rank's batch, as many for each sample; -1 if unknown.
        others: Those of other features.

    Returns:
        None on all ranks if it is unknown.

    Raises:
        ValueError: On all ranks, if features differ in it.
    """
    if min(sizes) < 0:
        return None
    total = sum(sizes)
    for other in others:
        if any(a * sum(other) != b * total for a, b in zip(sizes, other, strict=True)):
            raise ValueError(
                "features: expected as many bags for each sample on every rank, got by rank "
                f"{list(sizes)} bags of one feature and {list(other)} of another. Give each sample "
                "as many, with empty bags where it has fewer."
            )
    return sizes[rank()] * len(sizes) / total if total else 1.0


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise a ValueError if batches differ in size, for models without a loss to weight."""
    if len(set(sizes)) > 1:
        other = next(at for at, size in enumerate(sizes) if size != sizes[0])
        raise ValueError(
            f"batches: expected the same number of samples on every rank, got {sizes[0]} on rank 0 "
            f"and {sizes[other]} on rank {other}. Return (loss, anything) from the model, so that "
            "the loss can be weighted, or use equal batches."
        )


def _uneven(number: int, states: Sequence[int]) -> RuntimeError:
    fewer = states.index(_END)
    more = next(at for at, state in enumerate(states) if state != _END)
    return RuntimeError(
        f"batches: expected the same number on every rank, got {number} on rank {fewer} and more "
        f"than {number} on rank {more}. Make them equal, for example with drop_last=True or by "
        "padding."
    )
