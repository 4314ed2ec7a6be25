"""What ranks with the stand-in check; ``tests/stand_in/test_device.py`` names the checks."""

from __future__ import annotations

import gc
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.calibrate.probes import all_probes
from hotrec.calibrate.workload import CalibrationWorkload, group_alone
from hotrec.config.groups import AdamConfig
from hotrec.embedding.slots import SlotMap
from hotrec.embedding.table_memory import cached_rows
from hotrec.runtime.ranks import Ranks, broadcast_object
from hotrec.types import POPULAR_ROW, OptimizerKind
from tests.distributed.test_calibrate import tiny_target
from tests.exact.case import draw_cases
from tests.exact.test_checkpoints import run_routes
from tests.exact.training import run_cases
from tests.gpu.test_parity import device_routes
from tests.helpers.checks import run_checks
from tests.helpers.mappings import flags_at
from tests.stand_in.lifetimes import violations
from tests.stand_in.log import recording
from tests.stand_in.model import Run, Training
from tests.stand_in.steps import figures

NUM_ROUTES = 10


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def run_all(names: list[str]) -> dict[str, str | None]:
    """The checks of these names, one after the other on the same ranks."""
    return run_checks([globals()[name] for name in names])


# ------------------------------------------------------------------------------- the tool itself


def mixed_devices_raise() -> None:
    on_device, on_host = torch.zeros(4, device=device()), torch.zeros(4)
    wrong: list[Callable[[], Any]] = [
        lambda: on_device + on_host,
        lambda: on_device.index_add_(0, torch.tensor([1]), torch.ones(1)),
        lambda: on_device.uniform_(generator=torch.Generator()),
    ]
    for program in wrong:
        with pytest.raises(RuntimeError, match=r"same device|'cuda' device"):
            program()
    with pytest.raises(TypeError, match="numpy"):
        on_device.numpy()


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

    def event_too_old() -> None:
        tensor = torch.ones(4, device=device())
        event = stream.record_event()
        use(tensor)
        torch.cuda.current_stream().wait_event(event)

    for program, expected in ((wrong, 1), (recorded, 0), (event_too_old, 1)):
        with recording() as log:
            program()
            gc.collect()
        found = violations(log.entries)
        assert len(found) == expected, (program.__name__, found)
        assert all("checks.py" in text and "aten::mul" in text for text in found[:1])


# -------------------------------------------------------------------------------------- training


def check_cases(hosts: str, num: int, **given: Any) -> None:
    """As ``tests/gpu/test_parity.py`` does it with one rank, which runs on the stand-in too."""
    given = {"device": str(device()), "skip": False, **given}
    cases = draw_cases(hosts, num, 1, ("device", "cached"), **given)
    assert {case.tier for case in cases} == {"device", "cached"}
    assert {case.output for case in cases} == {"bags", "sequences", "packed"}
    assert {case.optimizer for case in cases} == {kind.value for kind in OptimizerKind}
    assert any(case.adapt for case in cases)
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)
    assert found.num_moved > 0


def training_equals_the_unsplit_reference() -> None:
    check_cases("00", 30)


def training_in_two_levels_equals_the_unsplit_reference() -> None:
    """On two pretended hosts."""
    with mock.patch.dict("os.environ"):
        check_cases("0011", 16, levels="two")


def checkpoints_go_on_as_the_unsplit_model() -> None:
    """Saved from the device's memories, loaded into others."""
    folder = Path(broadcast_object(tempfile.mkdtemp()))
    routes = device_routes("0" * dist.get_world_size(), str(device()), NUM_ROUTES)
    for is_saved in (True, False):
        found = run_routes(routes, folder, is_saved=is_saved)
        assert not found.failures, "\n".join(found.failures)


def calibration_cuts_long_bags() -> None:
    """Every probe of the calibration, once: no kernel is missing, no devices are mixed, and as in
    training none gets more than 256 ids of an unpooled table in one bag."""
    target = tiny_target(AdamConfig(learning_rate=0.1), [20_000, 3, 9_000], 4096, 1 << 22)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, world_size, rank, world_size, device())
    longest: dict[str, int] = {}
    for probe in all_probes(CalibrationWorkload(target, ranks, group_alone(ranks))):
        work = probe.make(*max(probe.sizes))
        prepared = work.prepare()
        with recording() as log:
            work.run(prepared)
        longest[probe.name] = max(figures(log.entries).longest.values(), default=0)
    assert {"fetch_slot", "fetch_mapped", "return_slot", "pooled_update_device"} <= set(longest)
    assert {"read_device", "pooled_host", "pooled_miss", "pooled_update_hit"} <= set(longest)
    assert max(longest.values()) <= 256, longest


def mapped_tables_are_out_of_forks() -> None:
    """Every whole page of rows and states in host memory, in each tier there; none elsewhere."""
    num_rows = {"a": 20_000, "b": 12_000, "c": 60, "d": 9_000}
    for tier in ("cached", "device"):
        pipeline = "look_ahead" if tier == "cached" else "sparse_dist"
        training = Training(Run(pipeline, optimizer="adam", tier=tier, num_rows=num_rows), device())
        num_pages = 0
        for tensor in (part for cache in cached_rows(training.model) for part in cache.memory()):
            begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
            for page in range(begin, end - mmap.PAGESIZE + 1, 64 * mmap.PAGESIZE):
                num_pages += 1
                assert "dc" in (flags_at(page) or []), tier
        assert (num_pages > 0) == (tier != "device"), tier
        training.close()


def a_step_of_slots_starts_few_operations() -> None:
    """Foresee a batch and reserve for another one, when slots are full."""
    generator = torch.Generator().manual_seed(0)
    slots = SlotMap(5000, 1000, np.empty(0, POPULAR_ROW), device())
    batches = [
        (torch.rand(150, generator=generator) ** 2 * 5000).long().unique().to(device())
        for _ in range(20)
    ]
    for number in range(8):
        slots.foresee(batches[number], number)
    for number in range(12):
        with recording() as log:
            slots.release(number - 2, is_changed=True)
            slots.foresee(batches[number + 8], number + 8)
            _, moves = slots.reserve(batches[number], number)
    found = figures(log.entries)
    assert moves.out_rows.numel() > 50
    assert found.num_operators <= 37, found.operators
    assert found.num_syncs == 1, found.syncs
