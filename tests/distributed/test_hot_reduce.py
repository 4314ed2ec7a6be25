"""The mean of hot gradients over real ranks, by every reduction and wire, against plain sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.embedding.hot_reduce import HotPlan, HotReducer, Shapes, hot_bytes
from hotrec.runtime.comm_thread import CommunicationFuture, CommunicationThread
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.runtime.wire import Wire
from hotrec.types import HotExchange, WireType
from tests.distributed.setups import gather
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import only_whole

SHAPES = [(50, 8), (7, 4), (300, 16)]
LARGE = [(1200, 8), (2400, 16)]
TOUCHED, OWNERS, DENSE = HotExchange.touched_rows, HotExchange.owners, HotExchange.dense
REDUCTIONS = [TOUCHED, OWNERS, DENSE]
# Of each value and of the largest value of a message, see ``hotrec.runtime.wire.encode``.
BOUNDS = {WireType.fp32: (0.0, 0.0), WireType.fp16: (2**-11, 2**-39), WireType.bf16: (2**-8, 0.0)}
Rows = tuple[torch.Tensor, torch.Tensor]


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def make_reducer(
    shapes: Shapes = SHAPES,
    exchange: HotExchange = HotExchange.auto,
    wire_type: WireType = WireType.fp32,
    **kwargs: Any,
) -> HotReducer:
    assert dist.group.WORLD is not None
    return HotReducer(shapes, Wire(dist.group.WORLD, wire_type), exchange, **kwargs)


# By case, the slots of H that a rank of W touches; "disjoint" has rows of all owners on each rank.
SLOTS: dict[str, Callable[[int, int, int, torch.Generator], torch.Tensor]] = {
    "overlapping": lambda h, r, w, g: (torch.rand(h, generator=g) < 0.5).nonzero().view(-1),
    "disjoint": lambda h, r, w, g: (torch.arange(h) // w % w == r).nonzero().view(-1),
    "all_rows": lambda h, r, w, g: torch.arange(h),
    "one_rank_alone": lambda h, r, w, g: torch.arange(h if r == w - 1 else 0),
    "nothing": lambda h, r, w, g: torch.arange(0),
    "one_owner": lambda h, r, w, g: torch.arange(h)[w - 1 :: w],
    "one_row": lambda h, r, w, g: torch.tensor([h - 1]),
}


def draw(shapes: Shapes, case: str, rank: int, seed: int = 0) -> list[Rows]:
    """What a rank touches in a step; every rank can draw every rank's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    found = []
    for num_hot, dim in shapes:
        slots = SLOTS[case](num_hot, rank, dist.get_world_size(), generator)
        found.append((slots, torch.randn(slots.numel(), dim, generator=generator)))
    return found


def plain(
    shapes: Shapes, of_ranks: Sequence[Sequence[Rows]]
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
    reducer: HotReducer, shapes: Shapes, case: str, wire_type: WireType, scale: float = 1.0
) -> None:
    rank, size = world()
    of_ranks = [
        [(slots, grad * scale) for slots, grad in draw(shapes, case, r)] for r in range(size)
    ]
    mine = [(slots.clone(), grad.clone()) for slots, grad in of_ranks[rank]]
    found = reducer.reduce(mine)
    # A message holds all dimensions, so its largest value may be of another one.
    tops = [float(grad.abs().max()) for rows in of_ranks for _, grad in rows if grad.numel()]
    for (slots, grad), (union, mean, sizes) in zip(found, plain(shapes, of_ranks), strict=True):
        assert (slots.dtype, grad.dtype) == (torch.int64, torch.float32)
        assert torch.equal(slots, union), (case, slots, union)
        # At most two roundings, of a share and of a sum, and as many small absolute errors.
        of_value, of_most = BOUNDS[wire_type]
        bound = (1e-6 + 2.02 * of_value) * sizes + 4 * of_most * max(tops, default=0.0)
        assert ((grad.double() - mean).abs() <= bound).all(), case
    bits = b"".join(tensor.numpy().tobytes() for pair in found for tensor in pair)
    assert len(set(gather(bits))) == 1, f"{case}: ranks differ"
    for (slots, grad), (given_slots, given) in zip(mine, of_ranks[rank], strict=True):
        assert torch.equal(slots, given_slots)
        assert torch.equal(grad, given)


