"""The groups with variants, and a dataclass for each choice: model, optimizer, placement, order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Union

from hotrec.config.fields import Rules, key, option, section
from hotrec.types import (
    DEFAULT_LOAD_FRAC,
    ColdTier,
    ModelKind,
    OptimizerKind,
    RowFetch,
    TorchrecPlan,
    TorchrecTier,
    WireType,
)

# Enumerations in lower case: YAML shows their names.
PlacementKind = StrEnum(
    "PlacementKind",
    "cost fraction coverage budget fae freq_cache scars all_hot all_cold saved torchrec",
)
Routing = StrEnum("Routing", "loader device")
OrderKind = StrEnum("OrderKind", "shuffled all_hot time")
OrderAssign = StrEnum("OrderAssign", "as_read by_owner by_tokens")
Pooling = StrEnum("Pooling", "sum mean")
Decay = StrEnum("Decay", "constant linear cosine polynomial")
RetrievalLoss = StrEnum("RetrievalLoss", "cross_entropy sampled_softmax")
NegativesKind = StrEnum("NegativesKind", "in_batch uniform")

# FBGEMM asserts it for every table with a fused optimizer (construct_split_state).
DIM_MULTIPLE = 4
# Torch counts the bytes of a layer's weights in 64 bits.
MAX_LAYER_SIZE = 2**20
# Meanings of keys that several dataclasses have.
MEMORY = "memory for hot rows and their optimizer state, in MiB per device"
AVAILABLE_MEMORY = f"maximum {MEMORY}; null: all free memory"
CACHE_LOAD = "fraction of the sharded rows that {} keeps on the device"
ASSIGN = (
    "rank that computes each sample of a global batch: as_read (the one that reads it), by_owner "
    "(the owner of most of its cold rows) or by_tokens (samples of different lengths in even work)"
)


@dataclass
class PlacementConfig:
    """What all placements share."""

    kind: PlacementKind = key("choose it with placement=")


@dataclass
class HotColdConfig(PlacementConfig):
    """What all placements with hot and cold rows share."""

    routing: Routing = key(
        "where ids are routed: loader (by its workers) or device", Routing.loader
    )
    adapt_every_steps: int = key(
        "steps between changes of the hot rows by the lookups so far; 0: they stay", 0, ge=0
    )

    @property
    def routes_in_loader(self) -> bool:
        """Whether loader workers split ids; they only have the initial hot rows."""
        return self.routing is Routing.loader and self.adapt_every_steps == 0


@dataclass
class OverridableConfig(HotColdConfig):
    """Settings of placements whose choice the user can override for single tables."""

    overrides: dict[str, Union[str, int, float]] = key(  # noqa: UP007 (OmegaConf reads Union)
        "per table: hot, cold, a number of rows, or a fraction of its rows", {}
    )

    def rules(self) -> Rules:
        for table, value in self.overrides.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            expected = "hot, cold, a number of rows or a fraction"
            is_known = is_number or value in ("hot", "cold")
            yield is_known, f"overrides.{table}: expected {expected}, got {value!r}."


@option("placement", PlacementKind.cost)
class CostPlacement(OverridableConfig):
    """What the cost model predicts to be fastest."""

    hot_budget_mib: float | None = key(AVAILABLE_MEMORY, None, ge=0)
    may_pool: bool = key(
        "allow tables to exchange pooled vectors if these are cheaper than rows", True
    )
    may_decline: bool = key(
        "use TorchRec's plan if predicted to be faster than hot and cold rows", True
    )


@dataclass
class TieredConfig(HotColdConfig):
    """What all placements share in which the user sets the cold rows' memory."""

    cold_tier: ColdTier = key(
        "memory of the cold rows: device (fused), or host behind device slots (cached)",
        ColdTier.fused,
    )
    cold_rows: WireType = key(
        "type of rows in host memory with cold_tier=cached; bf16 is rounded stochastically",
        WireType.fp32,
    )
    row_fetch: RowFetch = key(
        "how cached rows are copied to CUDA: staged by the host, mapped memory, or auto",
        RowFetch.auto,
    )
    cache_load_frac: float | None = key(
        f"{CACHE_LOAD.format('cold_tier=cached')}; null: the smallest for which the predicted step "
        "is at most 1% longer than with all slots that fit",
        None,
        gt=0,
        lt=1,
    )


