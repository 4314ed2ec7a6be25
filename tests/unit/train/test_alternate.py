from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.train.alternate import AlternatingLoader, Alternation
from hotrec.train.evaluate import Quality


def letters(alternation: Alternation, num_steps: int) -> str:
    """The kinds of the next batches: H all-hot, m mixed."""
    taken = ""
    for _ in range(num_steps):
        is_all_hot = alternation.next_is_all_hot()
        assert alternation.next_is_all_hot() is is_all_hot  # asking changes nothing
        alternation.advance()
        taken += "H" if is_all_hot else "m"
    return taken


def evaluate(alternation: Alternation, *losses: float) -> list[float]:
    """The rate after each of the losses."""
    rates = []
    for loss in losses:
        alternation.add_quality(len(rates), Quality(None, loss, None, 10))
        rates.append(alternation.rate)
    return rates


@pytest.mark.parametrize(
    ("num_all_hot", "num_mixed", "settings_", "expected"),
    [
        (4, 4, {}, "mmHHmmHH"),
        (4, 4, {"start_rate": 1.0}, "mmmmHHHH"),
        (4, 4, {"start_rate": 0.25}, "mHmHmHmH"),
        (10, 2, {"start_rate": 0.3}, "mHHHmHHHHHHH"),  # where mixed ones are used up, H runs on
        (3, 5, {}, "mmmHHmmH"),  # half of 5 is 3
        (6, 1, {"start_rate": 0.01}, "mHHHHHH"),  # a block holds one batch at least
        (0, 3, {}, "mmm"),
        (3, 0, {}, "HHH"),
        (100, 100, {"start_rate": 0.07}, ("m" * 7 + "H" * 7) * 14 + "mmHH"),  # 0.07 * 100 > 7
    ],
)
def test_blocks_of_an_epoch(num_all_hot, num_mixed, settings_, expected):
    alternation = Alternation(num_all_hot, num_mixed, **settings_)
    assert letters(alternation, 2 * len(expected)) == 2 * expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 25), st.floats(0.1, 1.0)), max_size=8),
)
def test_every_epoch_holds_every_batch_once_whatever_the_losses(num_all_hot, num_mixed, losses):
    if num_all_hot + num_mixed == 0:
        return
    alternation = Alternation(num_all_hot, num_mixed)
    taken = ""
    for num_steps, loss in losses:
        taken += letters(alternation, num_steps)
        alternation.add_quality(len(taken), Quality(None, loss, None, 10))
    size = num_all_hot + num_mixed
    taken += letters(alternation, 2 * size - len(taken) % size)
    for start in range(0, len(taken) - size + 1, size):
        assert taken[start : start + size].count("H") == num_all_hot
        assert taken[start : start + size].count("m") == num_mixed


@pytest.mark.parametrize(
    ("settings_", "losses", "rates"),
    [
        # A worse loss makes blocks finer, down to the least.
        ({"least_rate": 0.1}, (0.5, 0.6, 0.7, 0.8, 0.9), [0.5, 0.25, 0.125, 0.1, 0.1]),
        # They grow after several better ones in a row, up to all.
        (
            {"start_rate": 0.25, "patience": 3},
            (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05),
            [0.25] * 3 + [0.5] * 3 + [1.0] * 4,
        ),
        ({"start_rate": 0.25, "patience": 2}, (0.7, 0.75, 0.7, 0.65), [0.25, 0.125, 0.125, 0.25]),
    ],
)
def test_rates_follow_the_loss(settings_, losses, rates):
    assert evaluate(Alternation(100, 100, **settings_), *losses) == rates


def test_a_new_rate_begins_with_the_next_block():
    alternation = Alternation(8, 8)
    assert letters(alternation, 16 * 5) == "mmmmHHHHmmmmHHHH" * 5
    assert alternation.rate == 0.5  # without evaluations
    taken = letters(alternation, 2)
    evaluate(alternation, 0.5, 0.6)
    assert taken + letters(alternation, 14) == "mmmmHHmmHHmmHHHH"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(1, 12), st.integers(0, 40), st.lists(st.floats(0, 1)))
def test_a_state_continues_exactly(num_all_hot, num_mixed, stop, losses):
    alternation = Alternation(num_all_hot, num_mixed, patience=2)
    letters(alternation, stop // 2)
    evaluate(alternation, *losses)
    letters(alternation, stop)
    resumed = Alternation(num_all_hot, num_mixed, patience=2)
    resumed.load_state_dict(copy.deepcopy(alternation.state_dict()))
    assert resumed.state_dict() == alternation.state_dict()
    for loss in (0.2, 0.1, 0.05, 0.3):
        assert letters(resumed, 7) == letters(alternation, 7)
        assert evaluate(resumed, loss) == evaluate(alternation, loss)


class Numbers:
    """A loader of ``name`` and a number, that fails once where it is told to."""

    def __init__(self, name: str, num: int, fails_at: int | None = None) -> None:
        self.name, self.num, self.fails_at = name, num, fails_at
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position >= self.num:
            raise StopIteration
        if self.position == self.fails_at:
            self.fails_at = None
            raise OSError(5, "Input/output error")
        self.position += 1
        return f"{self.name}{self.position - 1}"

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def make(num_hot: int = 2, num_mixed: int = 3, epochs: int = 2, **kwargs: Any):
    alternation = Alternation(num_hot, num_mixed)
    hot = Numbers("H", num_hot * epochs) if num_hot else None
    mixed = Numbers("m", num_mixed * epochs, **kwargs) if num_mixed else None
    return AlternatingLoader(hot, mixed, alternation), alternation


ALL = ["m0", "m1", "H0", "m2", "H1", "m3", "m4", "H2", "m5", "H3"]


@pytest.mark.parametrize("stop", range(11))
def test_a_loader_continues_exactly(stop):
    first, _ = make()
    taken = list(islice(first, stop))
    resumed, _ = make()
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert taken + list(resumed) == ALL
