"""Post-mortem files of a failed run: its last collectives and its GPU memory.

Collectives are always recorded, in a bounded buffer of torch. Memory is recorded when it runs out,
with allocation stacks on demand.
"""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from hotrec.runtime.ranks import Ranks

logger = logging.getLogger(__name__)

FLIGHT_RECORDER = "flight_recorder"
_PREFIX = "rank_"
# Allocations and frees in a snapshot. Python stacks are kept for allocations, not for frees.
_NUM_ALLOCATIONS = 100_000
_WITHOUT_STACKS = " (with trainer.memory_stacks=true also the lines that allocated it)"
# After that the driver is considered stuck in the query of the collectives' state.
_DUMP_LIMIT_S = 20.0


def set_up_flight_recorder(run_dir: Path, device: str) -> Path:
    """Make NCCL's watchdog also write to the run directory; before the process group is created.

    Existing environment variables are kept. Returns the directory: NCCL's files in it are read by
    ``torchfrtrace DIRECTORY --prefix rank_ --allow-incomplete-ranks``; gloo's are pickles of the
    same form.
    """
    directory = (run_dir / FLIGHT_RECORDER).absolute()
    if device == "cuda":
        directory.mkdir(parents=True, exist_ok=True)  # NCCL's watchdog does not make it
    # Each variable with its earlier name, if it had another one.
    for name, old_name, value in (
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "", "1"),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", f"{directory / _PREFIX}"),
    ):
        if old_name not in os.environ:
            os.environ.setdefault(name, value)
    return directory


def write_flight_recorder(directory: Path, rank: int) -> None:
    """Write the stacks of this rank's threads, and its last collectives with sizes and states.

    For a process that is about to exit: if the driver hangs, it exits here.
    """
    # The dump holds the interpreter's lock, so that no Python thread could give up.
    faulthandler.dump_traceback_later(_DUMP_LIMIT_S, exit=True, file=2)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # torchfrtrace reads every file whose name contains the prefix.
        with (directory / f"threads_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file)
        c10d: Any = _distributed_c10d  # torch has no public way to it
        dump = c10d._dump_nccl_trace if dist.get_backend() == "nccl" else c10d._dump_fr_trace
        (directory / f"{_PREFIX}{rank}").write_bytes(dump())
    except Exception as error:  # any error: the run has ended for another reason
        logger.warning("flight recorder of rank %d: not written: %s", rank, error)
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def memory_snapshot(run_dir: Path, ranks: Ranks, *, has_stacks: bool = False) -> Iterator[None]:
    """If CUDA runs out of memory in the block, write a snapshot of its allocations.

    ``has_stacks`` adds the lines that allocated them. Each allocation then walks the Python stack
    with the interpreter's lock, on any thread, so that step times are not comparable with other
    runs.

    Raises:
        torch.OutOfMemoryError: torch's own, with the name of the file.
    """
    if ranks.device.type != "cuda":
        yield
        return
    if has_stacks:
        torch.cuda.memory._record_memory_history(
            context="state", stacks="python", max_entries=_NUM_ALLOCATIONS
        )
    try:
        yield
    except torch.OutOfMemoryError as error:
        path = run_dir / f"memory_rank_{ranks.rank}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        except (OSError, RuntimeError) as failure:
            logger.warning("memory snapshot: not written to %s: %s", path, failure)
            raise error from None
        raise torch.OutOfMemoryError(
            f"memory of {ranks.device}: expected free memory, got none; {path} shows the "
            f"allocations, at pytorch.org/memory_viz{'' if has_stacks else _WITHOUT_STACKS}. "
            f"{error}"
        ) from error
    finally:
        if has_stacks:
            torch.cuda.memory._record_memory_history(enabled=None)