@dataclass
class PolicyConfig(OverridableConfig, TieredConfig):
    """What all policies that read a profile share."""


@option("placement", PlacementKind.fraction)
class FractionPlacement(PolicyConfig):
    """A fixed fraction of the rows."""

    hot_frac: float = key("fraction of the rows that is hot", 0.01, ge=0, le=1)


@option("placement", PlacementKind.coverage)
class CoveragePlacement(PolicyConfig):
    """The fewest rows that serve a fraction of the lookups."""

    coverage_frac: float = key("fraction of the lookups that the hot rows serve", 0.8, ge=0, le=1)


@option("placement", PlacementKind.budget)
class BudgetPlacement(PolicyConfig):
    """The rows that fit in a budget, by accesses per byte."""

    hot_budget_mib: float = key(MEMORY, ge=0)


@option("placement", PlacementKind.fae)
class FaePlacement(PolicyConfig):
    """FAE: one access threshold that fills a memory budget; small tables are all hot."""

    hot_budget_mib: float = key(MEMORY, 256.0, ge=0)


@option("placement", PlacementKind.freq_cache)
class FreqCachePlacement(PolicyConfig):
    """Frequency-aware software cache: a fraction of the embedding parameters."""


@option("placement", PlacementKind.scars)
class ScarsPlacement(PolicyConfig):
    """SCARS: shortest mean step of all-hot and mixed batches, without tiers."""

    hot_budget_mib: float | None = key(AVAILABLE_MEMORY, None, ge=0)


@option("placement", PlacementKind.all_hot)
class AllHotPlacement(TieredConfig):
    """Every row on every rank."""


@option("placement", PlacementKind.all_cold)
class AllColdPlacement(TieredConfig):
    """No row replicated."""


@option("placement", PlacementKind.saved)
class SavedPlacement(HotColdConfig):
    """The partition at paths.partition, made before."""


@option("placement", PlacementKind.torchrec)
class TorchrecPlacement(PlacementConfig):
    """TorchRec's own sharding of unsplit tables."""

    plan: TorchrecPlan = key(
        "planner, table_wise, or hand_tuned (tables below a batch of rows data-parallel)",
        TorchrecPlan.planner,
    )
    tier: TorchrecTier = key(
        "memory of the rows: device (fused) or host (fused_uvm, fused_uvm_caching)",
        TorchrecTier.fused,
    )
    cache_load_frac: float = key(
        CACHE_LOAD.format("tier=fused_uvm_caching"), DEFAULT_LOAD_FRAC, gt=0, le=1
    )


@dataclass
class OrderConfig:
    """What all orders share."""

    kind: OrderKind = key("choose it with order=")
    assign: OrderAssign = key(ASSIGN, OrderAssign.as_read)


@option("order", OrderKind.shuffled)
class ShuffledOrder(OrderConfig):
    """All samples shuffled together."""


@option("order", OrderKind.time)
class TimeOrder(OrderConfig):
    """Samples in the order of the log, the earliest first."""

    evaluate_ahead: bool = key(
        "evaluate each day before training on it; no step then spans two days", False
    )
    new_only: bool = key("after trainer.warm_start, train only on samples appended since", False)


@option("order", OrderKind.all_hot)
class AllHotOrder(OrderConfig):
    """Alternate blocks of all-hot and mixed batches, whose length depends on the loss."""

    start_rate: float = key(
        "length of the first blocks, as a share of an epoch's batches of their kind",
        0.5,
        gt=0,
        le=1,
    )
    patience: int = key(
        "consecutive evaluations with a lower loss before blocks are doubled", 4, ge=1
    )


