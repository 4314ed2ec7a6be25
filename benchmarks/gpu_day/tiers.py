"""Stage 4: one GPU's tables in its own memory, in the host's, behind FBGEMM's cache, and our slots.

NVIDIA's setting (its dynamicemb benchmark): 10 tables of 128 floats, 1.05 M ids a step, Zipf 1.05,
no pooling, the forward and backward pass of the lookups alone; the tables are half as large, or a
quarter with Adam, since a host's memory must hold them. There a cache is measured on a stream of
100 batches that is played again and again; here on such a one, and on a stream that goes on.

Slots take as many bytes of the device as FBGEMM's cache without prefetch. They are given the
distinct rows of a batch on the host, which loader workers find in training, outside the step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_day.record import OK, DoesNotFitError, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, Laps, free_memory, main, show
from benchmarks.gpu_day.tbe import (
    DEVICE,
    MAPPED_SLOTS,
    SLOTS,
    UVM,
    UVM_CACHE,
    HostPool,
    Tables,
    ZipfIds,
    optimizers_of,
    tiers_of,
)
from hotrec.embedding.cached_rows import CachedRows
from hotrec.embedding.cpu_rows import fbgemm_rows, mapped_rows
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.report.units import show_bytes, show_count, show_seconds
from hotrec.runtime.memory import read_memory
from hotrec.types import POPULAR_ROW, OptimizerKind

NUM_TABLES, EXPONENT = 10, 1.05
FRESH, REPLAYED = "fresh", "replayed"
POOL = "host memory"
KINDS = (OptimizerKind.sgd, OptimizerKind.rowwise_adagrad, OptimizerKind.adam)
# Tier, share of the rows in the cache, and whether the cache is filled ahead.
PLACES: tuple[tuple[str, float, bool], ...] = (
    (DEVICE, 0.0, False),
    (UVM, 0.0, False),
    (UVM_CACHE, 0.1, False),
    (UVM_CACHE, 0.1, True),
    (UVM_CACHE, 0.015, False),
    (UVM_CACHE, 0.015, True),
    (SLOTS, 0.1, True),
    (SLOTS, 0.015, True),
    (MAPPED_SLOTS, 0.1, True),
    (MAPPED_SLOTS, 0.015, True),
)
OURS = (SLOTS, MAPPED_SLOTS)
# Batches whose rows are known ahead, as `pipeline.window` has it by default.
WINDOW = 32
# Left to the CUDA context, the libraries and the host's own work.
SPARE_DEVICE_BYTES, SPARE_HOST_BYTES = 3e9, 8e9


@dataclass(frozen=True)
class Sizes:
    """How large and how long.

    Args:
        num_rows: of a table; half of it with Adam.
        per_table: ids that a step reads of each table.
        dim: D.
        num_steps: steps that fill a cache; as many are timed.
    """

    num_rows: int
    per_table: int
    dim: int
    num_steps: int

    @property
    def num_ids(self) -> int:
        return NUM_TABLES * self.per_table

    def tables(self, kind: OptimizerKind, place: tuple[str, float, bool]) -> Tables:
        """The tables of a case; those of Adam have half the rows."""
        tier, cache_frac, is_prefetching = place
        rows = self.num_rows // 2 if kind is OptimizerKind.adam else self.num_rows
        return Tables(
            NUM_TABLES, rows, self.dim, OptimizerSpec(kind, learning_rate=0.01), tier,
            cache_frac=cache_frac or 0.2, is_prefetching=is_prefetching and tier not in OURS,
        )  # fmt: skip


def place_name(place: tuple[str, float, bool]) -> str:
    """Such as ``UVM cache 1.5%, prefetch``; slots are always filled ahead."""
    tier, cache_frac, is_prefetching = place
    share = f" {100 * cache_frac:g}%" if cache_frac else ""
    return f"{tier}{share}{', prefetch' if is_prefetching and tier not in OURS else ''}"


class CalibrationWorkload:
    """What the cases of this stage share: the host's memory, and the ids.

    Args:
        day: where it runs.
        sizes: of the tables and the streams.
        cases: all that will be measured, for the largest of which host memory is allocated once.
    """

    def __init__(self, day: Day, sizes: Sizes, cases: Sequence[Tables]) -> None:
        self._day, self._sizes = day, sizes
        needs = [tables.memory(sizes.num_ids)[1] for tables in cases]
        self._host_free = read_memory()[1] - SPARE_HOST_BYTES
        self._pool_bytes = max([n for n in needs if n <= self._host_free], default=0)
        self._pool: HostPool | None = None

    def allocate(self) -> dict[str, Any]:
        """Allocate and pin the host's memory."""
        if self._pool is None:
            # A megabyte for the alignment of the tensors in it.
            self._pool = HostPool(self._pool_bytes + (1 << 20), self._day.device)
        return {"host_bytes": self._pool_bytes}

    def check(self, tables: Tables) -> dict[str, int]:
        """The memory that a case is predicted to need.

        Raises:
            DoesNotFitError: if that is more than is free.
        """
        device_bytes, host_bytes = tables.memory(self._sizes.num_ids)
        # The ids of both streams, and the draws of a batch.
        device_bytes += 8 * self._sizes.num_ids * (3 * self._sizes.num_steps + 8)
        if self._day.device.type == "cuda":
            free = torch.cuda.mem_get_info(self._day.device)[0] - SPARE_DEVICE_BYTES
            if device_bytes > free:
                raise DoesNotFitError(
                    f"needs {show_bytes(device_bytes)} of {show_bytes(free)} of GPU memory"
                )
            if host_bytes > self._host_free:
                raise DoesNotFitError(
                    f"needs {show_bytes(host_bytes)} of {show_bytes(self._host_free)} of host "
                    "memory"
                )
        return {"predicted_device_bytes": device_bytes, "predicted_host_bytes": host_bytes}

    def measure(self, tables: Tables) -> dict[str, Any]:
        """Steps of a case on both streams, one after the other."""
        device = self._day.device
        free_memory(device)
        figures: dict[str, Any] = {**self.check(tables)}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        module = self._build(tables)
        ids = ZipfIds(tables.num_rows, EXPONENT, device, seed=7)
        num_steps, per_table = self._sizes.num_steps, self._sizes.per_table
        batches = [ids.draw(NUM_TABLES, per_table) for _ in range(3 * num_steps)]
        num_distinct = sum(
            table.unique().numel() for table in batches[num_steps].view(NUM_TABLES, per_table)
        )
        step: _Step | _SlotStep = _Step(module, tables, self._sizes.num_ids, device)
        if tables.has_slots:
            step = _SlotStep(module, tables, self._sizes.num_ids, device)
            batches = [step.prepare(ids) for ids in batches]
        warm, fresh, again = (batches[i * num_steps :][:num_steps] for i in range(3))
        for name, filling, timed, coming in (
            (FRESH, warm, fresh, again[0]),
            (REPLAYED, again, again, warm[0]),
        ):
            step.run(filling, timed[0], Laps(device))
            laps = Laps(device)
            step.run(timed, coming, laps)
            figures[name] = laps.quantiles()
        figures["num_distinct"] = num_distinct
        step.close()
        if device.type == "cuda":
            figures["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
        del module, step, ids, batches, warm, fresh, again
        free_memory(device)
        return figures

    def _build(self, tables: Tables) -> Any:
        if tables.tier == DEVICE:
            return tables.build(self._day.device)
        self.allocate()
        assert self._pool is not None
        with self._pool.serve():
            return tables.build(self._day.device)


class _Step:
    """Forward and backward of the lookups, one batch after the other."""

    def __init__(self, module: Any, tables: Tables, num_ids: int, device: torch.device) -> None:
        self._module, self._device = module, device
        self._offsets = torch.arange(num_ids + 1, device=device)
        self._grad = torch.randn(num_ids, tables.dim, device=device) * 1e-3
        self._stream = torch.cuda.Stream(device) if tables.is_prefetching else None
        self._is_fetched = False

    def _prefetch(self, ids: torch.Tensor) -> None:
        """Fill the cache for a batch beside the main stream, as TorchRec's pipeline does."""
        if self._stream is not None:
            main_stream = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._stream):
                self._module.prefetch(ids, self._offsets, forward_stream=main_stream)

    def run(self, batches: Sequence[torch.Tensor], coming: torch.Tensor, laps: Laps) -> None:
        """Steps of the batches; ``coming`` is the one that comes after them."""
        if not self._is_fetched:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._prefetch(batches[0])
            self._is_fetched = True
        for ids, next_ids in zip(batches, [*batches[1:], coming], strict=True):
            with laps.lap("step"):
                with laps.lap("forward"):
                    if self._stream is not None:
                        torch.cuda.current_stream(self._device).wait_stream(self._stream)
                    out = self._module(ids, self._offsets)
                self._prefetch(next_ids)
                with laps.lap("backward"):
                    out.backward(self._grad)

    def close(self) -> None:
        """It has no threads."""


