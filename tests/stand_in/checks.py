"""What ranks with the stand-in check; ``tests/stand_in/test_device.py`` names the checks."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.convert import check_replicas
from hotrec.embedding.tables import gather_tables
from hotrec.runtime.ranks import Ranks, broadcast_object
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.evaluate import evaluate
from hotrec.types import OptimizerKind, Tier
from tests.distributed.test_pipelines import NoLoader
from tests.exact.case import CUDA_TIERS, PARTITIONS, Case, draw_cases, fit
from tests.exact.training import run_cases
from tests.helpers.checks import run_checks
from tests.stand_in.lifetimes import violations
from tests.stand_in.log import recording
from tests.stand_in.model import Run, Training
from tests.stand_in.order import calls, differences
from tests.stand_in.steps import figures

PIPELINES = ("sparse_dist", "base", "look_ahead")


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run_all(names: list[str]) -> dict[str, str | None]:
    """The checks of these names, one after the other on the same ranks."""
    return run_checks([aloud(globals()[name]) for name in names])


def aloud(check: Callable[[], None]) -> Callable[[], None]:
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


def synchronisations_are_counted() -> None:
    """Programs of which it is known how often they wait."""
    values = torch.arange(8, device=device())
    pinned = torch.empty(8, dtype=torch.int64).pin_memory()

    def wait_twice() -> None:
        torch.cuda.synchronize()
        torch.cuda.current_stream().synchronize()

    programs: list[tuple[int, Callable[[], Any]]] = [
        (0, lambda: values + 1),
        (0, lambda: values.sort(stable=True)),
        (0, lambda: pinned.copy_(values, non_blocking=True)),
        (0, lambda: values.copy_(pinned, non_blocking=True)),
        (0, lambda: values.to("cpu", non_blocking=True)),
        (0, lambda: torch.repeat_interleave(values, values, output_size=28)),
        (1, lambda: torch.repeat_interleave(values, values)),
        (1, lambda: torch.empty(8, dtype=torch.int64).copy_(values, non_blocking=True)),
        (1, lambda: values[3].item()),
        (1, values.tolist),
        (1, lambda: values[values > 3]),
        (1, lambda: values[torch.tensor([1, 2])]),
        (1, values.unique),
        (1, lambda: torch.tensor([1, 2], device=device())),
        (1, wait_twice),
        (1, lambda: torch.cuda.current_stream().record_event().synchronize()),
        (2, lambda: torch.bincount(values)),
    ]
    for at, (expected, program) in enumerate(programs):
        with recording() as log:
            program()
        found = figures(log.entries)
        assert found.num_syncs == expected, (at, found.syncs)
    with recording() as log:
        lookup = torch.nn.functional.embedding_bag
        lookup(values % 4, torch.ones(4, 2, device=device()), values[torch.tensor([0, 1, 6])])
    assert max(figures(log.entries).longest.values()) == 5


def values_arrive_late() -> None:
    """A copy that does not block is there after a wait for it, and not before."""
    values = torch.arange(4, device=device())
    stream = torch.cuda.Stream()

    def wait_on_the_device(event: Any) -> None:
        torch.cuda.current_stream().wait_event(event)
        values.sum().item()

    waits: list[tuple[bool, Callable[[Any, Any], Any]]] = [
        (True, lambda before, after: after.synchronize()),
        (True, lambda before, after: after.query()),
        (True, lambda before, after: stream.synchronize()),
        (True, lambda before, after: torch.cuda.synchronize()),
        (True, lambda before, after: wait_on_the_device(after)),
        (False, lambda before, after: before.synchronize()),
        (False, lambda before, after: torch.cuda.current_stream().synchronize()),
        (False, lambda before, after: None),
    ]  # fmt: skip
    for at, (is_there, wait) in enumerate(waits):
        pinned = torch.zeros(4, dtype=torch.int64).pin_memory()
        before = stream.record_event()
        with torch.cuda.stream(stream):
            pinned.copy_(values, non_blocking=True)
        after = stream.record_event()
        wait(before, after)
        assert (pinned.tolist() == [0, 1, 2, 3]) is is_there, at
    # On the device it is there in the stream's order.
    pinned = values.to("cpu", non_blocking=True)
    assert pinned.to(device(), non_blocking=True).tolist() == [0, 1, 2, 3]


def memory_freed_too_early_is_seen() -> None:
    """The use on a second stream must be over, or recorded, when the memory is given back."""
    stream = torch.cuda.Stream()

    def use(tensor: torch.Tensor) -> torch.Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return tensor * 2

    def wrong() -> None:
        use(torch.ones(4, device=device()) + 1)

    def recorded() -> None:
        tensor = torch.ones(4, device=device())
        use(tensor)
        tensor.record_stream(stream)

    def waited_for() -> None:
        tensor = torch.ones(4, device=device())
        use(tensor)
        torch.cuda.current_stream().wait_stream(stream)

    def event_too_old() -> None:
        tensor = torch.ones(4, device=device())
        event = stream.record_event()
        use(tensor)
        torch.cuda.current_stream().wait_event(event)

    def synchronised() -> None:
        tensor = torch.ones(4, device=device())
        use(tensor)
        stream.synchronize()

    def result_is_used_here() -> None:
        result = use(torch.ones(4, device=device()))
        torch.cuda.current_stream().wait_stream(stream)
        result.add_(1)

    programs = {
        wrong: 1, recorded: 0, waited_for: 0, event_too_old: 1, synchronised: 0,
        # Its source is freed at once; the result, of the other stream, after its last use here.
        result_is_used_here: 2,
    }  # fmt: skip
    for program, expected in programs.items():
        with recording() as log:
            program()
            gc.collect()
        found = violations(log.entries)
        assert len(found) == expected, (program.__name__, found)
        assert all("checks.py" in text and "aten::mul" in text for text in found[:1])


def another_order_is_seen() -> None:
    """The ranks call two groups in different orders, and one with different sizes."""
    groups = [dist.new_group(), dist.new_group()]
    values = torch.ones(3, device=device())

    def run(order: list[int], size: int) -> list[str]:
        with recording() as log:
            for at in order:
                dist.all_reduce(values, group=groups[at])
            dist.all_reduce(torch.ones(size, device=device()), group=groups[0], async_op=True)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, calls(log.entries))
        return differences(of_ranks)

    is_first = dist.get_rank() == 0
    assert run([0, 1, 0], 2) == []
    # Async, or gloo would wait for ever, as NCCL would.
    with recording() as log:
        works = [
            dist.all_reduce(values.clone(), group=groups[at], async_op=True)
            for at in ([0, 1] if is_first else [1, 0])
        ]
    for work in works:
        work.wait()
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, calls(log.entries))
    found = differences(of_ranks)
    assert len(found) == 1, found
    assert found[0].startswith("thread MainThread, call 0: rank 0"), found


# -------------------------------------------------------------------------------------- training


def parity_cases(hosts: str, num_of_each: int) -> list[Case]:
    """So many of every pipeline with every optimizer; the rest is drawn."""
    kinds = [*product(OptimizerKind, PIPELINES)] * num_of_each
    tiers = (*CUDA_TIERS, "cached", "cached")
    drawn = draw_cases(hosts, len(kinds), 1, tiers, output="bags", device=str(device()))
    cases = []
    for case, (kind, pipeline) in zip(drawn, kinds, strict=True):
        is_cut = case.micro_batches and pipeline == "look_ahead"
        changes = {"pipeline": pipeline, "micro_batches": is_cut, "skip": False}
        cases.append(fit(replace(case, optimizer=kind.value, **changes)))  # type: ignore[arg-type]
    return cases


def training_equals_the_unsplit_reference() -> None:
    cases = parity_cases("0" * dist.get_world_size(), 3)
    assert {case.partition for case in cases} == set(PARTITIONS)
    assert {case.tier for case in cases} == {tier.value for tier in Tier}
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)


def training_in_two_levels_equals_the_unsplit_reference() -> None:
    """On two pretended hosts."""
    each = dist.get_world_size() // 2
    cases = parity_cases("0" * each + "1" * each, 1)
    with mock.patch.dict("os.environ"):
        found = run_cases([replace(case, levels="two") for case in cases])
    assert not found.failures, "\n".join(found.failures)


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
RUNS.append(replace(RUNS[-1], tier="cached"))
RUNS.append(replace(RUNS[-1], row_fetch="mapped"))


def _losses(training: Training, begin: int, end: int) -> list[float]:
    training.pipeline.start()
    stream = training.batches(begin, end)
    return [float(training.pipeline.progress(stream)[0]) for _ in range(begin, end)]


def assert_same_tables(first: Training, second: Training) -> None:
    for training in (first, second):
        training.pipeline.flush()
    one, two = gather_tables(first.model), gather_tables(second.model)
    for table, weight in one.items():
        assert float((weight - two[table]).abs().max()) <= 1e-6, table


def evaluation_between_steps_changes_nothing() -> None:
    for run in RUNS:
        evaluated_between_steps(run)


def evaluated_between_steps(run: Run) -> None:
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
    for run in RUNS:
        _save_and_load(run)


def _save_and_load(run: Run) -> None:
    """Saved by both ranks from "cuda", and read into another model, which has trained."""
    folder = Path(broadcast_object(tempfile.mkdtemp()))
    first, second = Training(run, device()), Training(run, device())
    _losses(first, 0, 2)
    _losses(second, 7, 8)
    for training in (first, second):
        training.pipeline.flush()
    checkpoints = Checkpoints(folder, facts={})
    path = save_checkpoint(checkpoints, Position(2, 64), first.model, first.optimizer, NoLoader())
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


def hot_rows_follow() -> None:
    """Rows that move between replica and shard, in every tier, change no loss and no row."""
    tiers = ("device", "host_cached", "device", "host", "cached", "cached")
    for run, tier in zip(RUNS, tiers, strict=True):
        # The last rows are read most.
        stale = replace(run, routing="device", tier=tier, skew=0.5, batch_size=8)
        first, second = Training(stale, device()), Training(stale, device())
        hot_set, moved = AdaptiveHotSet(second.model, second.optimizer), 0
        for step in range(0, 6, 2):
            assert _losses(first, step, step + 2) == pytest.approx(
                _losses(second, step, step + 2), abs=1e-6
            ), stale
            second.pipeline.flush()
            moved += hot_set.adapt().num_moved
            check_replicas(second.model)
        assert moved > 5, stale
        assert_same_tables(first, second)
        first.close()
        second.close()


def calibration_runs() -> None:
    """Every probe of the calibration, once: no kernel is missing and no devices are mixed."""
    from hotrec.calibrate.probes import all_probes
    from hotrec.calibrate.workload import CalibrationWorkload, group_alone
    from hotrec.config.groups import AdamConfig
    from tests.distributed.test_calibrate import tiny_target

    world_size, rank = dist.get_world_size(), dist.get_rank()
    ranks = Ranks(rank, world_size, rank, world_size, device())
    target = tiny_target(AdamConfig(learning_rate=0.1))
    probes = all_probes(CalibrationWorkload(target, ranks, group_alone(ranks)))
    names = {probe.name for probe in probes}
    assert {"read_host", "read_hit", "read_miss", "update_device", "pooled_update_device"} <= names
    assert {"fetch_slot", "fetch_mapped", "return_slot"} <= names
    for probe in probes:
        work = probe.make(*probe.sizes[0])
        work.run(work.prepare())