@dataclass
class ModelConfig:
    """What all models share."""

    kind: ModelKind = key("choose it with model=")
    embedding_dim: int = key("dimension of an embedding row; a multiple of 4", 64, ge=4, le=1024)
    pooling: Pooling = key("how the rows of a bag become one vector: sum or mean", Pooling.sum)

    @property
    def names_columns(self) -> bool:
        """Whether it distinguishes columns by their names, and needs those of the dataset."""
        return True

    def rules(self) -> Rules:
        dim = self.embedding_dim
        below = dim // DIM_MULTIPLE * DIM_MULTIPLE
        yield (
            dim == below,
            f"embedding_dim: expected a multiple of {DIM_MULTIPLE} (FBGEMM's tables support no "
            f"other, on CPU or CUDA), got {dim}. Take {max(below, DIM_MULTIPLE)} or "
            f"{below + DIM_MULTIPLE}.",
        )


@dataclass
class LayeredConfig(ModelConfig):
    """Settings of models whose bottom layers turn the dense columns into a vector."""

    dense_layer_sizes: list[int] = key(
        "sizes of the layers over the dense columns; the last must be embedding_dim",
        [128, 64],
        ge=1,
        le=MAX_LAYER_SIZE,
        size=1,
    )
    over_layer_sizes: list[int] = key(
        "sizes of the layers over the interactions; the last must be 1",
        [256, 128, 1],
        ge=1,
        le=MAX_LAYER_SIZE,
        size=1,
    )

    @property
    def names_columns(self) -> bool:
        return False

    def rules(self) -> Rules:
        dim, dense, over = self.embedding_dim, self.dense_layer_sizes, self.over_layer_sizes
        yield from super().rules()
        expected = f"the last to be model.embedding_dim, {dim}"
        yield dense[-1] == dim, f"dense_layer_sizes: expected {expected}, got {dense}."
        yield over[-1] == 1, f"over_layer_sizes: expected the last to be 1, got {over}."


@option("model", ModelKind.dlrm)
class DlrmConfig(LayeredConfig):
    """DLRM: pairwise dot products."""


@option("model", ModelKind.dcnv2)
class Dcnv2Config(LayeredConfig):
    """DCNv2: low-rank cross layers."""

    cross_num_layers: int = key("number of cross layers", 3, ge=1)
    cross_low_rank_dim: int = key("rank of the cross layers' matrices", 64, ge=1)


@option("model", ModelKind.deepfm)
class DeepFmConfig(LayeredConfig):
    """DeepFM: a factorization machine in parallel with deep layers."""

    deep_layer_sizes: list[int] = key(
        "sizes of the deep layers over all vectors", [256, 128], ge=1, le=MAX_LAYER_SIZE, size=1
    )


@option("model", ModelKind.din)
class DinConfig(LayeredConfig):
    """DIN: attention of one feature over the ids of a sequence."""

    attention: dict[str, str] = key(
        "columns of kind sequence, each with the feature to compare its ids with", {}, size=1
    )
    attention_layer_sizes: list[int] = key(
        "sizes of the layers that compute the weight of an id, without the last",
        [64, 32],
        ge=1,
        le=MAX_LAYER_SIZE,
        size=1,
    )

    @property
    def names_columns(self) -> bool:
        return True


@option("model", ModelKind.mmoe)
class MmoeConfig(LayeredConfig):
    """MMoE: experts that labels share; over_layer_sizes are those of each label's tower."""

    num_experts: int = key("number of experts", 4, ge=1)
    expert_layer_sizes: list[int] = key(
        "sizes of the layers of an expert", [128, 64], ge=1, le=MAX_LAYER_SIZE, size=1
    )


