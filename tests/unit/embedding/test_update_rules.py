"""The rules against torch's optimizers and against the formulas, row by row."""

from __future__ import annotations

import math

import pytest
import torch

from hotrec.embedding.update_rules import OptimizerSpec, repeat_sums, sum_by_row, update_rows
from hotrec.types import OptimizerKind

NUM_ROWS, DIM, NUM_STEPS = 12, 5, 6
# A schedule gives the steps another rate than the rule has.
RATE, BASE_RATE = 0.1, 0.7
ALL = list(OptimizerKind)


def spec_of(kind: OptimizerKind) -> OptimizerSpec:
    return OptimizerSpec(kind, learning_rate=BASE_RATE, eps=1e-3, beta1=0.8, beta2=0.95)


def steps(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows and gradients; the last row is never touched, row 0 always."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(NUM_STEPS):
        rows = torch.randperm(NUM_ROWS - 2, generator=generator)[:4] + 1
        rows = torch.cat([torch.tensor([0]), rows])
        out.append((rows, torch.randn(rows.numel(), DIM, generator=generator)))
    return out


def run(spec: OptimizerSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    weights = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1))
    states = {name: torch.zeros(spec.state_shape(NUM_ROWS, DIM)) for name in spec.state_names}
    for t, (rows, grad) in enumerate(steps(), start=1):
        update_rows(spec, weights, states, rows, grad, learning_rate=RATE, num_updates=t)
    return weights, states


def by_formula(kind: OptimizerKind) -> list[list[float]]:
    """The docstring of the module in Python floats."""
    weights = torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)).tolist()
    zeros = [[0.0] * DIM for _ in range(NUM_ROWS)]
    first, second = [list(row) for row in zeros], [list(row) for row in zeros]
    row_sum = [0.0] * NUM_ROWS
    lr, eps, beta1, beta2 = RATE, 1e-3, 0.8, 0.95
    for t, (rows, grads) in enumerate(steps(), start=1):
        for r, g in zip(rows.tolist(), grads.tolist(), strict=True):
            row_sum[r] += sum(x * x for x in g) / DIM
            for d in range(DIM):
                match kind:
                    case OptimizerKind.sgd:
                        move = g[d]
                    case OptimizerKind.adagrad:
                        second[r][d] += g[d] ** 2
                        move = g[d] / (math.sqrt(second[r][d]) + eps)
                    case OptimizerKind.rowwise_adagrad:
                        move = g[d] / (math.sqrt(row_sum[r]) + eps)
                    case OptimizerKind.adam:
                        first[r][d] = beta1 * first[r][d] + (1 - beta1) * g[d]
                        second[r][d] = beta2 * second[r][d] + (1 - beta2) * g[d] ** 2
                        mean = first[r][d] / (1 - beta1**t)
                        move = mean / (math.sqrt(second[r][d] / (1 - beta2**t)) + eps)
                weights[r][d] -= lr * move
    return weights


@pytest.mark.parametrize("kind", ALL)
def test_equals_the_formulas(kind: OptimizerKind) -> None:
    torch.testing.assert_close(
        run(spec_of(kind))[0], torch.tensor(by_formula(kind)), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("kind", ALL)
def test_untouched_rows_and_their_state_do_not_move(kind: OptimizerKind) -> None:
    spec = spec_of(kind)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(NUM_ROWS, DIM, generator=generator)
    states = {
        name: torch.rand(spec.state_shape(NUM_ROWS, DIM), generator=generator)
        for name in spec.state_names
    }
    before = {"weights": weights.clone(), **{name: s.clone() for name, s in states.items()}}
    rows = torch.tensor([7, 2])
    update_rows(
        spec, weights, states, rows, torch.randn(2, DIM, generator=generator),
        learning_rate=0.5, num_updates=3,
    )  # fmt: skip
    nothing = rows[:0], torch.empty(0, DIM)
    update_rows(spec, weights, states, *nothing, learning_rate=1.0, num_updates=4)
    still = torch.ones(NUM_ROWS, dtype=torch.bool).index_fill(0, rows, False)
    for name, after in {"weights": weights, **states}.items():
        assert torch.equal(after[still], before[name][still]), name
        assert not torch.equal(after[rows], before[name][rows]), name


def test_sum_by_row() -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(0, 9, (50,), generator=generator) * 3
    grad = torch.randn(50, DIM, generator=generator)
    distinct, sums = sum_by_row(rows, grad, 100)
    assert distinct.tolist() == sorted(set(rows.tolist()))
    dense = torch.zeros(30, DIM).index_add(0, rows, grad)
    torch.testing.assert_close(sums, dense[distinct], rtol=1e-6, atol=1e-6)
    assert torch.equal(sum_by_row(rows, grad, 100)[1], sums)
    repeated, of_each = repeat_sums(rows, grad)
    assert torch.equal(repeated, rows.sort().values)
    assert torch.equal(of_each, sums[torch.searchsorted(distinct, repeated)])
    empty_rows, empty_sums = sum_by_row(rows[:0], grad[:0], 100)
    assert empty_rows.shape == (0,)
    assert empty_sums.shape == (0, DIM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -0.1),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("eps", -1e-8),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_constants_out_of_range_are_refused(name: str, value: float) -> None:
    constants = {"learning_rate": 0.1, name: value}
    with pytest.raises(ValueError, match=rf"^optimizer\.{name}: expected .*, got "):
        OptimizerSpec(OptimizerKind.adam, **constants)
