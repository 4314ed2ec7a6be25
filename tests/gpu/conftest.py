from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hotrec.runtime.ranks import Ranks, process_group


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    """One rank over NCCL."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with process_group(device="cuda") as ranks:
        yield ranks
