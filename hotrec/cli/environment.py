"""Where this process stands, read from torchrun's environment without importing torch."""

from __future__ import annotations

import os

RUN_DIR = "HOTREC_RUN_DIR"


def is_under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment_rank() -> int:
    """This process's rank, 0 without torchrun."""
    return _integer("RANK", 0)


def environment_world_size() -> int:
    """The number of ranks, 1 without torchrun."""
    return _integer("WORLD_SIZE", 1)


def rank_prefix() -> str:
    """``"[rank 1] "`` where there are several ranks, else nothing."""
    return f"[rank {environment_rank()}] " if environment_world_size() > 1 else ""


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ValueError(f"environment {name}: expected a count, got {text!r}. Use torchrun.")
    return int(text)
