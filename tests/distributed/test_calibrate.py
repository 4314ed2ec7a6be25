"""Calibration on two real ranks: both get the same costs, and bytes are those that are counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.cost_model.costs import COLLECTIVES, KERNELS, UNKNOWN_INTERVAL, Costs, World
from hotrec.types import STAGES
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
    from hotrec.runtime.ranks import Ranks

    ranks = Ranks(dist.get_rank(), 2, dist.get_rank(), 2, torch.device("cpu"))
    optimizers = [RowwiseAdagradConfig(learning_rate=0.1), AdamConfig(learning_rate=0.1)]
    return [
        measure_costs(
            ranks, tiny_target(optimizer), name="tiny", max_bytes=65536.0, repeats=3
        ).to_json()
        for optimizer in optimizers
    ]


def count_bytes() -> list[tuple[str, float, int]]:
    """What the module says that a rank sends, and what the traffic counter sees."""
    from hotrec.calibrate.collectives import bytes_per_value, make_call, num_values
    from hotrec.runtime.traffic import count_sent_bytes

    found = []
    for kind in COLLECTIVES:
        for wanted in (1024.0, 5000.0):
            values = num_values(kind, wanted, 2)
            call = make_call(kind, values, None, torch.device("cpu"))
            with count_sent_bytes() as traffic:
                call(None)
            found.append((kind, values * bytes_per_value(kind, 2), traffic.sent_bytes[kind]))
    return found


def test_both_ranks_get_the_same_valid_costs() -> None:
    first, second = run_ranks(calibrate, timeout_s=150)
    assert first == second
    for document in first:
        costs = Costs.from_json(document)  # refuses what no machine can have
        assert (costs.name, costs.origin, costs.device) == ("tiny", "measured", "cpu")
        assert set(costs.kernels) == set(KERNELS) - GPU_KERNELS
        assert {curve.kind for curve in costs.curves} == set(COLLECTIVES)
        assert {curve.world for curve in costs.curves} == {World(2, 2)}
        assert costs.inter is None
        assert costs.host["device"] == "cpu"
        assert set(costs.facts["points"]) == set(costs.kernels)
        for name, line in costs.kernels.items():
            assert line.seconds(1e6, 1e8) > 0, name
        # A step of no samples takes time too: calls, Python, TorchRec's bookkeeping.
        assert 0 <= costs.overhead_s < 1
        assert 0 <= costs.look_ahead.seconds(num_bytes=1e6) < 1
        assert set(costs.stage_overhead_s) <= set(STAGES)
        assert all(costs.correction(stage) >= 0 for stage in STAGES)
        noise = costs.facts["noise"]
        assert [host["num_cores"] for host in noise["hosts"]] == [len(os.sched_getaffinity(0))]
        assert costs.facts["cut"] is None  # small messages and batches take little time
    # Two batch sizes of two placements, of two of TorchRec's plans and of look-ahead twice. With
    # Adam all rows are hot.
    families = [Counter(step["family"] for step in d["facts"]["steps"]) for d in first]
    assert families == [{"hot_cold": 4, "torchrec": 4, "look_ahead": 4}, {"hot_cold": 2}]
    # With Adam there are no cold rows on CPU to look ahead for.
    assert [d["look_ahead"]["source"] for d in first] == ["measured", "not measured"]
    # And two cases are too few for an interval.
    is_known = [tuple(d["ratio_interval"]) != UNKNOWN_INTERVAL for d in first]
    assert is_known == [True, False]


def test_bytes_are_those_that_the_traffic_counter_sees() -> None:
    for found in run_ranks(count_bytes):
        assert len(found) == 8
        for kind, said, counted in found:
            assert said == pytest.approx(counted, abs=1), kind
        assert min(said for _, said, _ in found) >= 1000


def measure_two_hosts() -> tuple[list[Any], float, float]:
    """Four ranks that take themselves for two hosts of two."""
    from hotrec.calibrate.collectives import start_network

    network = start_network(World(4, 2), torch.device("cpu"), max_bytes=16384.0, max_s=60.0)
    intra, inter = network.links()
    assert intra is not None
    assert inter is not None
    worlds = [(curve.kind, curve.world, curve.num_rails) for curve in network.curves]
    assert len(network.series) > len(worlds)
    return worlds, intra.bytes_per_s, inter.bytes_per_s


def test_inside_and_between_hosts_are_told_apart() -> None:
    worlds, intra, inter = run_ranks(measure_two_hosts, world_size=4, timeout_s=120)[0]
    assert worlds == [
        *[(kind, World(4, 2), 1) for kind in COLLECTIVES],
        ("all_to_all", World(2, 2), 1),
        ("all_reduce", World(2, 2), 1),
        ("all_to_all", World(2, 1), 2),
        ("all_reduce", World(2, 1), 2),
    ]
    assert intra > 0
    assert inter > 0
