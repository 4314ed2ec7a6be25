"""Placement -> TorchRec constraints and sharding plan."""

from hotrec.planner.cache_stats import MissCurve, offload_stats
from hotrec.planner.constraints import (
    ColdTier,
    TorchRecPlan,
    cold_tier_for,
    hot_cold_constraints,
    placement_constraints,
    torchrec_constraints,
)
from hotrec.planner.describe import plan_document, plan_text
from hotrec.planner.hot_cold_planner import HotColdPlanner
from hotrec.planner.machine import Machine, free_device_bytes
from hotrec.planner.plan import host_tier_bytes, make_plan

__all__ = [
    "ColdTier",
    "HotColdPlanner",
    "Machine",
    "MissCurve",
    "TorchRecPlan",
    "cold_tier_for",
    "free_device_bytes",
    "host_tier_bytes",
    "hot_cold_constraints",
    "make_plan",
    "offload_stats",
    "placement_constraints",
    "plan_document",
    "plan_text",
    "torchrec_constraints",
]
