"""Costs: seconds of each operation of a training step on a kind of machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import lsq_linear, nnls
from scipy.special import stdtrit

from hotrec.types import STAGES

Floats = npt.NDArray[np.float64]


# Ratio of measured to predicted step if no whole step was measured. Assumed: built-in costs are of
# similar machines, whose parts differ by less than a factor of two and not all in one direction.
UNKNOWN_INTERVAL = (0.6, 1.7)
# The interval is never narrower, since steps of two runs of the same plan differ this much.
NARROWEST_INTERVAL = (0.95, 1.05)
# A standard deviation of two cases is meaningless.
MIN_CASES = 3
QUANTILE = 0.95


class CostsError(ValueError):
    """Costs that are missing, invalid, or of another kind of machine."""


@dataclass(frozen=True)
class World:
    """Ranks and hosts.

    Raises:
        CostsError: If the ranks cannot be divided into hosts of equal size.
    """

    num_ranks: int
    ranks_per_host: int

    def __post_init__(self) -> None:
        ranks, local = self.num_ranks, self.ranks_per_host
        if ranks < 1 or local < 1 or ranks % local:
            raise CostsError(
                f"world: expected at least 1 rank, and ranks_per_host to divide them, got {ranks} "
                f"ranks and {local} per host. Use whole hosts."
            )

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // self.ranks_per_host

    @property
    def has_levels(self) -> bool:
        """Whether several hosts have several ranks each."""
        return 1 < self.ranks_per_host < self.num_ranks

    @property
    def inside(self) -> World:
        """The ranks of a host."""
        return World(self.ranks_per_host, self.ranks_per_host)

    def between_hosts_frac(self, kind: str) -> float:
        """Share of the bytes that a rank sends in a collective of all ranks that leave its host.

        In the hierarchical form of each collective (n bytes, W ranks, m per host, N hosts):

            all_to_all      (W-m)/(W-1)
            all_reduce      2 (N-1)/N n per host, of 2 (W-1)/W n per rank
            all_gather      (W-m) n per host, of (W-1) n per rank
        """
        ranks, local, hosts = self.num_ranks, self.ranks_per_host, self.num_hosts
        if hosts == 1:
            return 0.0
        others = (ranks - local) / (ranks - 1)
        reduced = ((hosts - 1) / hosts) * ranks / (ranks - 1) / local
        return {"all_to_all": others, "all_gather": others / local}.get(kind, reduced)


@dataclass(frozen=True)
class Line:
    """``fixed_s + per_item_s * items + per_byte_s * bytes``; KERNELS defines the items.

    Args:
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
        bytes_per_s: Inside a host: the sending rate of a rank; between hosts: that of a whole host
            while all its ranks send.
        source: "measured", or where the numbers come from.
    """

    latency_s: float
    bytes_per_s: float
    source: str = "measured"


def fit_nonnegative(matrix: Floats, wanted: Floats) -> Floats:
    """The least-squares solution >= 0, (K,), of ``matrix @ x = wanted``, (S, K) and (S,)."""
    # Calls, items and bytes differ by many orders of magnitude.
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0
    return np.asarray(nnls(matrix / scales, wanted)[0] / scales)


def fit_bounded(
    matrix: Floats, wanted: Floats, low: Sequence[float], high: Sequence[float]
) -> Floats:
    """As ``fit_nonnegative``, with bounds for each coefficient, (K,), ``low < high``."""
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0
    bounds = np.asarray(low) * scales, np.asarray(high) * scales
    found = lsq_linear(matrix / scales, wanted, bounds, method="bvls").x / scales
    return np.clip(found, low, high)  # rounding may violate them


@dataclass(frozen=True)
class CollectiveCurve:
    """A collective measured over sizes, in one world.

    Args:
        world: Its ranks and hosts; on rails, one rank of each host.
        sent_bytes: Bytes that a rank sends (``hotrec.runtime.traffic``), increasing.
        seconds: Median of the slowest rank for each size.
        spreads: Interquartile range / median.
        num_rails: Rails of all local ranks, measured at once; 1 for a collective of all ranks.
    """

    kind: str
    world: World
    sent_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    spreads: tuple[float, ...]
    num_rails: int = 1

    def line(self) -> Line:
        """The line with minimal relative errors and non-negative coefficients."""
        seconds = np.asarray(self.seconds, np.float64)
        matrix = np.stack([1 / seconds, np.asarray(self.sent_bytes) / seconds], axis=1)
        fixed, rate = fit_nonnegative(matrix, np.ones(seconds.size))
        return Line(float(fixed), 0.0, float(rate), float(np.median(self.spreads)))

    def seconds_at(self, num_bytes: Any) -> Any:
        """Seconds of messages of these bytes, a number or an array.

        Interpolated between the sizes, and extrapolated from the last two: measured curves are not
        linear, since traffic shaping does not limit short bursts, and gloo changes its algorithm
        with the size.
        """
        sizes = np.asarray(self.sent_bytes, np.float64)
        # The time of a message that took longer than a larger one is noise.
        seconds = np.minimum.accumulate(np.asarray(self.seconds, np.float64)[::-1])[::-1]
        rate = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
        beyond = np.maximum(num_bytes - sizes[-1], 0.0)
        return np.interp(num_bytes, sizes, seconds) + rate * beyond


# Item and bytes of each kernel; a row has D floats of 4 bytes.
KERNELS: Mapping[str, str] = {
    "route": "an id: hot or cold, de-duplication, inverse",
    "read_device": "a distinct row read from device memory, of a shard or a replica; its 4 D bytes",
    "update_device": "a gradient row, summed by row and applied by the optimizer; its 4 D bytes",
    "pool": "an id pooled from the rows at hand, forward and backward; its 4 D bytes",
    "hot_add": "a row added up by its owner, or back from one and ordered; its 4 D bytes",
    "pooled_device": "an id read and pooled by TorchRec's kernel, device memory; its 4 D bytes",
    "pooled_host": "the same, in host memory",
    "pooled_hit": "the same, in the device cache",
    "pooled_miss": "the same, missed in the cache",
    "pooled_update_device": "an id whose row that kernel updates in backward; its 4 D bytes",
    "pooled_update_host": "the same, in host memory",
    "pooled_update_hit": "the same, in the device cache",
    "fetch_slot": "a row and its optimizer state fetched from host memory into a slot; their bytes",
    "fetch_mapped": "the same, read by the device in mapped host memory; their bytes",
    "return_slot": "a changed row and its state written back from a slot; their bytes",
    "order_row": "a distinct row's owner found, and its request put in order by owner",
    "order_id": "the same for an id of a pooled table, by TorchRec",
    "copy": "bytes copied around a collective",
    "dense": "a floating-point operation of the dense layers, forward, backward, loss",
    "dense_update": "a parameter of the dense layers, optimizer",
}
# Kinds of steps, which whole runs correct one by one: of TorchRec's plans, and of split tables.
TORCHREC, IN_LINE, AHEAD = FAMILIES = ("torchrec", "in_line", "look_ahead")
# Corrections of TorchRec's kernels and messages, in addition to those of rows.
TORCHREC_STAGE = "torchrec_{}"
# The kernels without which no step can be predicted, on any device.
OPTIONAL = ("_host", "_hit", "_miss", "_slot", "_mapped", "order_row", "order_id")
REQUIRED = tuple(name for name in KERNELS if not name.endswith(OPTIONAL))
# Per sample of a batch of the measured dataset, except "route": per lookup.
LOADER_PARTS: Mapping[str, str] = {
    "read": "the main thread makes the batch, without workers",
    "work": "a worker makes the batch and hands it over",
    "receive": "the main thread gets the batch from a worker",
    "route": "whoever makes the batch routes its ids",
}
COLLECTIVES = ("all_to_all", "all_reduce", "all_gather")
# Numbers by which others are divided, or that multiply whole steps.
ABOVE_0 = ("bytes_per_s", "host_bytes", "seconds", *FAMILIES)


@dataclass(frozen=True)
class Costs:
    """The costs of one kind of machine.

    Args:
        name: Name of the set.
        origin: "measured" by calibrate, "fitted" to a run, or "built-in".
        device: "cpu" or "cuda".
        kernels: Line of each kernel in KERNELS, measured with all ranks of a host busy.
        intra: Link between the ranks of a host.
        inter: Link between hosts; None if measured on one host.
        curves: Measured collectives, which replace the links in the world of the measurement.
        device_bytes: Memory of a device; 0 on CPU.
        host_bytes: Memory of a host.
        overlap: Share, 0..1, of a computation that hides concurrent communication; less than 1 if
            communication itself uses processor time.
        overhead_s: Seconds of a step outside the modelled stages.
        stage_overhead_s: Fixed seconds of each stage: Python, many small calls.
        waiting_frac: Time that ranks wait for stragglers in each exchange, as a fraction of the
            dense layers' time.
        corrections: Measured over predicted seconds of each stage, and of TorchRec's part of it
            (TORCHREC_STAGE) if it has its own factor; 1 if absent.
        factors: Measured over predicted step, by FAMILIES: of whole steps with look-ahead, and of a
            run; 1 if absent.
        ratio_interval: 5% and 95% quantiles of measured over predicted step, at most 1 and at
            least 1.
        loader: Processor time of the loader, LOADER_PARTS. Empty if measured without a dataset.
        doubts: Reasons not to trust the costs, each following the words "the costs"; empty if they
            are trusted.
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
    factors: Mapping[str, float] = field(default_factory=dict)
    ratio_interval: tuple[float, float] = UNKNOWN_INTERVAL
    loader: Mapping[str, Line] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
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
                "none. Calibrate on a machine that has this memory, or use another tier."
            )
        return self.kernels[name]

    def correction(self, stage: str, *, of_torchrec: bool = False) -> float:
        """The factor of a stage, or of TorchRec's part of it if it has its own."""
        factor = self.corrections.get(stage, 1.0)
        return float(
            self.corrections.get(TORCHREC_STAGE.format(stage), factor) if of_torchrec else factor
        )

    @property
    def is_trusted(self) -> bool:
        return not self.doubts

    @property
    def caveat(self) -> str | None:
        """Warning about costs that are not trusted, else None."""
        if self.is_trusted:
            return None
        return f"the costs {' and '.join(self.doubts)}: calibrate again on a quiet machine"

    def loader_s(
        self, num_samples: float, num_routed: float, num_workers: int
    ) -> tuple[float, float] | None:
        """Processor seconds of a batch in the rank's main thread and in a worker; None if unknown.

        Args:
            num_samples: Samples of the batch.
            num_routed: Lookups that the loader routes; 0 if ids are routed on the device.
            num_workers: Loader workers of the rank.
        """
        if not self.loader:
            return None
        part = {name: line.seconds(num_samples) for name, line in self.loader.items()}
        route_s = self.loader["route"].seconds(num_routed)
        if num_workers == 0:
            return part["read"] + route_s, 0.0
        return part["receive"], part["work"] + route_s

    def interval_s(self, step_s: float) -> tuple[float, float]:
        """The 90% interval of a step that is predicted to take ``step_s``, in seconds."""
        low, high = self.ratio_interval
        return low * step_s, high * step_s

    def collective(self, kind: str, world: World) -> Line:
        """The line of a collective by the bytes that a rank sends.

        The one that best fits a measured curve, else the slower of the links. Between hosts all
        ranks of a host send ``World.between_hosts_frac`` of their bytes; inside, an all_to_all
        sends (m-1)/(W-1) of them with m ranks per host, the others all.

        Raises:
            CostsError: If the world has several hosts and the costs lack the link between them.
        """
        local = world.ranks_per_host
        if world.num_ranks == 1:
            return Line(source="one rank sends nothing")
        if (curve := self._curve(kind, world, 1)) is not None:
            return curve.line()
        if world.num_hosts == 1:
            return Line(self.intra.latency_s, 0.0, 1 / self.intra.bytes_per_s)
        inter = self._between(world)
        is_to_all = kind == "all_to_all"
        inside = (local - 1) / (world.num_ranks - 1) if is_to_all else 1.0
        between = local * world.between_hosts_frac(kind)
        per_byte_s = max(inside / self.intra.bytes_per_s, between / inter.bytes_per_s)
        return Line(self.intra.latency_s + inter.latency_s, 0.0, per_byte_s)

    def message_s(
        self, kind: str, world: World, num_bytes: Any, *, is_on_rails: bool = False
    ) -> Any:
        """Seconds of a collective in which a rank sends these bytes (``hotrec.runtime.traffic``).

        By a curve measured in exactly this world, else by the links. On rails, ranks of equal local
        rank exchange, of all local ranks at once: they share the links of a host.

        Args:
            kind: One of COLLECTIVES.
            world: Ranks and hosts.
            num_bytes: Bytes of a message, a number or an array.
            is_on_rails: Whether only ranks of equal local rank exchange.

        Raises:
            CostsError: If the costs lack the link between hosts.
        """
        local = world.ranks_per_host
        rail = World(world.num_hosts, 1)
        curve = self._curve(kind, rail, local) if is_on_rails else self._curve(kind, world, 1)
        if curve is not None:
            return curve.seconds_at(num_bytes)
        if not is_on_rails:
            return self.collective(kind, world).seconds(num_bytes=num_bytes)
        inter = self._between(world)
        return inter.latency_s + num_bytes * local / inter.bytes_per_s

    def has_curve(self, kind: str, world: World) -> bool:
        """Whether a collective of all ranks was measured in this world."""
        return self._curve(kind, world, 1) is not None

    def _curve(self, kind: str, world: World, num_rails: int) -> CollectiveCurve | None:
        for curve in self.curves:
            if (curve.kind, curve.world, curve.num_rails) == (kind, world, num_rails):
                return curve
        return None

    def _between(self, world: World) -> Link:
        if self.inter is None:
            raise CostsError(
                f"costs {self.name}: expected the link between hosts, for {world.num_hosts} hosts, "
                "got costs measured on one. Calibrate under torchrun on two hosts or more."
            )
        return self.inter

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Costs:
        """Read the result of ``to_json``.

        Raises:
            CostsError: If a part is missing or invalid.
        """
        try:
            parts = dict(document)
            parts["kernels"] = {name: Line(**line) for name, line in parts["kernels"].items()}
            parts["intra"] = Link(**parts["intra"])
            parts["inter"] = None if parts["inter"] is None else Link(**parts["inter"])
            parts["curves"] = tuple(_read_curve(curve) for curve in parts["curves"])
            parts["ratio_interval"] = tuple(parts["ratio_interval"])
            parts["loader"] = {name: Line(**line) for name, line in parts["loader"].items()}
            parts["doubts"] = tuple(parts["doubts"])
            return Costs(**parts)
        except (AttributeError, KeyError, TypeError) as error:
            raise CostsError(
                f"costs: expected the document of `hotrec calibrate`, got {error!r}. Calibrate "
                "again."
            ) from error


