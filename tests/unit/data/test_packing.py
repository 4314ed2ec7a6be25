"""Objects whose tensors lie in one block of shared memory."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from hotrec.data.packing import ALIGNED_BYTES, Packed, pack


def send(value):
    """Pack, send by a queue's means without the descriptor, and unpack."""
    packed = pack(value)
    assert packed.block.is_shared()
    return Packed(pickle.loads(pickle.dumps(packed.pickled)), packed.block).unpack()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.int32),
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(10)[::3],
        torch.tensor(2.5, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.empty(0, 3, dtype=torch.int64),
    ],
)
def test_a_tensor_comes_back(tensor):
    before = [torch.arange(3, dtype=torch.uint8)]
    found, got, after = send((before, tensor, torch.ones(2)))
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert got.is_contiguous()
    assert torch.equal(got, tensor)
    assert torch.equal(found[0], before[0])
    assert torch.equal(after, torch.ones(2))
    assert got.data_ptr() % ALIGNED_BYTES == after.data_ptr() % ALIGNED_BYTES == 0


def test_nothing_to_share_and_one_tensor_twice():
    assert send({"a": [1, None, "b"]}) == {"a": [1, None, "b"]}
    shared = torch.arange(100)
    first, second = send([shared, shared])
    assert first.data_ptr() == second.data_ptr()
    assert pack([shared, shared]).block.numel() == pack([shared]).block.numel()


def test_tensors_count_their_changes_apart():
    """Else autograd would refuse a step whose input was kept, and another tensor changed."""
    inputs, other = send([torch.ones(2, 3), torch.zeros(4)])
    layer = nn.Linear(3, 1)
    loss = layer(inputs).sum()
    other += 1
    loss.backward()
    assert torch.equal(inputs, torch.ones(2, 3))
