"""Messages between real ranks: every type, empty parts, odd values, and what is counted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire, wire_numel
from hotrec.types import WireType
from tests.distributed.setups import assert_same_on_ranks
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks

# Error bounds, of each value and of the largest value of a message.
BOUNDS = {WireType.fp32: (0.0, 0.0), WireType.fp16: (2**-11, 2**-39), WireType.bf16: (2**-8, 0.0)}
VALUE_BYTES = {WireType.fp32: 4, WireType.fp16: 2, WireType.bf16: 2}


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def wires() -> list[Wire]:
    assert dist.group.WORLD is not None
    return [Wire(dist.group.WORLD, wire_type) for wire_type in WireType]


def draw(num: int, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed, 1)))
    return torch.randn(num, generator=generator)


def close(found: torch.Tensor, expected: torch.Tensor, wire_type: WireType) -> None:
    of_value, of_most = BOUNDS[wire_type]
    most = expected.abs().max() if expected.numel() else 0.0
    error = (found.double() - expected.double()).abs()
    assert (error <= of_value * expected.double().abs() + of_most * most).all(), (found, expected)


def sizes_of(case: int) -> list[list[int]]:
    """Elements from rank (first index) to rank; some cases with nothing to or from a rank."""
    _, size = world()
    generator = torch.Generator().manual_seed(case)
    sizes = torch.randint(0, 40, (size, size), generator=generator)
    if case % 4 == 1:
        sizes[:, case % size] = 0
    if case % 4 == 2:
        sizes[case % size] = 0
    if case % 4 == 3:
        sizes.fill_(0)
    return sizes.tolist()


def all_to_all() -> None:
    rank, size = world()
    for wire in wires():
        for case in range(8):
            sizes = sizes_of(case)
            for scale in (1.0, 1e-9, 1e30):
                parts = [draw(sizes[rank][peer], case, rank + 1, peer + 1) for peer in range(size)]
                arriving = [sizes[peer][rank] for peer in range(size)]
                found = wire.all_to_all(torch.cat(parts) * scale, sizes[rank], arriving)
                assert found.dtype == torch.float32
                assert found.numel() == sum(arriving)
                for peer, part in enumerate(found.split(arriving)):
                    expected = draw(arriving[peer], case, peer + 1, rank + 1) * scale
                    # What stays here is not rounded.
                    close(part, expected, WireType.fp32 if peer == rank else wire.wire_type)


def all_gather() -> None:
    rank, size = world()
    for wire in wires():
        for case in range(8):
            sizes = sizes_of(case)[0]
            for scale in (1.0, 1e-9, 1e30):
                source = draw(sizes[rank], case, rank + 1) * scale
                joined = wire.all_gather_joined(source, sizes)
                for peer, part in enumerate(joined.split(sizes)):
                    close(part, draw(sizes[peer], case, peer + 1) * scale, wire.wire_type)
                assert_same_on_ranks(joined)


def all_reduce() -> None:
    rank, size = world()
    for wire in wires():
        for num in (0, 1, size, 37, 1000):
            for scale in (1.0, 1e-9, 1e30):
                shares = [draw(num, num + 1, peer + 1) * scale for peer in range(size)]
                values = shares[rank].clone()
                wire.all_reduce(values)
                assert_same_on_ranks(values)
                # Each share and the sum are rounded once.
                sizes = torch.stack(shares).double().abs()
                of_value, of_most = BOUNDS[wire.wire_type]
                most = sizes.max() if num else 0.0
                bound = 2.01 * (of_value + 1e-6) * sizes.sum(0) + 2 * size * of_most * most
                expected = torch.stack(shares).double().sum(0)
                assert ((values.double() - expected).abs() <= bound).all()


def a_matrix_is_reduced_in_place() -> None:
    rank, size = world()
    for wire in wires():
        values = torch.full((3, 5), float(rank + 1))
        wire.all_reduce(values)
        assert torch.equal(values, torch.full((3, 5), size * (size + 1) / 2))


def integers_are_not_rounded() -> None:
    rank, size = world()
    for wire in wires():
        for dtype in (torch.int32, torch.int64, torch.uint8):
            own = torch.arange(rank + 1, dtype=dtype) + 200
            sizes = [r + 1 for r in range(size)]
            for peer, part in enumerate(wire.all_gather_joined(own, sizes).split(sizes)):
                assert part.dtype == dtype
                assert part.tolist() == [200 + k for k in range(peer + 1)]
            large = torch.full((size,), 2**30 + rank).to(torch.int32)
            assert wire.all_to_all(large, [1] * size, [1] * size).tolist() == [
                2**30 + peer for peer in range(size)
            ]
            summed = torch.full((4,), rank + 1, dtype=dtype)
            wire.all_reduce(summed)
            assert summed.tolist() == [size * (size + 1) // 2] * 4


def infinities_and_nans_arrive() -> None:
    _, size = world()
    odd = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    for wire in wires():
        [*parts] = wire.all_to_all(odd.repeat(size), [4] * size, [4] * size).split(4)
        for part in (*parts, *wire.all_gather_joined(odd, [4] * size).split(4)):
            assert torch.equal(part.nan_to_num(7.0), odd.nan_to_num(7.0))
        summed = odd.clone()
        wire.all_reduce(summed)
        assert summed[0] == math.inf
        assert summed[1] == -math.inf
        assert summed[2].isnan()


def sent_bytes_are_counted() -> None:
    rank, size = world()
    for wire in wires():
        value_bytes, num = VALUE_BYTES[wire.wire_type], 10
        message_bytes = wire_numel(num, wire.wire_type) * value_bytes

        values, sizes = torch.ones(num * size), [num] * size
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "all_to_all": (partial(wire.all_to_all, values, sizes, sizes), size - 1),
            "all_gather": (partial(wire.all_gather_joined, values[:num], sizes), size - 1),
            "all_reduce": (partial(wire.all_reduce, values), 2 * (size - 1)),
        }
        for name, (send, num_messages) in calls.items():
            with count_sent_bytes() as traffic:
                send()
            assert traffic.total_bytes == num_messages * message_bytes
            assert name == "all_reduce" or traffic.sent_bytes[name] == traffic.total_bytes


def works_from_a_thread_beside_other_groups() -> None:
    rank, size = world()
    group = dist.new_group()
    wire = Wire(group, WireType.fp16)
    found: list[list[float]] = []

    def exchange() -> None:
        for step in range(20):
            sent = torch.full((3,), float(rank + step))
            found.append(wire.all_gather_joined(sent, [3] * size)[::3].tolist())

    with count_sent_bytes() as traffic:
        thread = threading.Thread(target=exchange)
        thread.start()
        for _ in range(20):
            dist.all_reduce(torch.ones(8))
        thread.join()
    assert found == [[float(peer + step) for peer in range(size)] for step in range(20)]
    assert traffic.sent_bytes["all_gather"] == 20 * (size - 1) * 2 * 5
    dist.destroy_process_group(group)


def ranks_of_a_part_of_the_world() -> None:
    """The group's ranks are not those of the world."""
    rank, size = world()
    group = dist.new_group(list(range(size - 1, 0, -1)) if size > 2 else list(range(size)))
    if dist.get_rank(group) >= 0:
        wire = Wire(group, WireType.bf16)
        found = wire.all_gather_joined(torch.tensor([float(rank)]), [1] * wire.world_size)
        ranks = [dist.get_global_rank(group, r) for r in range(wire.world_size)]
        assert found.tolist() == [float(r) for r in ranks]
    dist.barrier()


CHECKS: list[Callable[[], None]] = [
    all_to_all,
    all_gather,
    all_reduce,
    a_matrix_is_reduced_in_place,
    integers_are_not_rounded,
    infinities_and_nans_arrive,
    sent_bytes_are_counted,
    works_from_a_thread_beside_other_groups,
    ranks_of_a_part_of_the_world,
]


@pytest.fixture(scope="module", params=[1, 2, 3])
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_ranks(run_checks, request.param, timeout_s=120, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_wire(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
