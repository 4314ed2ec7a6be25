"""Whether the measurements of a calibration can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotrec.calibrate.timing import MAX_ERROR, Repeats
from hotrec.runtime.load import HostLoad, disturbance, worst_of

# Medians of two quiet rounds differ by a few percent.
MAX_DRIFT = 0.15


def doubts_of(hosts: Sequence[HostLoad], series: Sequence[Repeats]) -> list[str]:
    """Reasons not to trust the measurements, each continuing "the costs"."""
    doubts = []
    if (text := disturbance(hosts)) is not None:
        doubts.append(f"were measured {text}")
    drifts = [one.drift for one in series if len(one.rounds) > 1]
    drift = float(np.median(drifts)) if drifts else 0.0
    if drift > MAX_DRIFT:
        doubts.append(f"differ by {drift:.0%} from round to round")
    return doubts


def noise_text(hosts: Sequence[HostLoad], series: Sequence[Repeats]) -> str:
    """How quiet the hosts were, and how well the calls are known, in one sentence."""
    errors = np.array([one.error for one in series])
    load = "load of others unknown"
    if (worst := worst_of(hosts)) is not None:
        load = f"others took {worst.taken:.1f} of {worst.num_cores} cores"
    return (
        f"noise: {load}; standard error {np.median(errors):.1%} in the median, above "
        f"{MAX_ERROR:.0%} in {np.count_nonzero(errors > MAX_ERROR)} of {errors.size} calls"
    )
