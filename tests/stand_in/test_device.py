"""The CUDA path on a machine without a GPU; see ``tests/stand_in/README.md``."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.helpers.ranks import run_ranks
from tests.stand_in import checks, steps
from tests.stand_in.build import why_not
from tests.stand_in.launches import measure
from tests.stand_in.order import differences
from tests.stand_in.steps import Step, Trained

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),
]

run_on_device = partial(
    run_ranks, timeout_s=400, start_method="spawn", stand_in="tests.stand_in.device"
)
ON_TWO_RANKS = [
    "mixed_devices_raise",
    "synchronisations_are_counted",
    "memory_freed_too_early_is_seen",
    "training_equals_the_unsplit_reference",
    "checkpoints_go_on_as_the_unsplit_model",
    "mapped_tables_are_out_of_forks",
]
ON_ONE_RANK = [
    "a_step_of_slots_starts_few_operations",
    "calibration_cuts_long_bags",
]


@pytest.fixture(scope="module")
def verdicts() -> dict[int, dict[str, str | None]]:
    """By number of ranks, what is wrong with each check."""
    return {
        num: run_on_device(checks.run_all, num, names=names)[0]
        for num, names in ((1, ON_ONE_RANK), (2, ON_TWO_RANKS))
    }


@pytest.mark.parametrize(
    ("num_ranks", "check"), [*product([1], ON_ONE_RANK), *product([2], ON_TWO_RANKS)]
)
def test_on_the_device(verdicts: dict[int, Any], num_ranks: int, check: str) -> None:
    assert verdicts[num_ranks][check] is None, verdicts[num_ranks][check]


def test_on_the_devices_of_two_hosts() -> None:
    name = "training_in_two_levels_equals_the_unsplit_reference"
    for verdicts in run_on_device(checks.run_all, 4, names=[name]):
        assert verdicts[name] is None, verdicts[name]


class Bound(NamedTuple):
    """What one step may do, after the first ones; host synchronisations, at most."""

    run: dict[str, Any]  # see ``tests.stand_in.model.Run``
    num_main_syncs: int  # on the main stream
    num_syncs: int  # on all streams and threads


# One row that most ids are, and thousands of distinct rows.
LONG = {
    "batch_size": 1024,
    "num_rows": {"a": 100, "b": 50_000, "c": 60, "d": 4_000},
    "skews": {"a": 60.0, "b": 1.0},
}
# One of each is for the number of hot rows that an owner adds up, see ``RowSums``.
BOUNDS = {
    "sparse_dist-loader": Bound({"pipeline": "sparse_dist", "routing": "loader"}, 3, 4),
    "sparse_dist-device": Bound({"pipeline": "sparse_dist", "routing": "device"}, 3, 6),
    "base-loader": Bound({"pipeline": "base", "routing": "loader"}, 4, 4),
    "look_ahead-loader": Bound({"pipeline": "look_ahead", "routing": "loader"}, 2, 6),
    "look_ahead-device": Bound({"pipeline": "look_ahead", "routing": "device"}, 2, 8),
    "look_ahead-parts": Bound({"pipeline": "look_ahead", "micro_batches": True}, 12, 24),
    # Of these up to four are of threads that move rows, and one is of slots that hardly suffice.
    "look_ahead-slots": Bound({"pipeline": "look_ahead", "tier": "cached"}, 2, 12),
    # TorchRec's own lookup of the table that its owner pools waits.
    "look_ahead-pooled": Bound({"pipeline": "look_ahead", "pooled": "c"}, 7, 13),
    # Models of sequences; one row that most ids are.
    "hstu": Bound({"pipeline": "look_ahead", "kind": "hstu"}, 0, 6),
    "sasrec": Bound({"pipeline": "sparse_dist", "kind": "sasrec", "routing": "device"}, 3, 6),
    "packed": Bound({"pipeline": "look_ahead", "kind": "packed", **LONG}, 0, 6),
    "packed-parts": Bound(
        {"pipeline": "look_ahead", "kind": "packed", "micro_batches": True}, 9, 15
    ),
    "sparse_dist-long": Bound({"pipeline": "sparse_dist", **LONG}, 3, 6),
    "look_ahead-long": Bound({"pipeline": "look_ahead", "routing": "device", **LONG}, 2, 12),
}
MOST_IN_A_SEGMENT = 256
NUM_STEPS = 6


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Trained]]:
    """By name of the training, what each of two ranks says of it."""
    runs = [bound.run for bound in BOUNDS.values()]
    of_ranks = run_on_device(steps.train, 2, runs=runs, num_steps=NUM_STEPS)
    return {name: [ranks[at] for ranks in of_ranks] for at, name in enumerate(BOUNDS)}


@pytest.mark.parametrize("name", list(BOUNDS))
def test_the_host_waits_seldom(trained: dict[str, list[Trained]], name: str) -> None:
    bound = BOUNDS[name]
    for of_rank in trained[name]:
        for step in of_rank.steps[3:]:
            assert step.num_main_syncs <= bound.num_main_syncs, step.syncs
            assert step.num_syncs <= bound.num_syncs, step.syncs


@pytest.mark.parametrize("name", list(BOUNDS))
def test_memory_outlives_its_uses_on_other_streams(
    trained: dict[str, list[Trained]], name: str
) -> None:
    for of_rank in trained[name]:
        assert not of_rank.lifetimes, "\n".join(of_rank.lifetimes)


@pytest.mark.parametrize("name", list(BOUNDS))
def test_all_ranks_call_collectives_in_one_order(
    trained: dict[str, list[Trained]], name: str
) -> None:
    """Of each group and thread; and, as NCCL wants it, of all of them together."""
    calls = [of_rank.calls for of_rank in trained[name]]
    assert all(calls)
    found = differences(calls) + differences(calls, of_device=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", list(BOUNDS))
def test_no_kernel_gets_a_long_segment(trained: dict[str, list[Trained]], name: str) -> None:
    for of_rank in trained[name]:
        for step in of_rank.steps:
            assert "aten::_embedding_bag" in step.longest
            assert max(step.longest.values()) <= MOST_IN_A_SEGMENT, step.longest


# On one rank: the most device operations and host waits of a whole step of a DLRM over 26 tables;
# 60 operations are those of the dense layers' Adagrad, which a GPU does in one. TorchRec: 156, 10.
LAUNCHES = {
    "look_ahead": (175, 0),
    "look_ahead, all_cold": (160, 0),
    "look_ahead, slots": (200, 2),  # one is of the thread that gathers rows
    "look_ahead, device": (275, 2),
}


@pytest.fixture(scope="module")
def launches() -> dict[str, Step]:
    given = {"names": list(LAUNCHES), "num_steps": 5}
    found: dict[str, Step] = run_on_device(measure, 1, **given)[0]
    return found


@pytest.mark.parametrize("case", list(LAUNCHES))
def test_a_step_starts_few_operations(launches: dict[str, Step], case: str) -> None:
    most_operations, most_waits = LAUNCHES[case]
    step = launches[case]
    assert step.num_operators <= most_operations, step.operators
    assert step.num_syncs <= most_waits, step.syncs
    assert not step.pageable
