"""The exchange of cold rows and their gradients, on the communication thread of look-ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from hotrec.embedding.flat import put_rows
from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.messages import RowCounts, exchange_rows, row_counts
from hotrec.embedding.owned_rows import RequestedRows
from hotrec.embedding.prefetch.classes import (
    REST,
    URGENT,
    Hop,
    RowsByClass,
    Sides,
    sort_by_class,
)
from hotrec.embedding.relay import Relay
from hotrec.embedding.row_exchange import ShardedRows
from hotrec.embedding.slots import TooFewSlotsError
from hotrec.embedding.update_rules import RowSums
from hotrec.routing.features import RoutedFeatures, RoutedRows
from hotrec.runtime.comm_thread import CommunicationFuture, HostInts, ints_on, record_use
from hotrec.runtime.stages import named_range
from hotrec.runtime.watchdog import COMMUNICATION, enter
from hotrec.runtime.wire import Wire


@dataclass
class RowRequest:
    """The cold rows of a batch, by group.

    Hops are those of a row from its owner to the ranks that read it: one over all ranks or, with
    hosts, one from owners to relays and one from relays to the ranks of their host.
    """

    requested: list[RequestedRows]
    hops: list[Hop]
    positions: list[torch.Tensor]  # of the rows requested from this rank, int64 (R,), in rank order
    places: list[torch.Tensor] = field(default_factory=list)  # of the same
    relays: list[Relay] = field(default_factory=list)  # empty without hosts
    # Float (U, D) of each relay, allocated and filled like those of the batch.
    relayed: list[torch.Tensor] = field(default_factory=list)
    # For urgent and for the other rows, by group: the sums over the ranks of this host.
    sums: list[list[RowSums]] = field(default_factory=list)


@dataclass
class PrefetchedBatch:
    """One batch of this rank; groups are the embedding dimensions of all collections."""

    number: int  # the same on all ranks
    features: list[Any]  # that each collection is called with
    routed: list[RoutedFeatures]  # by collection
    groups: list[RoutedRows]
    will_update: bool
    is_all_hot: bool  # whether no rank's batch reads a cold row
    num_hot: list[int]  # distinct hot rows of each group
    # Float (U, D), hot rows first; allocated at the request, filled while the batch waits.
    rows: list[torch.Tensor] = field(default_factory=list)
    request: RowRequest | None = None  # None if no cold rows are exchanged
    hot_slots: list[torch.Tensor] = field(default_factory=list)  # of the same groups
    hot_plan: HotPlan | None = None  # None without hot rows, and in evaluation
    first_rows: CommunicationFuture[None] | None = None  # all rows but the urgent ones
    all_rows: CommunicationFuture[None] | None = None


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's rows, by group."""

    rows: Sequence[torch.Tensor]  # float (U, D), of this rank's share of the loss
    learning_rates: Sequence[float]  # of the owned rows in this step
    num_updates: int  # before this step


NEVER = -2  # not the batch before the first one, which is -1


