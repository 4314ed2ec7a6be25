"""Routing on the device, and routed features on their way there."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.packing import pack
from hotrec.embedding.collection import columns_by_dim
from hotrec.embedding.initialize import initial_rows
from hotrec.routing.features import RoutedFeatures
from hotrec.routing.router import Router
from hotrec.runtime.ranks import Ranks
from tests.exact.case import Case, draw_cases, draw_samples
from tests.exact.training import make_partition, table_configs

pytestmark = pytest.mark.gpu
TENSORS = (
    "positions_K", "bag_offsets", "bags_K", "row_offsets_U", "scales_K", "row_scales_K",
    "num_hot_lookups",
)  # fmt: skip


def make_router(case: Case) -> Router:
    return Router(columns_by_dim(table_configs(case)), make_partition(case))


def features_of(case: Case) -> KeyedJaggedTensor:
    return draw_samples(case, 0)[0].features()


def assert_same(first: RoutedFeatures, second: RoutedFeatures) -> None:
    assert first.num_hot_lookups() == second.num_hot_lookups()
    for one, two in zip(first.groups, second.groups, strict=True):
        assert one.rows.keys() == two.rows.keys()
        assert torch.equal(one.rows.values().cpu(), two.rows.values().cpu())
        assert torch.equal(one.rows.lengths().cpu(), two.rows.lengths().cpu())
        for name in TENSORS:
            mine, other = getattr(one, name), getattr(two, name)
            assert (mine is None) == (other is None)
            if mine is not None and name in ("positions_K", "bag_offsets", "row_offsets_U"):
                assert torch.equal(mine.cpu(), other.cpu()), name


def test_routing_on_the_device_equals_routing_in_a_worker(gpu: Ranks) -> None:
    for case in draw_cases("0", 24, seed=23, output="bags"):
        on_cpu = make_router(case)(features_of(case))
        routed = make_router(case).to(gpu.device)(features_of(case).to(gpu.device))
        for group in routed.groups:
            assert group.rows.values().device == gpu.device
            assert all(
                getattr(group, name).device == gpu.device
                for name in TENSORS
                if getattr(group, name) is not None
            )
        assert_same(routed, on_cpu)


def test_an_id_outside_its_table_is_refused_on_the_device(gpu: Ranks) -> None:
    case = draw_cases("0", 1, output="bags", batches="drawn")[0]
    features = features_of(case)
    wrong = KeyedJaggedTensor(
        keys=features.keys(), values=features.values() + 1000, lengths=features.lengths(),
        weights=features.weights_or_none(),
    ).to(gpu.device)  # fmt: skip
    with pytest.raises(ValueError, match=r"^table t\d feature .*: expected rows in 0\.\."):
        make_router(case).to(gpu.device)(wrong)


def test_routed_features_are_pinned_and_copied(gpu: Ranks) -> None:
    for case in draw_cases("0", 12, seed=29, output="bags"):
        routed = make_router(case)(features_of(case))
        for pinned in (routed.pin_memory(), pack(routed).pin_memory().unpack()):
            for group in pinned.groups:
                for pinned_K in (group.rows.values(), group.positions_K):
                    # Torch calls no empty tensor pinned.
                    assert pinned_K.is_pinned() or not pinned_K.numel()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                copied = pinned.to(gpu.device, non_blocking=True)
                copied.record_stream(torch.cuda.current_stream())
            stream.synchronize()
            assert_same(copied, routed)


def test_initial_rows_are_the_same_on_the_device(gpu: Ranks) -> None:
    rows = torch.tensor([0, 1, 5, (1 << 31) + 3, 1 << 33])
    expected = initial_rows(3, "t", rows, 64, 1 << 34)
    assert torch.equal(initial_rows(3, "t", rows.to(gpu.device), 64, 1 << 34).cpu(), expected)
