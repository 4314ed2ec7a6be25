"""The dense layers' late updates against DDP's, on real ranks: same losses, same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from hotrec.runtime.traffic import count_sent_bytes
from hotrec.train import dense_sync
from hotrec.train.dense_sync import DenseSync, dense_parameters
from hotrec.types import ModelKind, WireType
from tests.distributed.setups import assert_same_on_ranks
from tests.helpers.checks import run_checks
from tests.helpers.dense import (
    MODELS,
    OPTIMIZERS,
    Branches,
    Clicks,
    loss_of,
    make_inputs,
    make_optimizer,
    set_rate,
    weights_of,
)
from tests.helpers.ranks import run_ranks

NUM_STEPS = 5


def parts_of(step: int, num_parts: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    return [make_inputs(rank, step, part, size=4 + rank + part) for part in range(num_parts)]


def train_plainly(
    model: nn.Module, optimizer: str, num_parts: int, **ddp: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """With DDP, or on one rank without; losses and weights."""
    wrapped = DistributedDataParallel(model, **ddp) if dist.get_world_size() > 1 else model
    rule = make_optimizer(model, optimizer)
    losses = []
    for step in range(NUM_STEPS):
        parts = parts_of(step, num_parts)
        num_samples = sum(map(len, parts))
        set_rate(rule, step)
        rule.zero_grad()
        for number, inputs in enumerate(parts):
            if wrapped is not model:
                assert isinstance(wrapped, DistributedDataParallel)
                wrapped.require_backward_grad_sync = number == num_parts - 1
            loss = loss_of(wrapped, inputs, num_samples)
            loss.backward()
            losses.append(loss.detach())
        rule.step()
    return losses, weights_of(model)


def train_late(
    model: nn.Module,
    optimizer: str,
    num_parts: int,
    wire_type: WireType = WireType.fp32,
    between: Callable[[DenseSync, int], None] = lambda dense, step: None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    rule = make_optimizer(model, optimizer)
    dense = DenseSync(model, rule, wire_type)
    losses = []
    for step in range(NUM_STEPS):
        parts = parts_of(step, num_parts)
        num_samples = sum(map(len, parts))
        set_rate(rule, step)
        for number, inputs in enumerate(parts):
            loss = loss_of(model, inputs, num_samples)
            with dense.backward(is_last=number == num_parts - 1):
                loss.backward()
            losses.append(loss.detach())
        dense.finish_backward()
        dense.step()
        between(dense, step)
    dense.flush()
    weights = weights_of(model)
    dense.close()
    return losses, weights


def expect_same(got: Any, expected: Any, *, exact: bool, case: str, tolerance: float) -> None:
    (losses, weights), (plain_losses, plain_weights) = got, expected
    assert weights.keys() == plain_weights.keys()
    pairs = [(f"loss {n}", a, b) for n, (a, b) in enumerate(zip(losses, plain_losses, strict=True))]
    pairs += [(name, weights[name], plain_weights[name]) for name in weights]
    for name, one, other in pairs:
        if exact:
            assert torch.equal(one, other), (case, name, (one - other).abs().max())
        else:
            worst = f"{case} {name}: {(one - other).abs().max()}"
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=worst)


def expect_parity() -> None:
    """The late gradients and updates are DDP's."""
    world_size = dist.get_world_size()
    optimizers = list(OPTIMIZERS) if world_size < 3 else ["adam"]

    def between(dense: DenseSync, step: int) -> None:
        if step == 2:
            dense.flush()

    for name, optimizer, num_parts in product(MODELS, optimizers, (1, 2)):
        case = f"{name} {optimizer} {num_parts} parts"
        # The first rank's weights count, whatever the others start with.
        expected = train_plainly(MODELS[name](dist.get_rank()), optimizer, num_parts)
        got = train_late(MODELS[name](dist.get_rank()), optimizer, num_parts, between=between)
        expect_same(got, expected, exact=world_size == 1, case=case, tolerance=1e-6)
        for weight in (w for n, w in got[1].items() if "t_" not in n):
            assert_same_on_ranks(weight)


