"""The exchange of cold rows and their gradients: ahead on a thread, or in line at its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hotrec.embedding.classes import (
    REST,
    URGENT,
    Hop,
    RowsByClass,
    Sides,
    sort_by_class,
)
from hotrec.embedding.flat import put_rows
from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.messages import RowCounts, exchange_counts, exchange_rows
from hotrec.embedding.relay import Union
from hotrec.embedding.sharded_rows import ShardedRows
from hotrec.embedding.slots import TooFewSlotsError
from hotrec.embedding.update_rules import RowSums
from hotrec.routing.features import RoutedFeatures, RoutedRows
from hotrec.runtime.comm_thread import CommunicationFuture, ints_on, record_use
from hotrec.runtime.stages import mark, named_range
from hotrec.runtime.watchdog import COMMUNICATION, enter
from hotrec.runtime.wire import Wire


@dataclass
class RowRequest:
    """The cold rows of a batch, by group.

    Hops are those of a row from its owner to the ranks that read it: one over all ranks or, with
    hosts, one from owners to relays and one from relays to the ranks of their host.
    """

    hops: list[Hop]
    is_reserved: bool = False
    unions: list[Union] = field(default_factory=list)  # of a relay; empty without hosts
    # Float (U, D) of each union, allocated and filled like those of the batch.
    relayed: list[torch.Tensor] = field(default_factory=list)
    # For urgent and for the other rows, by group: the sums over the ranks of this host.
    sums: list[list[RowSums]] = field(default_factory=list)


@dataclass
class BatchRows:
    """The rows of one batch of this rank, by group: the embedding dimensions of all collections."""

    number: int  # the same on all ranks
    features: list[Any]  # that each collection is called with
    routed: list[RoutedFeatures]  # by collection
    groups: list[RoutedRows]
    will_update: bool
    is_all_hot: bool  # whether no rank's batch reads a cold row
    num_hot: list[int]  # distinct hot rows of each group
    replicated: list[int]  # the groups with replicas
    # Float (U, D), hot rows first; allocated at the request, filled while the batch waits.
    rows: list[torch.Tensor] = field(default_factory=list)
    request: RowRequest | None = None  # None if no cold rows are exchanged
    hot_slots: list[torch.Tensor] = field(default_factory=list)  # of the groups with replicas
    hot_plan: HotPlan | None = None  # None without hot rows, and in evaluation
    first_rows: CommunicationFuture[None] | None = None  # all rows but the urgent ones
    all_rows: CommunicationFuture[None] | None = None

    def hot_parts(self, of_groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The hot rows (U, D) of the groups with replicas."""
        return [of_groups[at][: self.num_hot[at]] for at in self.replicated]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of a request, which one stream has made, until another has used it."""
        parts: list[Any] = [*self.routed, *self.hot_slots]
        if self.request is not None:
            for hop in self.request.hops:
                parts += [*hop.places, *(order for order in hop.orders if order is not None)]
            parts += [part for union in self.request.unions for part in union.sums.tensors]
        for part in parts:
            part.record_stream(stream)


@dataclass(frozen=True)
class Gradients:
    """The gradients of a step's rows, by group."""

    rows: Sequence[torch.Tensor]  # float (U, D), of this rank's share of the loss
    learning_rates: Sequence[float]  # of the owned rows in this step
    num_updates: int  # before this step


def batch_rows(
    groups: Sequence[ShardedRows],
    number: int,
    features: Sequence[Any],
    routed: Sequence[RoutedFeatures],
    *,
    will_update: bool,
    is_all_hot: bool = False,
) -> BatchRows:
    """The rows of a batch, given the features of each collection."""
    parts = [group for part in routed for group in part.groups]
    num_hot = [group.num_hot(part.rows) for group, part in zip(groups, parts, strict=True)]
    replicated = [at for at, group in enumerate(groups) if group.hot is not None]
    slots = [groups[at].hot_slots(parts[at].rows) for at in replicated]
    return BatchRows(
        number,
        [*features],
        [*routed],
        parts,
        will_update,
        is_all_hot,
        num_hot,
        replicated,
        hot_slots=slots,
    )


