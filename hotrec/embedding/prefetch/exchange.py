"""The exchange of cold rows and their gradients, on the communication thread of look-ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import torch

from hotrec.embedding.flat import put_rows
from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.messages import RowCounts, exchange_rows, row_counts
from hotrec.embedding.owned_rows import RequestedRows
from hotrec.embedding.row_exchange import ShardedRows
from hotrec.embedding.slots import TooFewSlotsError
from hotrec.routing.features import RoutedFeatures, RoutedGroup
from hotrec.routing.sorting import sort_keys
from hotrec.runtime.comm_thread import CommunicationFuture, HostInts, ints_on, record_use
from hotrec.runtime.stages import named_range
from hotrec.runtime.watchdog import COMMUNICATION, enter
from hotrec.runtime.wire import Wire


@dataclass
class Selection:
    """Some of the rows of each group."""

    indices: list[torch.Tensor | None]  # int64, in rank order; None for all rows in order
    counts: RowCounts

    def of(self, group: int, values: torch.Tensor) -> torch.Tensor:
        """Select from a group's (rows, ...) values."""
        index = self.indices[group]
        return values if index is None else values.index_select(0, index)

    def rows(self, group: int, order_U: torch.Tensor | None) -> torch.Tensor | None:
        """The selected rows of ``order_U``; None for 0..U - 1."""
        return self.indices[group] if order_U is None else self.of(group, order_U)


class RowsByClass:
    """The rows of each group, sorted by rank and, within a rank, by class; see ``sort_by_class``.

    Both sides of an exchange sort the same rows by the same classes, so a range of classes has the
    same rows in the same order on both. Selecting a range does not wait for the device.
    """

    def __init__(
        self, classes: Sequence[torch.Tensor], num_classes: int, counts: RowCounts
    ) -> None:
        self.classes, self.num_classes, self.counts = classes, num_classes, counts
        self.orders: list[torch.Tensor] = []
        self.ends: list[list[int]] = []  # by group, of the classes of each rank

    def select(self, first: int, end: int) -> Selection:
        """The rows of the classes first..end - 1."""
        indices: list[torch.Tensor | None] = []
        counts: RowCounts = [[] for _ in self.counts]
        for order_K, ends in zip(self.orders, self.ends, strict=True):
            bounds, pieces = [0, *ends], []
            for rank, row in enumerate(counts):
                begin = bounds[rank * self.num_classes + first]
                until = bounds[rank * self.num_classes + end]
                pieces.append(order_K[begin:until])
                row.append(until - begin)
            indices.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return Selection(indices, counts)


def sort_by_class(parts: Sequence[RowsByClass]) -> None:
    """Sort the rows of all parts at once, and read the ends of classes in one copy."""
    groups = [
        (part, group, class_K) for part in parts for group, class_K in enumerate(part.classes)
    ]
    sizes = [row[group] for part, group, _ in groups for row in part.counts]
    widths = [part.num_classes for part, _, _ in groups for _ in part.counts]
    *firsts, num_keys = accumulate(widths, initial=0)
    keys = torch.cat([class_K for _, _, class_K in groups]).long()
    torch._foreach_add_(keys.split(sizes), firsts)
    sorted_K, order_K = sort_keys(keys, num_keys)
    ends_here = HostInts(
        torch.searchsorted(sorted_K, torch.arange(1, num_keys + 1, device=keys.device))
    ).wait()
    begin = at = 0
    for part, _, class_K in groups:
        end, until = begin + class_K.numel(), at + part.num_classes * len(part.counts)
        part.orders.append(order_K[begin:end] - begin if begin else order_K[begin:end])
        part.ends.append([value - begin for value in ends_here[at:until]])
        begin, at = end, until


Sides = tuple[RowsByClass, RowsByClass]  # the requested rows, and those requested from this rank