class ColdExchange:
    """Exchanges cold rows and their gradients with the owners of the rows.

    A row of batch s is urgent for s + 1 if any rank reads it in both: its value is only final once
    the update of s is applied. With depth d = 1 and window w, every rank runs the exchanges of step
    s in this order; with d = 0, the rows of s are requested and fetched in s, and none is urgent:

        send_ids(s + d + w)   send the ids of the rows of batch s + d + w to their owners
        reserve_slots(s + d + 1)
                              if rows are cached, start to fetch them into slots, for a whole step
        request_rows(s + d)   request the rows of batch s + d from their owners, which answer with
                              those that s + d - 1 reads too
        fetch_rows(s)         the rows of s + 1 that are not urgent
        exchange_urgent(s)    gradients of the urgent rows of s, then these updated rows
        send_late(s)          the other gradients of s

    send_late(s - 1) runs before fetch_rows(s), so fetched rows are final. The owner decides whether
    a row is urgent, the same for all ranks, so it is updated once. Everything except the
    construction and ``late_rows`` runs on the communication thread.

    A single rank on CUDA (``is_alone``) has nothing to fetch ahead: it does not use classes, and
    reads all rows of s + 1 at once in exchange_urgent(s), after running send_late(s).

    With hosts, relays drop the duplicates of their host (``hotrec.embedding.relay``), and every row
    and every gradient crosses twice: between relays and owners, then inside hosts. The owner's
    classes hold for all ranks of a host, so its partial sum of a row crosses once.

    Args:
        groups: Embedding dimensions, in the same order on all ranks.
        wires: Used by the communication thread alone: over all ranks or, with hosts, over the rail
            of this rank, then over its host.
        depth: See ``RowsAhead``.
        device: See ``RowsAhead``.
        window: See ``RowsAhead``.
    """

    def __init__(
        self,
        groups: Sequence[ShardedRows],
        wires: Sequence[Wire],
        depth: int,
        device: torch.device,
        window: int = 0,
    ) -> None:
        self._groups = groups
        self._cold = [index for index, group in enumerate(groups) if group.owners is not None]
        self._dims = [groups[index].dim for index in self._cold]
        self._wires = wires
        self._world_size = math.prod(wire.world_size for wire in wires)
        self._depth = depth
        self._window = window
        self._device = device
        self._is_cached = any(group.is_cached for group in groups)
        self.is_alone = device.type == "cuda" and self._world_size == 1
        self._has_classes = depth > 0 and not self.is_alone
        # The last batch that reads the row at each place. A slot is only reused for another row
        # after all updates of that batch, so its value is then valid as well.
        self._last_read = [
            torch.full((groups[index].owned.num_places,), NEVER, device=device)
            for index in (self._cold if self._has_classes else [])
        ]
        self._newest: PrefetchedBatch | None = None

    def send_ids(self, batch: PrefetchedBatch) -> None:
        """Send the ids of a batch's rows to their owners."""
        enter(COMMUNICATION, "ids_exchange")
        with named_range("ids_exchange"):
            requested = self._find_owners(batch)
            if not requested:
                return
            is_flat = len(self._wires) == 1
            send = self._send_to_owners if is_flat else self._send_to_relays
            batch.request = send(requested)
            if self._window:
                for index, positions_R in zip(self._cold, batch.request.positions, strict=True):
                    self._groups[index].owned.foresee(positions_R, batch.number)

    def _send_to_owners(self, requested: list[RequestedRows]) -> RowRequest:
        [wire] = self._wires
        if wire.world_size == 1:
            num_requested = [[part.positions_U.numel() for part in requested]]
        else:
            num_requested = _counts(requested)
        hop = Hop(num_requested, self._exchange_counts(wire, num_requested))
        positions = self._send_positions(wire, [part.positions_U for part in requested], hop)
        return RowRequest(requested, [hop], positions)

    def _send_to_relays(self, requested: list[RequestedRows]) -> RowRequest:
        """Request rows from relays, which request the union of their host from its owners."""
        rail, inside = self._wires
        num_hosts, num_groups = rail.world_size, len(requested)
        # To each local rank: by host of the owner, of each group.
        num_to = row_counts([*chain.from_iterable(_counts(requested))], num_hosts * num_groups)
        num_from = self._exchange_counts(inside, num_to)
        asked, served = (
            [[sum(row[group::num_groups]) for group in range(num_groups)] for row in counts]
            for counts in (num_to, num_from)
        )
        in_host = Hop(asked, served)
        sent = [part.positions_U for part in requested]
        relays = []
        for group, positions_K in enumerate(self._send_positions(inside, sent, in_host)):
            owners = self._groups[self._cold[group]].owners
            assert owners is not None
            num_from_GH = [row[group::num_groups] for row in num_from]
            relays.append(Relay(positions_K, num_from_GH, owners))
        num_to_HG = torch.stack([relay.num_to_H for relay in relays], dim=1)
        num_requested = row_counts(HostInts(num_to_HG).wait(), num_groups)
        hop = Hop(num_requested, self._exchange_counts(rail, num_requested))
        positions = self._send_positions(rail, [relay.positions_U for relay in relays], hop)
        return RowRequest(requested, [hop, in_host], positions, relays=relays)

    def _exchange_counts(self, wire: Wire, sent: RowCounts) -> RowCounts:
        """Send each rank its counts, and return those received from each rank."""
        width, world_size = len(sent[0]), wire.world_size
        if world_size == 1 or width == 0:
            return sent
        sizes = [width] * world_size
        numbers = ints_on(self._device, [*chain.from_iterable(sent)])
        received = wire.all_to_all(numbers, sizes, sizes)
        return row_counts(HostInts(received).wait(), width)

    def _send_positions(
        self, wire: Wire, sent: Sequence[torch.Tensor], hop: Hop
    ) -> list[torch.Tensor]:
        """The positions that are requested from this rank, int64 (R,), by group."""
        ones = [1] * len(sent)
        received = exchange_rows(wire, sent, hop.num_requested, hop.num_served, ones)
        return [part.view(-1).long() for part in received]

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
                batch.request.relayed = [
                    torch.empty(relay.num_rows, self._dims[at], device=self._device)
                    for at, relay in enumerate(batch.request.relays)
                ]
                if batch.will_update and self._has_classes:
                    self._find_conflicts(batch, batch.request)
        self._newest = batch

    def _find_owners(self, batch: PrefetchedBatch) -> list[RequestedRows]:
        """By cold group; empty if no cold rows are exchanged."""
        found = []
        for index in [] if batch.is_all_hot else self._cold:
            found.append(self._groups[index].find_owners(batch.groups[index].rows))
        return found

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
            largest = [*missing]
            for wire in self._wires:
                largest = max(self._exchange_counts(wire, [largest] * wire.world_size))
            needed, num_slots = largest
            if needed:
                num_held = self._depth + 1 + (self._window > 0)
                raise ValueError(
                    f"placement.cache_load_frac batch {number}: expected at least {needed} slots "
                    f"per rank for the rows of the {num_held} batches in flight, got {num_slots}. "
                    f"Increase it by a factor of {needed / num_slots:.2f} or more, or lower "
                    "pipeline.depth or the batch size (trainer.eval_batch_size in evaluation)."
                )

    def _find_conflicts(self, batch: PrefetchedBatch, request: RowRequest) -> None:
        """Exchange, in one message, which rows the last batch reads, and which of its this does."""
        number = batch.number
        of_rows, of_last = [], []
        for last_read, places in zip(self._last_read, request.places, strict=True):
            is_rest = last_read.index_select(0, places) != number - 1
            of_rows.append(is_rest.view(torch.uint8))
            # After the rows of all ranks, so that readers of the same row get the same reply.
            last_read[places] = number
        before = self._request_before(batch)
        if before is not None:
            for last_read, places in zip(self._last_read, before.places, strict=True):
                is_rest = last_read.index_select(0, places) != number
                of_last.append(is_rest.view(torch.uint8))
        self._send_classes(request, of_rows, before, of_last)

    def _send_classes(
        self,
        request: RowRequest,
        of_rows: list[torch.Tensor],
        before: RowRequest | None,
        of_last: list[torch.Tensor],
    ) -> None:
        """Send the classes of rows from their owners to their readers, hop by hop."""
        sorted_rows: list[RowsByClass] = []
        num_groups = len(of_rows)
        for at, (wire, hop) in enumerate(zip(self._wires, request.hops, strict=True)):
            if at:  # what the owners answered to this relay
                of_rows = _spread(of_rows, request.relays)
                of_last = of_last if before is None else _spread(of_last, before.relays)
            num_sent, num_received = hop.num_served, hop.num_requested
            if before is not None:
                other = before.hops[at]
                num_sent = [[*a, *b] for a, b in zip(num_sent, other.num_served, strict=True)]
                num_received = [
                    [*a, *b] for a, b in zip(num_received, other.num_requested, strict=True)
                ]
            sent = of_rows + of_last
            received = exchange_rows(wire, sent, num_sent, num_received, [1] * len(sent))
            answers = [part.view(-1) for part in received]
            hop.by_last = self._sides(hop, answers[:num_groups], of_rows)
            sorted_rows += hop.by_last
            if before is not None:
                other.by_next = self._sides(other, answers[num_groups:], of_last)
                sorted_rows += other.by_next
            of_rows, of_last = answers[:num_groups], answers[num_groups:]
        sort_by_class([*dict.fromkeys(sorted_rows)])
        if before is not None and before.relays:
            _, in_host = before.hops
            # Ahead of time: what is left to do with the gradients is to add them up.
            before.sums = [
                [
                    relay.sums_of(index)
                    for relay, index in zip(before.relays, arriving.indices, strict=True)
                    if index is not None
                ]
                for _, arriving in (
                    in_host.select(in_host.by_next, chosen) for chosen in (URGENT, REST)
                )
            ]

    def _sides(self, hop: Hop, requested: list[torch.Tensor], served: list[torch.Tensor]) -> Sides:
        of_served = RowsByClass(served, hop.num_served)
        if self._world_size == 1:
            return of_served, of_served
        return RowsByClass(requested, hop.num_requested), of_served

    def _request_before(self, batch: PrefetchedBatch) -> RowRequest | None:
        """The request of the previous batch, if that one updates rows."""
        before = self._newest
        if before is None or before.number != batch.number - 1 or not before.will_update:
            return None
        return before.request

    def fetch_rows(
        self, current: PrefetchedBatch | None, following: PrefetchedBatch | None
    ) -> None:
        """Send the rows that are final: all of the step's batch, and of the one that follows it."""
        enter(COMMUNICATION, "rows_exchange")
        with named_range("rows_exchange"):
            for batch, chosen in ((current, None), (following, REST)):
                if batch is not None:
                    self._send_rows(batch, chosen)
                    if not batch.will_update:  # it has all its rows
                        self._release(batch)

    def _release(self, batch: PrefetchedBatch) -> None:
        for group in self._groups:
            group.owned.release(batch.number, is_changed=batch.will_update)

    def _send_rows(self, batch: PrefetchedBatch, chosen: int | None) -> None:
        """Send the rows of a class, or all."""
        request = batch.request
        if request is None:
            return
        if chosen == REST and self.is_alone and batch.will_update:
            return  # without classes, all its rows are sent as urgent ones
        for index in self._cold:
            self._groups[index].owned.wait(batch.number)
        hops = [hop.select(hop.by_last, chosen) for hop in request.hops]
        arriving, leaving = hops[0]
        parts = [
            self._groups[index].owned.read(leaving.of(at, request.places[at]))
            for at, index in enumerate(self._cold)
        ]
        wire = self._wires[0]
        received = exchange_rows(wire, parts, leaving.counts, arriving.counts, self._dims)
        if request.relays:
            for at, rows_UD in enumerate(request.relayed):
                put_rows(rows_UD, arriving.indices[at], received[at])
            arriving, leaving = hops[1]
            parts = [
                rows_UD.index_select(0, leaving.of(at, relay.index_K))
                for at, (rows_UD, relay) in enumerate(
                    zip(request.relayed, request.relays, strict=True)
                )
            ]
            wire = self._wires[1]
            received = exchange_rows(wire, parts, leaving.counts, arriving.counts, self._dims)
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
        elif request is not None and request.hops[-1].by_last is not None:
            by_last = request.hops[-1].by_last[0]
            urgent = by_last.select(URGENT)
            for at, index in enumerate(self._cold):
                order_U = request.requested[at].order_U
                rows = urgent.rows(at, order_U)
                assert rows is not None
                late[index][batch.num_hot[index] :].index_fill_(0, rows, True)
                # Allocated on the communication thread's stream, used on this one.
                record_use(*(o for o in (by_last.orders[at], order_U) if o is not None))
        return late

    def exchange_urgent(
        self, batch: PrefetchedBatch, gradients: Gradients, following: PrefetchedBatch
    ) -> None:
        """Send the gradients of rows that the next batch reads, then fetch these rows for it."""
        request = batch.request
        if request is not None and request.hops[0].by_next is not None:
            enter(COMMUNICATION, "grads_exchange")
            with named_range("urgent gradients"):
                self._send_gradients(batch, request, gradients, URGENT)
        enter(COMMUNICATION, "rows_exchange")
        with named_range("urgent rows"):
            # A batch without cold rows updates none for the next one.
            if request is not None or self.is_alone:
                self._send_rows(following, URGENT)

    def send_late(self, batch: PrefetchedBatch, gradients: Gradients) -> None:
        """Send the remaining gradients to the rows' owners, which update the rows."""
        request = batch.request
        if request is not None:
            enter(COMMUNICATION, "grads_exchange")
            with named_range("late gradients"):
                self._send_gradients(batch, request, gradients, REST)
        self._release(batch)

    def _send_gradients(
        self, batch: PrefetchedBatch, request: RowRequest, gradients: Gradients, chosen: int
    ) -> None:
        """Send the gradients of one class, or all without classes."""
        hops = [hop.select(hop.by_next, chosen) for hop in request.hops]
        leaving, arriving = hops[-1]
        parts = []
        for at, index in enumerate(self._cold):
            cold_UD = gradients.rows[index][batch.num_hot[index] :]
            rows = leaving.rows(at, request.requested[at].order_U)
            part = cold_UD if rows is None else cold_UD.index_select(0, rows)
            # Owners sum, so each rank sends its share of the mean.
            parts.append(part.div_(self._world_size) if self._world_size > 1 else part)
        wire = self._wires[-1]
        received = exchange_rows(wire, parts, leaving.counts, arriving.counts, self._dims)
        if request.relays:
            leaving, arriving = hops[0]
            sums = (
                request.sums[chosen] if request.sums else [relay.sums for relay in request.relays]
            )
            parts = [add_up(values) for add_up, values in zip(sums, received, strict=True)]
            wire = self._wires[0]
            received = exchange_rows(wire, parts, leaving.counts, arriving.counts, self._dims)
        for at, index in enumerate(self._cold):
            self._groups[index].owned.update(
                arriving.of(at, request.places[at]),
                received[at],
                gradients.learning_rates[index],
                gradients.num_updates,
                is_distinct=self._world_size == 1,
            )


def _counts(requested: Sequence[RequestedRows]) -> RowCounts:
    """By owner, of each group; waits for the device."""
    num_to_G = [part.num_to_W for part in requested if part.num_to_W is not None]
    return row_counts(HostInts(torch.stack(num_to_G, dim=1)).wait(), len(requested))


def _spread(values: Sequence[torch.Tensor], relays: Sequence[Relay]) -> list[torch.Tensor]:
    """From the rows of each relay to those that its host's ranks requested."""
    return [
        of_union.index_select(0, relay.index_K)
        for of_union, relay in zip(values, relays, strict=True)
    ]
