"""Numbers in readable form, always with their unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrec.runtime.figures import Unit

NOT_RECORDED, DASH = "not recorded", "-"


def show_known(show: Callable[[float], str], value: float | None) -> str:
    """The number formatted by ``show``, or a dash if unknown."""
    return DASH if value is None else show(value)


def show_bytes(num_bytes: float) -> str:
    """Decimal units: 1 MB is 10^6 bytes, as networks count."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """Milliseconds below one second, else seconds."""
    if abs(seconds) < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    return f"{_three_digits(seconds)} s"


def show_interval(seconds: Sequence[float]) -> str:
    """Such as ``10.0 ms to 12.0 ms``."""
    return " to ".join(map(show_seconds, seconds))


def show_frac(frac: float) -> str:
    """A percentage; small ones keep two significant digits."""
    percent = frac * 100
    if percent == 0 or abs(percent) >= 0.1:
        return f"{percent:.1f}%"
    return f"{percent:.2g}%"


def show_error(frac: float) -> str:
    """A percentage with its sign: predicted too much is positive."""
    return f"{'-' if frac < 0 else '+'}{show_frac(abs(frac))}"


def show_count(number: float) -> str:
    """A whole number with separated thousands."""
    return f"{number:,.0f}"


def show_rate(per_s: float) -> str:
    """Whole events per second."""
    return f"{per_s:,.0f} /s"


def show_about(per_s: float) -> str:
    """A predicted rate, rounded because its third digit is uncertain."""
    return show_rate(float(f"{per_s:.3g}"))


def describe_world(world: Mapping[str, Any]) -> str:
    """Such as ``8 ranks on 1 host``, from ``num_ranks`` and ``ranks_per_host``."""
    ranks = int(world["num_ranks"])
    counts = {"rank": ranks, "host": ranks // int(world["ranks_per_host"])}
    return " on ".join(f"{show_count(n)} {thing}{'s' * (n != 1)}" for thing, n in counts.items())


def show_quality(value: float) -> str:
    """AUC, log loss and the like: four digits, so that 1e-4 shows."""
    return "nan" if math.isnan(value) else f"{value:.4f}"


def show_difference(value: float) -> str:
    """With its sign, four digits as ``show_quality``; no sign if it rounds to zero."""
    return "nan" if math.isnan(value) else f"{value:+z.4f}" if round(value, 4) else "0.0000"


def show_ratio(value: float, baseline: float) -> str:
    """Such as ``0.33x``; empty if a ratio is meaningless."""
    if baseline == 0 or math.isnan(value) or math.isnan(baseline):
        return ""
    return f"{value / baseline:.2f}x"


def show_setting(value: object) -> str:
    """Text, or yes and no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NOT_RECORDED if value is None else str(value)


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


SHOW: Mapping[Unit, Callable[[Any], str]] = {
    Unit.seconds: show_seconds,
    Unit.bytes: show_bytes,
    Unit.count: show_count,
    Unit.frac: show_frac,
    Unit.error: show_error,
    Unit.rate: show_rate,
    Unit.quality: show_quality,
    Unit.number: "{:g}".format,
    Unit.text: show_setting,
    Unit.flag: show_setting,
}
