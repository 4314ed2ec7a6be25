"""Host memory that the device maps, checked by ranks with the stand-in.

``tests/stand_in/test_host.py`` names the checks.
"""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.calibrate.probes import _host_rows, all_probes
from hotrec.calibrate.workload import CalibrationWorkload, group_alone
from hotrec.config.groups import SgdConfig
from hotrec.embedding.flat import MAX_BAG_IDS
from hotrec.embedding.table_memory import fused_modules
from hotrec.runtime.ranks import Ranks
from tests.distributed.test_calibrate import tiny_target
from tests.helpers.checks import run_checks
from tests.helpers.mappings import flags_at
from tests.stand_in.checks import device
from tests.stand_in.log import recording
from tests.stand_in.model import Run, Training
from tests.stand_in.steps import figures


def run_all(names: list[str]) -> dict[str, str | None]:
    """The checks of these names, one after the other on the same ranks."""
    return run_checks([globals()[name] for name in names])


def _refuse(seen: torch.Tensor) -> torch.Tensor:
    """FBGEMM 1.6 and 1.7, of memory that is mapped instead of managed."""
    raise RuntimeError("Expected tcontext != nullptr to be true, but got false.")


def _steps(run: Run, num_steps: int = 3) -> list[float]:
    training = Training(run, device())
    stream = training.batches(0, num_steps)
    losses = [float(training.pipeline.progress(stream)[0]) for _ in range(num_steps)]
    training.close()
    return losses


def slots_need_no_uvm_to_cpu() -> None:
    """Rows behind slots, staged and mapped, and calibration's, without FBGEMM's way to the host."""
    ops: Any = torch.ops.fbgemm
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "uvm_to_cpu", _refuse)
        here, seen = _host_rows(device(), 8, 4)
        here[3] = 5.0
        assert (here.device.type, seen.device.type) == ("cpu", "cuda")
        assert seen[3].tolist() == [5.0] * 4
        of_slots = [
            _steps(Run("look_ahead", optimizer="adagrad", tier="cached", row_fetch=row_fetch))
            for row_fetch in ("staged", "mapped")
        ]
    expected = _steps(Run("look_ahead", optimizer="adagrad"))
    for losses in of_slots:
        assert losses == pytest.approx(expected, abs=1e-6)


def mapped_tables_are_out_of_forks() -> None:
    """Every whole page of rows and states in host memory, in each tier there; none elsewhere."""
    num_rows = {"a": 20_000, "b": 12_000, "c": 60, "d": 9_000}
    for tier in ("cached", "device"):
        pipeline = "look_ahead" if tier == "cached" else "sparse_dist"
        training = Training(Run(pipeline, optimizer="adam", tier=tier, num_rows=num_rows), device())
        num_pages = 0
        for module in fused_modules(training.model):
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if name.endswith("_uvm"):
                    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
                    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
                    for page in range(begin, end - mmap.PAGESIZE + 1, 64 * mmap.PAGESIZE):
                        num_pages += 1
                        assert "dc" in (flags_at(page) or []), (tier, name)
        assert (num_pages > 0) == (tier != "device"), tier
        training.close()


def calibration_cuts_long_bags() -> None:
    """As in training, no kernel gets more than 256 ids of an unpooled table in one bag."""
    target = tiny_target(SgdConfig(learning_rate=0.1), [20_000, 3, 9_000], 4096, 1 << 22)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = Ranks(rank, world_size, rank, world_size, device())
    longest: dict[str, int] = {}
    for probe in all_probes(CalibrationWorkload(target, ranks, group_alone(ranks))):
        work = probe.make(*max(probe.sizes))
        prepared = work.prepare()
        with recording() as log:
            work.run(prepared)
        longest[probe.name] = max(figures(log.entries).longest.values(), default=0)
    assert max(longest.values()) <= MAX_BAG_IDS, longest
    unpooled = ("read_device", "update_device")
    assert min(longest[name] for name in unpooled) > MAX_BAG_IDS // 4, longest
