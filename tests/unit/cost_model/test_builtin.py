"""The built-in sets: possible, sourced, complete for their device, and of the right order."""

from __future__ import annotations

import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import KERNELS, REQUIRED, Costs, World

SETS = sorted(BUILTIN)


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_possible_and_every_number_has_a_source(name: str) -> None:
    costs = BUILTIN[name]
    assert costs.name == name
    assert costs.origin == "built-in"
    for kernel, line in costs.kernels.items():
        assert line.source not in ("", "measured"), kernel
        assert line.seconds(1e6, 2.56e8) > 0, kernel
    for link in (costs.intra, costs.inter):
        assert link is None or link.source not in ("", "measured")
    assert {"memory", "overhead_s", "overlap"} <= set(costs.facts)
    assert Costs.from_json(costs.to_json()) == costs
    assert set(costs.kernels) == set(KERNELS if costs.device == "cuda" else REQUIRED)
    assert (costs.device_bytes > 0) == (costs.device == "cuda")


@pytest.mark.parametrize("name", [n for n in SETS if BUILTIN[n].device == "cuda"])
def test_nearer_memory_is_faster(name: str) -> None:
    kernel = BUILTIN[name].kernels

    def of_rows(which: str) -> float:
        return kernel[which].seconds(1e6, 2.56e8)

    for prefix in ("read", "pooled"):
        assert of_rows(f"{prefix}_device") < of_rows(f"{prefix}_hit") < of_rows(f"{prefix}_miss")
        assert of_rows(f"{prefix}_device") < of_rows(f"{prefix}_host")
    for prefix in ("update", "pooled_update"):
        assert of_rows(f"{prefix}_device") <= of_rows(f"{prefix}_hit") < of_rows(f"{prefix}_host")


def test_links_are_of_the_published_order() -> None:
    h100, a100 = BUILTIN["dgx_h100_infiniband"], BUILTIN["dgx_a100"]
    assert h100.inter
    assert a100.inter
    assert a100.inter.bytes_per_s < h100.inter.bytes_per_s <= 8 * 50e9
    assert a100.intra.bytes_per_s < h100.intra.bytes_per_s <= 450e9
    cpu = BUILTIN["cpu_1gbit"]
    assert cpu.inter
    assert cpu.inter.bytes_per_s < 125e6
    # All ranks of a host share its adapters: a rank of eight gets an eighth.
    alone = h100.collective("all_to_all", World(2, 1)).per_byte_s
    shared = h100.collective("all_to_all", World(16, 8)).per_byte_s
    assert shared > 4 * alone
