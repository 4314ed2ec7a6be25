"""Host memory that a device maps: seen by the host, and by one address or not at all."""

from __future__ import annotations

import gc
import mmap
import os

import pytest
import torch

from hotrec.runtime.mapped_memory import host_view, keep_out_of_forks
from tests.helpers.mappings import flags_at


class Elsewhere(torch.Tensor):
    """A tensor whose address means something else to the host."""

    address = 0

    def data_ptr(self) -> int:
        return self.address


@pytest.mark.slow
def test_the_host_sees_the_same_memory_and_keeps_it() -> None:
    seen = torch.arange(6).view(2, 3)
    here = host_view(seen)
    assert here.data_ptr() == seen.data_ptr()
    assert here.tolist() == seen.tolist() == [[0, 1, 2], [3, 4, 5]]
    here[1, 2] = 7
    assert int(seen[1, 2]) == 7
    del seen
    gc.collect()
    others = [torch.full((2, 3), 9) for _ in range(100)]
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
    with pytest.raises(RuntimeError, match=r"^host memory mapped for cpu"):
        host_view(seen)
    assert other.tolist() == [0.0] * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forks_have_what_shares_pages_with_the_memory_and_not_the_memory() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 6 * page)
    # Begins and ends inside a page: three whole ones lie between.
    seen = torch.frombuffer(memory, dtype=torch.uint8)[100 : 4 * page + 100]
    pages = [seen.data_ptr() - 100 + at * page for at in range(6)]
    seen.fill_(1)
    keep_out_of_forks(seen)
    expected = [False, True, True, True, False, False]
    assert ["dc" in (flags_at(at) or []) for at in pages] == expected
    child = os.fork()
    if child == 0:
        os._exit(int([flags_at(at) is None for at in pages] != expected))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen.sum() == 4 * page
    del seen
    gc.collect()
    assert not any("dc" in (flags_at(at) or []) for at in pages)
