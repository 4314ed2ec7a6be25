"""Memory of a run: peaks, the rank with most, and the error of what was predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hotrec.train import peak_memory
from hotrec.train.peak_memory import compare_memory, memory_figures, peak_bytes

CPU = torch.device("cpu")
FIRST = {"hot_rows": {"device": 30, "host": 0}, "cold_rows": {"device": 0, "host": 500}}
SECOND = {"hot_rows": {"device": 30, "host": 0}, "cold_rows": {"device": 40, "host": 100}}


def test_the_resident_peak_grows_with_what_is_held() -> None:
    before = peak_bytes(CPU)["peak_resident_bytes"]
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = peak_bytes(CPU)["peak_resident_bytes"]
    assert before is not None
    assert after is not None
    # Other tests may have held more before.
    assert after >= max(before, held.numel())
    assert peak_bytes(CPU)["peak_allocated_bytes"] is None


def test_devices_are_asked_for_their_own_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: {device: 5}[d])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda d: {device: 7}[d])
    found = peak_bytes(device)
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (5, 7)


def test_figures_are_those_of_the_rank_with_most(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(own: Any) -> list[Any]:
        peaks, tables = own
        assert tables is FIRST
        return [own, ({**peaks, "peak_resident_bytes": 1 << 60}, SECOND)]

    monkeypatch.setattr(peak_memory, "all_gather_object", gather)
    figures = memory_figures(CPU, FIRST)
    assert figures["measured_device_bytes"] == 70
    assert figures["measured_host_bytes"] == 500
    assert figures["device_bytes_by_kind"] == {"hot_rows": 30, "cold_rows": 40}
    assert figures["host_bytes_by_kind"] == {"hot_rows": 0, "cold_rows": 500}
    assert figures["peak_resident_bytes"] == 1 << 60
    assert figures["peak_allocated_bytes"] is None


def test_errors_have_the_sign_of_the_prediction() -> None:
    memory = [{"device_bytes": 56.0, "host_bytes": 1.0}, {"device_bytes": 50.0, "host_bytes": 2.0}]
    measured = {"measured_device_bytes": 70, "measured_host_bytes": 0}
    assert compare_memory({"memory": memory}, measured) == {
        "predicted_device_bytes": 56.0,
        "device_bytes_error_frac": pytest.approx(-0.2),
        "predicted_host_bytes": 2.0,
        "host_bytes_error_frac": None,
    }
    assert compare_memory({}, measured) == {}
