"""The kernels that calibration times: the functions of training, on batches like its own.

On CUDA, unpooled lookups are timed in FBGEMM alone, without the sorting of rows around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from hotrec.calibrate.timing import Probe, Work
from hotrec.calibrate.workload import CalibrationWorkload
from hotrec.cost_model.step import FETCHES, MOVEMENTS
from hotrec.data.batch import Batch
from hotrec.embedding.cached_rows import RowMover, to_device
from hotrec.embedding.flat import flat_rows, table_begins
from hotrec.embedding.fused import fused_params, leave_out_of_forks
from hotrec.embedding.hot_reduce import HotReducer
from hotrec.embedding.optimizers import make_dense
from hotrec.embedding.owned_rows import RowOwners
from hotrec.embedding.pooling import output_rows
from hotrec.embedding.row_store import RowStore, host_rows
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.shape import ids_per_sample
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.routing.features import RoutedRows
from hotrec.runtime.memory import check_mappable, read_memory
from hotrec.runtime.wire import Wire
from hotrec.types import OptimizerKind, RowFetch

# At most this many ranks' requests are merged into one lookup.
MAX_REQUESTING_RANKS = 8
# FBGEMM's memory of a tier on a GPU.
LOCATIONS = {
    "device": EmbeddingLocation.DEVICE,
    "host": EmbeddingLocation.MANAGED,
    "cached": EmbeddingLocation.MANAGED_CACHING,
}


def all_probes(workload: CalibrationWorkload) -> list[Probe]:
    """Every kernel of ``hotrec.cost_model.KERNELS`` that the device has."""
    target, sizes = workload.target, workload.sizes()
    batch_size = target.batch_size
    dim = workload.dim
    at_dim = [(num_ids, of_dim) for num_ids, of_dim in sizes if of_dim == dim]
    samples = sorted({max(1, batch_size // part) for part in (8, 2)} | {batch_size, 2 * batch_size})
    work = target.subject.work
    values = [max(1, work.num_dense_values // part) for part in (16, 4, 1)]

    def by_items(name: str, make: Callable[..., Work], numbers: Sequence[int]) -> Probe:
        sizes = [(number, workload.dim) for number in numbers]
        return Probe(name, partial(make, workload), sizes, is_by_bytes=False)

    return [
        by_items("route", _route, [num_ids for num_ids, _ in at_dim]),
        Probe("pool", partial(_pool, workload), sizes),
        Probe(
            "copy",
            partial(_copy, workload),
            [(num_rows, dim) for num_rows in workload.moved_rows(4 * dim)],
            is_by_items=False,
        ),
        by_items("order_row", _order_rows, [num_ids for num_ids, _ in at_dim]),
        by_items("order_id", _order_ids, [num_ids for num_ids, _ in at_dim]),
        by_items("dense", _dense, samples),
        by_items("dense_update", _dense_update, values),
        Probe("hot_add", partial(_hot_add, workload), sizes),
        *row_probes(workload),
        *(
            Probe(
                name,
                partial(_move_rows, workload, name),
                [(num_rows, dim) for num_rows in workload.moved_rows(_slot_bytes(workload))],
                is_by_items=False,
            )
            for name in MOVEMENTS
            # On CPU slots are host memory, so the two ways of fetching are the same.
            if name != FETCHES[RowFetch.mapped] or workload.device.type == "cuda"
        ),
    ]


def _route(workload: CalibrationWorkload, num_ids: int, dim: int) -> Work:
    samples = workload.features(workload.samples, num_ids)
    turns = cycle(samples)
    return Work(workload.router, samples[0].values().numel(), 0, lambda: next(turns))


def _pool(workload: CalibrationWorkload, num_ids: int, dim: int) -> Work:
    """Concatenate hot and cold rows, pool them into bags, and run backward."""
    samples: list[KeyedJaggedTensor] = workload.features(workload.samples, num_ids)
    turns = cycle(workload.routed(workload.router, workload.samples, num_ids))
    num_ids = samples[0].values().numel()
    grad = torch.randn(samples[0].stride(), workload.num_columns * dim, device=workload.device)
    num_hot_keys = len(next(iter(workload.router.groups.values())).hot_tables)

    def prepare() -> tuple[RoutedRows, list[torch.Tensor]]:
        routed = next(turns)
        lengths = routed.rows.lengths().view(-1).long()
        halves = [int(lengths[:num_hot_keys].sum()), int(lengths[num_hot_keys:].sum())]
        rows = [torch.randn(n, dim, device=workload.device) for n in halves]
        return routed, [part.requires_grad_() for part in rows]

    def run(prepared: tuple[RoutedRows, list[torch.Tensor]]) -> None:
        routed, rows = prepared
        output_rows(torch.cat(rows), routed, workload.num_columns).backward(grad)

    return Work(run, num_ids, 4 * dim * num_ids, prepare)


def _order_rows(workload: CalibrationWorkload, num_ids: int, dim: int) -> Work:
    """Find the owners of the distinct rows of a batch, and order the rows by owner."""
    routed = workload.routed(workload.own_router, workload.own_samples, num_ids)
    samples = [of_batch.rows for of_batch in routed]
    turns = cycle(samples)
    num_rows = {table.name: table.num_rows for table in workload.own_samples.schema.tables}
    owners = RowOwners(num_rows, max(2, workload.ranks.world_size), workload.device)
    mean_rows = sum(rows.values().numel() for rows in samples) / len(samples)
    return Work(lambda rows: owners.find(rows, 0), mean_rows, 0, lambda: next(turns))


def _order_ids(workload: CalibrationWorkload, num_ids: int, dim: int) -> Work:
    """Order the ids of a batch by the owner of their table, and received ones by table."""
    samples = workload.features(workload.samples, num_ids)
    turns, order = cycle(samples), list(reversed(range(workload.num_columns)))

    def run(features: KeyedJaggedTensor) -> None:
        features.permute(order).permute(order)

    return Work(run, samples[0].values().numel(), 0, lambda: next(turns))


def _copy(workload: CalibrationWorkload, num_rows: int, dim: int) -> Work:
    source = torch.randn(num_rows, dim, device=workload.device)
    return Work(lambda _: source.clone(), num_rows, 4 * dim * num_rows)


def build_dense_layers(workload: CalibrationWorkload) -> nn.Module:
    """The configured model with the rows of its features as input instead of ids."""
    target = workload.target
    shape = target.spec.architecture
    model = build_architecture(shape, nn.Identity(), target.seed, workload.device)
    return ClickTask(model, workload.ranks.world_size)


def _dense(workload: CalibrationWorkload, num_samples: int, dim: int) -> Work:
    work = workload.target.subject.work
    task = workload.once("task", 0, lambda: build_dense_layers(workload))
    turns = _batches_of_rows(workload, num_samples)

    def prepare() -> Batch:
        task.zero_grad(set_to_none=True)
        return next(turns)

    return Work(lambda batch: task(batch)[0].backward(), work.flops * num_samples, 0, prepare)


def _batches_of_rows(workload: CalibrationWorkload, num_samples: int) -> Iterator[Batch]:
    names = list(workload.samples.schema.feature_names)
    shape, device = workload.target.spec.architecture, workload.device
    dims = [workload.dim] * len(names)
    num_dense = len(workload.target.schema.dense)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, requires_grad=True)

    while True:
        rows: Any
        if shape.reads_sequences:
            rows = {
                name: JaggedTensor(
                    draw(num_samples * num_ids, workload.dim),
                    lengths=torch.full((num_samples,), num_ids, device=device),
                )
                for name, num_ids in ids_per_sample(shape, {}).items()
            }
        else:
            rows = KeyedTensor(names, dims, draw(num_samples, sum(dims)))
        yield Batch(
            dense=torch.randn(num_samples, num_dense, device=device),
            sparse=rows,
            labels=torch.ones(num_samples, device=workload.device),
            weights=torch.ones(num_samples, device=workload.device),
            num_global_samples=num_samples * workload.ranks.world_size,
        )


def _with_grads(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[torch.Tensor]:
    params = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    for parameter in params:
        parameter.grad = torch.randn_like(parameter)
    return params


def _dense_update(workload: CalibrationWorkload, num_values: int, dim: int) -> Work:
    """The optimizer's step on the dense layers' tensors, scaled to a given total size."""
    task = workload.once("task", 0, lambda: build_dense_layers(workload))
    sizes = [parameter.numel() for parameter in task.parameters()]
    scale = num_values / sum(sizes)
    params = _with_grads([(max(1, round(n * scale)),) for n in sizes], workload.device)
    optimizer = make_dense(workload.target.spec.dense, params)
    return Work(lambda _: optimizer.step(), sum(p.numel() for p in params), 0)


def _hot_add(workload: CalibrationWorkload, num_ids: int, dim: int) -> Work:
    """The reduction of a rank that owns all hot rows: their sums, and the gathered union."""
    group = next(iter(workload.router.groups.values()))
    num_rows_T = torch.tensor([workload.hot_partition.num_hot(t) for t in group.hot_tables])
    begins = (num_rows_T.cumsum(0) - num_rows_T).to(workload.device)
    num_keys = [len(group.hot_tables), len(group.cold_tables)]
    slots = []
    for routed in workload.routed(workload.router, workload.samples, num_ids):
        hot = routed.rows.split(num_keys)[0]
        of_tables = torch.repeat_interleave(begins, hot.lengths().view(-1).long())
        slots.append(hot.values().long() + of_tables)
    gradient = torch.zeros((int(num_rows_T.sum()), dim), device=workload.device)
    reducer = HotReducer([(gradient.shape[0], dim)], Wire(workload.alone))
    turns = cycle(slots)

    def prepare() -> tuple[torch.Tensor, torch.Tensor]:
        slots_U = next(turns)
        return slots_U, torch.randn(slots_U.numel(), dim, device=gradient.device)

    def run(touched: tuple[torch.Tensor, torch.Tensor]) -> None:
        [(union, mean_UD)] = reducer.reduce([touched])
        gradient.index_copy_(0, union, mean_UD)

    # Each row is added up, and comes back.
    num_rows = 2 * sum(slots_U.numel() for slots_U in slots) / len(slots)
    return Work(run, num_rows, 4 * dim * num_rows, prepare)


def row_probes(workload: CalibrationWorkload) -> list[Probe]:
    """Lookup and update of cold rows, and of TorchRec's in every memory of the device."""
    probes = []
    for tier in LOCATIONS if workload.device.type == "cuda" else ("device",):
        states = ("hit", "miss") if tier == "cached" else (tier,)
        for prefix in ("", "pooled_") if tier == "device" else ("pooled_",):
            kernels = [(f"{prefix or 'read_'}{state}", state, False) for state in states]
            kernels.append((f"{prefix}update_{states[0]}", states[0], True))
            for name, state, is_update in kernels:
                make = partial(_row_work, workload, tier, bool(prefix), state, is_update)
                probes.append(Probe(name, make, workload.sizes()))
    return probes


