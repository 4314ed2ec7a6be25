"""The dense layers' late updates against DDP's, of layers that cannot be put off or are not used.

``tests/exact`` has plain layers: their late updates, rates, clipping, bf16 and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotrec.train.dense_sync import DenseSync, dense_parameters
from tests.distributed.setups import assert_same_on_ranks
from tests.helpers.checks import run_checks
from tests.helpers.dense import (
    MODELS,
    OPTIMIZERS,
    Branches,
    loss_of,
    make_inputs,
    make_optimizer,
    set_rate,
    weights_of,
)
from tests.helpers.ranks import run_ranks

NUM_STEPS, CLIP = 5, 0.4
Trained = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def train_plainly(model: nn.Module, optimizer: str, **ddp: Any) -> Trained:
    """With DDP, or on one rank without; losses and weights."""
    wrapped = DistributedDataParallel(model, **ddp) if dist.get_world_size() > 1 else model
    rule, losses = make_optimizer(model, optimizer), []
    for step in range(NUM_STEPS):
        set_rate(rule, step)
        rule.zero_grad()
        losses.append(loss_of(wrapped, make_inputs(dist.get_rank(), step), 6))
        losses[-1].backward()
        nn.utils.clip_grad_norm_(dense_parameters(model).values(), CLIP)
        rule.step()
    return losses, weights_of(model)


def train_late(model: nn.Module, optimizer: str) -> Trained:
    rule, losses = make_optimizer(model, optimizer), []
    dense = DenseSync(model, rule, max_norm=CLIP)
    for step in range(NUM_STEPS):
        set_rate(rule, step)
        losses.append(loss_of(model, make_inputs(dist.get_rank(), step), 6))
        with dense.backward():
            losses[-1].backward()
        dense.finish_backward()
        dense.step()
    dense.flush()
    weights = weights_of(model)
    dense.close()
    return losses, weights


def check_same(got: Trained, expected: Trained, case: object) -> None:
    """On one rank bit for bit; on all ranks the same."""
    tolerance = 1e-6 if dist.get_world_size() > 1 else 0.0
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, weight in expected[1].items():
        worst = float((got[1][name] - weight).abs().max())
        assert worst <= tolerance * max(1.0, float(weight.abs().max())), (case, name, worst)
        if "t_" not in name:
            assert_same_on_ranks(got[1][name])


def gradients_and_updates_are_those_of_ddp() -> None:
    """Whatever weights the other ranks begin with; clipped by the norm of all gradients."""
    rank = dist.get_rank()
    for name, optimizer in product(MODELS, OPTIMIZERS):
        expected = train_plainly(MODELS[name](rank), optimizer)
        check_same(train_late(MODELS[name](rank), optimizer), expected, (name, optimizer))


def what_one_rank_uses_is_updated_everywhere_and_what_nobody_uses_nowhere() -> None:
    before = weights_of(Branches(0))
    for optimizer in ("momentum", "adam"):  # with decay, which is that of used weights alone
        expected = train_plainly(Branches(0), optimizer, find_unused_parameters=True)
        got = train_late(Branches(0), optimizer)
        check_same(got, expected, optimizer)
        unused = ("nobody", "odd") if dist.get_world_size() == 1 else "nobody"
        same = {name for name in before if torch.equal(before[name], got[1][name])}
        assert same == {name for name in before if name.startswith(unused)}


def other_parameters_are_refused() -> None:
    model = nn.Linear(3, 3 + dist.get_rank() // 2)
    with pytest.raises(Exception, match="rank 2: expected the parameters of rank 0"):
        DenseSync(model, make_optimizer(model, "sgd"))


CHECKS: list[Callable[[], None]] = [
    gradients_and_updates_are_those_of_ddp,
    what_one_rank_uses_is_updated_everywhere_and_what_nobody_uses_nowhere,
    other_parameters_are_refused,
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_dense_layers_are_synchronized(world_size: int) -> None:
    checks = CHECKS if world_size == 3 else CHECKS[:2]
    verdicts = run_ranks(run_checks, world_size, timeout_s=250, checks=checks)[0]
    assert verdicts == dict.fromkeys(verdicts), "\n".join(filter(None, verdicts.values()))
