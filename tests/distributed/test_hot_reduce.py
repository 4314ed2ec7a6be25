"""The mean of hot gradients over real ranks, by every way and wire, against a plain computation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.hot_choice import hot_messages
from hotrec.embedding.hot_reduce import HotPlan, HotReducer
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks

SHAPES = [(50, 8), (7, 4), (300, 16)]
WAYS = [HotExchange.touched_rows, HotExchange.owners, HotExchange.dense]
# Of each value and of the largest value of a message, see ``hotrec.runtime.wire.encode``.
BOUNDS = {WireType.fp32: (0.0, 0.0), WireType.fp16: (2**-11, 2**-39), WireType.bf16: (2**-8, 0.0)}
Rows = tuple[torch.Tensor, torch.Tensor]


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def make_wire(wire_type: WireType = WireType.fp32) -> Wire:
    assert dist.group.WORLD is not None
    return Wire(dist.group.WORLD, wire_type)


def from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def draw(shapes: Sequence[tuple[int, int]], case: str, rank: int, seed: int = 0) -> list[Rows]:
    """What a rank touches in a step; every rank can draw every rank's."""
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    found = []
    for num_hot, dim in shapes:
        match case:
            case "overlapping":
                slots = torch.arange(num_hot)[torch.rand(num_hot, generator=generator) < 0.5]
            case "disjoint":
                # Of each rank rows of all owners.
                slots = torch.arange(num_hot)
                slots = slots[slots // size % size == rank]
            case "all_rows":
                slots = torch.arange(num_hot)
            case "one_rank_alone":
                slots = torch.arange(num_hot if rank == size - 1 else 0)
            case "nothing":
                slots = torch.arange(0)
            case "one_owner":  # all rows belong to the last rank
                slots = torch.arange(num_hot)
                slots = slots[slots % size == size - 1]
            case _:
                slots = torch.tensor([num_hot - 1])
        found.append((slots, torch.randn(slots.numel(), dim, generator=generator)))
    return found


CASES = (
    "overlapping",
    "disjoint",
    "all_rows",
    "one_rank_alone",
    "nothing",
    "one_owner",
    "one_row",
)


def plain(
    shapes: Sequence[tuple[int, int]], of_ranks: Sequence[Sequence[Rows]]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Union, mean and mean of the absolute gradients, by group, in double precision."""
    found = []
    for group, (num_hot, dim) in enumerate(shapes):
        total, sizes = torch.zeros(2, num_hot, dim, dtype=torch.float64)
        is_touched = torch.zeros(num_hot, dtype=torch.bool)
        for touched in of_ranks:
            slots, grad = touched[group]
            total[slots] += grad.double() / len(of_ranks)
            sizes[slots] += grad.double().abs() / len(of_ranks)
            is_touched[slots] = True
        union = is_touched.nonzero().view(-1)
        found.append((union, total[union], sizes[union]))
    return found


def check_case(
    reducer: HotReducer,
    shapes: Sequence[tuple[int, int]],
    case: str,
    wire_type: WireType,
    scale: float = 1.0,
) -> None:
    rank, size = world()
    of_ranks = [
        [(slots, grad * scale) for slots, grad in draw(shapes, case, r)] for r in range(size)
    ]
    mine = [(slots.clone(), grad.clone()) for slots, grad in of_ranks[rank]]
    found = reducer.reduce(mine)
    expected = plain(shapes, of_ranks)
    # A message holds all dimensions, so its largest value may be of another one.
    tops = [float(grad.abs().max()) for rows in of_ranks for _, grad in rows if grad.numel()]
    for (slots, grad), (union, mean, sizes) in zip(found, expected, strict=True):
        assert slots.dtype == torch.int64
        assert grad.dtype == torch.float32
        assert torch.equal(slots, union), (case, slots, union)
        # At most two roundings, of a share and of a sum, and as many small absolute errors.
        of_value, of_most = BOUNDS[wire_type]
        bound = (1e-6 + 2.02 * of_value) * sizes + 4 * of_most * max(tops, default=0.0)
        assert ((grad.double() - mean).abs() <= bound).all(), case
    bits = b"".join(tensor.numpy().tobytes() for pair in found for tensor in pair)
    assert len(set(from_all(bits))) == 1, f"{case}: ranks differ"
    for (slots, grad), (given_slots, given) in zip(mine, of_ranks[rank], strict=True):
        assert torch.equal(slots, given_slots)
        assert torch.equal(grad, given)


def every_way_gives_the_mean() -> None:
    for wire_type in WireType:
        for exchange in HotExchange:
            reducer = HotReducer(SHAPES, make_wire(wire_type), exchange)
            for case in CASES:
                check_case(reducer, SHAPES, case, wire_type)
            for scale in (1e-9, 1e6):
                check_case(reducer, SHAPES, "overlapping", wire_type, scale)


def one_dimension_gives_the_mean() -> None:
    for shapes in ([(300, 8)], [(1, 1)], [(5, 3)]):
        for exchange in HotExchange:
            reducer = HotReducer(shapes, make_wire(), exchange)
            for case in CASES:
                check_case(reducer, shapes, case, WireType.fp32)


def integers_survive_a_rounding_wire() -> None:
    """Slots beyond what 16-bit floats can hold."""
    rank, size = world()
    shapes = [(3_000_000, 2)]
    slots = torch.tensor([2049, 70_001, 2_999_999]) - torch.tensor([0, 0, rank])
    for wire_type in WireType:
        for exchange in (HotExchange.touched_rows, HotExchange.owners):
            reducer = HotReducer(shapes, make_wire(wire_type), exchange)
            [(union, grad)] = reducer.reduce([(slots, torch.ones(3, 2))])
            assert union.tolist() == [2049, 70_001, *range(3_000_000 - size, 3_000_000)]
            expected = torch.tensor([1.0, 1.0, *[1 / size] * size])
            assert torch.allclose(grad, expected[:, None].expand(-1, 2), rtol=2**-7, atol=0)


def a_plan_made_ahead_gives_the_same() -> None:
    rank, _ = world()
    for exchange in HotExchange:
        at_once, ahead = (HotReducer(SHAPES, make_wire(), exchange) for _ in range(2))
        steps = [draw(SHAPES, "overlapping", rank, seed) for seed in range(4)]

        def make_plan(step: list[Rows], reducer: HotReducer = ahead) -> HotPlan:
            counts = reducer.exchange_counts([slots.numel() for slots, _ in step])
            return reducer.plan([slots for slots, _ in step], counts)

        plan = make_plan(steps[0])
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            # The next step's slots travel before this step's gradients.
            next_plan = make_plan(following) if following is not None else plan
            found = ahead.reduce_planned([grad for _, grad in step], plan)
            for (slots, grad), (same_slots, same) in zip(found, at_once.reduce(step), strict=True):
                assert torch.equal(slots, same_slots)
                assert torch.equal(grad, same)
            plan = next_plan


def slots_may_come_in_any_order() -> None:
    rank, size = world()
    generator = torch.Generator().manual_seed(rank)
    for exchange in WAYS if size > 1 else ():
        reducer = HotReducer(SHAPES, make_wire(), exchange)
        mine = draw(SHAPES, "overlapping", rank)
        orders = [torch.randperm(slots.numel(), generator=generator) for slots, _ in mine]
        shuffled = [(s[o], g[o]) for (s, g), o in zip(mine, orders, strict=True)]
        for one, two in zip(reducer.reduce(mine), reducer.reduce(shuffled), strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


def sent_by(reducer: HotReducer, touched: list[Rows]) -> tuple[int, HotExchange]:
    """Bytes of the rank that sends most, without the counts, and what was chosen."""
    counts = reducer.exchange_counts([slots.numel() for slots, _ in touched])
    with count_sent_bytes() as traffic:
        plan = reducer.plan([slots for slots, _ in touched], counts)
        reducer.reduce_planned([grad for _, grad in touched], plan)
    assert len(set(from_all(plan.exchange.value))) == 1
    return max(from_all(traffic.total_bytes)), plan.exchange


def formulas_are_what_is_sent() -> None:
    rank, size = world()
    shapes = [(1200, 8), (2400, 16)]
    for wire_type, value_bytes in ((WireType.fp32, 4), (WireType.fp16, 2), (WireType.bf16, 2)):
        for case in ("overlapping", "disjoint", "all_rows"):
            touched = draw(shapes, case, rank)
            counts = from_all([slots.numel() for slots, _ in touched])
            of_ranks = [draw(shapes, case, r) for r in range(size)]
            union = [slots.numel() for slots, _, _ in plain(shapes, of_ranks)]
            expected = hot_messages(shapes, counts, union, value_bytes)
            for way in WAYS if size > 1 else ():
                sent, chosen = sent_by(HotReducer(shapes, make_wire(wire_type), way), touched)
                assert chosen is way
                # Owners are even but for chance; the rest are counts and fp16's factors.
                of_formula = sum(expected[way].values())
                assert sent == pytest.approx(of_formula, rel=0.06, abs=64 * size), (way, case)


def auto_sends_least() -> None:
    rank, size = world()
    if size == 1:
        return
    shapes = [(1200, 8), (2400, 16)]
    expected = {
        "overlapping": HotExchange.touched_rows if size == 2 else HotExchange.owners,
        "disjoint": HotExchange.touched_rows,
        "all_rows": HotExchange.dense,
    }
    for wire_type in WireType:
        for case, way in expected.items():
            auto = HotReducer(shapes, make_wire(wire_type), HotExchange.auto)
            touched = draw(shapes, case, rank)
            sent_by(auto, touched)  # from here on the union is known
            sent, chosen = sent_by(auto, touched)
            assert chosen is way, (wire_type, case, chosen)
            others = [sent_by(HotReducer(shapes, make_wire(wire_type), w), touched) for w in WAYS]
            assert sent == min(num_bytes for num_bytes, _ in others)


def owners_send_less_of_rows_that_many_touch() -> None:
    rank, size = world()
    touched = draw(SHAPES, "overlapping", rank)
    by_owners, _ = sent_by(HotReducer(SHAPES, make_wire(), HotExchange.owners), touched)
    to_all, _ = sent_by(HotReducer(SHAPES, make_wire(), HotExchange.touched_rows), touched)
    if size == 4:
        assert by_owners < 0.85 * to_all
    elif size == 2:
        assert by_owners >= to_all


def chosen_by_seconds() -> None:
    """A collective that takes long is avoided, whatever it sends."""
    rank, size = world()
    for slow, way in (
        (("all_gather",), HotExchange.dense),
        (("all_to_all", "all_reduce"), HotExchange.touched_rows),
    ):
        seconds = {
            name: (lambda num_bytes, s=1e3 if name in slow else 1.0: s * num_bytes + s)
            for name in ("all_gather", "all_to_all", "all_reduce")
        }
        reducer = HotReducer(SHAPES, make_wire(), HotExchange.auto, seconds)
        for _ in range(2):
            plan = reducer.plan([slots for slots, _ in draw(SHAPES, "overlapping", rank)])
            assert size == 1 or plan.exchange is way


def wrong_counts_are_refused_before_anything_is_sent() -> None:
    rank, size = world()
    reducer = HotReducer([(50, 8)], make_wire(), HotExchange.touched_rows)
    [(slots, grad)] = draw([(50, 8)], "all_rows", rank)
    counts = [[49]] * size
    if size > 1:
        with pytest.raises(ValueError, match=rf"counts of rank {rank}: expected \[50\], the slots"):
            reducer.plan([slots], counts)
    plan = reducer.plan([slots])
    with pytest.raises(ValueError, match=r"50 hot rows of dimension 8\): expected float32 \(50, 8"):
        reducer.reduce_planned([grad[1:]], plan)
    with pytest.raises(ValueError, match="expected one for each of 1 embedding dimensions, got 2"):
        reducer.reduce_planned([grad, grad], plan)


def runs_in_a_thread() -> None:
    """Beside collectives of another group on the main thread, on gradients made there."""
    rank, size = world()
    group = dist.new_group()
    found: list[list[Rows]] = []
    steps = [draw(SHAPES, "overlapping", rank, seed) for seed in range(6)]

    def reduce_all() -> None:
        reducer = HotReducer(SHAPES, Wire(group), HotExchange.auto)
        found.extend(reducer.reduce(step) for step in steps)

    thread = threading.Thread(target=reduce_all)
    thread.start()
    for _ in range(50):
        dist.all_reduce(torch.ones(100))
    thread.join()
    assert len(found) == len(steps)
    for seed, rows in enumerate(found):
        of_ranks = [draw(SHAPES, "overlapping", r, seed) for r in range(size)]
        expected = plain(SHAPES, of_ranks)
        for (slots, grad), (union, mean, _) in zip(rows, expected, strict=True):
            assert torch.equal(slots, union)
            assert torch.allclose(grad.double(), mean, rtol=0, atol=1e-6)
            assert not grad.requires_grad
    dist.destroy_process_group(group)


CHECKS: list[Callable[[], None]] = [
    every_way_gives_the_mean,
    one_dimension_gives_the_mean,
    integers_survive_a_rounding_wire,
    a_plan_made_ahead_gives_the_same,
    slots_may_come_in_any_order,
    formulas_are_what_is_sent,
    auto_sends_least,
    owners_send_less_of_rows_that_many_touch,
    chosen_by_seconds,
    wrong_counts_are_refused_before_anything_is_sent,
    runs_in_a_thread,
]


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_ranks(run_checks, request.param, timeout_s=180, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_hot_reduce(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
