"""Shared by the stages: the device, the clock of device and host, whole training steps."""

from __future__ import annotations

import argparse
import gc
import importlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_day.record import Parts, Record, Summary
from hotrec.bench.machine import machine_facts
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import CompareConfig
from hotrec.report.units import show_seconds

REPOSITORY = Path(__file__).resolve().parents[2]
DASH = "-"
NO_DEVICE = 77


@dataclass(frozen=True)
class Day:
    """Where a stage runs and writes."""

    record: Record
    device: torch.device
    is_rehearsal: bool
    document: Path

    def pick(self, real: Any, rehearsed: Any) -> Any:
        """A size: the real one, or the rehearsal's."""
        return rehearsed if self.is_rehearsal else real


def main(
    run: Callable[[Day], None],
    summarize: Callable[[Parts], Summary],
    arguments: Sequence[str] | None = None,
) -> int:
    """The command line of a stage: ``DOCUMENT [--rehearse] [--code TEXT] [--keep-failed]``.

    Returns:
        Its exit code.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("document", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--code", default=None)
    parser.add_argument("--keep-failed", action="store_true")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="torch|torchrec|fbgemm_gpu")
    if not torch.cuda.is_available():
        parser.exit(
            NO_DEVICE,
            f"gpu_day: expected a CUDA device, got none visible to torch {torch.__version__}. "
            "Run it on a machine with a GPU, or with --rehearse.\n",
        )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    machine = machine_facts()
    facts = {
        "is_rehearsal": options.rehearse,
        "code": options.code or machine["code"],
        "gpu": machine["gpu"],
        "packages": machine["packages"],
    }
    machine["date"] = time.strftime("%Y-%m-%d")
    record = Record(
        options.document, facts, machine, summarize, free_memory, is_broken,
        keeps_failed=options.keep_failed,
    )  # fmt: skip
    run(Day(record, device, options.rehearse, options.document))
    return 0 if record.finish() else 1


def is_broken() -> bool:
    """Whether CUDA refuses everything in this process, because of an error before."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """P10, P50 and P90."""
    low, middle, high = np.percentile(np.asarray(seconds, np.float64), [10, 50, 90])
    return {"p10_s": float(low), "p50_s": float(middle), "p90_s": float(high)}


def show(figures: dict[str, Any] | None) -> str:
    """``P50 (P10 to P90)`` of quantiles."""
    if figures is None:
        return DASH
    low, middle, high = (show_seconds(figures[f"p{share}_s"]) for share in (10, 50, 90))
    return f"{middle} ({low} to {high})"


@dataclass
class Laps:
    """Time between marks, on the device's line of time and on the host's.

    Device: events on the current stream, gaps between kernels included. Host: how long the calls
    took to return. Threads may share one.
    """

    _laps: dict[str, list[tuple[Any, Any, float]]] = field(default_factory=dict)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        """The block belongs to ``name``; blocks may stand in blocks."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_s = time.perf_counter()
        start.record()
        yield
        end.record()
        self._laps.setdefault(name, []).append((start, end, time.perf_counter() - start_s))

    def quantiles(self) -> dict[str, dict[str, dict[str, float]]]:
        """By name, "device" and "host", of the laps that have ended; waits for the device."""
        # Threads go on adding names and laps.
        ended = {name: tuple(laps) for name, laps in tuple(self._laps.items())}
        torch.cuda.synchronize()
        return {
            name: {
                "device": quantiles([start.elapsed_time(end) / 1000 for start, end, _ in laps]),
                "host": quantiles([host_s for _, _, host_s in laps]),
            }
            for name, laps in ended.items()
        }


@contextmanager
def bus_traffic() -> Iterator[dict[str, float]]:
    """Bytes that cross the bus while the block runs, "to_device" and "to_host".

    NVML's rates of 20 ms, sampled on a thread, times the seconds until the device has done the
    block's work. Stays empty where NVML is missing.
    """
    found: dict[str, float] = {}
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        yield found
        return
    nvml.nvmlInit()
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    # The device receives what goes to it.
    ways = {"to_device": nvml.NVML_PCIE_UTIL_RX_BYTES, "to_host": nvml.NVML_PCIE_UTIL_TX_BYTES}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    has_ended = threading.Event()

    def sample() -> None:
        while not has_ended.is_set():
            for way, counter in ways.items():
                rates[way].append(1000.0 * nvml.nvmlDeviceGetPcieThroughput(gpu, counter))

    thread = threading.Thread(target=sample)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    thread.start()
    try:
        yield found
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - start_s
    finally:
        has_ended.set()
        thread.join()
        nvml.nvmlShutdown()
    found |= {way: float(np.mean(some)) * elapsed_s for way, some in rates.items() if some}


def bench_config(*words: str) -> CompareConfig:
    """The configuration of ``hotrec compare`` with these words."""
    config: CompareConfig = build_config(compose_config("compare", words))
    return config


def free_memory() -> None:
    """Give back what a part has left in the allocator."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
