"""Load of others, read from /proc/stat, and what is said of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hotrec.calibrate.noise import doubts_of
from hotrec.runtime import load as load_module
from hotrec.runtime.load import HostLoad, LoadMeter
from hotrec.runtime.ranks import Ranks

RANKS = Ranks(0, 1, 0, 1, torch.device("cpu"))
TICKS = os.sysconf("SC_CLK_TCK")


def write_stat(path: Path, *cores: tuple[float, float]) -> Path:
    """Seconds of user time and stolen ones of each core."""
    lines = ["cpu  0 0 0 0 0 0 0 0 0 0"]
    for number, (user_s, stolen_s) in enumerate(cores):
        user, stolen = round(user_s * TICKS), round(stolen_s * TICKS)
        lines.append(f"cpu{number} {user} 0 0 7 0 9 9 {stolen} 0 0")
    path.write_text("\n".join([*lines, "intr 5 0"]) + "\n")
    return path


def test_the_work_of_others_is_what_the_cores_did_beside_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(load_module, "_ticks_of_children", lambda: 0)
    now = {"wall": 100.0, "own": 5.0}
    monkeypatch.setattr(load_module.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(load_module.time, "process_time", lambda: now["own"])
    stat = write_stat(tmp_path / "stat", (50, 0), (60, 1), (70, 0))  # the third is not ours
    meter = LoadMeter(stat)
    now |= {"wall": 110.0, "own": 13.0}
    write_stat(stat, (59, 0), (66, 3), (80, 5))
    [load] = meter.hosts(RANKS)
    assert load.num_cores == 2
    assert load.others == pytest.approx((9 + 6 - 8) / 10)
    assert load.stolen == pytest.approx(0.2)


def host(cores: int, wanted: float, others: float, stolen: float = 0.0) -> HostLoad:
    return HostLoad(cores, wanted, others, stolen)


@pytest.mark.parametrize(
    ("load", "is_disturbed"),
    [
        (host(2, 2, 0.1), False),
        (host(2, 2, 0.9, 0.3), True),
        (host(2, 2, 0.0, 0.3), True),
        (host(64, 2, 10), False),  # on cores that the ranks leave idle
        (host(64, 64, 10), True),
    ],
)
def test_work_of_others_disturbs_where_no_core_is_idle(load: HostLoad, is_disturbed: bool) -> None:
    doubts = doubts_of([host(8, 1, 0), load], [])
    assert load.is_disturbed == bool(doubts) == is_disturbed
    taken = f"({load.others + load.stolen:.1f} of {load.num_cores} cores busy)"
    assert all(taken in doubt for doubt in doubts)
