"""Look-ahead on the main thread: prefetches rows for forward and sends gradients after backward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hotrec.embedding.exchange import BatchRows, ColdExchange, Gradients, batch_rows, read_hot
from hotrec.embedding.hot_reduce import HotReducer, SparseGradient
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.sharding import ShardedHotColdCollection
from hotrec.embedding.tables import sharded_collections
from hotrec.routing.features import RoutedFeatures
from hotrec.routing.split import samples_reading, select_samples
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread, record_use
from hotrec.runtime.hosts import make_two_levels
from hotrec.runtime.ranks import (
    Group,
    backend_of,
    finish_others,
    finished_first,
)
from hotrec.runtime.stages import mark, named_range
from hotrec.runtime.watchdog import COMMUNICATION, enter, leave
from hotrec.runtime.wire import Wire
from hotrec.types import WireType


@dataclass(frozen=True)
class Part:
    """The samples of a batch that are computed together."""

    samples: torch.Tensor | None  # int64 (B',), ascending; None for all
    features: list[Any]  # that each collection is called with
    routed: list[RoutedFeatures]  # by collection
    is_last: bool  # the last part of the batch needs the rows that arrive last


class RowsAhead:
    """Prefetches the rows of a model's hot/cold collections ahead of the step that reads them.

    Until ``close``, the collections' forward reads prefetched rows, and their gradients are sent
    after backward; neither calls a collective, except for tables exchanged pooled. For each step,
    call ``prefetch`` with new batches, ``start_step``, ``wait_for_rows`` before the forward pass of
    each part, ``end_backward``, ``send_late`` and ``wait_for_hot_gradients``.

    NCCL requires the collectives of all groups of a device in the same order on every rank. With
    NCCL, the dense layers' collectives share ``line`` with the rows', between the urgent and the
    late gradients, and this thread is done before the main thread calls one of its own.

    Between steps the model may be called with any features in evaluation mode, by all ranks, and
    its state may be read: both wait for batches in flight.

    Args:
        model: The sharded model.
        device: The model's device.
        depth: 1 to fetch the rows of the next batch ahead of its step, 0 not to.
        window: The number of further batches announced to the owners of cached rows, which keep
            those rows in slots; ignored without cached rows.
        wire_type: The type in which rows and gradients are sent.

    Raises:
        ValueError: if the model has no hot/cold collection, or the depth is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        depth: int = 1,
        window: int = 0,
        wire_type: WireType = WireType.fp32,
    ) -> None:
        self._collections = [collection for _, collection in sharded_collections(model)]
        if not self._collections:
            raise ValueError(
                "pipeline look_ahead: expected a model with a hot/cold collection, got none. "
                "Choose a hot/cold placement, or pipeline=sparse_dist."
            )
        if depth not in (0, 1):
            raise ValueError(f"pipeline.depth: expected 0 or 1, got {depth}.")
        self.depth = depth
        self._device = device
        # The embedding dimensions of all collections, in order.
        self._groups = [rows for part in self._collections for rows in part.sharded_rows()]
        # For each collection, the index of its first dimension among all groups.
        nums = [len(collection.router.groups) for collection in self._collections]
        self._first_group = [sum(nums[:at]) for at in range(len(nums))]
        self._group = Group("rows ahead")
        wire = Wire(self._group, wire_type)
        self._thread = CommunicationThread(device, "communication")
        is_nccl = wire.world_size > 1 and backend_of(self._group.group, device) == "nccl"
        self.line = (self._group, self._thread) if is_nccl else None
        self._has_pooled = any(collection.pooled is not None for collection in self._collections)
        self._order = ExitStack()
        if is_nccl:
            self._order.enter_context(finished_first(self._thread.drain))
        self.window = window if any(group.is_cached for group in self._groups) else 0
        self._replicas: list[HotReplicas] = [rows.hot for rows in self._groups if rows.hot]
        shapes = [(replica.rows.shape[0], replica.dim) for replica in self._replicas]
        # None without hot rows, or with one rank, whose gradients are the mean.
        has_reducer = bool(shapes) and wire.world_size > 1
        is_relayed = any(collection.hosts is not None for collection in self._collections)
        self._hosts = (
            make_two_levels(wire_type, "rows ahead") if has_reducer or is_relayed else None
        )
        wires = [wire]
        if is_relayed:
            assert self._hosts is not None
            wires = [self._hosts.rail, self._hosts.inside]
        self._wires = wires
        self._reducer = HotReducer(shapes, wire, self._hosts) if has_reducer else None
        # Starts to find whether rows were written between steps, on any rank; a collective.
        self.ask_for_writes: Callable[[], Callable[[], bool]] = lambda: lambda: False
        self._start()
        self._current: BatchRows | None = None
        self._part: Part | None = None
        self._leaves: list[torch.Tensor] = []
        self._num_arrived = 0
        self._hot_future: CommunicationFuture[list[SparseGradient]] | None = None
        self._late: Callable[[], None] | None = None
        self._hooks = []
        for collection in self._collections:
            collection.forward = self._make_forward(collection)
            before = partial(_flush_before, self)
            self._hooks.append(collection.register_state_dict_pre_hook(before))
            before = partial(_drop_before, self)
            self._hooks.append(collection.register_load_state_dict_pre_hook(before))

    def _start(self) -> None:
        """Begin with no batch in flight, and no row read."""
        for group in self._groups:
            group.owned.restart()
        self._cold = ColdExchange(self._groups, self._wires, self.depth, self._device, self.window)
        self._num_updates = max((group.num_updates for group in self._groups), default=0)
        self._known: deque[BatchRows] = deque()  # not requested yet
        self._following: BatchRows | None = None  # requested ahead of its step
        self._num_prefetched = 0
        self._is_stale = False

    def drop_rows(self) -> None:
        """Flush before rows or their state are loaded; batches in flight then read them again."""
        self.flush()
        self._is_stale = True

    def restart_if_stale(self, is_written: Callable[[], bool]) -> None:
        """Prefetch the batches in flight again if rows were loaded, or written as was asked."""
        if is_written():
            self.drop_rows()
        if self._is_stale:
            self.drain()
            held = [*([self._following] if self._following else []), *self._known]
            self._start()
            for batch in held:
                self.prefetch(
                    batch.features, will_update=batch.will_update, is_all_hot=batch.is_all_hot
                )

    @property
    def feature_names(self) -> list[set[str]]:
        """The names of the features that each collection reads."""
        return [
            {name for table in collection.tables for name in table.feature_names}
            for collection in self._collections
        ]

    def prefetch(
        self, features: Sequence[Any], *, will_update: bool, is_all_hot: bool = False
    ) -> None:
        """Send a batch's ids to their owners, which send the rows up to ``depth`` steps ahead.

        On CUDA the current stream may differ from that of the steps, which then wait for it.

        Args:
            features: By collection, ids or routed features.
            will_update: Whether the batch is trained on; the same for all batches in flight.
            is_all_hot: Whether no rank's batch reads a cold row in this step; equal on all ranks.

        Raises:
            ValueError: if an all-hot batch has a cold row, or an id lies outside its table.
        """
        mark("other")
        with named_range("route"):
            routed = [
                collection.route(ids)
                for collection, ids in zip(self._collections, features, strict=True)
            ]
        number = self._num_prefetched
        batch = batch_rows(
            self._groups, number, features, routed, will_update=will_update, is_all_hot=is_all_hot
        )
        num_rows = sum(part.rows.values().numel() for part in batch.groups)
        if is_all_hot and num_rows > sum(batch.num_hot):
            raise ValueError(
                f"batch {number}: expected only hot rows, since it is marked all-hot, got "
                f"{num_rows - sum(batch.num_hot)} cold rows. Pack the batches with the current "
                "partition."
            )
        mark("route")
        self._num_prefetched += 1
        self._known.append(batch)
        # Allocated and freed on this stream, used on the communication thread's.
        self._thread.will_use(*routed, *batch.hot_slots)
        self._thread.submit(lambda: self._cold.send_ids(batch))

    def _request(self, batch: BatchRows) -> BatchRows:
        """Request the rows of a batch."""
        self._cold.allocate(batch)
        self._thread.will_use(*batch.rows)
        self._thread.submit(lambda: self._request_in_thread(batch))
        return batch

    def start_step(self) -> None:
        """Start the step of the oldest batch: fetch the rows that have become final."""
        # A batch that was requested before has all its rows when the previous step is done.
        new = None if self._following else self._request(self._known.popleft())
        batch = self._following or new
        assert batch is not None
        is_ahead = self.depth > 0 and bool(self._known)
        following = self._request(self._known.popleft()) if is_ahead else None
        if self._known:
            reserved = self._known[0]
            self._thread.submit(lambda: self._cold.reserve_slots(reserved))
        if new or following:
            fetched = self._thread.submit(lambda: self._cold.fetch_rows(new, following))
            if new:
                new.all_rows = fetched
            if following:
                following.first_rows = following.all_rows = fetched
        self._current, self._following = batch, following
        self._leaves = []

    def parts(self, *, split: bool) -> list[Part]:
        """The parts of the current batch, in the order of computation.

        With ``split``, samples that need not wait for rows come first, as a separate part.
        """
        batch = self._current
        assert batch is not None
        whole = Part(None, batch.features, batch.routed, True)
        if not split or self._cold.is_alone:
            return [whole]
        if len(self._collections) != 1 or batch.routed[0].pooled is not None:
            raise ValueError(
                "pipeline.micro_batches: expected one collection whose tables all exchange rows, "
                f"got {len(self._collections)} collections, "
                f"{sum(part.pooled is not None for part in batch.routed)} with pooled tables. "
                "Set pipeline.micro_batches=false."
            )
        if batch.first_rows is not None:
            self._wait(batch.first_rows)
        elif self.depth > 0:  # all rows arrive together
            return [whole]
        routed = batch.routed[0]
        is_late_B = samples_reading(routed, self._cold.late_rows(batch))
        chosen = [(~is_late_B).nonzero()[:, 0], is_late_B.nonzero()[:, 0]]
        if not all(samples.numel() for samples in chosen):
            return [whole]
        parts = []
        for samples, is_last in zip(chosen, (False, True), strict=True):
            some = select_samples(routed, samples, batch.num_hot)
            parts.append(Part(samples, [some], [some], is_last))
        mark("route")
        return parts

    def _wait(self, future: CommunicationFuture[None]) -> None:
        mark("other")
        with named_range("wait for rows"):
            future.wait()
        mark("rows_exchange")

    def wait_for_rows(self, part: Part) -> None:
        """Wait for the rows of a part, whose forward pass comes next."""
        batch = self._current
        assert batch is not None
        assert batch.all_rows is not None
        if part.is_last:
            self._wait(batch.all_rows)
        if not self._leaves:
            record_use(*batch.hot_slots)
            read_hot(self._groups, batch)
            mark("row_lookup")
            # Leaves share the batch's memory. The last rows may still arrive there, which the first
            # part does not read.
            self._leaves = [rows.detach().requires_grad_() for rows in batch.rows]
            if batch.will_update:
                for leaf in self._leaves:
                    leaf.register_post_accumulate_grad_hook(self._note_gradient)
        self._part = part
        self._num_arrived = 0

    def _make_forward(self, collection: ShardedHotColdCollection[Any]) -> Callable[..., Any]:
        at = self._collections.index(collection)
        first = self._first_group[at]

        def forward(features: Any) -> Any:
            part = self._part
            if part is None or features is not part.features[at]:
                if collection.training and torch.is_grad_enabled():
                    raise RuntimeError(
                        f"pipeline look_ahead collection {at}: expected the features of the "
                        "batch, got others. Call the collection with the batch's unchanged "
                        'features, or use pipeline="base".'
                    )
                self.restart_if_stale(self.ask_for_writes())
                self.drain()
                return type(collection).forward(collection, features)
            routed = part.routed[at]
            mark("dense")
            leaves = self._leaves[first : first + len(routed.groups)]
            pooled = None
            if collection.pooled is not None:
                finish_others()
                collection.pooled.set_learning_rate()
                pooled = collection.pooled.look_up(routed.pooled)
            return collection.assemble(leaves, routed, pooled)

        return forward

    def _note_gradient(self, leaf: torch.Tensor) -> None:
        """Count the groups with a gradient and send all gradients once they are complete."""
        self._num_arrived += 1
        if self.line is not None and self._has_pooled:
            return  # the rest of backward calls collectives on this thread
        if self._part is not None and self._part.is_last and self._num_arrived == len(self._leaves):
            mark("pool")
            self._send_gradients()

    def end_backward(self) -> None:
        """Send the gradients if no hook has; call it after the last part's backward pass."""
        if self._part is not None:
            # Rows that the loss does not depend on have no gradient, so their hook did not run.
            for leaf in self._leaves:
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
            self._send_gradients()

    @torch.no_grad()
    def _send_gradients(self) -> None:
        batch, self._part = self._current, None
        assert batch is not None
        grads: list[torch.Tensor] = [leaf.grad for leaf in self._leaves]  # type: ignore[misc]
        self._leaves = []
        rates = [group.learning_rate for group in self._groups]
        self._thread.will_use(*grads)
        gradients = Gradients(grads, rates, self._num_updates)
        self._num_updates += 1
        if self._reducer is not None:
            # First: the optimizer waits for hot gradients, the next forward for urgent rows.
            self._hot_future = self._thread.submit(lambda: self._reduce_hot(batch, gradients))
        else:
            self._set_reduced(zip(batch.hot_slots, batch.hot_parts(grads), strict=True))
        following = self._following
        self._late = partial(self._cold.send_late, batch, gradients)
        if self._cold.is_alone:
            self.send_late()
        if following is not None:
            following.all_rows = self._thread.submit(
                lambda: self._cold.exchange_urgent(batch, gradients, following)
            )
        # After the urgent ones, since no rank waits for these before the next step.
        if self.line is None:
            self.send_late()

    def send_late(self) -> None:
        """Send what no rank waits for before the next step, if it has not been sent."""
        late, self._late = self._late, None
        if late is not None:
            self._thread.submit(late)

    def _request_in_thread(self, batch: BatchRows) -> None:
        """Run the other exchanges that only depend on the ids, on the communication thread."""
        self._cold.request_rows(batch)
        if self._reducer is not None and batch.will_update:
            enter(COMMUNICATION, "hot_exchange")
            with named_range("hot slots"):
                batch.hot_plan = self._reducer.plan(batch.hot_slots)

    def _reduce_hot(self, batch: BatchRows, gradients: Gradients) -> list[SparseGradient]:
        """Average the gradients of touched hot rows, on the communication thread."""
        assert batch.hot_plan is not None
        enter(COMMUNICATION, "hot_exchange")
        with named_range("hot_exchange"):
            return batch.hot_plan.reduce(batch.hot_parts(gradients.rows))

    def wait_for_hot_gradients(self) -> None:
        """Wait for the hot rows' gradients and pass them to the replicas."""
        future, self._hot_future = self._hot_future, None
        if future is None:  # there is nothing to reduce
            return
        with named_range("wait for hot gradients"):
            reduced = future.wait()
        mark("hot_exchange")
        for gradient in reduced:
            record_use(*gradient)
        self._set_reduced(reduced)

    def _set_reduced(self, reduced: Iterable[SparseGradient]) -> None:
        for replica, (slots_U, grad_UD) in zip(self._replicas, reduced, strict=True):
            replica.check_updated()
            replica.reduced = (slots_U, grad_UD)

    def drain(self) -> None:
        """Wait for the communication thread; batches stay in flight."""
        self._thread.drain()

    def flush(self) -> None:
        """Drain, and write cached rows back to where they are read, which may round them."""
        self.drain()
        for group in self._groups:
            group.owned.flush()

    def close(self) -> None:
        """Restore the collections' forward, stop the thread and close its groups."""
        for hook in self._hooks:
            hook.remove()
        for collection in self._collections:
            collection.__dict__.pop("forward", None)
        self._order.close()
        self._thread.close()
        for group in self._groups:
            group.owned.close()
        self._group.close(after=self._thread.join)
        if self._hosts is not None:
            self._hosts.close(after=self._thread.join)
        leave(COMMUNICATION)


def _flush_before(rows: RowsAhead, *_: Any) -> None:
    rows.flush()


def _drop_before(rows: RowsAhead, *_: Any) -> None:
    rows.drop_rows()
