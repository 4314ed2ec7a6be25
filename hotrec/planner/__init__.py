"""Placement -> TorchRec constraints and sharding plan."""

from hotrec.planner.describe import plan_document, plan_text
from hotrec.planner.plan import (
    ColdTier,
    Machine,
    TorchRecPlan,
    cold_tier_for,
    hot_cold_constraints,
    make_plan,
    torchrec_constraints,
)

__all__ = [
    "ColdTier",
    "Machine",
    "TorchRecPlan",
    "cold_tier_for",
    "hot_cold_constraints",
    "make_plan",
    "plan_document",
    "plan_text",
    "torchrec_constraints",
]
