"""What a run takes of memory: peaks of the process and the device, and its tables by tier.

Peaks hold everything: dense layers, activations, messages, libraries. The tables alone are what a
plan predicts, so they are what its prediction is set against.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hotrec.runtime.ranks import all_gather_object

# Bytes of a table's tensors: what they hold -> "device" and "host" -> bytes.
Tables = Mapping[str, Mapping[str, int]]
PLACES = ("device", "host")


def peak_bytes(device: torch.device) -> dict[str, int | None]:
    """This rank's peaks since it started; None where the device keeps none. Waits for nothing.

    Returns:
        "peak_allocated_bytes" and "peak_reserved_bytes" of torch's allocator on the device, and
        "peak_resident_bytes" of the process on the host.
    """
    is_cuda = device.type == "cuda"
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) if is_cuda else None,
        # Linux counts it in KiB.
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def memory_figures(device: torch.device, tables: Tables | None) -> dict[str, Any]:
    """What summary.json says of memory: each figure that of the rank with most; a collective.

    Args:
        tables: of this rank; None where nobody counts them.
    """
    of_ranks: list[Any] = all_gather_object((peak_bytes(device), tables))
    figures: dict[str, Any] = {
        name: None if value is None else max(peaks[name] for peaks, _ in of_ranks)
        for name, value in of_ranks[0][0].items()
    }
    counted: list[Tables] = [of_rank for _, of_rank in of_ranks if of_rank is not None]
    for place in PLACES:
        by_kind = _most(counted, place)
        figures[f"{place}_bytes_by_kind"] = by_kind
        figures[f"measured_{place}_bytes"] = (
            max(sum(places[place] for places in of_rank.values()) for of_rank in counted)
            if counted
            else None
        )
    return figures


def _most(counted: Sequence[Tables], place: str) -> dict[str, int] | None:
    if not counted:
        return None
    return {kind: max(of_rank[kind][place] for of_rank in counted) for kind in counted[0]}


def compare_memory(prediction: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says of a prediction's memory; nothing if it has none.

    Args:
        prediction: "memory", by rank {"device_bytes", "host_bytes"}.
        figures: of ``memory_figures``.
    """
    compared: dict[str, Any] = {}
    memory = prediction.get("memory") or ()
    for place in PLACES if memory else ():
        predicted = max(float(rank[f"{place}_bytes"]) for rank in memory)
        measured = figures[f"measured_{place}_bytes"]
        compared[f"predicted_{place}_bytes"] = predicted
        compared[f"{place}_bytes_error_frac"] = (
            (predicted - measured) / measured if measured else None
        )
    return compared
