"""Calibration on two real ranks: both get the same costs, and bytes are those that are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from hotrec.cost_model.costs import COLLECTIVES, KERNELS, UNKNOWN_INTERVAL, Costs, World
from hotrec.types import STAGES
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks

# Kernels of memories that only a GPU has.
GPU_KERNELS = {name for name in KERNELS if name.endswith(("_host", "_hit", "_miss", "_mapped"))}


def tiny_target(
    optimizer: Any,
    table_rows: Sequence[int] = (50, 3, 400),
    batch_size: int = 16,
    cap_bytes: int = 1 << 14,
) -> Any:
    from hotrec.bench.job import make_subject
    from hotrec.bench.samples import table_per_feature
    from hotrec.calibrate.workload import CalibrationTarget
    from hotrec.config.groups import DlrmConfig

    model = DlrmConfig(embedding_dim=8, dense_layer_sizes=[8, 8], over_layer_sizes=[4, 1])
    schema = table_per_feature(table_rows, num_dense=2)
    subject = make_subject(model, optimizer, schema, batch_size=batch_size)
    return CalibrationTarget(subject, cap_bytes)


def calibrate() -> list[dict[str, Any]]:
    from hotrec.calibrate.measure import measure_costs
    from hotrec.config.groups import AdamConfig, RowwiseAdagradConfig

    given: Any = {"name": "tiny", "max_bytes": 65536.0, "repeats": 3}
    return [
        measure_costs(this_rank(), tiny_target(rule(learning_rate=0.1)), **given).to_json()
        for rule in (RowwiseAdagradConfig, AdamConfig)
    ]


def test_both_ranks_get_the_same_valid_costs() -> None:
    first, second = run_ranks(calibrate, timeout_s=150)
    assert first == second
    for document in first:
        costs = Costs.from_json(document)  # refuses what no machine can have
        assert (costs.name, costs.origin, costs.device) == ("tiny", "measured", "cpu")
        assert set(costs.kernels) == set(KERNELS) - GPU_KERNELS == set(costs.facts["points"])
        assert {(c.kind, c.world) for c in costs.curves} == {(c, World(2, 2)) for c in COLLECTIVES}
        assert costs.inter is None
        assert all(line.seconds(1e6, 1e8) > 0 for line in costs.kernels.values())
        # A step of no samples takes time too: calls, Python, TorchRec's bookkeeping.
        assert costs.overhead_s >= 0
        assert all(costs.correction(stage) >= 0 for stage in STAGES)
        assert costs.facts["cut"] is None  # small messages and batches take little time
    # Two batch sizes of two placements, of two of TorchRec's plans and of look-ahead twice. With
    # Adam all rows are hot on CPU: there are no cold ones to look ahead for.
    families = [Counter(step["family"] for step in d["facts"]["steps"]) for d in first]
    assert families == [{"hot_cold": 4, "torchrec": 4, "look_ahead": 4}, {"hot_cold": 2}]
    assert [set(d["factors"]) for d in first] == [{"look_ahead"}, set()]
    # And two cases are too few for an interval.
    is_known = [tuple(d["ratio_interval"]) != UNKNOWN_INTERVAL for d in first]
    assert is_known == [True, False]


def count_bytes() -> None:
    """What the module says that a rank sends is what the traffic counter sees."""
    from hotrec.calibrate.collectives import bytes_per_value, make_call, num_values
    from hotrec.runtime.traffic import count_sent_bytes

    for kind, wanted in product(COLLECTIVES, (1024.0, 5000.0)):
        values = num_values(kind, wanted, 2)
        call = make_call(kind, values, None, torch.device("cpu"))
        with count_sent_bytes() as traffic:
            call(None)
        said = values * bytes_per_value(kind, 2)
        assert said == pytest.approx(traffic.sent_bytes[kind], abs=1), kind
        assert said >= 1000


def test_bytes_are_those_that_the_traffic_counter_sees() -> None:
    run_ranks(count_bytes)


def measure_two_hosts() -> None:
    """Four ranks that take themselves for two hosts of two."""
    from hotrec.calibrate.collectives import start_network

    network = start_network(World(4, 2), torch.device("cpu"), max_bytes=16384.0, max_s=60.0)
    of_kinds = [(world, rails, ("all_to_all", "all_reduce")) for world, rails in LINKS]
    expected = [(kind, world, rails) for world, rails, kinds in of_kinds for kind in kinds]
    worlds = [(curve.kind, curve.world, curve.num_rails) for curve in network.curves]
    assert worlds == [*((kind, World(4, 2), 1) for kind in COLLECTIVES), *expected]
    for link in network.links():
        assert link is not None
        assert link.bytes_per_s > 0


LINKS = [(World(2, 2), 1), (World(2, 1), 2)]  # inside a host, between hosts


def test_inside_and_between_hosts_are_told_apart() -> None:
    run_ranks(measure_two_hosts, world_size=4, timeout_s=120)