@dataclass
class RetrievalConfig(ModelConfig):
    """Settings of models with a vector of the user and one of the item."""

    item_id: str | None = key(
        "categorical column of the item, for sampled_softmax and eval_ranking; null: none", None
    )
    loss: RetrievalLoss = key(
        "cross_entropy of samples, or sampled_softmax of the items of positive ones",
        RetrievalLoss.cross_entropy,
    )
    negatives: NegativesKind = key(
        "negatives of sampled_softmax: in_batch (the global batch's) or uniform (of all items)",
        NegativesKind.in_batch,
    )
    num_negatives: int = key("number of uniform negatives of a step, over all ranks", 1024, ge=1)
    temperature: float = key("divisor of the scores in sampled_softmax", 1.0, gt=0)

    @property
    def read_of_item(self) -> list[str]:
        """The columns that the item's vector reads."""
        raise NotImplementedError(type(self).__name__)

    @property
    def multiplies_vectors(self) -> bool:
        """Whether its logit is the product of the two vectors alone."""
        return True

    def rules(self) -> Rules:
        yield from super().rules()
        yield (
            self.loss is RetrievalLoss.cross_entropy or self.item_id is not None,
            f"item_id: expected the column of the item with loss={self.loss.name}, got none. Set "
            "model.item_id.",
        )
        read = self.read_of_item
        yield (
            self.item_id is None or self.item_id in read,
            f"item_id: expected one of the item's columns {read}, got {self.item_id!r}. Name one "
            "of them.",
        )
        yield (
            self.negatives is NegativesKind.in_batch or read == [self.item_id],
            "negatives: expected in_batch for a model that reads more of the item than item_id, "
            f"since drawn items have no other columns, got {self.negatives.name} and columns "
            f"{read}. Set model.negatives=in_batch, or let the model read item_id alone.",
        )


@option("model", ModelKind.two_tower)
class TwoTowerConfig(RetrievalConfig):
    """Two towers: the product of a vector of the user and one of the item."""

    item_columns: list[str] = key(
        "features and dense columns of the item; all others are the user's", size=1
    )
    tower_layer_sizes: list[int] = key(
        "sizes of the layers of each tower", [128, 64], ge=1, le=MAX_LAYER_SIZE, size=1
    )

    @property
    def read_of_item(self) -> list[str]:
        return self.item_columns


@dataclass
class SequenceConfig(RetrievalConfig):
    """Settings of models that read the rows of a history one by one."""

    history: dict[str, str] = key(
        "categorical_list columns, each with the feature of one id that the next would be",
        {},
        size=1,
    )
    side: list[str] = key(
        "columns of kind categorical_list with one id for each id of the history", []
    )
    context: list[str] = key(
        "features of one id that come before the history, such as the user", []
    )
    num_layers: int = key("number of layers", 2, ge=1)
    num_heads: int = key("number of attention heads of a layer", 2, ge=1)
    max_length: int = key("how many of the last ids of a history are read", 50, ge=1)
    dropout: float = key(
        "fraction of values to drop in training; each rank drops others", 0.0, ge=0, lt=1
    )
    over_layer_sizes: list[int] = key(
        "sizes of the layers over the output; the last must be 1; not of sampled_softmax",
        [64, 1],
        ge=1,
        le=MAX_LAYER_SIZE,
        size=1,
    )

    @property
    def read_of_item(self) -> list[str]:
        return list(self.history.values())

    @property
    def multiplies_vectors(self) -> bool:
        return self.loss is RetrievalLoss.sampled_softmax

    def rules(self) -> Rules:
        yield from super().rules()
        over = self.over_layer_sizes
        yield over[-1] == 1, f"over_layer_sizes: expected the last to be 1, got {over}."
        yield (
            self.pooling is Pooling.sum,
            f"pooling: expected sum for {self.kind.name}, which pools no history, got "
            f"{self.pooling.name}. Remove it.",
        )


@option("model", ModelKind.hstu)
class HstuConfig(SequenceConfig):
    """HSTU: layers of pointwise attention over a history and the candidate."""

    attention_dim: int = key("dimension of the queries and keys of a head", 32, ge=1)
    linear_dim: int = key("dimension of the values of a head", 32, ge=1)


