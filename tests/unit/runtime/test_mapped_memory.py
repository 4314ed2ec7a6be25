"""Host memory that a device maps: seen by the host, and by one address or not at all."""

from __future__ import annotations

import gc

import pytest
import torch

from hotrec.runtime.mapped_memory import host_view


class Elsewhere(torch.Tensor):
    """A tensor whose address means something else to the host."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
def test_the_host_sees_the_same_memory_and_keeps_it(dtype: torch.dtype) -> None:
    seen = torch.arange(6).to(dtype).view(2, 3)
    here = host_view(seen)
    assert here.data_ptr() == seen.data_ptr()
    assert here.tolist() == seen.tolist() == [[0, 1, 2], [3, 4, 5]]
    here[1, 2] = 7
    assert int(seen[1, 2]) == 7
    del seen
    gc.collect()
    others = [torch.full((2, 3), 9).to(dtype) for _ in range(100)]
    assert here.tolist() == [[0, 1, 2], [3, 4, 7]]
    assert len(others) == 100
    assert host_view(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("is_mapped", [True, False])
def test_an_address_of_other_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    other = torch.zeros(4)
    # The first page is mapped in no process.
    monkeypatch.setattr(Elsewhere, "address", other.data_ptr() if is_mapped else 64)
    seen = torch.ones(4).as_subclass(Elsewhere)
    with pytest.raises(RuntimeError, match=r"^host memory mapped for cpu: expected one address"):
        host_view(seen)
    assert other.tolist() == [0.0] * 4
