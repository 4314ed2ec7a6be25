"""TorchRec's exchanges in 16 bits over real ranks: bytes, and how far the training moves off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from hotrec.embedding.tables import gather_tables
from hotrec.runtime.traffic import count_sent_bytes
from hotrec.types import (
    HotExchange,
    OptimizerKind,
    Partition,
    Placement,
    TorchrecPlan,
    WireType,
)
from tests.distributed import setups
from tests.distributed.setups import (
    NUM_ROWS,
    PARTITIONS,
    PLACEMENT,
    Setup,
    assert_same_on_ranks,
    make_batch,
    spec_of,
)
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks

FP32, FP16, BF16 = WireType.fp32, WireType.fp16, WireType.bf16
SGD, ADAGRAD = OptimizerKind.sgd, OptimizerKind.adagrad
WHERE: dict[str, Partition | Placement | TorchrecPlan] = {
    "all_cold": PARTITIONS["all_cold"],
    "mixed": PARTITIONS["mixed"],
    "every kind": PLACEMENT,
    "table-wise and replicated": TorchrecPlan.hand_tuned,
}
NUM_STEPS = 6
# Norm of the error that 16 bits make, as a share of the norm of what training changes.
BOUND = {FP16: 4e-3, BF16: 3e-2}
# Adagrad divides by what it has seen of a value: large steps would blow up any rounding.
LEARNING_RATES = {SGD: 0.2, ADAGRAD: 0.01}


def build(
    where: Partition | Placement | TorchrecPlan,
    wire_type: WireType,
    kind: OptimizerKind = SGD,
    *,
    rate_factor: float = 1.0,
) -> Setup:
    return setups.build(
        spec_of(kind, LEARNING_RATES[kind] * rate_factor),
        where,
        exchange=HotExchange.auto,
        wire_type=wire_type,
        dims=dict.fromkeys(NUM_ROWS, 64),
        dense_rate=0.1 * rate_factor,
    )


def weights(setup: Setup) -> dict[str, torch.Tensor]:
    """The tables; and the layers as one, since a bias hardly moves."""
    layers = [
        value.detach().flatten()
        for name, value in setup.model.named_parameters()
        if "hidden" in name or "out" in name
    ]
    assert len(layers) == 4
    return {**gather_tables(setup.model), "layers": torch.cat(layers)}


def train(setup: Setup, num_steps: int = NUM_STEPS, loss_factor: float = 1.0) -> list[float]:
    losses = []
    for step in range(num_steps):
        batch = make_batch(step)
        batch.weights *= loss_factor
        losses.append(setup.step(batch) / loss_factor)
    return losses


def assert_close(
    wire_type: WireType,
    begin: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    found: dict[str, torch.Tensor],
) -> None:
    """Off by no more than the bound; and off, or nothing has travelled in 16 bits."""
    worst = 0.0
    for name, value in exact.items():
        error = float((found[name] - value).norm() / (value - begin[name]).norm())
        assert error <= BOUND[wire_type], (wire_type, name, error)
        worst = max(worst, error)
    assert worst > 0


def sixteen_bits_stay_close_to_fp32() -> None:
    for where in WHERE.values():
        for kind in (SGD, ADAGRAD):
            exact = build(where, FP32, kind)
            begin = weights(exact)
            losses = train(exact)
            for wire_type in (FP16, BF16):
                narrow = build(where, wire_type, kind)
                found = train(narrow)
                worst = max(abs(a - b) for a, b in zip(losses, found, strict=True))
                assert worst <= BOUND[wire_type], (wire_type, worst)
                assert_close(wire_type, begin, weights(exact), weights(narrow))


def tiny_gradients_train_as_well() -> None:
    # Gradients of 1e-8 and less, by a small loss and a large learning rate.
    factor = 2.0**-16
    for where in WHERE.values():
        exact = build(where, FP32)
        begin = weights(exact)
        train(exact)
        for wire_type in (FP16, BF16):
            narrow = build(where, wire_type, rate_factor=1 / factor)
            train(narrow, loss_factor=factor)
            assert_close(wire_type, begin, weights(exact), weights(narrow))


def sent(setup: Setup) -> dict[str, int]:
    """Bytes of all ranks in a step, by collective."""
    train(setup, 2)  # the first steps set up what is sent
    batch = make_batch(9)
    setup.optimizer.zero_grad()
    with count_sent_bytes() as traffic:
        loss, _ = setup.model(batch)
        loss.backward()
    names = sorted(traffic.sent_bytes)
    total = torch.tensor([traffic.sent_bytes[name] for name in names])
    torch.distributed.all_reduce(total)
    return dict(zip(names, total.tolist(), strict=True))


def bytes_halve() -> None:
    for name, where in WHERE.items():
        fp32, fp16, bf16 = (sent(build(where, wire_type)) for wire_type in (FP32, FP16, BF16))
        # Ids travel as before. Of the rest bf16 saves half, fp16 a half per 32 gradients less.
        values = 2 * (fp32["all_to_all"] - bf16["all_to_all"])
        assert values > 0.8 * fp32["all_to_all"], (name, fp32, bf16)
        headers = fp16["all_to_all"] - bf16["all_to_all"]
        assert headers == values // 2 // 4 // 32 * 2, (name, headers, values)
        assert fp16["all_reduce"] == bf16["all_reduce"] == fp32["all_reduce"] // 2, name


def pipelined_as_in_line() -> None:
    for where in (PLACEMENT, TorchrecPlan.hand_tuned):
        in_line, ahead = (build(where, FP16) for _ in range(2))
        losses = train(in_line, 4)
        pipeline: Any = TrainPipelineSparseDist(ahead.model, ahead.optimizer, torch.device("cpu"))
        batches: Any = iter([make_batch(step) for step in range(4)])
        for _ in losses:
            pipeline.progress(batches)
        one, two = weights(in_line), weights(ahead)
        assert all(torch.equal(one[name], two[name]) for name in one)


def replicas_of_dense_layers_stay_equal() -> None:
    for wire_type in (FP16, BF16):
        setup = build(TorchrecPlan.hand_tuned, wire_type)
        train(setup)
        for value in weights(setup).values():
            assert_same_on_ranks(value)


def fp32_adds_nothing() -> None:
    for where in (PLACEMENT, TorchrecPlan.hand_tuned):
        setup = build(where, FP32)
        for module in setup.model.modules():
            if isinstance(module, DistributedDataParallel):
                assert not module._comm_hooks
            assert not getattr(module, "qcomm_codecs_registry", None)


CHECKS = [
    sixteen_bits_stay_close_to_fp32,
    tiny_gradients_train_as_well,
    bytes_halve,
    pipelined_as_in_line,
    replicas_of_dense_layers_stay_equal,
    fp32_adds_nothing,
]


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    return run_ranks(run_checks, 2, timeout_s=240, checks=CHECKS)[0]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_sixteen_bits(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
