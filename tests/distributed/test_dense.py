"""The dense layers' late updates against DDP's, on real ranks: same losses, same weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotrec.runtime.traffic import count_sent_bytes
from hotrec.train.dense_sync import DenseSync, dense_parameters
from hotrec.types import WireType
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


def parts_of(step: int, num_parts: int) -> list[torch.Tensor]:
    """What this rank reads in a step, of which it makes one backward pass each."""
    rank = dist.get_rank()
    return [make_inputs(rank, step, part, size=4 + rank + part) for part in range(num_parts)]


def train_plainly(model: nn.Module, optimizer: str, num_parts: int, **ddp: Any) -> Trained:
    """With DDP, or on one rank without; losses and weights."""
    wrapped = DistributedDataParallel(model, **ddp) if dist.get_world_size() > 1 else model
    rule, losses = make_optimizer(model, optimizer), []
    for step in range(NUM_STEPS):
        parts = parts_of(step, num_parts)
        set_rate(rule, step)
        rule.zero_grad()
        for number, inputs in enumerate(parts):
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = number == num_parts - 1
            loss = loss_of(wrapped, inputs, sum(map(len, parts)))
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(dense_parameters(model).values(), CLIP)
        rule.step()
    return losses, weights_of(model)


def train_late(
    model: nn.Module, optimizer: str, num_parts: int, wire_type: WireType = WireType.fp32
) -> Trained:
    rule, losses = make_optimizer(model, optimizer), []
    dense = DenseSync(model, rule, wire_type, CLIP)
    for step in range(NUM_STEPS):
        parts = parts_of(step, num_parts)
        set_rate(rule, step)
        for number, inputs in enumerate(parts):
            loss = loss_of(model, inputs, sum(map(len, parts)))
            with dense.backward(is_last=number == num_parts - 1):
                loss.backward()
            losses.append(loss.detach())
        dense.finish_backward()
        dense.step()
        if step == 2:
            dense.flush()
    dense.flush()
    weights = weights_of(model)
    dense.close()
    return losses, weights


def check_same(got: Trained, expected: Trained, case: object, tolerance: float) -> None:
    (losses, weights), (plain_losses, plain) = got, expected
    if dist.get_world_size() == 1:
        tolerance = 0.0
    torch.testing.assert_close(losses, plain_losses, rtol=tolerance, atol=tolerance)
    for name, weight in plain.items():
        worst = float((weights[name] - weight).abs().max())
        assert worst <= tolerance * max(1.0, float(weight.abs().max())), (case, name, worst)


def gradients_and_updates_are_those_of_ddp() -> None:
    """Whatever weights the other ranks begin with; clipped by the norm of all gradients."""
    rank = dist.get_rank()
    optimizers = list(OPTIMIZERS) if dist.get_world_size() < 3 else ["adam"]
    for name, optimizer, num_parts in product(MODELS, optimizers, (1, 2)):
        expected = train_plainly(MODELS[name](rank), optimizer, num_parts)
        got = train_late(MODELS[name](rank), optimizer, num_parts)
        check_same(got, expected, (name, optimizer, num_parts), 1e-6)
        for weight in (w for n, w in got[1].items() if "t_" not in n):
            assert_same_on_ranks(weight)


def what_one_rank_uses_is_updated_everywhere_and_what_nobody_uses_nowhere() -> None:
    before = weights_of(Branches(0))
    for optimizer in ("sgd", "adam"):
        expected = train_plainly(Branches(0), optimizer, 1, find_unused_parameters=True)
        got = train_late(Branches(0), optimizer, 1)
        check_same(got, expected, optimizer, 1e-6)
        unused = ("nobody", "odd") if dist.get_world_size() == 1 else "nobody"
        same = {name for name in before if torch.equal(before[name], got[1][name])}
        assert same == {name for name in before if name.startswith(unused)}


def bf16_is_near_in_half_the_bytes() -> None:
    expected = train_plainly(MODELS["dlrm"](0), "sgd", 2)
    got = train_late(MODELS["dlrm"](0), "sgd", 2, WireType.bf16)
    check_same(got, expected, "bf16", 5e-3)
    assert any(not torch.equal(w, expected[1][name]) for name, w in got[1].items())
    parameters = dense_parameters(MODELS["dlrm"](0)).values()
    for wire_type, value_bytes in ((WireType.fp32, 4), (WireType.bf16, 2)):
        model = MODELS["dlrm"](0)
        dense = DenseSync(model, make_optimizer(model, "sgd"), wire_type)
        loss = loss_of(model, make_inputs(dist.get_rank(), 0), 6)
        with count_sent_bytes() as traffic:
            with dense.backward():
                loss.backward()
            dense.finish_backward()
            dense.step()
            dense.flush()
        dense.close()
        # Two ranks: each sends half of the message twice, with a flag for each parameter.
        expected_bytes = sum(value_bytes * p.numel() + 4 for p in parameters)
        assert traffic.total_bytes == pytest.approx(expected_bytes, abs=16), wire_type


def other_parameters_are_refused() -> None:
    model = nn.Linear(3, 3 + dist.get_rank() // 2)
    with pytest.raises(Exception, match="rank 2: expected the parameters of rank 0"):
        DenseSync(model, make_optimizer(model, "sgd"))


CHECKS: dict[int, list[Callable[[], None]]] = {
    1: [
        gradients_and_updates_are_those_of_ddp,
        what_one_rank_uses_is_updated_everywhere_and_what_nobody_uses_nowhere,
    ],
    2: [gradients_and_updates_are_those_of_ddp, bf16_is_near_in_half_the_bytes],
    3: [
        gradients_and_updates_are_those_of_ddp,
        what_one_rank_uses_is_updated_everywhere_and_what_nobody_uses_nowhere,
        other_parameters_are_refused,
    ],
}


@pytest.mark.parametrize("world_size", CHECKS)
def test_dense_layers_are_synchronized(world_size: int) -> None:
    verdicts = run_ranks(run_checks, world_size, timeout_s=250, checks=CHECKS[world_size])[0]
    assert verdicts == dict.fromkeys(verdicts), "\n".join(filter(None, verdicts.values()))