@dataclass
class RowRequest:
    """The cold rows of a batch on both sides of the exchange, by group."""

    requested: list[RequestedRows]
    num_requested: RowCounts  # from each rank
    num_served: RowCounts  # that each rank requests from this one
    positions: list[torch.Tensor]  # of the rows requested from this rank, int64 (R,), in rank order
    places: list[torch.Tensor] = field(default_factory=list)  # of the same
    # Class 0 is a lag of 1, the last class depth + 1 or more.
    by_lag: Sides | None = None
    # Class 0 are the urgent rows, which some rank reads in the next batch too, class 1 the others;
    # None until there is a next batch.
    by_need: Sides | None = None

    def select(self, sides: Sides | None, first: int, end: int) -> tuple[Selection, Selection]:
        """The requested and the served rows of some classes, or all if there are no classes."""
        if sides is not None:
            return sides[0].select(first, end), sides[1].select(first, end)
        indices: list[torch.Tensor | None] = [None] * len(self.requested)
        return Selection(indices, self.num_requested), Selection(indices, self.num_served)


@dataclass
class PrefetchedBatch:
    """One batch of this rank; groups are the embedding dimensions of all collections."""

    number: int  # the same on all ranks
    features: list[Any]  # that each collection is called with
    routed: list[RoutedFeatures]  # by collection
    groups: list[RoutedGroup]
    will_update: bool
    is_all_hot: bool  # whether no rank's batch reads a cold row
    num_hot: list[int]  # distinct hot rows of each group
    # Float (U, D), hot rows first; allocated at the request, filled while the batch waits.
    rows: list[torch.Tensor] = field(default_factory=list)
    request: RowRequest | None = None  # None if no cold rows are exchanged
    hot_counts: RowCounts = field(default_factory=list)  # [rank][group with hot rows]
    hot_slots: list[torch.Tensor] = field(default_factory=list)  # of the same groups
    hot_plan: HotPlan | None = None  # None without hot rows, and in evaluation
    first_rows: CommunicationFuture[None] | None = None  # all rows but those with a lag of 1
    all_rows: CommunicationFuture[None] | None = None


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's rows, by group."""

    rows: Sequence[torch.Tensor]  # float (U, D), of this rank's share of the loss
    learning_rates: Sequence[float]  # of the owned rows in this step
    num_updates: int  # before this step


# The lag of a row that no recent batch has read.
LONG_AGO = 255


