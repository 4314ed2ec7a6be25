"""Batches of a program's iterator, each yielded once every rank has one.

Otherwise a rank without another batch, or with an error, would leave the others in a collective
that it never joins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.routing.batches import features_in
from hotrec.runtime.ranks import Group, rank, same_verdict, world_size

# The next item of a rank.
_BATCH, _END, _ERROR = range(3)


class Agreement:
    """Gathers a few integers of every rank on the CPU, while the model computes."""

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

    def close(self) -> None:
        if self._group is not None:
            self._group.close()


@dataclass(frozen=True)
class _Taken:
    """The next item of an iterator: a batch, its end, or its exception."""

    source: Iterator[Any]
    number: int
    batch: Any
    error: Exception | None
    facts: Callable[[], list[list[int]]]

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Handed:
    """A batch that was yielded and is not computed yet.

    Args:
        factor: Factor of this rank's loss, so that the mean over the ranks is that of all samples.
        is_doubtful: Whether its features failed the check on some rank; equal on all ranks.
    """

    factor: float
    is_doubtful: bool


class Feed(Iterator[Any]):
    """The batches of an iterator, the same number on every rank; a collective per batch.

    One batch is prefetched, whose facts the ranks exchange in the background.

    Args:
        source: The program's iterator.
        agreement: Exchanges the facts.
        check: Raises if this rank cannot look up a batch's features.
        is_strict: Whether a batch that fails the check is refused on all ranks; otherwise it is
            yielded as doubtful.
        before: The feeds of earlier iterators, whose last batches come first.
    """

    def __init__(
        self,
        source: Iterator[Any],
        agreement: Agreement,
        check: Callable[[Any], None],
        *,
        is_strict: bool,
        before: Sequence[Feed] = (),
    ) -> None:
        self.source = source
        self._agreement, self._check, self._is_strict = agreement, check, is_strict
        self._num_taken: int = max((b._num_taken for b in before if b.source is source), default=0)
        self._taken: deque[_Taken] = deque(taken for feed in before for taken in feed._taken)
        self.held: deque[Handed] = deque(handed for feed in before for handed in feed.held)
        self._is_over = False
        self.error: RuntimeError | None = None  # at its end, if ranks have different numbers

    def __next__(self) -> Any:
        while not self._is_over:
            taken = self._taken.popleft() if self._taken else self._take()
            facts = taken.facts()
            states = [state for state, _, _ in facts]
            if _ERROR in states:
                self._is_over = True
                same_verdict(taken.raise_error)
            if _END in states:
                if _BATCH in states:
                    self.error = _uneven(taken.number, states)
                self._is_over = self.error is not None or taken.source is self.source
                continue
            sizes = [size for _, size, _ in facts]
            is_doubtful = any(doubt for *_, doubt in facts)
            if not any(sizes):
                raise ValueError(
                    f"batch {taken.number}: expected a sample on some rank, got none. Skip batches "
                    "that are empty on all ranks."
                )
            self.held.append(Handed(factor_of(sizes), is_doubtful))
            if not self._taken:
                self._taken.append(self._take())
            return taken.batch
        raise StopIteration

    def _take(self) -> _Taken:
        batch, error, size, is_doubtful = None, None, -1, False
        try:
            batch = next(self.source, None)
        except Exception as caught:  # of any kind: all ranks must be informed
            error = caught
        if batch is not None:
            try:
                self._check(batch)
            except Exception as caught:
                error, is_doubtful = caught if self._is_strict else None, True
            size = num_samples(batch)
        state = _ERROR if error is not None else _END if batch is None else _BATCH
        facts = self._agreement.start([state, size, int(is_doubtful)])
        number, self._num_taken = self._num_taken, self._num_taken + (batch is not None)
        return _Taken(self.source, number, batch, error, facts)


def num_samples(batch: Any) -> int:
    """The number of bags of each feature of a batch; -1 if unknown, or not the same for all."""
    sizes = {
        -1 if isinstance(f, KeyedJaggedTensor) and f.variable_stride_per_key() else f.stride()
        for f in features_in(batch)
    }
    return sizes.pop() if len(sizes) == 1 else -1


def factor_of(sizes: Sequence[int]) -> float:
    """The factor of this rank's mean that makes the mean over the ranks that of all samples.

    Args:
        sizes: Samples of each rank's batch; -1 if unknown.
    """
    is_known = min(sizes) >= 0 and sum(sizes) > 0
    return sizes[rank()] * len(sizes) / sum(sizes) if is_known else 1.0


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
    fewer, more = states.index(_END), states.index(_BATCH)
    return RuntimeError(
        f"batches: expected the same number on every rank, got {number} on rank {fewer} and more "
        f"than {number} on rank {more}. Make them equal, for example with drop_last=True or by "
        "padding."
    )
