"""What a machine takes for each thing that a step does: value objects, numpy only."""

from hotrec.costs.costs import (
    COLLECTIVES,
    KERNELS,
    STAGES,
    Costs,
)
from hotrec.costs.lines import CollectiveCurve, CostsError, Line, Link, World

__all__ = [
    "COLLECTIVES",
    "KERNELS",
    "STAGES",
    "CollectiveCurve",
    "Costs",
    "CostsError",
    "Line",
    "Link",
    "World",
]