class ColdExchange:
    """Exchanges cold rows and their gradients with the owners of the rows.

    The lag of a row in batch b is b minus the last batch before b in which any rank reads the row;
    the row's value is final once that batch's update is applied. With depth d and window w, every
    rank runs the exchanges of step s in this order:

        send_ids(s + d + w)   send the ids of the rows of batch s + d + w to their owners
        reserve_slots(s + d + 1)
                              if rows are cached, start to fetch them into slots, for a whole step
        request_rows(s + d)   request the rows of batch s + d from their owners, which answer with
                              the lags, and with the rows of batch s + d - 1 that are read again
        fetch_rows(s)         rows of batches after s that became final with the update of s - 1
        exchange_urgent(s)    gradients of the rows of s that s + 1 reads, then these updated rows
        send_late(s)          the other gradients of s

    send_late(s - 1) runs before fetch_rows(s), so fetched rows are final. The owner decides whether
    a row of s is urgent or late, the same for all ranks, so it is updated once. Everything except
    the construction and ``late_rows`` runs on the communication thread.

    A single rank with all rows in its device's memory (``is_alone``) has nothing to fetch ahead: it
    does not use classes, and reads all rows of s + 1 at once in exchange_urgent(s), after running
    send_late(s).

    ``groups`` have the same order on all ranks; only the communication thread uses ``wire``.
    """

    def __init__(
        self,
        groups: Sequence[ShardedRows],
        wire: Wire,
        depth: int,
        device: torch.device,
        window: int = 0,
    ) -> None:
        self._groups = groups
        self._cold = [index for index, group in enumerate(groups) if group.owners is not None]
        self._hot = [index for index, group in enumerate(groups) if group.hot is not None]
        self._dims = [groups[index].dim for index in self._cold]
        self._wire = wire
        self._depth = depth
        self._window = window
        self._device = device
        self._is_cached = any(group.is_cached for group in groups)
        self.is_alone = (
            device.type == "cuda"
            and wire.world_size == 1
            and all(groups[index].owned.is_on_device for index in self._cold)
        )
        # The last batch that reads the row at each place; initially long ago. A slot is only reused
        # for another row after all updates of that batch, so its value is then valid as well.
        self._last_read = [
            torch.full((groups[index].owned.num_places,), -LONG_AGO - 1, device=device)
            for index in ([] if self.is_alone else self._cold)
        ]
        self._newest: PrefetchedBatch | None = None

    def send_ids(self, batch: PrefetchedBatch) -> None:
        """Send the ids of a batch's rows to their owners."""
        enter(COMMUNICATION, "ids_exchange")
        with named_range("ids_exchange"):
            requested = self._find_owners(batch)
            num_requested: RowCounts = [[] for _ in range(self._wire.world_size)]
            if self._wire.world_size == 1:
                num_requested = [[part.positions_U.numel() for part in requested]]
            elif requested:
                num_to_G = [part.num_to_W for part in requested if part.num_to_W is not None]
                num_to_WG = HostInts(torch.stack(num_to_G, dim=1)).wait()
                num_requested = row_counts(num_to_WG, len(requested))
            num_hot = [batch.num_hot[index] for index in self._hot]
            # The same message includes the number of touched hot rows, for the hot reducer.
            counts = self._exchange_counts([[*row, *num_hot] for row in num_requested])
            batch.hot_counts = [row[len(requested) :] for row in counts]
            if requested:
                num_served = [row[: len(requested)] for row in counts]
                batch.request = self._send_request(requested, num_requested, num_served)
                if self._window:
                    for index, positions_R in zip(self._cold, batch.request.positions, strict=True):
                        self._groups[index].owned.foresee(positions_R, batch.number)

    def _exchange_counts(self, sent: RowCounts) -> RowCounts:
        """Send each rank its counts, and return those received from each rank."""
        width, world_size = len(sent[0]), self._wire.world_size
        if world_size == 1 or width == 0:
            return sent
        sizes = [width] * world_size
        numbers = ints_on(self._device, [*chain.from_iterable(sent)])
        received = self._wire.all_to_all(numbers, sizes, sizes)
        return row_counts(HostInts(received).wait(), width)

    def reserve_slots(self, batch: PrefetchedBatch) -> None:
        """Start the owners' fetch of a batch's rows into slots, ahead of the request."""
        if batch.request is not None and self._is_cached:
            enter(COMMUNICATION, "ids_exchange")
            with named_range("ids_exchange"):
                self._reserve(batch.number, batch.request)

    def request_rows(self, batch: PrefetchedBatch) -> None:
        """Reserve places at the owners of a batch's rows, and find conflicts with other batches.

        In evaluation and without look-ahead, nothing is updated between request and reply.
        """
        if batch.request is not None:
            enter(COMMUNICATION, "ids_exchange")
            with named_range("ids_exchange"):
                self._reserve(batch.number, batch.request)
                if batch.will_update and self._depth > 0 and not self.is_alone:
                    self._find_conflicts(batch, batch.request)
        self._newest = batch

    def _find_owners(self, batch: PrefetchedBatch) -> list[RequestedRows]:
        """By cold group; empty if no cold rows are exchanged."""
        found = []
        for index in [] if batch.is_all_hot else self._cold:
            found.append(self._groups[index].find_owners(batch.groups[index].rows))
        return found

    def _send_request(
        self,
        requested: list[RequestedRows],
        num_requested: RowCounts,
        num_served: RowCounts,
    ) -> RowRequest:
        sent = [part.positions_U for part in requested]
        received = exchange_rows(self._wire, sent, num_requested, num_served, [1] * len(sent))
        positions = [part.view(-1).long() for part in received]
        return RowRequest(requested, num_requested, num_served, positions)

    def _reserve(self, number: int, request: RowRequest) -> None:
        """Find the places of a batch's rows, by group, unless already done.

        Raises:
            ValueError: on every rank, if the batches in flight need more slots than some rank has.
        """
        if request.places:
            return
        missing = (0, 0)
        for index, positions_R in zip(self._cold, request.positions, strict=True):
            try:
                request.places.append(self._groups[index].owned.reserve(positions_R, number))
            except TooFewSlotsError as error:
                missing = max(missing, (error.num_needed, error.num_slots))
        if self._is_cached:
            needed, num_slots = max(self._exchange_counts([[*missing]] * self._wire.world_size))
            if needed:
                num_held = self._depth + 1 + (self._window > 0)
                raise ValueError(
                    f"placement.cache_load_frac batch {number}: expected at least {needed} slots "
                    f"per rank for the rows of the {num_held} batches in flight, got {num_slots}. "
                    f"Increase it by a factor of {needed / num_slots:.2f} or more, or lower "
                    "pipeline.depth or the batch size (trainer.eval_batch_size in evaluation)."
                )

    def _find_conflicts(self, batch: PrefetchedBatch, request: RowRequest) -> None:
        """Exchange, in one message, the lags and which rows of the last batch are read again."""
        number, num_lags = batch.number, self._depth + 1
        lags_served, needs_served = [], []
        for last_read, places in zip(self._last_read, request.places, strict=True):
            lag_R = number - 1 - last_read.index_select(0, places)
            lags_served.append(lag_R.clamp_(max=self._depth).to(torch.uint8))
            # After the lags of all ranks, so that readers of the same row get the same reply.
            last_read[places] = number
        before = self._request_before(batch)
        num_sent, num_received = request.num_served, request.num_requested
        if before is not None:
            for last_read, places in zip(self._last_read, before.places, strict=True):
                is_late = last_read.index_select(0, places) != number
                needs_served.append(is_late.view(torch.uint8))
            num_sent = [[*a, *b] for a, b in zip(num_sent, before.num_served, strict=True)]
            num_received = [
                [*a, *b] for a, b in zip(num_received, before.num_requested, strict=True)
            ]
        sent = lags_served + needs_served
        received = exchange_rows(self._wire, sent, num_sent, num_received, [1] * len(sent))
        answers = [part.view(-1) for part in received]
        lags, needs = answers[: len(lags_served)], answers[len(lags_served) :]
        requested = RowsByClass(lags, num_lags, request.num_requested)
        served = RowsByClass(lags_served, num_lags, request.num_served)
        request.by_lag = self._sides(requested, served)
        sorted_rows = [*request.by_lag]
        if before is not None:
            requested = RowsByClass(needs, 2, before.num_requested)
            served = RowsByClass(needs_served, 2, before.num_served)
            before.by_need = self._sides(requested, served)
            sorted_rows += before.by_need
        sort_by_class([*dict.fromkeys(sorted_rows)])

    def _sides(self, requested: RowsByClass, served: RowsByClass) -> Sides:
        return (served, served) if self._wire.world_size == 1 else (requested, served)

    def _request_before(self, batch: PrefetchedBatch) -> RowRequest | None:
        """The request of the previous batch, if that one updates rows."""
        before = self._newest
        if before is None or before.number != batch.number - 1 or not before.will_update:
            return None
        return before.request

    def fetch_rows(self, step: int, batches: Sequence[tuple[PrefetchedBatch, bool]]) -> None:
        """Send the rows that became final with the update before ``step``.

        ``batches`` are requested and not yet computed; True marks those fetched for the first time.
        """
        enter(COMMUNICATION, "rows_exchange")
        with named_range("rows_exchange"):
            for batch, is_new in batches:
                # Rows with a smaller lag are not final yet.
                nearest = batch.number - step
                # A new batch also gets the rows that became final earlier.
                self._send_rows(batch, nearest, self._depth + 1 if is_new else nearest + 1)
                if is_new and not batch.will_update:  # it has all its rows
                    self._release(batch)

    def _release(self, batch: PrefetchedBatch) -> None:
        for group in self._groups:
            group.owned.release(batch.number, is_changed=batch.will_update)

    def _send_rows(self, batch: PrefetchedBatch, first: int, end: int) -> None:
        """Send the rows of the lag classes first..end - 1."""
        request = batch.request
        if request is None:
            return
        # Without classes, all rows are in one: without updates all are final.
        only = 0 if self.is_alone and batch.will_update else self._depth
        if request.by_lag is None and not first <= only < end:
            return
        arriving, leaving = request.select(request.by_lag, first, end)
        for index in self._cold:
            self._groups[index].owned.wait(batch.number)
        parts = [
            self._groups[index].owned.read(leaving.of(at, request.places[at]))
            for at, index in enumerate(self._cold)
        ]
        received = exchange_rows(self._wire, parts, leaving.counts, arriving.counts, self._dims)
        for at, index in enumerate(self._cold):
            rows = arriving.rows(at, request.requested[at].order_U)
            put_rows(batch.rows[index][batch.num_hot[index] :], rows, received[at])

    def late_rows(self, batch: PrefetchedBatch) -> list[torch.Tensor]:
        """Mark the rows that arrive with the last fetch, bool (U,) of each group.

        Runs on the main thread.
        """
        late = [
            torch.zeros(rows.shape[0], dtype=torch.bool, device=rows.device) for rows in batch.rows
        ]
        request = batch.request
        if self._depth == 0:
            for num_hot, late_U in zip(batch.num_hot, late, strict=True):
                late_U[num_hot:] = True
        elif request is not None and request.by_lag is not None:
            by_lag = request.by_lag[0]
            last = by_lag.select(0, 1)
            for at, index in enumerate(self._cold):
                order_U = request.requested[at].order_U
                rows = last.rows(at, order_U)
                assert rows is not None
                late[index][batch.num_hot[index] :].index_fill_(0, rows, True)
                # Allocated on the communication thread's stream, used on this one.
                record_use(*(o for o in (by_lag.orders[at], order_U) if o is not None))
        return late

    def exchange_urgent(
        self, batch: PrefetchedBatch, gradients: Gradients, following: PrefetchedBatch
    ) -> None:
        """Send the gradients of rows that the next batch reads, then fetch these rows for it."""
        request = batch.request
        if request is not None and request.by_need is not None:
            enter(COMMUNICATION, "grads_exchange")
            with named_range("urgent gradients"):
                self._send_gradients(batch, gradients, *request.select(request.by_need, 0, 1))
        enter(COMMUNICATION, "rows_exchange")
        with named_range("urgent rows"):
            # A batch without cold rows updates none for the next one.
            if request is not None or self.is_alone:
                self._send_rows(following, 0, 1)

    def send_late(self, batch: PrefetchedBatch, gradients: Gradients) -> None:
        """Send the remaining gradients to the rows' owners, which update the rows."""
        request = batch.request
        if request is not None:
            enter(COMMUNICATION, "grads_exchange")
            with named_range("late gradients"):
                self._send_gradients(batch, gradients, *request.select(request.by_need, 1, 2))
        self._release(batch)

    def _send_gradients(
        self, batch: PrefetchedBatch, gradients: Gradients, leaving: Selection, arriving: Selection
    ) -> None:
        request, world_size = batch.request, self._wire.world_size
        assert request is not None
        parts = []
        for at, index in enumerate(self._cold):
            cold_UD = gradients.rows[index][batch.num_hot[index] :]
            rows = leaving.rows(at, request.requested[at].order_U)
            part = cold_UD if rows is None else cold_UD.index_select(0, rows)
            # Owners sum, so each rank sends its share of the mean.
            parts.append(part.div_(world_size) if world_size > 1 else part)
        received = exchange_rows(self._wire, parts, leaving.counts, arriving.counts, self._dims)
        for at, index in enumerate(self._cold):
            self._groups[index].owned.update(
                arriving.of(at, request.places[at]),
                received[at],
                gradients.learning_rates[index],
                gradients.num_updates,
                is_distinct=world_size == 1,
            )