def _row_work(
    workload: CalibrationWorkload,
    tier: str,
    is_pooled: bool,
    state: str,
    is_update: bool,
    num_ids: int,
    dim: int,
) -> Work:
    if not is_pooled:
        return _exchanged_rows(workload, is_update, num_ids, dim)
    module = workload.once("lookup", (tier, dim), lambda: _module(workload, tier, dim))
    samples = workload.features(workload.own_samples, num_ids)
    grads = [torch.randn_like(_look_up(module, features).detach()) for features in samples]
    turns = cycle(list(zip(samples, grads, strict=True)))

    def prepare() -> Any:
        features, grad = next(turns)
        if state == "miss":
            module.flush()
            module.reset_cache_states()
        elif state == "hit":
            _look_up(module, features)  # loads the rows into the cache
        return (_look_up(module, features), grad) if is_update else features

    def update(prepared: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows, grad = prepared
        rows.backward(grad)

    num_items = sum(features.values().numel() for features in samples) / len(samples)
    run = update if is_update else partial(_look_up, module)
    return Work(run, num_items, 4 * dim * num_items, prepare)


def _exchanged_rows(workload: CalibrationWorkload, is_update: bool, num_ids: int, dim: int) -> Work:
    """Reads or updates of rows that other ranks have asked for."""
    spec, device = workload.target.spec.embedding, workload.device
    table_rows = [table.num_rows for table in workload.own_samples.schema.tables]
    check_host_tier(table_rows, dim, "device")

    def build() -> RowStore:
        shape = spec.state_shape(sum(table_rows), dim)
        states = {name: torch.zeros(shape, device=device) for name in spec.state_names}
        weights = torch.empty(sum(table_rows), dim, device=device).uniform_(-0.01, 0.01)
        return RowStore(weights, states, spec)

    rows = workload.once("rows", dim, build)
    begins = table_begins(table_rows).to(device)
    asked = [flat_rows(features, begins) for features in _requested_rows(workload, num_ids)]
    turns = cycle(asked)

    def prepare() -> tuple[torch.Tensor, torch.Tensor | None]:
        rows_K = next(turns)
        grads = torch.randn(rows_K.numel(), dim, device=device) if is_update else None
        return rows_K, grads

    def run(prepared: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        rows_K, grads = prepared
        if grads is None:
            rows.read(rows_K)
        else:
            rows.update(rows_K, grads, spec.learning_rate, 1)

    num_items = sum(rows_K.numel() for rows_K in asked) / len(asked)
    return Work(run, num_items, 4 * dim * num_items, prepare)


def _module(workload: CalibrationWorkload, tier: str, dim: int) -> Any:
    """FBGEMM's module of pooled tables that training uses, with random rows."""
    spec, device = row_spec(workload), workload.device
    table_rows = [table.num_rows for table in workload.own_samples.schema.tables]
    check_host_tier(table_rows, dim, tier)
    location, compute = EmbeddingLocation.HOST, ComputeDevice.CPU
    if device.type == "cuda":
        location, compute = LOCATIONS[tier], ComputeDevice.CUDA
    module: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, compute) for rows in table_rows],
        # Large enough for the rows of the largest batch, or there would be no hits.
        cache_load_factor=min(1.0, max(0.1, 4 * workload.num_ids / sum(table_rows))),
        pooling_mode=PoolingMode.SUM,
        device=device,
        **fused_params(spec),
    )
    for weight in module.split_embedding_weights():
        weight.uniform_(-0.01, 0.01)
    leave_out_of_forks(module)
    return module


