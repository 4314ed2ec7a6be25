"""Fixtures of more than one package; torch is imported where a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hotrec.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """A process group of this process alone, so that TorchRec shards without a spawn."""
    import torch

    from hotrec.runtime.ranks import process_group

    torch.set_num_threads(1)
    with process_group(device="cpu") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    """One rank over NCCL."""
    import torch

    from hotrec.runtime.ranks import process_group

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with process_group(device="cuda") as ranks:
        yield ranks
