"""Costs: seconds for each thing that a training step does on a kind of machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hotrec.types import STAGES


class CostsError(ValueError):
    """Costs that are missing, invalid, or of another kind of machine."""


@dataclass(frozen=True)
class World:
    """Ranks and hosts.

    Raises:
        CostsError: If the ranks do not divide into hosts of equal size.
    """

    num_ranks: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_host < 1:
            raise CostsError(
                f"world: expected at least 1 rank and 1 rank per host, got {self.num_ranks} and "
                f"{self.ranks_per_host}."
            )
        if self.num_ranks % self.ranks_per_host:
            raise CostsError(
                f"world: expected ranks_per_host to divide {self.num_ranks} ranks, got "
                f"{self.ranks_per_host}. Use whole hosts."
            )

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // self.ranks_per_host


@dataclass(frozen=True)
class Line:
    """``fixed_s + per_item_s * items + per_byte_s * bytes``.

    Args:
        fixed_s: Seconds of a call, whatever its size.
        per_item_s: Seconds of an item; KERNELS says what that is.
        per_byte_s: Seconds of a byte.
        spread: Relative spread of the measurements (interquartile range / median).
        source: "measured", or where the numbers come from.
    """

    fixed_s: float = 0.0
    per_item_s: float = 0.0
    per_byte_s: float = 0.0
    spread: float = 0.0
    source: str = "measured"

    def seconds(self, num_items: float = 0.0, num_bytes: float = 0.0) -> float:
        return self.fixed_s + self.per_item_s * num_items + self.per_byte_s * num_bytes


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Args:
        latency_s: Seconds of a small collective.
        bytes_per_s: Inside a host: what a rank can send; between hosts: what a whole host can send
            while all its ranks do.
        source: "measured", or where the numbers come from.
    """

    latency_s: float
    bytes_per_s: float
    source: str = "measured"


