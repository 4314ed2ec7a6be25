"""hotrec: recommendation models on TorchRec, hot embedding rows replicated, cold rows sharded.

Library use: ``profile`` counts the ids of a loader, ``parallelize`` shards a TorchRec model,
``Pipeline`` trains it; see examples/. The names below are imported when they are first used, so
that ``import hotrec`` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__
    from hotrec.assemble.torchrec_plan import plan_document, plan_text
    from hotrec.cli.call import command
    from hotrec.cli.fit import Run, fit, predict
    from hotrec.cost_model.profile import Profile
    from hotrec.embedding.adapt import AdaptiveHotSet
    from hotrec.embedding.canonical import gather_tables
    from hotrec.embedding.convert import check_replicas
    from hotrec.embedding.late import LateLinear
    from hotrec.embedding.packed import PackedJaggedTensor, use_packed_jagged_tensor
    from hotrec.embedding.update_rules import OptimizerSpec
    from hotrec.models.encoder import load_encoder
    from hotrec.models.plain import load_model
    from hotrec.planner.machine import Machine
    from hotrec.program.checkpoint import load_checkpoint, save_checkpoint
    from hotrec.program.choice import Choice
    from hotrec.program.count import profile
    from hotrec.program.parallel import choice_of, parallelize
    from hotrec.program.pipeline import Pipeline
    from hotrec.types import (
        Exchange,
        OptimizerKind,
        Partition,
        PipelineKind,
        Placement,
        Sharding,
        TablePlacement,
        Tier,
        TorchrecPlan,
    )

__all__ = [
    "AdaptiveHotSet",
    "Choice",
    "Exchange",
    "LateLinear",
    "Machine",
    "OptimizerKind",
    "OptimizerSpec",
    "PackedJaggedTensor",
    "Partition",
    "Pipeline",
    "PipelineKind",
    "Placement",
    "Profile",
    "Run",
    "Sharding",
    "TablePlacement",
    "Tier",
    "TorchrecPlan",
    "check_replicas",
    "choice_of",
    "command",
    "fit",
    "gather_tables",
    "load_checkpoint",
    "load_encoder",
    "load_model",
    "parallelize",
    "plan_document",
    "plan_text",
    "predict",
    "profile",
    "save_checkpoint",
    "use_packed_jagged_tensor",
]

_HOME = {
    "AdaptiveHotSet": "hotrec.embedding.adapt",
    "Choice": "hotrec.program.choice",
    "LateLinear": "hotrec.embedding.late",
    "Machine": "hotrec.planner.machine",
    "OptimizerSpec": "hotrec.embedding.update_rules",
    "PackedJaggedTensor": "hotrec.embedding.packed",
    "Pipeline": "hotrec.program.pipeline",
    "Profile": "hotrec.cost_model.profile",
    "Run": "hotrec.cli.fit",
    "check_replicas": "hotrec.embedding.convert",
    "choice_of": "hotrec.program.parallel",
    "command": "hotrec.cli.call",
    "fit": "hotrec.cli.fit",
    "gather_tables": "hotrec.embedding.canonical",
    "load_checkpoint": "hotrec.program.checkpoint",
    "load_encoder": "hotrec.models.encoder",
    "load_model": "hotrec.models.plain",
    "parallelize": "hotrec.program.parallel",
    "plan_document": "hotrec.assemble.torchrec_plan",
    "plan_text": "hotrec.assemble.torchrec_plan",
    "predict": "hotrec.cli.fit",
    "profile": "hotrec.program.count",
    "save_checkpoint": "hotrec.program.checkpoint",
    "use_packed_jagged_tensor": "hotrec.embedding.packed",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hotrec' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "hotrec.types")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
