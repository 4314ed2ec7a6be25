"""Blocks of steps in turn."""

from __future__ import annotations

import pytest
import torch

from hotrec.runtime.stages import StageClock
from hotrec.train import interleave
from hotrec.train.interleave import Block, in_turn, run_block

CPU = torch.device("cpu")


class Logged:
    """Takes a second for a step, ten for what it leaves in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = ""
        self._now_s = 100.0
        monkeypatch.setattr(interleave.time, "perf_counter", lambda: self._now_s)

    def step(self) -> None:
        self.calls += "s"
        self._now_s += 1

    def drain(self) -> None:
        self.calls += "d"
        self._now_s += 10


def test_each_comes_first_equally_often() -> None:
    assert ["".join(in_turn("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


@pytest.mark.parametrize(("drains", "ended_s"), [(True, 13), (False, 3)])
def test_a_block_is_steps_and_what_they_leave_in_flight(
    drains: bool, ended_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    contender, clock = Logged(monkeypatch), StageClock(CPU)
    block = run_block(contender, 3, 1, CPU, clock=clock, drains=drains)
    assert contender.calls == ("sssd" if drains else "sss")
    assert (block.returned_s, block.ended_s) == ([1, 2, 3], ended_s)
    assert clock.num_steps == 2


@pytest.mark.parametrize(("num_skipped", "step_s"), [(0, 3.0), (1, 2.0), (2, 1.0)])
def test_first_steps_do_not_count(num_skipped: int, step_s: float) -> None:
    block = Block([5.0, 8.0, 9.0], 20.0, num_skipped, cpu_s=1.0, main_cpu_s=1.0)
    assert block.mean_step_s == step_s
