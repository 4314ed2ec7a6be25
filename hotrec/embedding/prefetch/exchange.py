"""What travels between the ranks, and when: the communication thread's side of look-ahead.

Of a row that batch b reads, the lag is b minus the last batch before it that reads the row (any
rank). Its value is final when that batch's update is applied. With depth d, in the order in which
every rank runs them, the exchanges of step s are

    admit(s + d)   rows of batch s + d are asked of their owners; these answer how long ago each
                   was read, and which rows of batch s + d - 1 are read again
    fetch(s)       rows of batches after s that became final with the update of s - 1
    urgent(s)      gradients of the rows of s that s + 1 reads, and these rows, updated
    late(s)        the other gradients of s

late(s - 1) comes before fetch(s), so that what fetch sends is final. A row of s is in one of urgent
and late on all ranks, since its owner says which: it is updated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotrec.embedding.flat import put_rows
from hotrec.embedding.hot_exchange import HotReplicas
from hotrec.embedding.prefetch.lane import used_here
from hotrec.embedding.prefetch.layout import Asked, ColdLayout
from hotrec.embedding.prefetch.messages import (
    ByClass,
    Counts,
    Selection,
    pack,
    read_together,
    sizes,
    unpack,
)
from hotrec.embedding.prefetch.stores import OwnedRows
from hotrec.embedding.prefetch.window import (
    LONG_AGO,
    AheadBatch,
    Conversation,
    Gradients,
    num_hot_rows,
)
from hotrec.runtime.host_ints import HostInts, ints_on
from hotrec.runtime.stages import named_range
from hotrec.runtime.watchdog import COMMUNICATION, enter
from hotrec.runtime.wire import Wire


@dataclass(frozen=True)
class Group:
    """One embedding dimension of one collection.

    Args:
        dim: D.
        num_hot_keys: hot tables, which come first among the keys of its routed rows.
        hot_begins_T: int64, where each hot table begins in the replica; None without any.
        replica: None without hot tables.
        layout: None without cold tables, on all ranks alike.
        owned: this rank's cold rows.
    """

    dim: int
    num_hot_keys: int
    hot_begins_T: torch.Tensor | None
    replica: HotReplicas | None
    layout: ColdLayout | None
    owned: OwnedRows


class ColdExchange:
    """Runs on the communication thread alone, but for its construction.

    Args:
        groups: of all collections, in the same order on all ranks.
        wire: of this thread.
        depth: d, batches that are admitted ahead of the step.
        device: of the rows.
    """

    def __init__(
        self, groups: Sequence[Group], wire: Wire, depth: int, device: torch.device
    ) -> None:
        self._groups = groups
        self._cold = [index for index, group in enumerate(groups) if group.layout is not None]
        self._hot = [index for index, group in enumerate(groups) if group.replica is not None]
        self._dims = [groups[index].dim for index in self._cold]
        self._wire = wire
        self._depth = depth
        self._device = device
        # The last batch that reads each owned row; far below any number at first.
        self._last_read = [
            torch.full((groups[index].owned.num_rows,), -LONG_AGO - 1, device=device)
            for index in self._cold
        ]
        self._newest: AheadBatch | None = None

    def admit(self, batch: AheadBatch) -> None:
        """Ask for a batch's rows, and find the conflicts with other batches.

        In evaluation, and without look-ahead, nothing is updated between asking and reading.
        """
        enter(COMMUNICATION, "ids_exchange")
        with named_range("ids_exchange"):
            asked = self._find_owners(batch)
            num_to: Counts = [[] for _ in range(self._size)]
            if asked:
                num_to_WG = torch.stack([part.num_to_W for part in asked], dim=1)
                num_to = _rows_of(HostInts(num_to_WG).wait(), len(asked))
            num_hot = [
                num_hot_rows(batch.groups[index].rows, self._groups[index].num_hot_keys)
                for index in self._hot
            ]
            width = len(asked) + len(num_hot)
            told = ints_on(self._device, [num for row in num_to for num in (*row, *num_hot)])
            heard = self._wire.all_to_all(told, [width] * self._size, [width] * self._size)
            counts = _rows_of(HostInts(heard).wait(), width) if width else num_to
            batch.hot_counts = [row[len(asked) :] for row in counts]
            if asked:
                num_from = [row[: len(asked)] for row in counts]
                batch.conversation = self._converse(batch, asked, num_to, num_from)
        self._newest = batch

    @property
    def _size(self) -> int:
        return self._wire.world_size

    def _find_owners(self, batch: AheadBatch) -> list[Asked]:
        """By cold group; empty where no cold rows are exchanged."""
        if batch.is_all_hot:
            return []
        found = []
        for index in self._cold:
            group = self._groups[index]
            assert group.layout is not None
            found.append(group.layout.find(batch.groups[index].rows, group.num_hot_keys))
        return found

    def _converse(
        self, batch: AheadBatch, asked: list[Asked], num_to: Counts, num_from: Counts
    ) -> Conversation:
        ones = [1] * len(asked)
        positions = self._send([part.positions_U for part in asked], num_to, num_from, ones)
        positions = [part.view(-1).long() for part in positions]
        talk = Conversation(asked, num_to, num_from, positions)
        if batch.will_update and self._depth > 0:
            self._find_conflicts(batch, talk)
        return talk

    def _find_conflicts(self, batch: AheadBatch, talk: Conversation) -> None:
        """Tell the others how long ago their rows were read, and which of the last batch are again.

        Both as bytes, in one message.
        """
        number = batch.number
        lags_here, needs_here = [], []
        for last_read, positions in zip(self._last_read, talk.positions, strict=True):
            lag_R = number - last_read.index_select(0, positions)
            lags_here.append((lag_R.clamp_(max=self._depth + 1) - 1).to(torch.uint8))
        for last_read, positions in zip(self._last_read, talk.positions, strict=True):
            last_read[positions] = number
        before = self._before(batch)
        told_to, heard_from = talk.num_from, talk.num_to
        if before is not None:
            for last_read, positions in zip(self._last_read, before.positions, strict=True):
                is_late = last_read.index_select(0, positions) != number
                needs_here.append(is_late.to(torch.uint8))
            told_to = [[*a, *b] for a, b in zip(told_to, before.num_from, strict=True)]
            heard_from = [[*a, *b] for a, b in zip(heard_from, before.num_to, strict=True)]
        told = lags_here + needs_here
        heard = self._send(told, told_to, heard_from, [1] * len(told))
        heard = [part.view(-1) for part in heard]
        lags, needs = heard[: len(talk.asked)], heard[len(talk.asked) :]
        talk.by_lag = ByClass(lags, self._depth + 1, talk.num_to)
        talk.by_lag_here = ByClass(lags_here, self._depth + 1, talk.num_from)
        known = [talk.by_lag, talk.by_lag_here]
        if before is not None:
            before.by_need = ByClass(needs, 2, before.num_to)
            before.by_need_here = ByClass(needs_here, 2, before.num_from)
            known += [before.by_need, before.by_need_here]
        read_together(known)

    def _before(self, batch: AheadBatch) -> Conversation | None:
        """Of the batch before, if it is one that updates rows."""
        before = self._newest
        if before is None or before.number != batch.number - 1 or not before.will_update:
            return None
        return before.conversation

    def _send(
        self, parts: Sequence[torch.Tensor], num_to: Counts, num_from: Counts, dims: Sequence[int]
    ) -> list[torch.Tensor]:
        message = pack(parts, num_to, dims)
        heard = self._wire.all_to_all(message, sizes(num_to, dims), sizes(num_from, dims))
        return unpack(heard, num_from, dims)

    def fetch(self, step: int, batches: Sequence[tuple[AheadBatch, bool]]) -> None:
        """Send the rows that became final with the update before ``step``.

        Args:
            batches: those admitted and not yet computed, and whether each is fetched for the first
                time.
        """
        enter(COMMUNICATION, "rows_exchange")
        with named_range("rows_exchange"):
            for batch, is_new in batches:
                # Nearer than this a row is not final yet.
                nearest = batch.number - step
                # A new batch also gets what has been final for longer.
                self._send_rows(batch, nearest, self._depth + 1 if is_new else nearest + 1)

    def _send_rows(self, batch: AheadBatch, first: int, end: int) -> None:
        """Send the rows of the lags' classes first..end - 1."""
        talk = batch.conversation
        if talk is None:
            return
        if talk.by_lag is None or talk.by_lag_here is None:
            # Nothing is updated: all rows have been final for long.
            if end <= self._depth:
                return
            leaving, arriving = _everything(talk.num_from), _everything(talk.num_to)
        else:
            leaving = talk.by_lag_here.select(first, end)
            arriving = talk.by_lag.select(first, end)
        parts = []
        for at, index in enumerate(self._cold):
            owned = self._groups[index].owned
            parts.append(owned.read(leaving.of(at, talk.positions[at]), self._dims[at]))
        received = self._send(parts, leaving.counts, arriving.counts, self._dims)
        for at, index in enumerate(self._cold):
            order = arriving.of(at, talk.asked[at].order_U)
            cold_rows = self._cold_part(batch.rows[index], talk.asked[at])
            put_rows(cold_rows, order, received[at])

    def _cold_part(self, rows_UD: torch.Tensor, asked: Asked) -> torch.Tensor:
        return rows_UD[rows_UD.shape[0] - asked.order_U.numel() :]

    def mark_late(self, batch: AheadBatch, late: list[torch.Tensor]) -> list[torch.Tensor]:
        """Mark the rows that are not among the batch's first ones; on the main thread.

        Args:
            late: bool (U,) of each group, False.
        """
        talk = batch.conversation
        if self._depth == 0:
            for group, routed, marks in zip(self._groups, batch.groups, late, strict=True):
                marks[num_hot_rows(routed.rows, group.num_hot_keys) :] = True
        elif talk is not None and talk.by_lag is not None:
            last = talk.by_lag.select(0, 1)
            for at, index in enumerate(self._cold):
                is_last = last.of(at, talk.asked[at].order_U)
                self._cold_part(late[index], talk.asked[at]).index_fill_(0, is_last, True)
                # What the communication thread made is used on this stream.
                used_here(talk.by_lag.orders[at], talk.asked[at].order_U)
        return late

    def urgent(self, batch: AheadBatch, gradients: Gradients, following: AheadBatch) -> None:
        """Bring home the gradients of rows that the next batch reads, and send it these rows."""
        talk = batch.conversation
        if talk is not None and talk.by_need is not None and talk.by_need_here is not None:
            enter(COMMUNICATION, "grads_exchange")
            with named_range("urgent gradients"):
                self._push(
                    batch, gradients, talk.by_need.select(0, 1), talk.by_need_here.select(0, 1)
                )
        enter(COMMUNICATION, "rows_exchange")
        with named_range("urgent rows"):
            # Where the batch itself has no cold rows, the next one has none that it changed.
            if talk is not None:
                self._send_rows(following, 0, 1)

    def late(self, batch: AheadBatch, gradients: Gradients) -> None:
        """Bring home the gradients that are left."""
        talk = batch.conversation
        if talk is None:
            return
        enter(COMMUNICATION, "grads_exchange")
        with named_range("late gradients"):
            if talk.by_need is None or talk.by_need_here is None:
                leaving, arriving = _everything(talk.num_to), _everything(talk.num_from)
            else:
                leaving, arriving = talk.by_need.select(1, 2), talk.by_need_here.select(1, 2)
            self._push(batch, gradients, leaving, arriving)

    def _push(
        self, batch: AheadBatch, gradients: Gradients, leaving: Selection, arriving: Selection
    ) -> None:
        talk = batch.conversation
        assert talk is not None
        parts = []
        for at, index in enumerate(self._cold):
            of_cold = self._cold_part(gradients.rows[index], talk.asked[at])
            part = of_cold.index_select(0, leaving.of(at, talk.asked[at].order_U))
            # The share of this rank in the mean over the ranks.
            parts.append(part.div_(self._size) if self._size > 1 else part)
        received = self._send(parts, leaving.counts, arriving.counts, self._dims)
        for at, index in enumerate(self._cold):
            self._groups[index].owned.update(
                arriving.of(at, talk.positions[at]),
                received[at],
                gradients.learning_rates[index],
                gradients.num_updates,
            )


def _rows_of(values: list[int], width: int) -> Counts:
    return [values[begin : begin + width] for begin in range(0, len(values), width)]


def _everything(counts: Counts) -> Selection:
    return Selection([None] * len(counts[0]), counts)
