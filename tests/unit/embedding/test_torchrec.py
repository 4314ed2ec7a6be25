"""Each private name of TorchRec, FBGEMM and DDP that hotrec uses means what hotrec takes it for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from hotrec.embedding import torchrec as adapter
from hotrec.embedding.cpu_rows import ColdRowsOnCpu
from hotrec.embedding.hot_rows import HotReplicas
from tests.helpers.tiny import TinyLoader, build_tiny
from tests.unit.embedding.setups import PARTITIONS, shard_here, split_model

pytestmark = pytest.mark.usefixtures("one_rank")


def test_kernels_of_hot_and_cold_rows() -> None:
    model = shard_here(split_model(PARTITIONS["mixed"]), PARTITIONS["mixed"])
    found: dict[str, tuple[int, int, int, type]] = {}
    for kernel in adapter.kernels(model):
        replaced_by = type(kernel.replacement)
        for shard in kernel.shards:
            found[shard.table] = (shard.first_row, shard.num_rows, shard.begin, replaced_by)
    assert found == {
        "t_hot": (0, 3, 0, HotReplicas),
        "t": (0, 12, 0, ColdRowsOnCpu),
        "v": (0, 9, 12, ColdRowsOnCpu),
        "u_hot": (0, 5, 0, HotReplicas),
    }
    [rows, other_rows] = model.module.collection.sharded_rows()
    in_parts = [*adapter.kernels(rows), *adapter.kernels(other_rows)]
    of_model = [kernel.fbgemm for kernel in adapter.kernels(model)]
    assert [kernel.fbgemm for kernel in in_parts] == of_model


def test_a_shard_knows_its_rows() -> None:
    shard = adapter.TableShard("t", 3, 2, 0)
    rows = np.array([2, 3, 4, 5])
    assert rows[shard.holds(rows)].tolist() == [3, 4]


def test_torchrecs_own_kernels_are_not_replaced() -> None:
    model, _ = build_tiny()
    assert {kernel.replacement for kernel in adapter.kernels(model)} == {None}
    bags: Any = model.module.dlrm.sparse_arch.embedding_bag_collection
    assert [table.name for table in adapter.table_configs(bags)] == ["table_wise", "data_parallel"]
    assert not adapter.is_weighted(bags)
    # The dense layers, and the replicated table.
    assert [adapter.lookups(bags)[1]] == adapter.ddp_modules(model)[1:]


def test_a_pipeline_shows_what_it_has_rewritten() -> None:
    model, optimizer = build_tiny()
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    calls: list[int] = []

    def around(rewrite: Any) -> None:
        calls.append(len(adapter.pipelined_modules(pipeline)))
        rewrite()
        calls.append(len(adapter.pipelined_modules(pipeline)))

    adapter.wrap_rewriting(pipeline, around)
    pipeline.progress(iter(TinyLoader(num_batches=1)))
    assert calls == [0, 2]
    for module, of_torchrec, own in adapter.rewritten_forwards(pipeline)[:2]:
        assert module.forward is of_torchrec
        assert own == type(module).forward.__get__(module)


def test_rules_in_backward_are_noted_on_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert adapter.rules_in_backward(parameter) == []
    adapter.apply_in_backward((torch.optim.SGD, {"lr": 0.5}), [parameter])
    assert adapter.rules_in_backward(parameter) == [(torch.optim.SGD, {"lr": 0.5})]


def test_what_a_module_holds_itself() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Linear(2, 2)
            self.third = None
            self.register_buffer("count", torch.zeros(()))
            self.weight = nn.Parameter(torch.zeros(1))

    holder = Holder()
    assert adapter.children_of(holder) == {"first": holder.first, "second": holder.first}
    assert list(adapter.parameters_of(holder)) == ["weight"]
    assert list(adapter.tensors_of(holder)) == ["weight", "count"]
    model, _ = build_tiny()
    assert [*model.named_parameters()]
    assert adapter.tensors_of(model) == {}  # those of a DistributedModelParallel are inside it


def test_autograd() -> None:
    weight = torch.ones(2, requires_grad=True)
    events: list[str] = []

    def hook(_: torch.Tensor) -> None:
        adapter.call_after_backward(lambda: events.append("after backward"))
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        queue(lambda: events.append("DDP"))

    out = weight * 2
    out.register_hook(hook)
    out.sum().backward()
    assert events == ["DDP", "after backward"]
    writes = adapter.num_writes(weight)
    with torch.no_grad():
        weight.add_(1)
    assert adapter.num_writes(weight) == writes + 1
    assert adapter.tensors_in({"a": [weight, 1], "b": (None, out)}) == [weight, out]