def expect_equal(found: Sequence[Rows], expected: Sequence[Rows]) -> None:
    for (slots, grad), (other_slots, other) in zip(found, expected, strict=True):
        assert torch.equal(slots, other_slots)
        assert torch.equal(grad, other)


def every_reduction_gives_the_mean() -> None:
    for exchange in HotExchange:
        for wire_type in WireType:
            reducer = make_reducer(SHAPES, exchange, wire_type)
            for case in SLOTS:
                check_case(reducer, SHAPES, case, wire_type)
            for scale in (1e-9, 1e6):
                check_case(reducer, SHAPES, "overlapping", wire_type, scale)
        for shapes in ([(300, 8)], [(1, 1)], [(5, 3)]):
            reducer = make_reducer(shapes, exchange)
            for case in SLOTS:
                check_case(reducer, shapes, case, WireType.fp32)


def sums_are_in_rank_order() -> None:
    """All-gather and owners add up in the same order; of two ranks no order differs."""
    rank, size = world()
    for case in SLOTS:
        touched = draw(SHAPES, case, rank)
        gathered = make_reducer(SHAPES, TOUCHED).reduce(touched)
        expect_equal(make_reducer(SHAPES, OWNERS).reduce(touched), gathered)
        if size <= 2:
            expect_equal(make_reducer(SHAPES, DENSE).reduce(touched), gathered)
        if size == 1:
            continue
        for group, (slots, grad) in enumerate(gathered):
            num_hot, dim = SHAPES[group]
            total = torch.zeros(num_hot, dim)
            for other in range(size):
                others_slots, others_grad = draw(SHAPES, case, other)[group]
                total[others_slots] += others_grad / size
            assert torch.equal(grad, total[slots])


def integers_survive_a_rounding_wire() -> None:
    """Slots beyond what 16-bit floats can hold."""
    rank, size = world()
    slots = torch.tensor([2049, 70_001, 2_999_999]) - torch.tensor([0, 0, rank])
    for wire_type in WireType:
        for exchange in REDUCTIONS:  # few rows of many: DENSE sends slots too
            reducer = make_reducer([(3_000_000, 2)], exchange, wire_type)
            [(union, grad)] = reducer.reduce([(slots, torch.ones(3, 2))])
            assert union.tolist() == [2049, 70_001, *range(3_000_000 - size, 3_000_000)]
            expected = torch.tensor([1.0, 1.0, *[1 / size] * size])
            assert torch.allclose(grad, expected[:, None].expand(-1, 2), rtol=2**-7, atol=0)


def plans_made_ahead_in_a_thread_give_the_same() -> None:
    """Beside collectives of another group on the main thread, on gradients made there."""
    rank, size = world()
    group, thread = dist.new_group(), CommunicationThread(torch.device("cpu"), "hot")
    steps = [draw(SHAPES, "overlapping", rank, seed) for seed in range(5)]

    def make_plan(reducer: HotReducer, step: list[Rows]) -> HotPlan:
        return reducer.plan([slots for slots, _ in step])

    def reduce(step: list[Rows], plan: CommunicationFuture[HotPlan]) -> list[Rows]:
        return plan.wait().reduce([grad.requires_grad_() for _, grad in step])

    for exchange in HotExchange:
        ahead, at_once = HotReducer(SHAPES, Wire(group), exchange), make_reducer(SHAPES, exchange)
        plan = thread.submit(partial(make_plan, ahead, steps[0]))
        futures = []
        for step, following in pairwise([*steps, steps[0]]):
            # The next step's slots are exchanged before this step's gradients.
            next_plan = thread.submit(partial(make_plan, ahead, following))
            futures.append(thread.submit(partial(reduce, step, plan)))
            plan = next_plan
        for _ in range(10):
            dist.all_reduce(torch.ones(100))
        for step, future in zip(steps, futures, strict=True):
            found = future.wait()
            assert size == 1 or not any(grad.requires_grad for _, grad in found)
            expect_equal(found, at_once.reduce(step))
    thread.close()
    dist.destroy_process_group(group)