@dataclass(frozen=True)
class CollectiveCurve:
    """A collective measured over sizes, in one world.

    Args:
        kind: One of COLLECTIVES.
        world: The world in which it was measured.
        sent_bytes: Bytes that a rank sends (``hotrec.runtime.traffic``), rising.
        seconds: Median of the slowest rank for each size.
        spreads: Interquartile range / median, for each size.
    """

    kind: str
    world: World
    sent_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    spreads: tuple[float, ...]

    def line(self) -> Line:
        """The straight line with the least relative errors (least squares of error / seconds).

        Neither latency nor rate comes out negative: where one would, it is 0 and the other is
        fitted alone.
        """
        sizes = np.asarray(self.sent_bytes, np.float64)
        seconds = np.asarray(self.seconds, np.float64)
        columns = np.stack([1 / seconds, sizes / seconds], axis=1)
        ones = np.ones(seconds.size)
        fixed, rate = np.linalg.lstsq(columns, ones, rcond=None)[0]
        if fixed < 0 or rate < 0:
            alone = [float(column @ ones / (column @ column)) for column in columns.T]
            errors = [
                float(((ones - a * c) ** 2).sum()) for a, c in zip(alone, columns.T, strict=True)
            ]
            fixed, rate = (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
        return Line(float(fixed), 0.0, float(rate), self._spread())

    def line_at(self, num_bytes: float) -> Line:
        """The line through the smallest message's time and the time of ``num_bytes``.

        Measured curves are not linear: traffic shaping lets short bursts pass, and gloo changes its
        algorithm with the size. This line is exact at ``num_bytes``, whose time is interpolated
        between the sizes and extrapolated from the last two.
        """
        sizes = np.asarray(self.sent_bytes, np.float64)
        # A message that took longer than a larger one was disturbed.
        seconds = np.minimum.accumulate(np.asarray(self.seconds, np.float64)[::-1])[::-1]
        if num_bytes <= sizes[0]:
            return Line(float(seconds[0]), 0.0, 0.0, self._spread())
        if num_bytes <= sizes[-1]:
            found = float(np.interp(num_bytes, sizes, seconds))
        else:
            rate = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            found = float(seconds[-1] + rate * (num_bytes - sizes[-1]))
        fixed = float(seconds[0])
        return Line(fixed, 0.0, (found - fixed) / num_bytes, self._spread())

    def _spread(self) -> float:
        return float(np.median(self.spreads)) if self.spreads else 0.0


# Item and bytes of each kernel; D floats of 4 bytes a row.
KERNELS: Mapping[str, str] = {
    "route": "an id: hot or cold, de-duplication, inverse",
    "read_device": "a distinct row read for a requesting rank, from device memory; its 4 D bytes",
    "read_host": "the same, from host memory",
    "read_hit": "the same, from the device cache of a host table",
    "read_miss": "the same, missed in that cache: fetched and inserted",
    "update_device": "a gradient row that arrived: sum by row, optimizer; its 4 D bytes",
    "update_host": "the same, in host memory",
    "update_hit": "the same, in the device cache",
    "pool": "an id pooled from the rows at hand, forward and backward; its 4 D bytes",
    "hot_read": "a distinct row read from the replica; its 4 D bytes",
    "hot_pack": "a touched row of this rank put into the message; its 4 D bytes",
    "hot_add": "a row of any rank added to the gradient; its 4 D bytes",
    "hot_update": "a row that any rank touched, updated in the replica; its 4 D bytes",
    "pooled_device": "an id read and pooled by TorchRec's kernel, device memory; its 4 D bytes",
    "pooled_host": "the same, in host memory",
    "pooled_hit": "the same, in the device cache",
    "pooled_miss": "the same, missed in the cache",
    "pooled_update_device": "an id whose row that kernel updates in backward; its 4 D bytes",
    "pooled_update_host": "the same, in host memory",
    "pooled_update_hit": "the same, in the device cache",
    "replicated_read": "an id of a data-parallel table of TorchRec, both ways; its 4 D bytes",
    "replicated_update": "a row of such a table, dense optimizer, touched or not; its 4 D bytes",
    "copy": "bytes copied around a collective",
    "dense": "a floating-point operation of the dense layers, forward, backward, loss",
    "dense_update": "a parameter of the dense layers, optimizer",
}
# Those without which no step can be predicted, on any device.
REQUIRED = (
    "route",
    "read_device",
    "update_device",
    "pool",
    "hot_read",
    "hot_pack",
    "hot_add",
    "hot_update",
    "pooled_device",
    "pooled_update_device",
    "replicated_read",
    "replicated_update",
    "copy",
    "dense",
    "dense_update",
)
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Costs:
    """The costs of one kind of machine.

    Args:
        name: Name of the set.
        origin: "measured" by calibrate, "fitted" to a run, or "built-in".
        device: "cpu" or "cuda".
        kernels: Line of each kernel in KERNELS, measured with all ranks of a host at work.
        intra: Link between the ranks of a host.
        inter: Link between hosts; None if measured on one host.
        curves: Measured collectives, which replace the links in the world of the measurement.
        device_bytes: Memory of a device; 0 on CPU.
        host_bytes: Memory of a host.
        overlap: Share, 0..1, of a computation that hides communication going on meanwhile; less
            than 1 where communication itself takes processor time.
        overhead_s: Seconds of a step outside the modelled stages.
        stage_overhead_s: Fixed seconds of each stage: Python, many small calls.
        waiting_frac: Time that ranks wait for stragglers in each exchange, as a fraction of the
            dense layers' time.
        corrections: Measured over predicted seconds of each stage; 1 where absent.
        look_ahead: What a step with look-ahead takes beside its stages, by the bytes of a rank's
            cold rows: its thread of communication takes it from the cores that compute. Measured
            in whole steps; nothing where it was not.
        host: Fingerprint of the machine that was measured, empty for built-in sets.
        facts: Free-form facts for the reader.
    """

    name: str
    origin: str
    device: str
    kernels: Mapping[str, Line]
    intra: Link
    inter: Link | None
    device_bytes: int
    host_bytes: int
    curves: tuple[CollectiveCurve, ...] = ()
    overlap: float = 1.0
    overhead_s: float = 0.0
    stage_overhead_s: Mapping[str, float] = field(default_factory=dict)
    waiting_frac: Mapping[str, float] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)
    look_ahead: Line = Line(source="not measured")
    host: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_costs(self)

    def kernel(self, name: str) -> Line:
        """The line of a kernel.

        Raises:
            CostsError: If the costs lack it.
        """
        if name not in self.kernels:
            raise CostsError(
                f"costs {self.name} kernel {name}: expected a measured line ({KERNELS[name]}), got "
                f"none. Calibrate on a machine that has this memory, or take another tier."
            )
        return self.kernels[name]

    def correction(self, stage: str) -> float:
        return float(self.corrections.get(stage, 1.0))

    def collective(self, kind: str, world: World, num_bytes: float | None = None) -> Line:
        """Seconds of a collective by the bytes that a rank sends (``hotrec.runtime.traffic``).

        A curve measured in this very world (its line for messages of ``num_bytes``, or the one that
        fits all sizes best), else from the links: the slower of what passes inside
        the hosts and between them, for the hierarchical form of each collective (n bytes, W ranks,
        m per host, N hosts):

            all_to_all      (m-1)/(W-1) of the sent bytes inside, (W-m)/(W-1) between, all ranks
            all_reduce      sends 2 (W-1)/W n inside; between hosts 2 (N-1)/N n per host
            all_gather      sends (W-1) n inside; between hosts (W-m) n per host
            reduce_scatter  half of all_reduce, in bytes and so in time

        Raises:
            CostsError: If the world has several hosts and the costs lack the link between them.
        """
        if world.num_ranks == 1:
            return Line(source="one rank sends nothing")
        for curve in self.curves:
            if curve.kind == kind and curve.world == world:
                return curve.line() if num_bytes is None else curve.line_at(num_bytes)
        ranks, local, hosts = world.num_ranks, world.ranks_per_host, world.num_hosts
        if hosts == 1:
            return Line(self.intra.latency_s, 0.0, 1 / self.intra.bytes_per_s)
        if self.inter is None:
            raise CostsError(
                f"costs {self.name}: expected the link between hosts, for {hosts} hosts, got costs "
                "measured on one. Calibrate under torchrun on two hosts or more."
            )
        inside, between = 1.0, 0.0
        if kind == "all_to_all":
            inside = (local - 1) / (ranks - 1)
            between = local * (ranks - local) / (ranks - 1)
        elif kind in ("all_reduce", "reduce_scatter"):
            between = ((hosts - 1) / hosts) * ranks / (ranks - 1)
        elif kind == "all_gather":
            between = (ranks - local) / (ranks - 1)
        per_byte_s = max(inside / self.intra.bytes_per_s, between / self.inter.bytes_per_s)
        return Line(self.intra.latency_s + self.inter.latency_s, 0.0, per_byte_s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Costs:
        """Read what ``to_json`` wrote.

        Raises:
            CostsError: If a part is missing or invalid.
        """
        try:
            parts = dict(document)
            parts["kernels"] = {name: Line(**line) for name, line in parts["kernels"].items()}
            parts["intra"] = Link(**parts["intra"])
            parts["inter"] = None if parts["inter"] is None else Link(**parts["inter"])
            parts["curves"] = tuple(_read_curve(curve) for curve in parts["curves"])
            if "look_ahead" in parts:  # absent from costs of earlier versions
                parts["look_ahead"] = Line(**parts["look_ahead"])
            return Costs(**parts)
        except (AttributeError, KeyError, TypeError) as error:
            raise CostsError(
                f"costs: expected the document that `hotrec calibrate` writes, got {error!r}. "
                "Calibrate again."
            ) from error


def _read_curve(document: Mapping[str, Any]) -> CollectiveCurve:
    return CollectiveCurve(
        kind=document["kind"],
        world=World(**document["world"]),
        sent_bytes=tuple(document["sent_bytes"]),
        seconds=tuple(document["seconds"]),
        spreads=tuple(document["spreads"]),
    )


def check_costs(costs: Costs) -> None:
    """Checks costs.

    Raises:
        CostsError: If a part is missing, negative, zero or not a number.
    """
    where = f"costs {costs.name}"
    if costs.device not in ("cpu", "cuda"):
        raise CostsError(f"{where} device: expected cpu or cuda, got {costs.device!r}.")
    unknown = sorted(set(costs.kernels) - set(KERNELS))
    if unknown:
        raise CostsError(f"{where} kernels: expected some of {sorted(KERNELS)}, got {unknown}.")
    missing = [name for name in REQUIRED if name not in costs.kernels]
    if missing:
        raise CostsError(
            f"{where} kernels: expected {', '.join(REQUIRED)}, got none for {', '.join(missing)}. "
            "Calibrate again."
        )
    for name, line in costs.kernels.items():
        _check_numbers(f"{where} kernel {name}", asdict(line), ("source",))
    _check_numbers(f"{where} look_ahead", asdict(costs.look_ahead), ("source",))
    for level, link in (("intra", costs.intra), ("inter", costs.inter)):
        if link is not None:
            _check_numbers(f"{where} link {level}", {"latency_s": link.latency_s})
            if not (math.isfinite(link.bytes_per_s) and link.bytes_per_s > 0):
                raise CostsError(
                    f"{where} link {level} bytes_per_s: expected above 0, got {link.bytes_per_s}. "
                    "Measure it again."
                )
    for curve in costs.curves:
        _check_curve(f"{where} curve {curve.kind}", curve)
    if not 0 <= costs.overlap <= 1:
        raise CostsError(f"{where} overlap: expected 0..1, got {costs.overlap}.")
    _check_numbers(where, {"overhead_s": costs.overhead_s, "device_bytes": costs.device_bytes})
    for name in ("corrections", "stage_overhead_s", "waiting_frac"):
        _check_numbers(f"{where} {name}", getattr(costs, name))
        strange = sorted(set(getattr(costs, name)) - set(STAGES))
        if strange:
            raise CostsError(f"{where} {name}: expected stages of {STAGES}, got {strange}.")
    if costs.host_bytes <= 0:
        raise CostsError(f"{where} host_bytes: expected above 0, got {costs.host_bytes}.")


def _check_curve(where: str, curve: CollectiveCurve) -> None:
    if curve.kind not in COLLECTIVES:
        raise CostsError(f"{where}: expected one of {COLLECTIVES}, got {curve.kind!r}.")
    sizes: Sequence[float] = curve.sent_bytes
    lengths = {len(sizes), len(curve.seconds), len(curve.spreads)}
    rising = all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
    if lengths != {len(sizes)} or len(sizes) < 2 or not rising or min(sizes, default=0) < 0:
        raise CostsError(
            f"{where}: expected two or more rising sizes with a time for each, got {list(sizes)}."
        )
    if not all(math.isfinite(s) and s > 0 for s in curve.seconds):
        raise CostsError(f"{where}: expected times above 0, got {list(curve.seconds)}.")


def _check_numbers(where: str, numbers: Mapping[str, Any], but: Sequence[str] = ()) -> None:
    for name, value in numbers.items():
        if name in but:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise CostsError(f"{where} {name}: expected a number of at least 0, got {value!r}.")