def _read_curve(document: Mapping[str, Any]) -> CollectiveCurve:
    lists = {key: tuple(document[key]) for key in ("sent_bytes", "seconds", "spreads")}
    return CollectiveCurve(**{**document, "world": World(**document["world"]), **lists})


def check_costs(costs: Costs) -> None:
    """Checks costs.

    Raises:
        CostsError: If a part is missing, negative, zero or not a number.
    """
    where = f"costs {costs.name}"
    _expect(costs.device in ("cpu", "cuda"), f"{where} device", "cpu or cuda", costs.device)
    unknown = sorted(set(costs.kernels) - set(KERNELS))
    _expect(not unknown, f"{where} kernels", f"some of {sorted(KERNELS)}", unknown)
    missing = ", ".join(name for name in REQUIRED if name not in costs.kernels)
    _expect(not missing, f"{where} kernels", ", ".join(REQUIRED), f"none for {missing}")
    _expect(0 <= costs.overlap <= 1, f"{where} overlap", "0..1", costs.overlap)
    has_all = set(costs.loader) in (set(), set(LOADER_PARTS))
    _expect(has_all, f"{where} loader", f"{sorted(LOADER_PARTS)} or none", sorted(costs.loader))
    known: dict[str, Sequence[str]] = {"factors": FAMILIES, "waiting_frac": STAGES}
    known |= {"stage_overhead_s": STAGES}
    known |= {"corrections": [*STAGES, *map(TORCHREC_STAGE.format, STAGES)]}
    for key, names in known.items():
        strange = sorted(set(getattr(costs, key)) - set(names))
        _expect(not strange, f"{where} {key}", f"some of {names}", strange)
    interval = costs.ratio_interval
    holds_1 = len(interval) == 2 and 0 < interval[0] <= 1 <= interval[1] < math.inf
    _expect(holds_1, f"{where} ratio_interval", "0 < low <= 1 <= high", interval)
    for curve in costs.curves:
        sizes = curve.sent_bytes
        is_one_each = len(sizes) == len(curve.seconds) == len(curve.spreads) >= 2
        is_rising = all(a < b for a, b in pairwise((-1e-300, *sizes)))
        expected = f"one of {COLLECTIVES} at two or more increasing sizes, each with a time"
        is_right = is_one_each and is_rising and curve.kind in COLLECTIVES
        _expect(is_right, f"{where} curve", expected, (curve.kind, list(sizes)))
    parts = {name: part for name, part in vars(costs).items() if name not in ("host", "facts")}
    for key, number in _numbers(parts, where):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        least = 0.0 if key.rpartition(" ")[2] in ABOVE_0 else -1e-300
        is_right = is_number and least < number < math.inf
        _expect(is_right, key, "a number above 0" if least == 0 else "a number >= 0", number)


