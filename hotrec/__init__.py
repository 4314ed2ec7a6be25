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
    "ColdTier": "hotrec.types",
    "HotColdPlanner": "hotrec.planning.torchrec_plan",
    "Machine": "hotrec.planning.machine",
    "hot_cold_constraints": "hotrec.planning.constraints",
    "make_plan": "hotrec.planning.torchrec_plan",
    "placement_constraints": "hotrec.planning.constraints",
    "plan_document": "hotrec.planning.torchrec_plan",
    "plan_text": "hotrec.planning.torchrec_plan",
    "HotColdEmbeddingBagCollection": "hotrec.embedding.collection",
    "HotColdSharder": "hotrec.embedding.sharding",
    "HotExchange": "hotrec.types",
    "OptimizerKind": "hotrec.types",
    "OptimizerSpec": "hotrec.embedding.update_rules",
    "RowsAhead": "hotrec.embedding.prefetch.row_ahead",
    "check_replicas": "hotrec.embedding.convert",
    "gather_tables": "hotrec.embedding.tables",
    "initialize_embeddings": "hotrec.embedding.initialize",
    "make_optimizer": "hotrec.embedding.optimizers",
    "shard": "hotrec.embedding.convert",
    "use_hot_cold": "hotrec.embedding.convert",
    "load_model": "hotrec.models.plain",
    "LookAhead": "hotrec.train.pipelines",
    "make_pipeline": "hotrec.train.pipelines",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hotrec' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
