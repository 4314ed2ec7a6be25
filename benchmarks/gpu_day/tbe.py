"""FBGEMM's tables in each memory, their bytes, and skewed ids generated on the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
from fbgemm_gpu.split_embedding_configs import EmbOptimType  # noqa: F401 (loads the operators)
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    CacheAlgorithm,
    CacheState,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from hotrec.embedding.fused import fused_params
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.types import OptimizerKind

DEVICE, UVM, UVM_CACHE = "device memory", "UVM", "UVM cache"
# hotrec's: host rows behind slots that hold a row with its state. They are filled by the host, or
# by the device, which reads mapped memory.
SLOTS, MAPPED_SLOTS = "slots", "mapped slots"
LOCATIONS = {
    DEVICE: EmbeddingLocation.DEVICE,
    UVM: EmbeddingLocation.MANAGED,
    UVM_CACHE: EmbeddingLocation.MANAGED_CACHING,
}
CACHE_WAYS = 32
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Tables:
    """Tables of one size with a fused optimizer.

    Args:
        tier: where the rows are.
        cache_frac: of a UVM cache, share of all rows that have a slot; of slots, those that take as
            many bytes as this UVM cache.
        is_prefetching: the cache is filled for the next batch while this one is computed.
        is_pooled: bags are pooled, else every row is returned.
    """

    num_tables: int
    num_rows: int
    dim: int
    optimizer: OptimizerSpec
    tier: str
    cache_frac: float = 0.2
    is_prefetching: bool = False
    is_pooled: bool = False

    def build(
        self, device: torch.device, *, is_random: bool = True
    ) -> SplitTableBatchedEmbeddingBagsCodegen:
        """The module; its weights are small random numbers, else zeros.

        Its cache does not count; who sets ``gather_uvm_cache_stats`` on it, has it count from then.
        """
        location = LOCATIONS[UVM if self.has_slots else self.tier]
        params: dict[str, Any] = {
            **fused_params(self.optimizer),
            "prefetch_pipeline": self.is_prefetching,
        }
        found = training.construct_cache_state
        make_state = _cache_state if self.tier == UVM_CACHE else found
        with mock.patch.object(training, "construct_cache_state", make_state):
            module = SplitTableBatchedEmbeddingBagsCodegen(
                [(self.num_rows, self.dim, location, ComputeDevice.CUDA)] * self.num_tables,
                cache_algorithm=CacheAlgorithm.LRU,
                cache_load_factor=self.cache_frac,
                pooling_mode=PoolingMode.SUM if self.is_pooled else PoolingMode.NONE,
                device=device,
                **params,
            )
        # It has the counters, but they cost time.
        module.gather_uvm_cache_stats = False
        if is_random:
            for name in ("weights_dev", "weights_uvm"):
                getattr(module, name).data.uniform_(-0.01, 0.01)
        return module

    @property
    def has_slots(self) -> bool:
        return self.tier in (SLOTS, MAPPED_SLOTS)

    @property
    def cache_bytes(self) -> int:
        """Device memory of a UVM cache of this size, without its maps of all rows."""
        num_sets = math.ceil(self.num_tables * self.num_rows * self.cache_frac / CACHE_WAYS)
        return num_sets * CACHE_WAYS * (4 * self.dim + 8 + 8 + (4 if self.is_prefetching else 0))

    @property
    def num_slots(self) -> int:
        """Slots of a row and its state that a UVM cache's memory holds."""
        return self.cache_bytes // (4 * self.dim + self.optimizer.state_bytes_per_row(self.dim))

    def memory(self, num_ids: int) -> tuple[int, int]:
        """Predicted bytes of device and host, for steps of ``num_ids`` unpooled ids."""
        total_rows = self.num_tables * self.num_rows
        weights = 4 * self.dim * total_rows
        state = self.optimizer.state_bytes_per_row(self.dim) * total_rows
        # Rows out and their gradients; ids sorted and counted, about twelve numbers each.
        work = num_ids * (2 * 4 * self.dim + 12 * 8)
        if self.tier == DEVICE:
            return weights + state + work, 0
        # FBGEMM keeps a row-wise sum of every row on the device, and caches no state.
        is_row_wise = self.optimizer.kind is OptimizerKind.rowwise_adagrad
        on_device, on_host = (state, weights) if is_row_wise else (0, weights + state)
        if self.tier == UVM_CACHE:
            on_device += self.cache_bytes + 4 * total_rows
        if self.has_slots:
            on_device += self.cache_bytes
        return on_device + work, on_host


