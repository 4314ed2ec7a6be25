"""What ranks with the stand-in check; ``tests/distributed/test_stand_in.py`` asks for it by name."""

from __future__ import annotations

import functools
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.batch import Batch
from hotrec.distributed import Ranks, broadcast_object
from hotrec.embedding import HotExchange, OptimizerKind, gather_tables
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.evaluate import evaluate
from hotrec.types import Tier
from tests.distributed.parity_cases import BATCHES, PARTITIONS, Case, run_cases
from tests.distributed.test_pipelines import NoLoader
from tests.helpers.checks import run_checks
from tests.stand_in.model import Run, Training

PIPELINES = ("sparse_dist", "base", "look_ahead", "in_line")


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run_all(names: list[str]) -> dict[str, str | None]:
    """The checks of these names, one after the other on the same ranks."""
    return run_checks([_aloud(globals()[name]) for name in names])


def _aloud(check: Callable[[], None]) -> Callable[[], None]:
    """A check that fails on one rank leaves the others waiting for it: say at once what it was."""

    @functools.wraps(check)
    def run() -> None:
        try:
            check()
        except Exception:
            traceback.print_exc()
            raise

    return run


# ------------------------------------------------------------------------------- the tool itself


def mixed_devices_raise() -> None:
    on_device, on_host = torch.zeros(4, device=device()), torch.zeros(4)
    wrong = [
        lambda: on_device + on_host,
        lambda: torch.cat([on_device, on_host]),
        lambda: on_device.index_fill_(0, torch.empty(0, dtype=torch.int64), 0.0),
        lambda: on_device.index_add_(0, torch.tensor([1]), torch.ones(1)),
        lambda: torch.nn.functional.embedding_bag(
            torch.tensor([1]), on_device.view(2, 2), torch.tensor([0])
        ),
        lambda: on_device.uniform_(generator=torch.Generator()),
    ]
    for program in wrong:
        with pytest.raises(RuntimeError, match=r"same device|'cuda' device"):
            program()
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()
    # What torch allows: a scalar anywhere, and copies.
    assert (on_device + torch.tensor(1.0)).tolist() == [1.0] * 4
    on_device.copy_(on_host)
    assert on_device[torch.tensor([1, 2])].device == on_device.device


def tensors_are_torchs_own() -> None:
    """Views, resizing, autograd and in-place results share the memory that they should."""
    base = torch.arange(6.0, device=device())
    view = base.view(2, 3)[:, 1]
    view.zero_()
    assert base.tolist() == [0, 0, 2, 3, 0, 5]
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.unfold(0, 2, 2)[2].tolist() == [0, 5]
    out = torch.empty(0, device=device())
    torch.add(base, 1, out=out)
    assert out.tolist() == [1, 1, 3, 4, 1, 6]
    weight = torch.ones(3, device=device(), requires_grad=True)
    (weight * torch.arange(3.0, device=device())).sum().backward()
    assert weight.grad is not None
    assert weight.grad.is_cuda
    assert weight.grad.tolist() == [0, 1, 2]
    assert torch.zeros(2).pin_memory().is_pinned()
    assert not torch.zeros(2).is_pinned()


# -------------------------------------------------------------------------------------- training