def slots_may_come_in_any_order() -> None:
    rank, size = world()
    generator = torch.Generator().manual_seed(rank)
    for exchange in REDUCTIONS if size > 1 else ():
        reducer = make_reducer(SHAPES, exchange)
        mine = draw(SHAPES, "overlapping", rank)
        orders = [torch.randperm(slots.numel(), generator=generator) for slots, _ in mine]
        shuffled = [(s[o], g[o]) for (s, g), o in zip(mine, orders, strict=True)]
        expect_equal(reducer.reduce(shuffled), reducer.reduce(mine))


def sent_by(reducer: HotReducer, touched: list[Rows]) -> tuple[int, HotExchange]:
    """Bytes of the rank that sends most, without the counts, and what was chosen."""
    counts = gather([slots.numel() for slots, _ in touched])
    with count_sent_bytes() as traffic:
        plan = reducer.plan([slots for slots, _ in touched], counts)
        plan.reduce([grad for _, grad in touched])
    assert len(set(gather(plan.exchange.value))) == 1
    return max(gather(traffic.total_bytes)), plan.exchange


def formulas_are_what_is_sent_and_auto_sends_least() -> None:
    rank, size = world()
    cheapest = {
        "overlapping": TOUCHED if size == 2 else OWNERS,
        "disjoint": TOUCHED,
        "all_rows": DENSE,
    }
    nothing = draw(LARGE, "nothing", rank)
    for wire_type, (case, exchange) in product(WireType, cheapest.items() if size > 1 else ()):
        touched = draw(LARGE, case, rank)
        counts = gather([slots.numel() for slots, _ in touched])
        of_ranks = [draw(LARGE, case, r) for r in range(size)]
        union = [slots.numel() for slots, _, _ in plain(LARGE, of_ranks)]
        expected = hot_bytes(LARGE, counts, union, 4 if wire_type is WireType.fp32 else 2)
        sent = {}
        for named in REDUCTIONS:
            reducer = make_reducer(LARGE, named, wire_type)
            assert sent_by(reducer, nothing)[1] is named
            sent[named], _ = sent_by(reducer, touched)
            # Owners are even but for chance; the rest are counts and fp16's factors.
            of_formula = pytest.approx(expected[named], rel=0.06, abs=64 * size)
            assert sent[named] == of_formula, (named, case)
        auto = make_reducer(LARGE, wire_type=wire_type)
        sent_by(auto, touched)  # from here on the union is known,
        sent_by(auto, nothing)  # which an empty step does not change
        assert sent_by(auto, touched) == (sent[exchange], exchange), (wire_type, case)
        assert sent[exchange] == min(sent.values())


def dense_finds_the_union_by_the_shorter_message() -> None:
    """Slots of few touched rows, else a flag for every row."""
    rank, size = world()
    for num_touched in (1, 300) if size > 1 else ():
        slots = torch.arange(num_touched)
        reducer = make_reducer([(1200, 8)], DENSE)
        sent, _ = sent_by(reducer, [(slots, torch.ones(num_touched, 8))])
        values = 2 * 4 * 8 * 1200 * (size - 1) // size
        flags = 2 * 1200 * (size - 1) // size
        assert sent - values == min(4 * num_touched * (size - 1), flags)


def wrong_counts_are_refused_before_anything_is_sent() -> None:
    rank, size = world()
    reducer = make_reducer([(50, 8)], TOUCHED)
    [(slots, _)] = draw([(50, 8)], "all_rows", rank)
    if size > 1:
        with pytest.raises(ValueError, match=rf"counts of rank {rank}: expected \[50\]"):
            reducer.plan([slots], [[49]] * size)
    reducer.plan([slots])


CHECKS: list[Callable[[], None]] = [
    every_reduction_gives_the_mean,
    sums_are_in_rank_order,
    integers_survive_a_rounding_wire,
    plans_made_ahead_in_a_thread_give_the_same,
    slots_may_come_in_any_order,
    formulas_are_what_is_sent_and_auto_sends_least,
    dense_finds_the_union_by_the_shorter_message,
    wrong_counts_are_refused_before_anything_is_sent,
]


@pytest.fixture(scope="module", params=[1, 2, 3, *only_whole(4)])
def verdicts(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return run_ranks(run_checks, request.param, timeout_s=180, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_hot_reduce(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
