"""Stage 2: one GPU's tables in its memory, in host memory, behind FBGEMM's cache, and our slots.

NVIDIA's setting (its dynamicemb benchmark): 10 tables of 128 floats, 1.05 M ids per step, Zipf
1.05, no pooling, only the forward and backward pass of the lookups. The tables are half as large,
since they must fit into host memory; those for Adam have a third of that, the same bytes with its
moments. NVIDIA measures a cache on a repeated stream of batches; here it is measured on an endless
stream, and then on a repeated one. FBGEMM's counters are off during timing.

Slots take as many bytes of the device as FBGEMM's cache without prefetch. FBGEMM removes duplicate
ids in its step. hotrec's loader workers do so outside of the step, as in training; a second row has
them removed on the device, inside the step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu_day.record import OK, DoesNotFitError, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, Day, Laps, bus_traffic, free_memory, main, show
from benchmarks.gpu_day.tbe import (
    DEVICE,
    MAPPED_SLOTS,
    SLOTS,
    UVM,
    UVM_CACHE,
    HostPool,
    Tables,
    ZipfIds,
)
from hotrec.embedding.cached_rows import CachedRows, RowMover
from hotrec.embedding.pooling import sum_in_pieces
from hotrec.embedding.row_store import host_rows
from hotrec.embedding.slots import TooFewSlotsError
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.report.units import show_bytes, show_count, show_seconds
from hotrec.runtime.mapped_memory import host_view
from hotrec.runtime.memory import read_memory
from hotrec.types import POPULAR_ROW, OptimizerKind

NUM_TABLES, EXPONENT = 10, 1.05
FRESH, REPLAYED = "fresh", "replayed"
POOL = "host memory"


class Place(NamedTuple):
    """Where the rows are.

    Args:
        tier: the memory.
        cache_frac: share of the rows that FBGEMM's cache holds; of slots, of as many bytes.
        is_ahead: FBGEMM's cache is filled for the next batch; slots always are.
        is_unique_here: duplicates of ids are removed on the device, inside the step.
    """

    tier: str
    cache_frac: float = 0.0
    is_ahead: bool = False
    is_unique_here: bool = False

    @property
    def name(self) -> str:
        """Such as ``UVM cache 1.5%, prefetch``."""
        share = f" {100 * self.cache_frac:g}%" if self.cache_frac else ""
        ahead = ", prefetch" if self.is_ahead else ""
        return f"{self.tier}{share}{ahead}{', unique on the device' if self.is_unique_here else ''}"


# What a part of the table is for comes first: a stage that is ended early has it.
PLACES = (
    Place(DEVICE),
    Place(UVM_CACHE, 0.1),
    Place(UVM_CACHE, 0.1, is_ahead=True),
    Place(SLOTS, 0.1),
    Place(SLOTS, 0.1, is_unique_here=True),
    Place(MAPPED_SLOTS, 0.1),
    Place(UVM_CACHE, 0.015, is_ahead=True),
    Place(UVM),
    Place(UVM_CACHE, 0.015),
)
FEW_SLOTS = Place(SLOTS, 0.015)
CASES = (
    *((OptimizerKind.sgd, place) for place in (*PLACES[:7], FEW_SLOTS, *PLACES[7:])),
    *((OptimizerKind.rowwise_adagrad, place) for place in PLACES),
    *((OptimizerKind.adam, place) for place in PLACES[:6]),
    (OptimizerKind.adam, FEW_SLOTS),
)
# Batches that are announced ahead, as `pipeline.window` has it by default.
WINDOW = 32
# Untimed steps in which rows are counted and the bus is watched.
NUM_COUNTED = 30
# Left to the CUDA context, the libraries and the host's own work.
SPARE_DEVICE_BYTES, SPARE_HOST_BYTES = 3e9, 8e9
# The parts in which rows are moved, on threads of their own, and whether the device makes them.
MOVES = {"gather": False, "copy_to_device": True, "put_in_slots": True, "put_back": False}
PARTS = {"foresee": True, "reserve": True, "read": True, "sum gradients": True, "update": True}


@dataclass(frozen=True)
class Sizes:
    """How large and how long.

    Args:
        num_rows: of a table; a third of it with Adam.
        per_table: ids that a step reads of each table.
        dim: D.
        num_steps: timed steps.
        num_filling: steps before them on the fresh stream. Caches of 10% are full after 80.
    """

    num_rows: int
    per_table: int
    dim: int
    num_steps: int
    num_filling: int

    @property
    def num_ids(self) -> int:
        return NUM_TABLES * self.per_table

    @property
    def num_drawn(self) -> int:
        """Batches of the fresh stream; the last ``num_steps`` are played again."""
        return self.num_filling + 2 * self.num_steps + NUM_COUNTED

    def tables(self, kind: OptimizerKind, place: Place) -> Tables:
        """The tables of a case."""
        rows = self.num_rows // 3 if kind is OptimizerKind.adam else self.num_rows
        return Tables(
            NUM_TABLES, rows, self.dim, OptimizerSpec(kind, learning_rate=0.01), place.tier,
            cache_frac=place.cache_frac or 0.2, is_prefetching=place.is_ahead,
        )  # fmt: skip


class Distinct(NamedTuple):
    """The distinct rows of a batch, and where the ids are that read them.

    Args:
        rows_U: rows of the concatenated tables, ascending.
        ids_K: ids in the order of their rows.
        starts_U: where each row's ids begin among them.
        of_ids_K: the place of each id's row.
        longest: ids of the row that most ids read.
    """

    rows_U: torch.Tensor
    ids_K: torch.Tensor
    starts_U: torch.Tensor
    of_ids_K: torch.Tensor
    longest: int


def find_distinct(ids: torch.Tensor, num_rows: int) -> Distinct:
    """Of the ids of all tables, each of ``num_rows`` rows, table after table."""
    begins = torch.arange(NUM_TABLES, device=ids.device) * num_rows
    sorted_K, order_K = torch.sort((ids.view(NUM_TABLES, -1) + begins[:, None]).view(-1))
    rows_U, of_sorted_K, counts_U = torch.unique_consecutive(
        sorted_K, return_inverse=True, return_counts=True
    )
    of_ids_K = torch.empty_like(order_K).index_copy_(0, order_K, of_sorted_K)
    return Distinct(rows_U, order_K, counts_U.cumsum(0) - counts_U, of_ids_K, int(counts_U.max()))


class Bench:
    """What the cases of this stage share: the host's memory, and the ids.

    Args:
        day: where it runs.
        sizes: of the tables and the streams.
        cases: all that will be measured, for the largest of which host memory is allocated once.
    """

    def __init__(self, day: Day, sizes: Sizes, cases: Sequence[Tables]) -> None:
        self._device, self._sizes = day.device, sizes
        needs = [tables.memory(sizes.num_ids)[1] for tables in cases]
        self._host_free = read_memory()[1] - SPARE_HOST_BYTES
        self._pool_bytes = max([n for n in needs if n <= self._host_free], default=0)
        self._pool: HostPool | None = None
        self._stream: tuple[int, list[torch.Tensor]] = (0, [])

    def allocate(self) -> dict[str, Any]:
        """Allocate and pin the host's memory."""
        if self._pool is None:
            # A megabyte for the alignment of the tensors in it.
            self._pool = HostPool(self._pool_bytes + (1 << 20), self._device)
        return {"host_bytes": self._pool_bytes}

    def check(self, tables: Tables) -> dict[str, int]:
        """The memory that a case is predicted to need.

        Raises:
            DoesNotFitError: if that is more than is free.
        """
        device_bytes, host_bytes = tables.memory(self._sizes.num_ids)
        # The ids of both streams and their draws; with slots, the places of ids as well.
        per_id = 32 if tables.has_slots else 8
        device_bytes += per_id * self._sizes.num_ids * (self._sizes.num_drawn + 12)
        free = torch.cuda.mem_get_info(self._device)[0] - SPARE_DEVICE_BYTES
        for what, needed, left in (
            ("GPU", device_bytes, free),
            ("host", host_bytes, self._host_free),
        ):
            if needed > left:
                raise DoesNotFitError(
                    f"needs {show_bytes(needed)} of {show_bytes(left)} of {what} memory"
                )
        return {"predicted_device_bytes": device_bytes, "predicted_host_bytes": host_bytes}

    def _batches(self, num_rows: int) -> list[torch.Tensor]:
        """The stream: batches drawn one after the other, of which the last are played again."""
        if self._stream[0] != num_rows:
            ids = ZipfIds(num_rows, EXPONENT, self._device, seed=7)
            drawn = [
                ids.draw(NUM_TABLES, self._sizes.per_table) for _ in range(self._sizes.num_drawn)
            ]
            self._stream = num_rows, drawn
        drawn, again = self._stream[1], self._stream[1][-self._sizes.num_steps :]
        # As far as look-ahead looks past the last step.
        return drawn + again * (1 + -(-(WINDOW + 1) // len(again)))

    def measure(self, tables: Tables, place: Place) -> dict[str, Any]:
        """Steps of a case on both streams, one after the other.

        Raises:
            DoesNotFitError: if it needs more memory, or more slots, than there are.
        """
        free_memory()
        figures: dict[str, Any] = {**self.check(tables)}
        torch.cuda.reset_peak_memory_stats(self._device)
        with ExitStack() as stack:
            module = self._build(tables)
            batches = self._batches(tables.num_rows)
            step: _Step | _SlotStep = _Step(module, tables, batches, self._sizes.num_ids)
            if tables.has_slots:
                step = stack.enter_context(
                    _SlotStep(module, tables, batches, self._sizes.num_ids, place.is_unique_here)
                )
            try:
                figures |= self._run(step)
            except TooFewSlotsError as error:
                raise DoesNotFitError(
                    f"needs {error.num_needed} slots of {error.num_slots} for the batches in flight"
                ) from error
        figures["num_distinct"] = find_distinct(batches[0], tables.num_rows).rows_U.numel()
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return figures

    def _run(self, step: _Step | _SlotStep) -> dict[str, Any]:
        """Fill and time on a fresh stream, count, fill and time on the replayed one."""
        figures: dict[str, Any] = {}
        num_steps = self._sizes.num_steps
        for name, num_filling in ((FRESH, self._sizes.num_filling), (REPLAYED, num_steps)):
            step.run(num_filling, Laps())
            laps = Laps()
            step.run(num_steps, laps)
            figures[name] = laps.quantiles()
            if name == FRESH:
                with bus_traffic() as moved:
                    figures["moved"] = step.count(NUM_COUNTED)
                figures["bus"] = {way: total / NUM_COUNTED for way, total in moved.items()}
        return figures

    def _build(self, tables: Tables) -> Any:
        if tables.tier == DEVICE:
            return tables.build(self._device, is_random=False)
        self.allocate()
        assert self._pool is not None
        with self._pool.serve():
            # Zeros: to draw 70 GB over the bus would take longer than the steps.
            return tables.build(self._device, is_random=False)


class _Step:
    """Forward and backward of the lookups, one batch after the other.

    Args:
        module: FBGEMM's tables.
        tables: what they are.
        batches: the stream.
        num_ids: of a batch.
    """

    def __init__(
        self, module: Any, tables: Tables, batches: Sequence[torch.Tensor], num_ids: int
    ) -> None:
        self._module, self._batches, self._number = module, batches, 0
        device = batches[0].device
        self._offsets = torch.arange(num_ids + 1, device=device)
        self._grad = torch.randn(num_ids, tables.dim, device=device) * 1e-3
        self._has_cache = tables.tier == UVM_CACHE
        self._stream = torch.cuda.Stream(device) if tables.is_prefetching else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._prefetch(batches[0])

    def _prefetch(self, ids: torch.Tensor) -> None:
        """Fill the cache for a batch beside the main stream, as TorchRec's pipeline does."""
        if self._stream is not None:
            main_stream = torch.cuda.current_stream()
            with torch.cuda.stream(self._stream):
                self._module.prefetch(ids, self._offsets, forward_stream=main_stream)

    def run(self, num_steps: int, laps: Laps) -> None:
        """Steps of the next batches."""
        for number in range(self._number, self._number + num_steps):
            with laps.lap("step"):
                with laps.lap("forward"):
                    if self._stream is not None:
                        torch.cuda.current_stream().wait_stream(self._stream)
                    out = self._module(self._batches[number], self._offsets)
                self._prefetch(self._batches[number + 1])
                with laps.lap("backward"):
                    out.backward(self._grad)
        self._number += num_steps

    def count(self, num_steps: int) -> dict[str, float]:
        """Rows that the cache lacks, and those of them for which it has no place, in a step."""
        if not self._has_cache:
            self.run(num_steps, Laps())
            return {}
        self._module.gather_uvm_cache_stats = True
        self._module.reset_uvm_cache_stats()
        self.run(num_steps, Laps())
        counts = self._module.get_uvm_cache_stats().tolist()
        self._module.gather_uvm_cache_stats = False
        return {"fetched": counts[3] / num_steps, "conflicts": counts[4] / num_steps}


def _host_rows(module: Any, tables: Tables) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The weights and states of all rows in host memory: the host's views, and the device's.

    FBGEMM's own memory where it is on the host; it keeps a row-wise sum on the device.
    """
    num_rows, spec = tables.num_tables * tables.num_rows, tables.optimizer
    shapes = {"weights": (num_rows, tables.dim)}
    shapes |= dict.fromkeys(spec.state_names, spec.state_shape(num_rows, tables.dim))
    parts = {}
    for name, shape in shapes.items():
        flat = getattr(module, f"{name}_uvm").detach()
        if flat.numel():
            parts[name] = host_view(flat).view(shape), flat.view(shape)
        else:
            parts[name] = host_rows(shape, torch.float32, module.current_device)
    return parts


class _SlotStep:
    """The same with hotrec's slots, for which rows are moved one batch ahead.

    Args:
        module: FBGEMM's tables, in host memory.
        tables: what they are.
        batches: the stream.
        num_ids: of a batch.
        is_unique_here: duplicates of ids are removed in the step that first knows a batch.
    """

    def __init__(
        self,
        module: Any,
        tables: Tables,
        batches: Sequence[torch.Tensor],
        num_ids: int,
        is_unique_here: bool,
    ) -> None:
        self._tables, self._batches, device = tables, batches, batches[0].device
        self._rate = tables.optimizer.learning_rate
        parts = _host_rows(module, tables)
        self._row_bytes = sum(here[:1].nbytes for here, _ in parts.values())
        weights, *states = (here for here, _ in parts.values())
        self._rows = CachedRows(
            (weights, dict(zip(tables.optimizer.state_names, states, strict=True))),
            tables.num_slots,
            np.empty(0, POPULAR_ROW),
            tables.optimizer,
            device,
            [seen for _, seen in parts.values()] if tables.tier == MAPPED_SLOTS else None,
            is_distinct=True,
        )
        self._grad = torch.randn(num_ids, tables.dim, device=device) * 1e-3
        self._found: dict[int, Distinct] = {}
        if not is_unique_here:
            ids_of = {id(ids): ids for ids in batches}
            found = {key: find_distinct(ids, tables.num_rows) for key, ids in ids_of.items()}
            self._found = {at: found[id(ids)] for at, ids in enumerate(batches)}
        # The next batch and its slots, and how many are known.
        self._number, self._num_known, self._slots = 0, 0, torch.empty(0)
        self._laps = Laps()

    def __enter__(self) -> _SlotStep:
        self._patches = ExitStack()
        for name in MOVES:
            whole = getattr(RowMover, name)
            self._patches.enter_context(mock.patch.object(RowMover, name, self._timed(name, whole)))
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()
        self._patches.close()

    def _timed(self, name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **words: Any) -> Any:
            with self._laps.lap(name):
                return move(*arguments, **words)

        return timed

    def run(self, num_steps: int, laps: Laps) -> None:
        """Steps of the next batches."""
        self._laps = laps
        if self._number == 0:
            self._reserve()
        for _ in range(num_steps):
            number, slots = self._number, self._slots
            batch = self._found.pop(number)
            with laps.lap("step"):
                with laps.lap("forward"):
                    self._rows.wait(number)
                    with laps.lap("read"):
                        held_UD = self._rows.read(slots)
                    held_UD.index_select(0, batch.of_ids_K)
                self._number += 1
                self._reserve()
                with laps.lap("backward"):
                    with laps.lap("sum gradients"):
                        grad_UD = sum_in_pieces(
                            self._grad, batch.ids_K, batch.starts_U, None, batch.longest
                        )
                    with laps.lap("update"):
                        self._rows.update(slots, grad_UD, self._rate, number + 1, is_distinct=True)
                    self._rows.release(number, is_changed=True)

    def _reserve(self) -> None:
        """Fill the slots of the batch ``self._number``, and get to know those of the window."""
        with self._laps.lap("foresee"):
            while self._num_known <= self._number + WINDOW:
                self._rows.foresee(self._distinct(self._num_known).rows_U, self._num_known)
                self._num_known += 1
        with self._laps.lap("reserve"):
            rows_U = self._distinct(self._number).rows_U
            self._slots = self._rows.reserve(rows_U, self._number)

    def _distinct(self, number: int) -> Distinct:
        if number not in self._found:
            self._found[number] = find_distinct(self._batches[number], self._tables.num_rows)
        return self._found[number]

    def count(self, num_steps: int) -> dict[str, float]:
        """Rows that are fetched and written back in a step."""
        before = self._rows.read_bytes, self._rows.written_bytes
        self.run(num_steps, Laps())
        fetched, written = (
            (now - then) / (num_steps * self._row_bytes)
            for now, then in zip(
                (self._rows.read_bytes, self._rows.written_bytes), before, strict=True
            )
        )
        return {"fetched": fetched, "written": written}


def summarize(parts: Parts) -> Summary:
    cases = {name: part for name, part in parts.items() if name != POOL}
    tables = []
    for kind in dict.fromkeys(name.partition(": ")[0] for name in cases):
        of_kind = {
            name.partition(": ")[2]: part
            for name, part in cases.items()
            if name.startswith(f"{kind}: ")
        }
        tables.append(_table(kind, of_kind))
        if any("reserve" in part.get(FRESH, {}) for part in of_kind.values()):
            tables.append(_parts_table(kind, of_kind))
    kinds = dict.fromkeys(name.partition(": ")[0] for name in cases)
    said = "; ".join(filter(None, (_verdict(kind, cases) for kind in kinds)))
    return Summary(
        f"Step on a fresh stream over that in device memory: {said or 'nothing to compare'}.",
        tables,
    )


def _table(kind: str, of_kind: Parts) -> Table:
    header = ["rows in", "fresh: step", "forward", "backward", "host's step"]
    header += ["replayed: step", "host's step", "rows fetched", "written back"]
    header += ["over the bus: in", "out", "GPU memory (predicted)"]
    rows = [[place, *_cells(part)] for place, part in of_kind.items()]
    distinct = [part["num_distinct"] for part in of_kind.values() if part["status"] == OK]
    note = (
        "Device time, P50 (P10 to P90), and the host's P50 for a step; forward and backward of the "
        "lookups alone. Caches and slots begin empty and are full before they are timed. Rows and "
        "bytes a step, counted in untimed steps of the fresh stream; rows for which FBGEMM's cache "
        "has no place among the ones that compete for it are in brackets; bytes by NVML."
    )
    note += f" {show_count(distinct[0])} distinct rows a step." if distinct else ""
    if kind == OptimizerKind.sgd.value:
        note += (
            " NVIDIA published for one H100, with tables of twice as many rows, replayed: 0.96 ms "
            "in device memory, 4.15 ms behind a cache that holds the stream's rows."
        )
    return Table(kind, header, rows, note)


def _cells(part: Mapping[str, Any]) -> list[str]:
    if part["status"] != OK:
        return [part["status"], *[DASH] * 10]
    fresh, replayed, moved = part[FRESH], part[REPLAYED], part["moved"]
    cells = [show(fresh["step"]["device"])]
    cells += [show_seconds(fresh[lap]["device"]["p50_s"]) for lap in ("forward", "backward")]
    cells.append(show_seconds(fresh["step"]["host"]["p50_s"]))
    cells += [show(replayed["step"]["device"]), show_seconds(replayed["step"]["host"]["p50_s"])]
    fetched = show_count(round(moved["fetched"])) if "fetched" in moved else DASH
    if "conflicts" in moved:
        fetched += f" ({show_count(round(moved['conflicts']))})"
    cells.append(fetched)
    cells.append(show_count(round(moved["written"])) if "written" in moved else DASH)
    bus = part["bus"]
    cells += [show_bytes(bus[way]) if way in bus else DASH for way in ("to_device", "to_host")]
    device = show_bytes(part["peak_device_bytes"])
    return [*cells, f"{device} ({show_bytes(part['predicted_device_bytes'])})"]


def _parts_table(kind: str, of_kind: Parts) -> Table:
    """Of slots, each part on its own: they overlap, so that they add up to more than a step."""
    shown = {
        place: part[FRESH] for place, part in of_kind.items() if "reserve" in part.get(FRESH, {})
    }
    rows = []
    for name, is_device in {**PARTS, **MOVES}.items():
        cells = []
        for laps in shown.values():
            if name not in laps:  # no row has been written back yet
                cells.append(DASH)
                continue
            clocks = ("device", "host") if is_device else ("host",)
            cells.append(" / ".join(show_seconds(laps[name][c]["p50_s"]) for c in clocks))
        rows.append([name, *cells])
    return Table(
        f"{kind}: parts of a step behind slots",
        ["part", *shown],
        rows,
        "P50 on the fresh stream, device / host, or the host's alone where the host does it. "
        "foresee and reserve are the bookkeeping; foresee also removes duplicates where that is "
        "done on the device. From gather on: on threads of their own, beside the step.",
    )


def _verdict(kind: str, cases: Parts) -> str:
    steps = {
        name.partition(": ")[2]: part[FRESH]["step"]["device"]["p50_s"]
        for name, part in cases.items()
        if name.startswith(f"{kind}: ") and part["status"] == OK
    }
    least = steps.pop(DEVICE, None)
    if not steps:
        return ""
    ratios = [
        (f"{place} {seconds / least:.1f}" if least else f"{place} {show_seconds(seconds)}")
        + _against_cache(place, steps)
        for place, seconds in steps.items()
    ]
    return f"{kind}: {', '.join(ratios)}"


def _against_cache(place: str, steps: Mapping[str, float]) -> str:
    """How much faster slots are than FBGEMM's best cache of as many bytes."""
    ours = next((tier for tier in (MAPPED_SLOTS, SLOTS) if place.startswith(tier)), None)
    if ours is None:
        return ""
    cache = place.partition(",")[0].replace(ours, UVM_CACHE)
    others = [seconds for name, seconds in steps.items() if name.partition(",")[0] == cache]
    return f" ({min(others) / steps[place]:.2f} times as fast as {cache})" if others else ""


def run(day: Day) -> None:
    sizes = day.pick(Sizes(13_400_000, 104_857, 128, 30, 90), Sizes(9_000, 50, 8, 3, 3))
    cases = {f"{kind.value}: {p.name}": (sizes.tables(kind, p), p) for kind, p in CASES}
    bench = Bench(day, sizes, [tables for tables, _ in cases.values()])
    day.record.part(POOL, bench.allocate)
    for name, (tables, place) in cases.items():
        day.record.part(name, lambda t=tables, p=place: bench.measure(t, p))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
