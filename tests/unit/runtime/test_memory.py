"""The host: what a process may use of memory, what devices may map, and what it is known by."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.calibrate.probes import check_host_tier
from hotrec.runtime.memory import check_mappable, read_memory


@pytest.mark.parametrize("tier", ["host", "cached"])
def test_calibration_refuses_tables_that_the_host_cannot_map(tier: str) -> None:
    too_many = read_memory()[0] // (4 * 64) + 1  # rows alone fill the whole host
    with pytest.raises(ValueError, match=rf"tier {tier}"):
        check_host_tier([too_many], 64, tier)
    check_host_tier([1000], 64, tier)
    check_host_tier([too_many], 64, "device")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (100 * 1024, 60 * 1024)),
        ({"memory.max": "max", "memory.current": "5"}, (100 * 1024, 60 * 1024)),
        ({"memory.max": "40960", "memory.current": "1024"}, (40960, 39936)),
        (
            {"memory/memory.limit_in_bytes": "40960", "memory/memory.usage_in_bytes": "40000"},
            (40960, 960),
        ),
        # Version 1 says "no limit" by a number larger than any machine.
        (
            {"memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.usage_in_bytes": "1"},
            (100 * 1024, 60 * 1024),
        ),
    ],
)
def test_memory_is_the_control_groups_where_it_is_smaller(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   60 kB\nHugePages_Total: 0\n"
    )
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert read_memory(meminfo, tmp_path / "cgroup") == expected


def test_memory_is_what_the_environment_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   60 kB\n")
    monkeypatch.setenv("HOTREC_HOST_GIB", "1.5")
    total, free = read_memory(meminfo, tmp_path)
    assert (total, total - free) == (3 << 29, 40 * 1024)  # what is in use
    check_mappable("plan host tiers", free, free)
    with pytest.raises(ValueError, match=rf"^plan host tiers: .*{free}.*{free + 1}"):
        check_mappable("plan host tiers", free + 1, free)
    monkeypatch.setenv("HOTREC_HOST_GIB", "1e-6")  # less than is in use
    assert read_memory(meminfo, tmp_path) == (1073, 0)
    for text in ("80GB", "0", "nan"):
        monkeypatch.setenv("HOTREC_HOST_GIB", text)
        with pytest.raises(ValueError, match=rf"HOTREC_HOST_GIB: .*'{text}'"):
            read_memory(meminfo, tmp_path)
