"""Several checks on the same ranks: a spawn costs seconds, a check far less."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

GRACE = timedelta(seconds=5)


def run_checks(checks: list[Callable[[], None]]) -> dict[str, str | None]:
    """Every check in one spawn; one that fails on a rank alone ends the others there too.

    Verdicts pass through the store: collectives of ranks that are not at the same check would
    take each other's data, which aborts the process.

    Returns:
        By name of the check, None or the tracebacks of the ranks that failed.

    Raises:
        Exception: that of a check from which the other ranks do not come back.
    """
    store = _get_default_store()
    found: dict[str, str | None] = {}
    for check in checks:
        name = check.__name__
        keys = [f"verdict/{name}/{rank}" for rank in range(dist.get_world_size())]
        try:
            check()
            store.set(keys[dist.get_rank()], "")
        except Exception as error:
            store.set(keys[dist.get_rank()], traceback.format_exc())
            try:
                store.wait(keys, GRACE)
            except RuntimeError:  # others stand in a collective that this rank has left
                raise error from None
        verdicts = [store.get(key).decode() for key in keys]
        found[name] = "\n".join(filter(None, verdicts)) or None
    return found
