"""Models of sequences, checked by ranks with the stand-in.

``tests/stand_in/test_sequences.py`` names the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, update_wrapper
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hotrec.data.chunks import Dataset
from hotrec.types import (
    PipelineKind,
    Placement,
    RowFetch,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)
from tests.distributed import test_program_sequences as programs
from tests.distributed import test_sequence_models as models
from tests.distributed.programs import Choice
from tests.exact.case import draw_cases
from tests.exact.training import run_cases
from tests.helpers.checks import run_checks
from tests.stand_in.checks import aloud, device, evaluated_between_steps
from tests.stand_in.model import Run


def run_all(names: list[str], dataset: str, folder: str) -> dict[str, str | None]:
    """The checks of these names, one after the other on the same ranks.

    Args:
        names: their names.
        dataset: path of the dataset of ``models.prepare_log``.
        folder: for checkpoints, shared by the ranks.
    """
    given: dict[str, tuple[Any, ...]] = {
        "models_equal_one_process": (dataset,),
        "checkpoints_go_on": (dataset, folder),
    }
    return run_checks([_named(name, given.get(name, ())) for name in names])


def _named(name: str, given: tuple[Any, ...]) -> Callable[[], None]:
    check: Any = globals()[name]
    return aloud(update_wrapper(partial(check, *given), check))


def _placed(tier: Tier, load: float | None = None, **keys: Any) -> Placement:
    """The hot rows of ``models.HOT``, and all others in one tier."""
    of_table = TablePlacement(tier=tier, cache_load_frac=load, **keys)
    return Placement(models.HOT.partition, dict.fromkeys(models.NUM_ROWS, of_table))


def ways() -> list[models.Way]:
    """Every pipeline and every memory tier that a device has, with both models in turn."""
    way = models.way
    mapped_slots = _placed(Tier.CACHED, 0.95, row_fetch=RowFetch.mapped)
    cached = {"placed": TorchrecPlan.planner, "tier": TorchrecTier.fused_uvm_caching}
    found = [
        way("hstu", "look_ahead"),
        way("sasrec", "look_ahead", _placed(Tier.CACHED, 0.95)),
        way("hstu", "look_ahead", mapped_slots),
        way("sasrec", "look_ahead", micro_batches=True),
        way("hstu", "look_ahead", models.STALE),
        way("sasrec", "sparse_dist"),
        way("hstu", "sparse_dist"),
        way("hstu", "base"),
        replace(way("sasrec", "prefetch"), **cached),
        replace(way("hstu", "prefetch"), **{**cached, "placed": TorchrecPlan.table_wise}),
        way("sasrec", "sparse_dist", TorchrecPlan.hand_tuned),
    ]
    return [
        replace(
            of,
            device=device(),
            # Lookups are counted where ids are routed on the device.
            is_routed_by_loader=at % 2 == 0 and not of.is_adaptive,
            by_tokens=at % 3 == 0,
        )
        for at, of in enumerate(found)
    ]


def _differences(of: models.Way, dataset: Dataset, found: models.Found) -> list[str]:
    expected = models.train_plain(models.spec_of(of.model, dataset.schema), found.before)
    said = models.differences(found, expected)
    return [f"{of}: {said}"] if said else []


def models_equal_one_process(path: str) -> None:
    dataset, failures = Dataset.open(Path(path)), []
    assert {of.pipeline.kind for of in ways()} == set(PipelineKind) - {PipelineKind.auto}
    for of in ways():
        found = models.train(dataset, of)
        failures += _differences(of, dataset, found)
        assert (found.num_moved > 0) == of.is_adaptive, of
    assert not failures, "\n".join(failures)


def checkpoints_go_on(path: str, folder: str) -> None:
    """Saved by all ranks from the device; as one process without a break."""
    dataset, failures = Dataset.open(Path(path)), []
    for at, of in enumerate(ways()[2:13:3]):
        saved = Path(folder) / f"{dist.get_world_size()}-{at}"
        models.train(dataset, of, saved=saved)
        resumed = models.train(dataset, of, resumed=saved / f"step-{models.SEGMENT:08d}")
        failures += _differences(of, dataset, resumed)
    assert not failures, "\n".join(failures)


def cases_equal_the_unsplit_reference() -> None:
    hosts, tiers = "0" * dist.get_world_size(), ("device", "cached")
    given = {"output": "sequences", "device": str(device())}
    cases = draw_cases(hosts, 20, 51, tiers, **given)
    assert {case.tier for case in cases} == set(tiers)
    found = run_cases(cases)
    assert not found.failures, "\n".join(found.failures)


def programs_equal_the_unsplit_model() -> None:
    """Bags beside sequences, and packed sequences with ``LateLinear``."""
    for name, kind in product(
        ("both", "packed"), (PipelineKind.look_ahead, PipelineKind.sparse_dist)
    ):
        programs.trains(name, Choice(kind.name, kind), device=device())


def evaluation_changes_nothing() -> None:
    for run in (Run("look_ahead", kind="hstu"), Run("sparse_dist", kind="packed")):
        evaluated_between_steps(run)
