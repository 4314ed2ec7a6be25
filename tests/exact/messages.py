"""Sums and messages between ranks against plain sums in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from hotrec.cost_model.costs import World
from hotrec.cost_model.step import BYTES_OF, hot_messages
from hotrec.embedding.hot_reduce import HotReducer, Shapes
from hotrec.runtime.hosts import TwoLevelWire
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import WireType
from tests.distributed.setups import assert_same_on_ranks, gather

# By wire, the error of each value that is rounded once, and its bytes.
WIRES = {WireType.fp32: (0.0, 4), WireType.bf16: (2**-8, 2)}
SCALES = (1.0, 1e-9, 1e30)
SHAPES = [(50, 8), (7, 4), (300, 16)]
LARGE = [(1200, 8), (2400, 16)]
Rows = tuple[torch.Tensor, torch.Tensor]


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def wires() -> list[Wire]:
    assert dist.group.WORLD is not None
    return [Wire(dist.group.WORLD, wire_type) for wire_type in WIRES]


def draw(num: int, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(s * 1000**i for i, s in enumerate(seed, 1)))
    return torch.randn(num, generator=generator)


def check_sum(
    found: torch.Tensor, shares: Sequence[torch.Tensor], wire_type: WireType, roundings: float
) -> None:
    """Of so many roundings."""
    terms = torch.stack(list(shares)).double()
    bound = (1e-6 + 1.01 * roundings * WIRES[wire_type][0]) * terms.abs().sum(0)
    assert ((found.double() - terms.sum(0)).abs() <= bound).all(), (found, terms.sum(0))


def sizes_of(case: int) -> list[list[int]]:
    """Elements from rank (first index) to rank; some cases with nothing to or from a rank."""
    _, size = world()
    generator = torch.Generator().manual_seed(case)
    sizes = torch.randint(0, 40, (size, size), generator=generator)
    if case == 1:
        sizes[:, case % size] = 0
    if case == 2:
        sizes[case % size] = 0
    return (sizes if case < 3 else sizes * 0).tolist()


def values_arrive() -> None:
    """To one rank or all; what stays on a rank is not rounded."""
    rank, size = world()
    for wire, case, scale in product(wires(), range(4), SCALES):
        sizes, (of_value, _) = sizes_of(case), WIRES[wire.wire_type]
        parts = [draw(sizes[rank][peer], case, rank + 1, peer + 1) for peer in range(size)]
        arriving = [sizes[peer][rank] for peer in range(size)]
        found = wire.all_to_all(torch.cat(parts) * scale, sizes[rank], arriving)
        for peer, part in enumerate(found.split(arriving)):
            expected = draw(arriving[peer], case, peer + 1, rank + 1) * scale
            bound = 0.0 if peer == rank else of_value
            torch.testing.assert_close(part, expected, rtol=bound, atol=0)
        source = draw(sizes[0][rank], case, rank + 1) * scale
        joined = wire.all_gather_joined(source, sizes[0])
        for peer, part in enumerate(joined.split(sizes[0])):
            expected = draw(sizes[0][peer], case, peer + 1) * scale
            torch.testing.assert_close(part, expected, rtol=of_value, atol=0)
        assert_same_on_ranks(joined)


def values_are_summed() -> None:
    rank, size = world()
    for wire, num, scale in product(wires(), (0, 1, size, 37, 1000), SCALES):
        shares = [draw(num, num + 1, peer + 1) * scale for peer in range(size)]
        summed = shares[rank].view(-1, 1).clone()
        wire.all_reduce(summed)  # a matrix, in place
        check_sum(summed.view(-1), shares, wire.wire_type, 2)  # a share and the sum
        assert_same_on_ranks(summed)


def sent_bytes_are_counted() -> None:
    _, size = world()
    for wire in wires():
        num, (_, value_bytes) = 10, WIRES[wire.wire_type]
        values, sizes = torch.ones(num * size), [num] * size
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "all_to_all": (partial(wire.all_to_all, values, sizes, sizes), size - 1),
            "all_gather": (partial(wire.all_gather_joined, values[:num], sizes), size - 1),
            "all_reduce": (partial(wire.all_reduce, values), 2 * (size - 1)),
        }
        for name, (send, num_messages) in calls.items():
            with count_sent_bytes() as traffic:
                send()
            assert traffic.total_bytes == num_messages * num * value_bytes
            assert name == "all_reduce" or traffic.sent_bytes[name] == traffic.total_bytes


# Of ``Wire``, on any back end.
MESSAGES: list[Callable[[], None]] = [
    values_arrive,
    values_are_summed,
    sent_bytes_are_counted,
]

# By case, the slots of H that a rank of W touches; "disjoint" has rows of all owners on each rank.
SLOTS: dict[str, Callable[[int, int, int, torch.Generator], torch.Tensor]] = {
    "overlapping": lambda h, r, w, g: (torch.rand(h, generator=g) < 0.5).nonzero().view(-1),
    "disjoint": lambda h, r, w, g: (torch.arange(h) // w % w == r).nonzero().view(-1),
    "all_rows": lambda h, r, w, g: torch.arange(h),
    "one_rank_alone": lambda h, r, w, g: torch.arange(h if r == w - 1 else 0),
    "nothing": lambda h, r, w, g: torch.arange(0),
    "one_owner": lambda h, r, w, g: torch.arange(h)[w - 1 :: w],
    "shuffled": lambda h, r, w, g: torch.randperm(h, generator=g)[: h // 2 + 1],
}


def make_reducer(
    shapes: Shapes, wire_type: WireType, hosts: TwoLevelWire | None = None
) -> HotReducer:
    assert dist.group.WORLD is not None
    return HotReducer(shapes, Wire(dist.group.WORLD, wire_type), hosts)


def touched_by(shapes: Shapes, case: str, rank: int, scale: float = 1.0) -> list[Rows]:
    """What a rank touches; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(rank)
    found = []
    for num_hot, dim in shapes:
        slots = SLOTS[case](num_hot, rank, dist.get_world_size(), generator)
        found.append((slots, scale * torch.randn(slots.numel(), dim, generator=generator)))
    return found


