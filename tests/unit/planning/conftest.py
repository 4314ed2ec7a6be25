from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hotrec.runtime.ranks import Ranks, process_group


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """A process group of this process alone, so that TorchRec shards without a spawn."""
    torch.set_num_threads(1)
    with process_group(device="cpu") as ranks:
        yield ranks