def parity_cases() -> list[Case]:
    """Every pipeline with every optimizer and hot exchange; the rest in turn."""
    cases = []
    exchanges = (HotExchange.TOUCHED_ROWS, HotExchange.OWNERS, HotExchange.DENSE)
    for kind in OptimizerKind:
        for pipeline in PIPELINES:
            for exchange in exchanges:
                at = len(cases)
                cases.append(
                    Case(
                        seed=1000 + at,
                        partition=PARTITIONS[at % len(PARTITIONS)],
                        optimizer=kind,
                        is_weighted=at % 5 == 0,
                        is_uniform_dim=at % 4 != 0,
                        exchange=exchange,
                        route_in_loader=(at // 2) % 2 == 0,
                        device=str(device()),
                        tier=list(Tier)[at % len(Tier)],
                        batches=BATCHES[(at // 7) % len(BATCHES)],
                        placement="mixed" if at % 5 == 1 else "row_wise",
                        pipeline=pipeline,
                        depth=at % 3,
                        micro_batches=at % 5 != 1 and at % 4 == 2,
                    )
                )
    return cases


def training_equals_the_unsplit_reference() -> None:
    cases = parity_cases()
    assert {case.partition for case in cases} == set(PARTITIONS)
    assert {case.tier for case in cases} == set(Tier)
    failures = run_cases(cases)
    assert not failures, "\n".join(failures)


class _Split:
    """The same held-out batches whenever it is iterated."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Batch]:
        return self.training.batches(100, 102)


RUNS = [
    Run(pipeline=pipeline, routing=routing, optimizer=optimizer, dims=dims)
    for pipeline, routing, optimizer, dims in (
        ("sparse_dist", "loader", "adam", 1),
        ("base", "device", "rowwise_adagrad", 2),
        ("look_ahead", "loader", "adam", 2),
        ("look_ahead", "device", "adagrad", 1),
    )
]


def _losses(training: Training, begin: int, end: int) -> list[float]:
    training.pipeline.start()
    stream = training.batches(begin, end)
    return [float(training.pipeline.progress(stream)[0]) for _ in range(begin, end)]


def assert_same_tables(first: Training, second: Training) -> None:
    for training in (first, second):
        training.pipeline.settle()
    one, two = gather_tables(first.model), gather_tables(second.model)
    for table, weight in one.items():
        assert float((weight - two[table]).abs().max()) <= 1e-6, table


def evaluation_between_steps_changes_nothing() -> None:
    for run in RUNS:
        plain, evaluated = Training(run, device()), Training(run, device())
        expected = _losses(plain, 0, 2) + _losses(plain, 2, 4)
        losses = _losses(evaluated, 0, 2)
        first = evaluate(evaluated.pipeline, _Split(evaluated))
        assert evaluate(evaluated.pipeline, _Split(evaluated)) == first
        losses += _losses(evaluated, 2, 4)
        assert losses == pytest.approx(expected, abs=1e-6), run
        assert_same_tables(evaluated, plain)
        plain.close()
        evaluated.close()


def checkpoint_goes_on() -> None:
    """Saved by both ranks from "cuda", and read into a model that has trained otherwise."""
    folder = Path(broadcast_object(tempfile.mkdtemp()))
    for at, run in enumerate(RUNS):
        first, second = Training(run, device()), Training(run, device())
        _losses(first, 0, 2)
        _losses(second, 7, 8)
        for training in (first, second):
            training.pipeline.settle()
        checkpoints = Checkpoints(folder / str(at), facts={})
        path = save_checkpoint(
            checkpoints, Position(2, 64), first.model, first.optimizer, NoLoader()
        )
        load_checkpoint(
            path, model=second.model, optimizer=second.optimizer, loader=NoLoader(), facts={}
        )
        assert_same_tables(first, second)
        if run.pipeline == "look_ahead":  # which counts its updates from its start
            second.close()
            second.restart()
        assert _losses(first, 2, 4) == pytest.approx(_losses(second, 2, 4), abs=1e-6), run
        assert_same_tables(first, second)
        first.close()
        second.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def calibration_runs() -> None:
    from hotrec.cli.calibrate import measure_costs
    from hotrec.cli.schema import AdamConfig
    from tests.distributed.test_calibrate import tiny_subject

    world_size, rank = dist.get_world_size(), dist.get_rank()
    ranks = Ranks(rank, world_size, rank, world_size, device())
    subject: Any = replace(tiny_subject(AdamConfig(learning_rate=0.1)))
    costs = measure_costs(ranks, subject, name="tiny", max_bytes=16384.0, repeats=1)
    assert costs.device == "cuda"
    for name in ("read_host", "read_hit", "read_miss", "update_device", "pooled_update_device"):
        assert name in costs.kernels