def _numbers(part: Any, where: str) -> Iterator[tuple[str, Any]]:
    """All values but texts in nested parts, with their places."""
    if isinstance(part, Line | Link | CollectiveCurve | World):
        part = vars(part)
    if isinstance(part, Mapping):
        for name, inner in part.items():
            yield from _numbers(inner, f"{where} {name}")
    elif isinstance(part, tuple):
        for inner in part:
            yield from _numbers(inner, where)
    elif part is not None and not isinstance(part, str):
        yield where, part


def _expect(is_right: bool, where: str, expected: str, got: object) -> None:
    if not is_right:
        shown = got if isinstance(got, str) else repr(got)
        raise CostsError(f"{where}: expected {expected}, got {shown}. Calibrate again.")


def ratio_interval(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """5% and 95% quantiles of the ratio of measured to predicted step in an unmeasured case.

    Student's t prediction interval of one more observation, on the logarithms of the ratios: mean
    +- t(0.95, n - 1) s sqrt(1 + 1/n), where n counts cases, not repeats, since all repeats of a
    case share its prediction error (Hahn and Meeker, Statistical Intervals, 1991, prediction
    intervals of a normal distribution). It is widened to include NARROWEST_INTERVAL.

    Args:
        ratios: Measured over predicted step of each repeat of each case. Predict a case with costs
            that were not fitted to it.

    Returns:
        Low and high, or UNKNOWN_INTERVAL for fewer than MIN_CASES cases.
    """
    if len(ratios) < MIN_CASES:
        return UNKNOWN_INTERVAL
    logs = [np.log(np.asarray(of_case, np.float64)) for of_case in ratios]
    means = np.array([of_case.mean() for of_case in logs])
    # More repeats do not reduce the noise within cases: the next run has it too.
    within = np.mean([of_case.var() for of_case in logs])
    deviation = np.sqrt(means.var(ddof=1) + within)
    num_cases = len(logs)
    half = stdtrit(num_cases - 1, QUANTILE) * deviation * np.sqrt(1 + 1 / num_cases)
    low, high = np.exp([means.mean() - half, means.mean() + half]).tolist()
    return min(low, NARROWEST_INTERVAL[0]), max(high, NARROWEST_INTERVAL[1])


def interval_text(interval: tuple[float, float]) -> str:
    """An interval of ratios in words, "-12% to +15%"."""
    low, high = interval
    return f"{low - 1:+.0%} to {high - 1:+.0%}"
