"""hotrec: recommendation models on TorchRec, hot embedding rows replicated, cold rows sharded.

Library use: ``use_hot_cold(model, partition)`` swaps the collections of a TorchRec model,
``make_plan`` plans, ``shard`` shards; see examples/dlrm_library_use.py. The names below are
imported when they are first used, so that ``import hotrec`` needs no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Partition": "hotrec.types",
    "Placement": "hotrec.types",
    "TablePlacement": "hotrec.types",
    "ColdTier": "hotrec.planning",
    "HotColdPlanner": "hotrec.planning",
    "Machine": "hotrec.planning",
    "hot_cold_constraints": "hotrec.planning",
    "make_plan": "hotrec.planning",
    "placement_constraints": "hotrec.planning",
    "plan_document": "hotrec.planning",
    "plan_text": "hotrec.planning",
    "HotColdEmbeddingBagCollection": "hotrec.embedding",
    "HotColdSharder": "hotrec.embedding",
    "HotExchange": "hotrec.embedding",
    "OptimizerKind": "hotrec.embedding",
    "OptimizerSpec": "hotrec.embedding",
    "RowsAhead": "hotrec.embedding",
    "check_replicas": "hotrec.embedding",
    "gather_tables": "hotrec.embedding",
    "initialize_embeddings": "hotrec.embedding",
    "make_optimizer": "hotrec.embedding",
    "shard": "hotrec.embedding",
    "use_hot_cold": "hotrec.embedding",
    "LookAhead": "hotrec.train.pipelines",
    "make_pipeline": "hotrec.train.pipelines",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hotrec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
