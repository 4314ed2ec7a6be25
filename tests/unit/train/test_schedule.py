from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.config.groups import Decay
from hotrec.train.schedule import Schedule, next_segment, set_learning_rates


@given(
    start=st.integers(0, 60),
    length=st.integers(0, 60),
    eval_every=st.integers(0, 17),
    save_every=st.integers(0, 17),
)
def test_segments_cover_every_step_once_and_end_where_due(
    start: int, length: int, eval_every: int, save_every: int
) -> None:
    num_steps, every = start + length, {eval_every, save_every} - {0}
    ends = {start + 3, start + 90}
    cut, position = [], start
    while position < num_steps:
        cut.append(next_segment(position, num_steps, every, ends))
        position = cut[-1].last_step
    steps = [step for part in cut for step in range(part.first_step, part.last_step + 1)]
    assert steps == list(range(start + 1, num_steps + 1))
    assert sum(part.num_steps for part in cut) == length
    expected = {step for step in steps if step in ends or any(step % n == 0 for n in every)}
    assert {part.last_step for part in cut} == expected | {num_steps} - {start}
    assert [part.is_last for part in cut] == [part is cut[-1] for part in cut]


def test_warm_up_reaches_one_and_stays_when_constant() -> None:
    schedule = Schedule(warmup_steps=4)
    assert [schedule(step) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Schedule()(1) == 1.0


@pytest.mark.parametrize(
    ("decay", "quarter", "middle"),
    [
        (Decay.linear, 0.75, 0.5),
        (Decay.cosine, 0.5 * (1 + math.cos(math.pi / 4)), 0.5),
        (Decay.polynomial, 0.5625, 0.25),
    ],
)
def test_decay_starts_at_one_and_ends_at_zero(decay: Decay, quarter: float, middle: float) -> None:
    schedule = Schedule(decay=decay, warmup_steps=2, decay_start_step=10, num_decay_steps=20)
    expected = {1: 0.5, 10: 1, 15: quarter, 20: middle, 30: 0, 1000: 0}
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
    factors = [schedule(step) for step in range(10, 31)]
    assert factors == sorted(factors, reverse=True)


def test_every_group_keeps_its_own_base_rate() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD(
        [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.01}], lr=1.0
    )
    schedule = Schedule(warmup_steps=10)
    # Twice, as in two calls of train: the base must not become the rate of the last step.
    for step in (5, 7):
        assert set_learning_rates(optimizer, schedule, step) == 0.5 * schedule(step)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.5 * schedule(step), 0.01 * schedule(step)]