class NewTensors(TorchDispatchMode):
    """Counts the tensors that are made of Python's numbers; on CUDA each is a wait of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func._schema.name == "aten::lift_fresh"
        return func(*args, **(kwargs or {}))


def expect_no_new_tensors() -> None:
    with NewTensors() as made:
        torch.tensor([1.0])
    assert made.count == 1, "the count sees none"
    model = Clicks(ModelKind.dlrm, 0)
    dense = DenseSync(model, make_optimizer(model, "sgd"), max_norm=0.1)
    counts = []
    for step in range(4):
        loss = loss_of(model, make_inputs(dist.get_rank(), step), 6)
        with NewTensors() as made:
            with dense.backward():
                loss.backward()
            dense.finish_backward()
            dense.step()
            dense.flush()
        counts.append(made.count)
    dense.close()
    assert counts[1:] == [0, 0, 0], counts


def expect_branches() -> None:
    """A parameter that one rank uses is updated everywhere, one that nobody uses nowhere."""
    world_size = dist.get_world_size()
    for optimizer in ("sgd", "adam"):
        expected = train_plainly(Branches(0), optimizer, 1, find_unused_parameters=True)
        got = train_late(Branches(0), optimizer, 1)
        expect_same(got, expected, exact=world_size == 1, case=optimizer, tolerance=1e-6)
        before = weights_of(Branches(0))
        changed = {name for name in before if not torch.equal(before[name], got[1][name])}
        unused = ("nobody", "odd") if world_size == 1 else "nobody"
        assert {name for name in before if name.startswith(unused)} == before.keys() - changed


def expect_16_bits() -> None:
    """Half the bytes, nearly the same weights, the same ones on every rank, and in fp32 no more."""
    num_values = sum(p.numel() for p in dense_parameters(MODELS["dlrm"](0)).values())
    num_flags = len(dense_parameters(MODELS["dlrm"](0)))
    expected = train_plainly(MODELS["dlrm"](0), "sgd", 2)
    for wire_type, tolerance in ((WireType.fp16, 1e-3), (WireType.bf16, 5e-3)):
        got = train_late(MODELS["dlrm"](0), "sgd", 2, wire_type)
        expect_same(got, expected, exact=False, case=str(wire_type), tolerance=tolerance)
        assert any(not torch.equal(w, expected[1][name]) for name, w in got[1].items())
    for wire_type, value_bytes in ((WireType.fp32, 4), (WireType.bf16, 2), (WireType.fp16, 2)):
        model = MODELS["dlrm"](0)
        rule = make_optimizer(model, "sgd")
        dense = DenseSync(model, rule, wire_type)
        with count_sent_bytes() as traffic:
            loss = loss_of(model, make_inputs(dist.get_rank(), 0), 6)
            with dense.backward():
                loss.backward()
            dense.finish_backward()
            dense.step()
            dense.flush()
        # Two ranks: each sends half of the message twice; fp16 has a factor in each.
        exact = num_values * value_bytes + num_flags * 4
        assert exact - 8 <= traffic.total_bytes <= exact + 32, (wire_type, traffic.sent_bytes)
        dense.close()


def expect_order() -> None:
    """Every rank starts the bottom layers' message first, after the rows' gradients are out."""
    for name in ("dlrm", "dcnv2"):
        model = MODELS[name](0)
        assert isinstance(model, Clicks)
        optimizer = make_optimizer(model, "sgd")
        dense = DenseSync(model, optimizer)
        started: list[int] = []
        start = dense_sync.Sender.start

        def spy(sender: Any, message: torch.Tensor, num_values: int) -> Any:
            started.append(num_values)  # noqa: B023
            return start(sender, message, num_values)  # noqa: B023

        sizes = {
            part: sum(p.numel() for p in getattr(model.model, part).parameters())
            for part in ("dense_arch", "inter_arch", "over_arch")
        }
        seen: list[Any] = []

        def look(grad: torch.Tensor) -> None:
            layers = [p.grad for p in model.model.over_arch.parameters()]  # noqa: B023
            seen.append(([g is None for g in layers], list(started)))  # noqa: B023

        model.model.inter_arch.register_forward_pre_hook(
            lambda _, args, kwargs: (
                kwargs["sparse_features"].requires_grad_().register_hook(look) and None
            ),
            with_kwargs=True,
        )
        dense_sync.Sender.start = spy  # type: ignore[assignment, method-assign]
        try:
            loss = loss_of(model, make_inputs(dist.get_rank(), 0), 6)
            with dense.backward():
                loss.backward()
            in_backward = list(started)
            dense.finish_backward()
        finally:
            dense_sync.Sender.start = start  # type: ignore[method-assign]
        cross = [sizes["inter_arch"]] if sizes["inter_arch"] else []
        # No weight gradient of the top layers is there yet; the cross layers may be under way.
        (are_none, early), *_ = seen
        assert all(are_none)
        assert early in ([], cross)
        assert in_backward == cross
        assert started == [*cross, sizes["dense_arch"], sizes["over_arch"]]
        dense.step()
        dense.flush()
        dense.close()


def expect_refusal() -> None:
    model = nn.Linear(3, 3 + dist.get_rank() // 2)
    with pytest.raises(
        Exception, match="dense layers of rank 2: expected the parameters of rank 0"
    ):
        DenseSync(model, make_optimizer(model, "sgd"))


CHECKS: dict[int, list[Callable[[], None]]] = {
    1: [expect_parity, expect_branches],
    2: [expect_parity, expect_no_new_tensors, expect_16_bits, expect_order],
    3: [expect_parity, expect_branches, expect_refusal],
}


@pytest.mark.parametrize("world_size", list(CHECKS))
def test_dense_layers_are_synchronized(world_size: int) -> None:
    verdicts = run_ranks(run_checks, world_size, timeout_s=250, checks=CHECKS[world_size])[0]
    failures = [f"{name}: {found}" for name, found in verdicts.items() if found is not None]
    assert not failures, "\n".join(failures)