# The distinct rows of a batch, on the host, and which of them each id is, on the device.
Distinct = tuple[torch.Tensor, torch.Tensor]


class _SlotStep:
    """The same with ``hotrec.embedding.cached_rows``, of which one batch is moved ahead."""

    def __init__(self, module: Any, tables: Tables, num_ids: int, device: torch.device) -> None:
        self._tables = tables
        rate = tables.optimizer.learning_rate
        self._rows = CachedRows(
            fbgemm_rows(module, tables.optimizer),
            tables.num_slots,
            np.empty(0, POPULAR_ROW),
            torch.optim.SGD([torch.zeros(1)], lr=rate),
            tables.optimizer,
            device,
            mapped_rows(module, tables.optimizer, is_wanted=tables.tier == MAPPED_SLOTS),
        )
        self._grad = torch.randn(num_ids, tables.dim, device=device) * 1e-3
        # The batch to compute, its slots, and the batches that are known.
        self._number, self._slots, self._num_known = 0, torch.empty(0), 0

    def prepare(self, ids: torch.Tensor) -> Distinct:
        """What loader workers hand over of the ids of all tables."""
        begins = torch.arange(NUM_TABLES, device=ids.device) * self._tables.num_rows
        rows, of_ids = (ids.view(NUM_TABLES, -1) + begins[:, None]).unique(return_inverse=True)
        return rows.cpu(), of_ids.view(-1)

    def run(self, batches: Sequence[Distinct], coming: Distinct, laps: Laps) -> None:
        """Steps of the batches; ``coming`` is the one that comes after them."""
        ahead, first = [*batches, coming], self._number
        if first == 0:
            self._reserve(ahead, first)
        for _, of_ids in batches:
            with laps.lap("step"):
                with laps.lap("forward"):
                    self._rows.wait(self._number)
                    held_UD = self._rows.read(self._slots)
                    held_UD.index_select(0, of_ids)
                number, slots = self._number, self._slots
                self._number += 1
                self._reserve(ahead, first)
                with laps.lap("backward"):
                    grad_UD = torch.zeros_like(held_UD).index_add_(0, of_ids, self._grad)
                    rate = self._tables.optimizer.learning_rate
                    self._rows.update(slots, grad_UD, rate, number + 1)
                    self._rows.release(number, is_changed=True)

    def _reserve(self, ahead: Sequence[Distinct], first: int) -> None:
        """Fill the slots of the batch ``self._number``; ``ahead`` are those from ``first`` on."""
        last = first + len(ahead) - 1
        while self._num_known <= min(self._number + WINDOW, last):
            self._rows.foresee(ahead[self._num_known - first][0], self._num_known)
            self._num_known += 1
        self._slots = self._rows.reserve(ahead[self._number - first][0], self._number)

    def close(self) -> None:
        """Let the threads end that move rows."""
        self._rows.close()