def _look_up(module: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    rows: torch.Tensor = module(indices=features.values().long(), offsets=features.offsets().long())
    return rows


def _move_rows(workload: CalibrationWorkload, name: str, num_rows: int, dim: int) -> Work:
    """Move distinct rows with their state into slots or back, as look-ahead's threads do."""
    state_floats = row_spec(workload).state_bytes_per_row(dim) // 4
    max_rows = max(workload.moved_rows(_slot_bytes(workload)))
    num_all = max(max_rows, workload.target.cap_bytes // (4 * (dim + state_floats)))
    generator = torch.Generator().manual_seed(workload.target.seed)

    def build() -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        seen = [
            host_rows((num_all, width), torch.float32, workload.device)
            for width in (dim, state_floats)
            if width
        ]
        for here, _ in seen:
            here.fill_(1)  # unwritten pages would share one physical page
        return seen, torch.randperm(num_all, generator=generator)

    seen, order = workload.once("mover", dim, build)
    host, mapped = [here for here, _ in seen], [there for _, there in seen]
    held = [torch.ones(max_rows, *part.shape[1:], device=workload.device) for part in host]
    is_mapped = name == FETCHES[RowFetch.mapped]
    mover = RowMover(host, held, workload.device, mapped if is_mapped else None)
    turns = cycle(order[: num_all // num_rows * num_rows].view(-1, num_rows))
    slots = torch.arange(num_rows, device=workload.device)

    def fetch(rows: torch.Tensor) -> None:
        numbers = to_device(rows, workload.device)
        mover.put_in_slots(slots, mover.copy_to_device(numbers, mover.gather(rows)))

    def return_rows(rows: torch.Tensor) -> None:
        mover.put_back(rows, mover.copy_to_host(mover.read_slots(slots)), 0)

    run = fetch if name in FETCHES.values() else return_rows
    return Work(run, num_rows, mover.row_bytes * num_rows, lambda: next(turns).sort().values)


def _slot_bytes(workload: CalibrationWorkload) -> int:
    """Bytes of a row and its optimizer state."""
    return row_spec(workload).bytes_per_row(workload.dim)


def row_spec(workload: CalibrationWorkload) -> OptimizerSpec:
    """The optimizer of sharded rows: the configured one if the device supports it."""
    spec = workload.target.spec.embedding
    if spec.kind is OptimizerKind.adam and workload.device.type == "cpu":
        # FBGEMM has no Adam on CPU, but plans that shard rows are still predicted.
        return OptimizerSpec(OptimizerKind.adagrad, spec.learning_rate, spec.eps)
    return spec


def _requested_rows(workload: CalibrationWorkload, num_ids: int) -> list[KeyedJaggedTensor]:
    """Row requests received by this rank: from each rank the distinct rows of its batch, sorted."""
    num_requesting = min(workload.ranks.world_size, MAX_REQUESTING_RANKS)
    of_rank = num_ids // num_requesting
    routed = workload.routed(workload.own_router, workload.own_samples, of_rank)
    messages = [of_batch.rows for of_batch in routed]
    # Each simulated rank uses another batch, so that they do not all request the same rows.
    return [
        _merge([messages[(turn + rank) % len(messages)] for rank in range(num_requesting)])
        for turn in range(len(messages))
    ]


def _merge(messages: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Several ranks' rows by table, in the layout of TorchRec's input distribution."""
    by_rank = [message.to_dict() for message in messages]
    keys = messages[0].keys()
    values = [rows[key].values() for key in keys for rows in by_rank]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        lengths=torch.tensor([rows.numel() for rows in values], device=values[0].device).int(),
        stride=len(messages),
    )


def check_host_tier(table_rows: Sequence[int], dim: int, tier: str) -> None:
    """Raise a ValueError unless rows and two optimizer states fit in this host's free memory."""
    if tier == "device":
        return
    rows_bytes = 4 * dim * sum(table_rows)
    check_mappable(f"calibrate tables of tier {tier}", 3 * rows_bytes, read_memory()[1])
