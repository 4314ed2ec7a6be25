"""The exchange of a collection's rows in line: on the calling thread, at their lookup, in backward.

Any loop with one backward pass per step trains the model so, TorchRec's pipelines included.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hotrec.embedding.exchange import BatchRows, ColdExchange, Gradients, batch_rows, read_hot
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.embedding.sharded_rows import ShardedRows, ShardSettings
from hotrec.routing.features import RoutedFeatures
from hotrec.runtime.hosts import make_two_levels
from hotrec.runtime.stages import mark
from hotrec.runtime.wire import Wire


class _ReadRows(torch.autograd.Function):
    """Reads the rows of a batch; backward updates them. ``anchor`` ties the node into the graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, line: InLine, batch: BatchRows
    ) -> tuple[torch.Tensor, ...]:
        ctx.line, ctx.batch = line, batch
        # Not left in the batch, which would keep the graph alive.
        rows, batch.rows = line.fetch(batch), []
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        batch, ctx.batch = ctx.batch, None
        if batch is None:
            raise RuntimeError(
                "embedding rows: expected one backward pass after a forward pass, got a second, "
                "and rows would be updated twice. Add up losses instead of retaining the graph."
            )
        ctx.line.update(batch, grads)
        return None, None, None


class InLine:
    """Exchanges the rows of a collection, by embedding dimension, over the model's own group."""

    def __init__(self, groups: Sequence[ShardedRows], settings: ShardSettings) -> None:
        self._groups, self._settings, hosts = groups, settings, settings.hosts
        self._wire = Wire(settings.env.process_group, settings.wire_type)
        wires = [self._wire] if hosts is None else [hosts.rail, hosts.inside]
        self._cold = ColdExchange(groups, wires, 0, settings.device, is_in_line=True)
        self._replicas = [group.hot for group in groups if group.hot is not None]
        # Made by the first lookup that is trained: look-ahead has its own.
        self._reducer: HotReducer | None = None
        self._anchor = torch.zeros((), device=settings.device, requires_grad=True)

    @torch.no_grad()
    def request(self, routed: RoutedFeatures) -> BatchRows:
        """Send the ids of a batch's cold rows to their owners."""
        batch = batch_rows(self._groups, 0, [], [routed], will_update=True)
        self._cold.send_ids(batch)
        self._cold.request_rows(batch)
        return batch

    def read(self, batch: BatchRows) -> tuple[torch.Tensor, ...]:
        """The rows float (U, D) of each dimension, hot rows first; backward updates them, once."""
        is_alone = self._wire.world_size == 1
        if self._replicas and self._reducer is None and torch.is_grad_enabled() and not is_alone:
            self._reducer = self._make_reducer()
        rows: tuple[torch.Tensor, ...] = _ReadRows.apply(self._anchor, self, batch)
        return rows

    def _make_reducer(self) -> HotReducer:
        hosts = self._settings.hosts or make_two_levels(self._settings.wire_type, "hot gradients")
        if hosts is not None and hosts is not self._settings.hosts:
            weakref.finalize(self, hosts.close)
        shapes = [(replica.rows.shape[0], replica.dim) for replica in self._replicas]
        return HotReducer(shapes, self._wire, hosts)

    def fetch(self, batch: BatchRows) -> list[torch.Tensor]:
        self._cold.allocate(batch)
        self._cold.fetch_rows(batch, None)
        read_hot(self._groups, batch)
        mark("row_lookup")
        return batch.rows

    def update(self, batch: BatchRows, grads: Sequence[torch.Tensor]) -> None:
        """Send gradients to the owners of cold rows, and average those of hot rows.

        Raises:
            RuntimeError: if rows are behind slots, or hot gradients of before await their update.
        """
        mark("pool")
        if any(group.is_cached for group in self._groups):
            raise RuntimeError(
                "placement.cold_tier=cached: expected the pipeline look_ahead, which fills the "
                "slots, to train the rows, got a backward pass without it. Set "
                "pipeline=look_ahead."
            )
        for replica in self._replicas:
            replica.check_updated()
        touched = [*zip(batch.hot_slots, batch.hot_parts(grads), strict=True)]
        if self._reducer is not None:
            touched = self._reducer.reduce(touched)
        for replica, (slots, grad) in zip(self._replicas, touched, strict=True):
            # One rank's own may belong to autograd, and the update overwrites it.
            replica.reduced = slots, grad if self._reducer else grad.clone()
        mark("hot_exchange")
        rates = [group.learning_rate for group in self._groups]
        num_updates = max(group.num_updates for group in self._groups)
        self._cold.send_late(batch, Gradients(grads, rates, num_updates))
        for group in self._groups:
            group.owned.flush()