def summarize(parts: Parts) -> Summary:
    cases = {name: part for name, part in parts.items() if name != POOL}
    tables = []
    for kind in dict.fromkeys(name.partition(": ")[0] for name in cases):
        of_kind = {
            name.partition(": ")[2]: part for name, part in cases.items() if name.startswith(kind)
        }
        rows = [[place, *_cells(part)] for place, part in of_kind.items()]
        header = ["rows in"]
        for stream in (FRESH, REPLAYED):
            header += [f"{stream}: step", "forward", "backward", "host"]
        tables.append(Table(kind, [*header, "GPU memory (predicted)"], rows, _note(of_kind)))
    verdicts = [_verdict(table.title, cases) for table in tables]
    said = "; ".join(verdict for verdict in verdicts if verdict) or "nothing to compare with it"
    return Summary(f"Step on a fresh stream over that in device memory: {said}.", tables)


def _cells(part: Mapping[str, Any]) -> list[str]:
    if part["status"] != OK:
        return [part["status"], *[DASH] * 8]
    cells = []
    for stream in (FRESH, REPLAYED):
        laps = part[stream]
        cells.append(show(laps["step"]["device"]))
        cells += [show_seconds(laps[lap]["device"]["p50_s"]) for lap in ("forward", "backward")]
        cells.append(show_seconds(laps["step"]["host"]["p50_s"]))
    peak = show_bytes(part["peak_device_bytes"]) if "peak_device_bytes" in part else DASH
    return [*cells, f"{peak} ({show_bytes(part['predicted_device_bytes'])})"]


