"""The host: what a process may use of memory, what devices may map, and what it is known by."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotrec.calibrate.measure import measure_memory
from hotrec.calibrate.probes import check_host_tier
from hotrec.runtime.memory import check_mappable, read_fingerprint, read_memory


def test_more_than_is_free_is_refused_with_both_numbers() -> None:
    check_mappable("plan host tiers", 100, 100)
    with pytest.raises(ValueError, match=r"^plan host tiers: expected at most 100 bytes.* got 101"):
        check_mappable("plan host tiers", 101, 100)


def test_the_fingerprint_of_this_machine(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Processor @ 2 GHz\nflags\t: x\n")
    found = read_fingerprint("cpu", cpuinfo)
    # On CPU the GPUs do not matter.
    expected = {"processor": "A Processor @ 2 GHz", "device": "cpu", "num_gpus": 0, "gpu": None}
    assert expected.items() <= found.items()
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found == read_fingerprint("cpu", cpuinfo)
    assert read_fingerprint("cpu", tmp_path / "none")["processor"] != ""
    assert read_fingerprint()["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert measure_memory(torch.device("cpu")) == (0, read_memory()[0])


@pytest.mark.parametrize("tier", ["host", "cached"])
def test_calibration_refuses_tables_that_the_host_cannot_map(tier: str) -> None:
    too_many = read_memory()[0] // (4 * 64) + 1  # rows alone fill the whole host
    with pytest.raises(ValueError, match=rf"^calibrate tables of tier {tier}: expected at most"):
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


@pytest.mark.parametrize("limit", ["max", "40960"])
def test_memory_is_what_the_environment_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   60 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("4096")
    found = read_memory(meminfo, tmp_path)
    monkeypatch.setenv("HOTREC_HOST_GIB", "1.5")
    total, free = read_memory(meminfo, tmp_path)
    assert total == 3 << 29
    assert total - free == found[0] - found[1]  # what is in use
    check_mappable("plan host tiers", 1 << 30, free)
    monkeypatch.setenv("HOTREC_HOST_GIB", "1e-6")  # less than is in use
    assert read_memory(meminfo, tmp_path) == (1073, 0)
    for text in ("80GB", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("HOTREC_HOST_GIB", text)
        with pytest.raises(ValueError, match=rf"^environment HOTREC_HOST_GIB: .* got '{text}'"):
            read_memory(meminfo, tmp_path)
    monkeypatch.setenv("HOTREC_HOST_GIB", "")
    assert read_memory(meminfo, tmp_path) == found
