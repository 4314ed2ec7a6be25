"""The pieces that costs are made of: worlds, lines, links, measured curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class CostsError(ValueError):
    """Costs that are missing, impossible, or of another kind of machine."""


@dataclass(frozen=True)
class World:
    """Ranks and hosts.

    Raises:
        CostsError: if the ranks do not divide into hosts of equal size.
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
        fixed_s: seconds of a call, whatever its size.
        per_item_s: seconds of an item; KERNELS says what that is.
        per_byte_s: seconds of a byte.
        spread: how far repeated measurements lay apart, relative (interquartile range / median).
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
    """What joins ranks.

    Args:
        latency_s: of a small collective.
        bytes_per_s: inside a host: what a rank can send; between hosts: what a whole host can send
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
        kind: one of COLLECTIVES.
        world: where it was measured.
        sent_bytes: per rank, as ``hotrec.traffic`` counts them, rising.
        seconds: median of the slowest rank, for each size.
        spreads: interquartile range / median, for each size.
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

        A measured curve is no line: a network that is shaped lets short bursts pass, gloo changes
        its algorithm with the size. This line is exact for the message that is asked about. Between
        two sizes the time is interpolated, beyond the largest the last two go on.
        """
        sizes = np.asarray(self.sent_bytes, np.float64)
        # A message takes no longer than a larger one; what seems to was disturbed.
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