def _note(of_kind: Parts) -> str:
    distinct = [part["num_distinct"] for part in of_kind.values() if part["status"] == OK]
    text = (
        "Device time, P50 (P10 to P90), and the host's P50 for a step; forward and backward of the "
        "lookups alone. Fresh: rows that the stream has not drawn before are among those of every "
        "step; replayed: the same batches again and again."
    )
    return text + (f" {show_count(distinct[0])} distinct rows a step." if distinct else "")


def _verdict(kind: str, cases: Parts) -> str:
    steps = {
        name.partition(": ")[2]: part[FRESH]["step"]["device"]["p50_s"]
        for name, part in cases.items()
        if name.startswith(f"{kind}: ") and part["status"] == OK
    }
    least = steps.pop(DEVICE, None)
    if least is None or not steps:
        return ""
    ratios = [
        f"{place} {seconds / least:.1f}{_against_cache(place, steps)}"
        for place, seconds in steps.items()
    ]
    return f"{kind}: {', '.join(ratios)}"


def _against_cache(place: str, steps: Mapping[str, float]) -> str:
    """How much faster slots are than FBGEMM's best cache of as many bytes."""
    ours = next((tier for tier in OURS if place.startswith(tier)), None)
    if ours is None:
        return ""
    cache = place.replace(ours, UVM_CACHE)
    others = [seconds for name, seconds in steps.items() if name.startswith(cache)]
    return f" ({min(others) / steps[place]:.2f} times as fast as {cache})" if others else ""


def run(day: Day) -> None:
    sizes = day.pick(Sizes(13_400_000, 104_857, 128, 100), Sizes(10_000, 50, 8, 3))
    tiers, kinds = tiers_of(day.device), optimizers_of(day.device)
    cases = {
        f"{kind.value}: {place_name(place)}": sizes.tables(kind, place)
        for kind in KINDS
        for place in PLACES
        if kind in kinds and place[0] in (*tiers, *OURS)
    }
    bench = CalibrationWorkload(day, sizes, list(cases.values()))
    if day.device.type == "cuda":
        day.record.part(POOL, bench.allocate)
    for name, tables in cases.items():
        day.record.part(name, lambda t=tables: bench.measure(t))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
