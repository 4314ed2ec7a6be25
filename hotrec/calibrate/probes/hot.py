"""Probes of the hot replicas: lookup, gradient, reduction, update; by the code that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.calibrate.kernels import Probe, Work
from hotrec.calibrate.workload import CalibrationWorkload, in_turn
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.embedding.hot_rows import HotReplicas
from hotrec.embedding.optimizers import HotOptimizer
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange


@dataclass(frozen=True)
class _Bucket:
    """What DDP hands to the communication hook."""

    gradient: torch.Tensor

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return 0


class _ReplayedWire(Wire):
    """A wire that sends nothing: the other ranks' messages are this rank's own, of earlier turns.

    Args:
        world_size: Number of ranks to stand for.
        messages: What all ranks together send in the next turn, in the order of the calls.
    """

    def __init__(self, group: Any, world_size: int) -> None:
        super().__init__(group)
        self.world_size = world_size
        self.messages: list[torch.Tensor] = []

    def all_gather_joined(self, source: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self.messages.pop(0)


@dataclass(frozen=True)
class _Hot:
    """A rank's replica and batches of slots; alone in its group, so that nothing is sent."""

    bench: CalibrationWorkload
    dim: int
    weight: nn.Parameter
    num_rows_T: list[int]
    samples: list[KeyedJaggedTensor]

    def replicas(self) -> HotReplicas:
        """New for each repeat, with nothing touched yet; shares the weights."""
        return HotReplicas(
            self.weight, self.num_rows_T, self.dim, self.bench.alone, HotExchange.touched_rows
        )

    @property
    def mean_rows(self) -> float:
        return sum(features.values().numel() for features in self.samples) / len(self.samples)

    def work(self, run: Callable[[Any], object], prepare: Callable[[], Any]) -> Work:
        return Work(run, self.mean_rows, 4 * self.dim * self.mean_rows, prepare)


def hot_probes(bench: CalibrationWorkload) -> list[Probe]:
    """All four, on the rows of ``bench.hot_partition``."""
    makers = {
        "hot_read": _read, "hot_pack": _pack, "hot_add": _add, "hot_update": _update
    }  # fmt: skip

    def maker(make: Callable[[_Hot], Work]) -> Callable[[int, int], Work]:
        return lambda num_ids, dim: make(_build(bench, num_ids, dim))

    return [Probe(name, maker(make), bench.sizes()) for name, make in makers.items()]


def _build(bench: CalibrationWorkload, num_ids: int, dim: int) -> _Hot:
    group = next(iter(bench.router.groups.values()))
    num_rows_T = [bench.hot_partition.num_hot(table) for table in group.hot_tables]
    values = torch.randn(sum(num_rows_T) * dim, device=bench.device)
    num_keys = [len(group.hot_tables), len(group.cold_tables)]
    samples = [
        bench.router(features).groups[0].rows.split(num_keys)[0]
        for features in bench.features(bench.samples, num_ids)
    ]
    return _Hot(bench, dim, nn.Parameter(values), num_rows_T, samples)


def _read(hot: _Hot) -> Work:
    turns, replicas = in_turn(hot.samples), hot.replicas()
    return hot.work(replicas, lambda: next(turns))


def _looked_up(hot: _Hot, turns: Any) -> tuple[HotReplicas, torch.Tensor, torch.Tensor]:
    """A replica that has been read, its rows, and their gradient."""
    replicas = hot.replicas()
    rows = replicas(next(turns))
    return replicas, rows, torch.randn_like(rows)


def _slots(hot: _Hot, features: KeyedJaggedTensor) -> torch.Tensor:
    """Flat slots of the features' rows, ascending."""
    begins = torch.tensor(hot.num_rows_T, device=features.values().device)
    begins = begins.cumsum(0) - begins
    lengths = features.lengths().view(-1).long()
    return features.values().long() + torch.repeat_interleave(begins, lengths)


def _pack(hot: _Hot) -> Work:
    """Backward of the lookup, which adds to the gradient, and the touched rows out of it."""
    slots = in_turn([_slots(hot, features) for features in hot.samples])
    turns = in_turn(hot.samples)
    hot.weight.grad = torch.zeros_like(hot.weight)

    def run(prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        rows, grad, slots_U = prepared
        rows.backward(grad)
        assert hot.weight.grad is not None
        hot.weight.grad.view(-1, hot.dim).index_select(0, slots_U)

    return hot.work(run, lambda: (*_looked_up(hot, turns)[1:], next(slots)))


def _add(hot: _Hot) -> Work:
    """The reduction over the ranks; here every rank's message is one of this rank's samples."""
    # One rank alone reduces nothing, but its costs may be used for several.
    num_ranks, device = max(2, hot.bench.ranks.world_size), hot.bench.device
    shape = (sum(hot.num_rows_T), hot.dim)
    gradient = torch.zeros(shape, device=device)
    wire = _ReplayedWire(hot.bench.alone, num_ranks)
    reducer = HotReducer([shape], wire, HotExchange.touched_rows, device=device)
    slots = [_slots(hot, features) for features in hot.samples]
    grads = [torch.randn(slots_U.numel(), hot.dim, device=device) for slots_U in slots]
    turns = in_turn(range(len(slots)))

    def prepare() -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
        turn = next(turns)
        of_ranks = [(turn + rank) % len(slots) for rank in range(num_ranks)]
        wire.messages = [
            torch.cat([slots[at] for at in of_ranks]).int(),
            torch.cat([grads[at].view(-1) for at in of_ranks]),
        ]
        return slots[turn], grads[turn], [[slots[at].numel()] for at in of_ranks]

    def run(prepared: tuple[torch.Tensor, torch.Tensor, list[list[int]]]) -> None:
        slots_U, grad_UD, counts = prepared
        [(union, mean_UD)] = reducer.reduce([(slots_U, grad_UD)], counts)
        gradient.index_copy_(0, union, mean_UD)

    num_items = num_ranks * hot.mean_rows
    return Work(run, num_items, 4 * hot.dim * num_items, prepare)


def _update(hot: _Hot) -> Work:
    """The optimizer's step after one backward pass."""
    turns = in_turn(hot.samples)
    replicas = hot.replicas()
    names = [f"table{number}" for number in range(len(hot.num_rows_T))]
    optimizer = HotOptimizer({"": replicas}, {"": names}, hot.bench.specs[0])

    def prepare() -> None:
        rows = replicas(next(turns))
        rows.backward(torch.randn_like(rows))
        bucket: Any = _Bucket(hot.weight.grad)  # type: ignore[arg-type]
        replicas.reduce_gradient(None, bucket)

    return hot.work(lambda _: optimizer.step(), prepare)