@option("model", ModelKind.sasrec)
class SasrecConfig(SequenceConfig):
    """SASRec: a causal transformer over a history and the candidate."""

    def rules(self) -> Rules:
        yield from super().rules()
        dim, num_heads = self.embedding_dim, self.num_heads
        yield (
            dim % num_heads == 0,
            f"num_heads: expected a divisor of model.embedding_dim, {dim}, got {num_heads}.",
        )


@option("model", ModelKind.own)
class OwnModelConfig(ModelConfig):
    """A model of your own: a torch.nn.Module over the pooled columns, or over their rows."""

    _target_: str = key("import path of its class, such as my_package.my_model.MyModel")
    args: dict[str, Any] = key("additional keyword arguments of its constructor", {})


@dataclass
class ScheduleConfig:
    """Learning rate over the steps."""

    decay: Decay = key(
        "shape of the decay: constant, linear, cosine or polynomial (a square)", Decay.constant
    )
    warmup_steps: int = key("number of steps of linear warm-up", 0, ge=0)
    decay_start_step: int = key(
        "last step at the full learning rate; 0: the last of the warm-up", 0, ge=0
    )
    num_decay_steps: int = key(
        "number of steps of the decay, to 0; 0: the rest of the run", 0, ge=0
    )

    def rules(self) -> Rules:
        yield (
            self.decay_start_step == 0 or self.decay_start_step >= self.warmup_steps,
            f"decay_start_step: expected 0 or at least warmup_steps {self.warmup_steps}, got "
            f"{self.decay_start_step}. Start the decay after the warm-up.",
        )
        for name in ("decay_start_step", "num_decay_steps"):
            value = getattr(self, name)
            yield (
                value == 0 or self.decay is not Decay.constant,
                f"{name}: expected 0 with decay=constant, got {value}. Choose "
                "optimizer.schedule.decay=linear, cosine or polynomial.",
            )

    @property
    def first_decay_step(self) -> int:
        """The last step at the full rate."""
        return max(self.decay_start_step, self.warmup_steps)

    def rules_in(self, num_steps: int) -> Rules:
        """The rules for a run of at most ``num_steps``."""
        yield (
            self.warmup_steps <= num_steps,
            f"warmup_steps: expected at most the {num_steps} steps of the run, got "
            f"{self.warmup_steps}. Shorten the warm-up, or train longer.",
        )
        yield (
            self.decay is Decay.constant or self.first_decay_step < num_steps,
            f"decay_start_step: expected a decay that starts before the last of the run's "
            f"{num_steps} steps, got one after step {self.first_decay_step}. Start it earlier, or "
            "train longer.",
        )


@dataclass
class OptimizerConfig:
    """What all optimizers share."""

    kind: OptimizerKind = key("choose it with optimizer=")
    learning_rate: float = key("base learning rate of the embeddings", gt=0)
    dense_kind: OptimizerKind | None = key(
        "update rule of the dense layers; null: of the embeddings, not by row", None
    )
    dense_learning_rate: float | None = key(
        "base learning rate of the dense layers; null: that of the embeddings", None, gt=0
    )
    schedule: ScheduleConfig = section("the learning rate over the steps", ScheduleConfig)


@option("optimizer", OptimizerKind.sgd)
class SgdConfig(OptimizerConfig):
    """Plain SGD."""


@option("optimizer", OptimizerKind.adagrad)
class AdagradConfig(OptimizerConfig):
    """Adagrad."""

    eps: float = key("term added to the denominator for stability", 1e-8, ge=0)


@option("optimizer", OptimizerKind.rowwise_adagrad)
class RowwiseAdagradConfig(AdagradConfig):
    """Adagrad with one sum of squares per row."""


@option("optimizer", OptimizerKind.adam)
class AdamConfig(AdagradConfig):
    """Adam on touched rows; needs CUDA if there are cold rows."""