def _cache_state(rows: Sequence[int], *_: object) -> CacheState:
    """FBGEMM's, for tables of one feature each that are all cached.

    Its map of rows to tables is a tensor here; as a list of 134 M numbers it takes 8 s and 2 GB.
    """
    ends = [0, *itertools.accumulate(rows)]
    tables = torch.arange(len(rows), dtype=torch.int32)
    table_of_row: Any = torch.repeat_interleave(tables, torch.tensor(rows))
    return CacheState(ends, table_of_row, ends[-1])


def map_host_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of host memory, zeros, that the device maps; made as FBGEMM makes its tables."""
    like = torch.empty(1, dtype=torch.uint8, device=device)
    memory = torch.ops.fbgemm.new_unified_tensor(like, [num_bytes], is_host_mapped=True)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device, out=memory)


class HostPool:
    """Host-mapped memory, allocated once, that module after module places its UVM tensors in.

    To pin 70 GB takes a minute; modules that each did so would spend their time on nothing else.

    Args:
        num_bytes: what the largest module needs.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        whole = map_host_memory(num_bytes + PAGE_BYTES, device)
        # malloc begins 16 bytes behind a page, where a row would lie in one more line of the cache.
        self._bytes = whole[-whole.data_ptr() % PAGE_BYTES :][:num_bytes]
        self._used = 0

    def _take(
        self, like: torch.Tensor, sizes: Sequence[int], is_host_mapped: bool = False
    ) -> torch.Tensor:
        assert is_host_mapped, "gpu_day places no table in managed memory"
        begin = -(-self._used // 256) * 256
        self._used = begin + math.prod(sizes) * like.element_size()
        if self._used > self._bytes.numel():
            raise RuntimeError(
                f"host memory: expected at most {self._bytes.numel()} bytes of UVM tensors, got "
                f"{self._used}. Correct Tables.memory."
            )
        return self._bytes[begin : self._used].view(like.dtype).view(*sizes)

    @contextmanager
    def serve(self) -> Iterator[None]:
        """FBGEMM modules built inside place their UVM tensors here, over those built before."""
        self._used = 0
        with mock.patch.object(torch.ops.fbgemm, "new_unified_tensor", self._take):
            yield


class ZipfIds:
    """Rows whose k-th most popular one is drawn with probability ~ k^-exponent.

    Args:
        num_rows: of the table.
        exponent: of the law.
        seed: of the draws.
    """

    def __init__(self, num_rows: int, exponent: float, device: torch.device, seed: int) -> None:
        ranks = torch.arange(1, num_rows + 1, dtype=torch.float64, device=device)
        cumulative = ranks.pow_(-exponent).cumsum_(0)
        self._cumulative = cumulative / cumulative[-1].clone()
        self._num_rows = num_rows
        # Popular rows lie scattered, as by a permutation, without one in memory.
        self._factor = next(
            f for f in range(int(num_rows * 0.618) | 1, num_rows + 2) if math.gcd(f, num_rows) == 1
        )
        # The host's: the draws do not depend on the device.
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, num_tables: int, per_table: int) -> torch.Tensor:
        """Int64 (num_tables * per_table,), table after table; popular rows differ by table."""
        shape = (num_tables, per_table)
        device = self._cumulative.device
        chance = torch.rand(shape, dtype=torch.float64, generator=self._generator)
        ranks = torch.searchsorted(self._cumulative, chance.to(device)).clamp_(
            max=self._num_rows - 1
        )
        shift = torch.arange(num_tables, device=device)[:, None] * 7919
        return ((ranks * self._factor + shift) % self._num_rows).reshape(-1)