def read_hot(groups: Sequence[ShardedRows], batch: BatchRows) -> None:
    """Copy the hot rows of a batch from the replicas."""
    for at, slots in zip(batch.replicated, batch.hot_slots, strict=True):
        replica = groups[at].hot
        assert replica is not None
        torch.index_select(replica.rows, 0, slots, out=batch.rows[at][: batch.num_hot[at]])


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
    construction and ``late_rows`` runs on the communication thread. In line, which has depth 0 and
    no window, the caller's thread runs send_ids, request_rows and fetch_rows at the lookup and
    send_late in backward, where each marks its stage; rows are not reserved but read where they
    are, since look-ahead may hold batches in flight meanwhile.

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
        is_in_line: Whether it runs on the thread of the steps.
    """

    def __init__(
        self,
        groups: Sequence[ShardedRows],
        wires: Sequence[Wire],
        depth: int,
        device: torch.device,
        window: int = 0,
        *,
        is_in_line: bool = False,
    ) -> None:
        self._groups = groups
        self._mark: Callable[[str], None] = mark if is_in_line else _ignore
        self._enter = _ignore if is_in_line else partial(enter, COMMUNICATION)
        self._is_in_line = is_in_line
        self._cold = [index for index, group in enumerate(groups) if group.owners is not None]
        self._cold_groups = [groups[index] for index in self._cold]
        self._dims = [group.dim for group in self._cold_groups]
        self._wires = wires
        self._world_size = math.prod(wire.world_size for wire in wires)
        self._depth = depth
        self._window = window
        self._device = device
        self._is_cached = not is_in_line and any(group.is_cached for group in groups)
        self.is_alone = device.type == "cuda" and self._world_size == 1
        self._has_classes = depth > 0 and not self.is_alone
        # The last batch that reads the row at each place. A slot is only reused for another row
        # after all updates of that batch, so its value is then valid as well.
        self._last_read = [
            torch.full((group.owned.num_places,), NEVER, device=device)
            for group in (self._cold_groups if self._has_classes else [])
        ]
        self._newest: BatchRows | None = None

    def send_ids(self, batch: BatchRows) -> None:
        """Send the ids of a batch's rows to their owners."""
        self._enter("ids_exchange")
        with named_range("ids_exchange"):
            if batch.is_all_hot or not self._cold:
                return
            requested = [
                group.find_owners(batch.groups[index].rows)
                for index, group in zip(self._cold, self._cold_groups, strict=True)
            ]
            orders = [part.order_U for part in requested]
            sent = [part.positions_U for part in requested]
            nums = [part.num_to_W for part in requested if part.num_to_W is not None]
            if len(self._wires) == 2:
                batch.request = self._ask_relays(orders, sent, torch.stack(nums, dim=1))
            elif nums:
                counts = exchange_counts(self._wires[0], torch.stack(nums, dim=1))
                batch.request = RowRequest([_ask(self._wires[0], orders, sent, *counts)])
            else:  # one rank
                alone = [[part.numel() for part in sent]]
                batch.request = RowRequest([_ask(self._wires[0], orders, sent, alone, alone)])
            if self._window:
                asked = batch.request.hops[0].places
                for group, positions_R in zip(self._cold_groups, asked, strict=True):
                    group.owned.foresee(positions_R, batch.number)

    def _ask_relays(
        self,
        orders: Sequence[torch.Tensor | None],
        sent: Sequence[torch.Tensor],
        num_to_WG: torch.Tensor,
    ) -> RowRequest:
        """Request rows from relays, which request the union of their host from its owners."""
        rail, inside = self._wires
        num_groups = len(sent)
        # To each local rank: by host of the owner, of each group.
        by_host = exchange_counts(inside, num_to_WG.view(inside.world_size, -1))
        counts = (
            [[sum(row[group::num_groups]) for group in range(num_groups)] for row in rows]
            for rows in by_host
        )
        in_host, unions = _ask(inside, orders, sent, *counts), []
        for at, (group, positions_K) in enumerate(
            zip(self._cold_groups, in_host.places, strict=True)
        ):
            assert group.owners is not None
            num_from_GH = [row[at::num_groups] for row in by_host[1]]
            unions.append(Union(positions_K, num_from_GH, group.owners))
        in_host.places = [union.sums.index for union in unions]
        nums = exchange_counts(rail, torch.stack([union.num_to_H for union in unions], dim=1))
        positions = [union.positions_U for union in unions]
        on_rail = _ask(rail, [None] * num_groups, positions, *nums)
        return RowRequest([on_rail, in_host], unions=unions)

    def reserve_slots(self, batch: BatchRows) -> None:
        """Start the owners' fetch of a batch's rows into slots, ahead of the request."""
        if batch.request is not None and self._is_cached:
            self._enter("ids_exchange")
            with named_range("ids_exchange"):
                self._reserve(batch.number, batch.request)

    def request_rows(self, batch: BatchRows) -> None:
        """Reserve places at the owners of a batch's rows, and find conflicts with other batches.

        In evaluation and without look-ahead, nothing is updated between request and reply.
        """
        if batch.request is not None:
            self._enter("ids_exchange")
            with named_range("ids_exchange"):
                self._reserve(batch.number, batch.request)
                batch.request.relayed = [
                    torch.empty(union.positions_U.numel(), dim, device=self._device)
                    for dim, union in zip(self._dims, batch.request.unions, strict=False)
                ]
                if batch.will_update and self._has_classes:
                    self._find_conflicts(batch, batch.request)
        if self._has_classes:
            self._newest = batch

    def _reserve(self, number: int, request: RowRequest) -> None:
        """Find the places of a batch's rows, by group, unless already done.

        Raises:
            ValueError: on every rank, if the batches in flight need more slots than some rank has.
        """
        if request.is_reserved or not self._is_cached:
            return
        request.is_reserved = True
        missing, places = (0, 0), request.hops[0].places
        for at, group in enumerate(self._cold_groups):
            try:
                places[at] = group.owned.reserve(places[at], number)
            except TooFewSlotsError as error:
                missing = max(missing, (error.num_needed, error.num_slots))
        largest = [*missing]
        for wire in self._wires if self._world_size > 1 else []:
            numbers = ints_on(self._device, largest * wire.world_size)
            largest = max(exchange_counts(wire, numbers.view(-1, 2))[1])
        needed, num_slots = largest
        if needed:
            num_held = self._depth + 1 + (self._window > 0)
            raise ValueError(
                f"placement.cache_load_frac batch {number}: expected at least {needed} slots "
                f"per rank for the rows of the {num_held} batches in flight, got {num_slots}. "
                f"Increase it by a factor of {needed / num_slots:.2f} or more, or lower "
                "pipeline.depth or the batch size (trainer.eval_batch_size in evaluation)."
            )

    def _find_conflicts(self, batch: BatchRows, request: RowRequest) -> None:
        """Exchange, in one message, which rows the last batch reads, and which of its this does."""
        number = batch.number
        of_rows, of_last = [], []
        for last_read, places in zip(self._last_read, request.hops[0].places, strict=True):
            is_rest = last_read.index_select(0, places) != number - 1
            of_rows.append(is_rest.view(torch.uint8))
            # After the rows of all ranks, so that readers of the same row get the same reply.
            last_read[places] = number
        before = self._request_before(batch)
        if before is not None:
            for last_read, places in zip(self._last_read, before.hops[0].places, strict=True):
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
                of_rows = hop.spread(of_rows)
                of_last = of_last if before is None else before.hops[at].spread(of_last)
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
        if before is not None and before.unions:
            in_host = before.hops[1]
            # Ahead of time: what is left to do with the gradients is to add them up.
            before.sums = [
                [
                    union.sums_of(places.index_select(0, index))
                    for union, places, index in zip(
                        before.unions, in_host.places, arriving.indices, strict=True
                    )
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

    def _request_before(self, batch: BatchRows) -> RowRequest | None:
        """The request of the previous batch, if that one updates rows."""
        before = self._newest
        if before is None or before.number != batch.number - 1 or not before.will_update:
            return None
        return before.request

    def allocate(self, batch: BatchRows) -> None:
        """Make room for the rows of a batch."""
        batch.rows = [
            torch.empty(of_batch.rows.values().numel(), group.dim, device=self._device)
            for group, of_batch in zip(self._groups, batch.groups, strict=True)
        ]

    def fetch_rows(self, current: BatchRows | None, following: BatchRows | None) -> None:
        """Send the rows that are final: all of the step's batch, and of the one that follows it."""
        self._enter("rows_exchange")
        with named_range("rows_exchange"):
            for batch, chosen in ((current, None), (following, REST)):
                if batch is not None:
                    self._send_rows(batch, chosen)
                    if not batch.will_update:  # it has all its rows
                        self._release(batch)

    def _release(self, batch: BatchRows) -> None:
        for group in self._groups if self._is_cached else []:
            group.owned.release(batch.number, is_changed=batch.will_update)

    def _send_rows(self, batch: BatchRows, chosen: int | None) -> None:
        """Send the rows of a class, or all."""
        request = batch.request
        if request is None:
            return
        if chosen == REST and self.is_alone and batch.will_update:
            return  # without classes, all its rows are sent as urgent ones
        if self._is_cached:
            for group in self._cold_groups:
                group.owned.wait(batch.number)
        read = [
            group.owned.look_up if self._is_in_line else group.owned.read
            for group in self._cold_groups
        ]
        targets = [batch.rows[index][batch.num_hot[index] :] for index in self._cold]
        for wire, hop in zip(self._wires, request.hops, strict=True):
            arriving, leaving = hop.select(hop.by_last, chosen)
            places = [leaving.of(at, of_group) for at, of_group in enumerate(hop.places)]
            parts = [of_group(rows) for of_group, rows in zip(read, places, strict=True)]
            self._mark("row_lookup")
            received = exchange_rows(wire, parts, leaving.counts, arriving.counts, self._dims)
            for at, rows_UD in enumerate(targets if hop is request.hops[-1] else request.relayed):
                put_rows(rows_UD, arriving.among(at, hop.orders[at]), received[at])
            read = [partial(torch.index_select, rows_UD, 0) for rows_UD in request.relayed]
            self._mark("rows_exchange")

    def late_rows(self, batch: BatchRows) -> list[torch.Tensor]:
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
                order_U = request.hops[-1].orders[at]
                rows = urgent.among(at, order_U)
                assert rows is not None
                late[index][batch.num_hot[index] :].index_fill_(0, rows, True)
                # Allocated on the communication thread's stream, used on this one.
                record_use(*(o for o in (by_last.orders[at], order_U) if o is not None))
        return late

    def exchange_urgent(self, batch: BatchRows, gradients: Gradients, following: BatchRows) -> None:
        """Send the gradients of rows that the next batch reads, then fetch these rows for it."""
        request = batch.request
        if request is not None and request.hops[0].by_next is not None:
            self._enter("grads_exchange")
            with named_range("urgent gradients"):
                self._send_gradients(batch, request, gradients, URGENT)
        self._enter("rows_exchange")
        with named_range("urgent rows"):
            # A batch without cold rows updates none for the next one.
            if request is not None or self.is_alone:
                self._send_rows(following, URGENT)

    def send_late(self, batch: BatchRows, gradients: Gradients) -> None:
        """Send the remaining gradients to the rows' owners, which update the rows."""
        request = batch.request
        if request is not None:
            self._enter("grads_exchange")
            with named_range("late gradients"):
                self._send_gradients(batch, request, gradients, REST)
        self._release(batch)

    def _send_gradients(
        self, batch: BatchRows, request: RowRequest, gradients: Gradients, chosen: int
    ) -> None:
        """Send the gradients of one class, or all without classes."""
        owners, readers = request.hops[0], request.hops[-1]
        leaving, arriving = readers.select(readers.by_next, chosen)
        parts = []
        for at, index in enumerate(self._cold):
            cold_UD = gradients.rows[index][batch.num_hot[index] :]
            rows = leaving.among(at, readers.orders[at])
            part = cold_UD if rows is None else cold_UD.index_select(0, rows)
            if rows is None and self._is_in_line:
                part = part.clone()  # it is overwritten, and autograd may need its own
            # Owners sum, so each rank sends its share of the mean.
            parts.append(part.div_(self._world_size) if self._world_size > 1 else part)
        nums = leaving.counts, arriving.counts
        received = exchange_rows(self._wires[-1], parts, *nums, self._dims)
        if request.unions:
            sums = request.sums[chosen] if request.sums else [u.sums for u in request.unions]
            parts = [add_up(values) for add_up, values in zip(sums, received, strict=True)]
            leaving, arriving = owners.select(owners.by_next, chosen)
            nums = leaving.counts, arriving.counts
            received = exchange_rows(self._wires[0], parts, *nums, self._dims)
        self._mark("grads_exchange")
        for at, index in enumerate(self._cold):
            self._groups[index].owned.update(
                arriving.of(at, owners.places[at]),
                received[at],
                gradients.learning_rates[index],
                gradients.num_updates + 1,
                is_distinct=self._world_size == 1,
            )
        self._mark("row_update")


def _ignore(stage: str) -> None:
    """In place of ``mark`` or ``enter``."""


def _ask(
    wire: Wire,
    orders: Sequence[torch.Tensor | None],
    positions: Sequence[torch.Tensor],
    num_to: RowCounts,
    num_from: RowCounts,
) -> Hop:
    """Request rows by their positions, given their numbers to and from each rank."""
    received = exchange_rows(wire, positions, num_to, num_from, [1] * len(positions))
    return Hop([*orders], [part.view(-1).long() for part in received], num_to, num_from)