def check_means(reducer: HotReducer, shapes: Shapes, wire_type: WireType) -> None:
    """The union of what ranks touch, and the mean of its gradients; the same bits on all."""
    rank, size = world()
    for case, scale in [*((case, 1.0) for case in SLOTS), ("overlapping", 1e-9)]:
        of_ranks = [touched_by(shapes, case, peer, scale) for peer in range(size)]
        found = reducer.reduce(touched_by(shapes, case, rank, scale))
        for at, ((slots, grad), (num_hot, dim)) in enumerate(zip(found, shapes, strict=True)):
            shares = torch.zeros(size, num_hot, dim)
            for share, touched in zip(shares, of_ranks, strict=True):
                share[touched[at][0]] = touched[at][1] / size
            union = torch.cat([touched[at][0] for touched in of_ranks]).unique()
            assert slots.tolist() == union.tolist(), case
            # Of two levels the sums inside hosts are rounded, too.
            check_sum(grad, [share[union] for share in shares], wire_type, 2)
        assert_same_on_ranks(torch.cat([grad.flatten() for _, grad in found]))


def owners_give_the_mean() -> None:
    for wire_type in WIRES:
        for shapes in (SHAPES, [(1, 1)]):
            check_means(make_reducer(shapes, wire_type), shapes, wire_type)


def slots_survive_a_rounding_wire() -> None:
    """Beyond what 16-bit floats can hold."""
    rank, size = world()
    slots = torch.tensor([2049, 70_001, 2_999_999]) - torch.tensor([0, 0, rank])
    reducer = make_reducer([(3_000_000, 2)], WireType.bf16)
    [(union, _)] = reducer.reduce([(slots, torch.ones(3, 2))])
    assert union.tolist() == [2049, 70_001, *range(3_000_000 - size, 3_000_000)]


def hot_rows_send_what_is_predicted() -> None:
    rank, size = world()
    for wire_type, case in product(WIRES, ("overlapping", "disjoint", "all_rows")):
        of_ranks = [touched_by(LARGE, case, peer) for peer in range(size)]
        quantities = dict.fromkeys(BYTES_OF.values(), 0.0) | dict.fromkeys(BYTES_OF, 0.0)
        for at, (_, dim) in enumerate(LARGE):
            slots = [one[at][0] for one in of_ranks]
            nums = {
                "hot_rows": max(part.numel() for part in slots),
                "union_rows": torch.cat(slots).unique().numel(),
            }
            for rows, num in nums.items():
                quantities[rows] += num
                quantities[BYTES_OF[rows]] += 4 * dim * num
        expected, _ = hot_messages(World(size, size), WIRES[wire_type][1] / 4, quantities)
        reducer = make_reducer(LARGE, wire_type)
        with count_sent_bytes() as traffic:
            reducer.reduce(of_ranks[rank])
        # Owners are even but for chance; the rest are counts.
        sent = max(gather(traffic.total_bytes))
        assert abs(sent - expected) <= 0.06 * expected + 96 * size, (wire_type, case)


HOT: list[Callable[[], None]] = [
    owners_give_the_mean,
    slots_survive_a_rounding_wire,
    hot_rows_send_what_is_predicted,
]
