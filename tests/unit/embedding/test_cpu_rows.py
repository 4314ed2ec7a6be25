"""The CPU lookups against FBGEMM's own kernels, on the same ids and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.cpu_rows import ColdRowsOnCpu
from hotrec.embedding.flat import flat_rows, table_begins
from hotrec.embedding.fused import fused_params
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

NUM_ROWS = [7, 1, 30]
DIM = 8
KINDS = [kind for kind in OptimizerKind if kind is not OptimizerKind.adam]


def make_module(kind: OptimizerKind, num_rows: list[int]) -> Any:
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in num_rows],
        pooling_mode=PoolingMode.NONE,
        **fused_params(OptimizerSpec(kind, learning_rate=0.2, eps=1e-3)),
    )
    generator = torch.Generator().manual_seed(0)
    for part in module.split_embedding_weights():
        part.copy_(torch.randn(part.shape, generator=generator))
    return module


def rows_of(module: Any, kind: OptimizerKind) -> Any:
    """With the learning rate that is the optimizer's, not the spec's."""
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.2}])
    return ColdRowsOnCpu(module, optimizer, OptimizerSpec(kind, learning_rate=123.0, eps=1e-3))


def look_up(cold: ColdRowsOnCpu, ids: KeyedJaggedTensor, num_rows: list[int]) -> torch.Tensor:
    return cold.look_up(flat_rows(ids, table_begins(num_rows)))


def ids_of(step: int, *, is_empty: bool = False) -> KeyedJaggedTensor:
    """Two "samples" (ranks) per table, with rows repeated within and across them."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (len(NUM_ROWS), 2), generator=generator)
    if is_empty:
        lengths.zero_()
    values = [
        torch.randint(0, rows, (int(count),), generator=generator)
        for rows, count in zip(NUM_ROWS, lengths.sum(1).tolist(), strict=True)
    ]
    keys = [f"t{index}" for index in range(len(NUM_ROWS))]
    return KeyedJaggedTensor(keys=keys, values=torch.cat(values), lengths=lengths.view(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_lookup_and_update_equal_fbgemm(kind: OptimizerKind) -> None:
    module, reference = make_module(kind, NUM_ROWS), make_module(kind, NUM_ROWS)
    cold = rows_of(module, kind)
    for step in range(6):
        if step == 3:
            cold._optimizer.param_groups[0]["lr"] = 0.05
            reference.set_learning_rate(0.05)
        ids = ids_of(step, is_empty=step == 2)
        rows = look_up(cold, ids, NUM_ROWS)
        expected = reference(ids.values(), ids.offsets())
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)
        grad = torch.randn(rows.shape, generator=torch.Generator().manual_seed(step))
        rows.backward(grad)
        if step != 2:  # FBGEMM is not given an empty batch
            expected.backward(grad)
        pairs = zip(
            module.split_embedding_weights(), reference.split_embedding_weights(), strict=True
        )
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    if kind is not OptimizerKind.sgd:
        for ours, theirs in zip(
            module.split_optimizer_states(), reference.split_optimizer_states(), strict=True
        ):
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)


def test_a_rank_without_rows_of_some_tables() -> None:
    module = make_module(OptimizerKind.rowwise_adagrad, [0, 4, 0])
    cold = rows_of(module, OptimizerKind.rowwise_adagrad)
    ids = KeyedJaggedTensor(
        keys=["t0", "t1", "t2"], values=torch.tensor([3, 0, 3]), lengths=torch.tensor([0, 3, 0])
    )
    before = module.split_embedding_weights()[1].clone()
    rows = look_up(cold, ids, [0, 4, 0])
    assert torch.equal(rows, before[[3, 0, 3]])
    rows.sum().backward()
    assert (module.split_embedding_weights()[1] != before).any(1).tolist() == [
        True, False, False, True,
    ]  # fmt: skip


def test_no_gradient_no_update() -> None:
    module = make_module(OptimizerKind.sgd, NUM_ROWS)
    cold = rows_of(module, OptimizerKind.sgd)
    before = [part.clone() for part in module.split_embedding_weights()]
    with torch.no_grad():
        assert not look_up(cold, ids_of(0), NUM_ROWS).requires_grad
    for ours, theirs in zip(module.split_embedding_weights(), before, strict=True):
        assert torch.equal(ours, theirs)


def test_flat_rows() -> None:
    begins = table_begins([5, 3, 9])
    assert begins.tolist() == [0, 5, 8]
    ids = KeyedJaggedTensor(
        keys=["a", "b", "c"],
        values=torch.tensor([4, 0, 2, 8], dtype=torch.int32),
        lengths=torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.int32),
    )
    assert flat_rows(ids, begins).tolist() == [4, 0, 7, 16]


def test_another_memory_layout_is_refused() -> None:
    module = make_module(OptimizerKind.sgd, NUM_ROWS)
    parts = module.split_embedding_weights()
    module.split_embedding_weights = lambda: [parts[0], parts[2], parts[1]]
    with pytest.raises(RuntimeError, match=r"^fbgemm weights_host: expected contiguous tables"):
        rows_of(module, OptimizerKind.sgd)
