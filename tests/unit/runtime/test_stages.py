"""The stage clock, with time that moves by what the test says."""

from __future__ import annotations

import pytest
import torch

from hotrec.runtime.stages import StageClock, backward_point, mark, mark_backward
from hotrec.types import STAGES
from tests.conftest import Time

CPU = torch.device("cpu")


def measured(clock: StageClock, step: int = -1) -> dict[str, float]:
    """What the clock measured, without the stages that took no time."""
    return {stage: float(s[step]) for stage, s in clock.seconds().items() if s[step]}


def test_a_mark_books_the_time_since_the_last_one(time: Time) -> None:
    clock = StageClock(CPU)
    for factor in (1, 10, 100):
        time.now_s += 1000  # between steps: nobody's
        with clock.step():
            for stage, seconds in (("route", 1), ("dense", 2), ("route", 4)):
                time.now_s += seconds * factor
                mark(stage)
            time.now_s += 8 * factor
    assert clock.num_steps == 3
    assert measured(clock, 0) == {"route": 5, "dense": 2, "optimizer": 8}
    assert list(clock.seconds()) == list(STAGES)
    assert clock.medians()["route"] == 50
    clock.clear()
    assert clock.num_steps == 0
    assert clock.medians() == {}


def test_marks_outside_a_step_do_nothing(time: Time) -> None:
    clock = StageClock(CPU)
    with clock.step():
        time.now_s += 1
    time.now_s += 1
    mark("dense")
    with pytest.raises(ZeroDivisionError), clock.step():
        raise ZeroDivisionError
    mark("dense")
    assert clock.num_steps == 1  # a step that failed is none
    assert measured(clock) == {"optimizer": 1}
    weight = torch.ones(3, requires_grad=True)
    assert mark_backward(weight, "dense") is weight
    assert backward_point("dense", weight) is None


def test_backward_comes_to_marks_in_the_opposite_order(time: Time) -> None:
    def slow(tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """Multiplies by two; backward takes ``seconds``."""
        out = tensor * 2

        def take(_: torch.Tensor) -> None:
            time.now_s += seconds

        out.register_hook(take)
        return out

    clock = StageClock(CPU)
    rows = torch.ones(3, requires_grad=True)
    dense = torch.ones(3, requires_grad=True)
    with clock.step():
        before_lookup = backward_point("row_update", rows)
        looked_up = mark_backward(slow(rows, 1), "grads_exchange", before_lookup)
        bottom_is_undone = backward_point("dense", rows)
        bottom = slow(dense, 2)  # does not depend on the rows
        pooled = mark_backward(slow(looked_up, 4), "dense", bottom_is_undone)
        loss = mark_backward(slow(pooled + bottom, 8).sum(), "ids_exchange")
        time.now_s += 16
        loss.backward()
    assert measured(clock) == {
        "ids_exchange": 16,
        "dense": 8 + 4 + 2,  # the top, and the bottom with what was computed after it
        "row_update": 1,
    }
    assert rows.grad is not None
    assert rows.grad.tolist() == [8, 8, 8]  # marks change no gradient
    assert dense.grad is not None
    assert dense.grad.tolist() == [4, 4, 4]
