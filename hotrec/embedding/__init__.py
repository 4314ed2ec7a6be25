"""The hybrid-parallel embedding: hot rows replicated, cold rows sharded."""

from hotrec.embedding.ahead import RowsAhead
from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import check_replicas, shard, use_hot_cold
from hotrec.embedding.fused import fused_params
from hotrec.embedding.hot_exchange import HotExchange
from hotrec.embedding.initialize import initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.update_rules import OptimizerKind, OptimizerSpec

__all__ = [
    "HotColdEmbeddingBagCollection",
    "HotColdSharder",
    "HotExchange",
    "OptimizerKind",
    "OptimizerSpec",
    "RowsAhead",
    "check_replicas",
    "fused_params",
    "gather_tables",
    "initialize_embeddings",
    "make_optimizer",
    "shard",
    "use_hot_cold",
]
