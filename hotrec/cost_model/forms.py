"""Linear forms: seconds by stage of a step, from the quantities of work that a rank does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hotrec.cost_model.costs import Costs, Line, World
from hotrec.types import PipelineKind

# Bytes of a float on the wire, by the type in which it travels.
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline for the step models. The effect of micro-batches is not predicted.

    Args:
        kind: Kind of the pipeline.
        wire: Type of rows and gradients on the wire, a key of WIRE_BYTES.
        depth: Batches whose rows travel ahead in look-ahead. Of 1 and more the prediction is the
            same: as many rows and gradients travel, and those of the next step are as urgent. With
            0 all of them are.

    Raises:
        ValueError: If the wire type is unknown, or the depth negative.
    """

    kind: PipelineKind = PipelineKind.sparse_dist
    wire: str = "fp32"
    depth: int = 1

    def __post_init__(self) -> None:
        if self.wire not in WIRE_BYTES:
            raise ValueError(
                f"pipeline wire: expected one of {sorted(WIRE_BYTES)}, got {self.wire!r}."
            )
        if self.depth < 0:
            raise ValueError(f"pipeline depth: expected at least 0, got {self.depth}.")

    @property
    def narrow_frac(self) -> float:
        """Bytes of a value on the wire, over those of a float32."""
        return WIRE_BYTES[self.wire] / WIRE_BYTES["fp32"]

    @property
    def is_look_ahead(self) -> bool:
        return self.kind is PipelineKind.look_ahead

    @property
    def of_torchrec(self) -> PipelineSpec:
        """The pipeline of unsplit tables where this one trains hot and cold rows."""
        return replace(self, kind=PipelineKind.sparse_dist) if self.is_look_ahead else self


SPARSE_DIST = PipelineSpec()
LOOK_AHEAD = PipelineSpec(PipelineKind.look_ahead)


# What a rank does in a step. "groups" are sets of tables that share messages: one per dimension.
QUANTITIES = (
    "lookups",  # ids that are routed and pooled from rows
    "lookup_bytes",  # 4 D of each
    "rows_device",  # distinct cold rows read, by the tier they live in; and 4 D of each
    "bytes_device",
    "rows_host",
    "bytes_host",
    "rows_hit",
    "bytes_hit",
    "rows_miss",
    "bytes_miss",
    "state_bytes_host",  # element-wise optimizer state of rows in host tiers, cached or not
    "cold_groups",  # dimensions with cold rows
    "urgent_rows",  # of the distinct cold rows, those that some rank reads in the next step too
    "urgent_bytes",
    "hot_rows",  # distinct hot rows of this rank
    "hot_bytes",
    "union_rows",  # distinct hot rows of any rank
    "union_bytes",
    "replica_rows",  # hot rows, touched or not
    "replica_bytes",
    "hot_groups",
    "pooled_ids_device",  # ids that this rank pools for all ranks in TorchRec's kernel, by tier
    "pooled_bytes_device",  # 4 D of each
    "pooled_ids_host",
    "pooled_bytes_host",
    "pooled_ids_hit",
    "pooled_bytes_hit",
    "pooled_ids_miss",
    "pooled_bytes_miss",
    "pooled_sent_ids",  # ids that this rank requests from others
    "pooled_sent_bytes",  # bytes of pooled vectors that this rank sends
    "pooled_groups",
    "replicated_ids",  # of TorchRec's data-parallel tables
    "replicated_id_bytes",
    "replicated_rows",
    "replicated_bytes",
    "replicated_groups",
)
BYTES_PER_ID = 8
# Where sharded rows are read: of quantities and kernels.
TIERS = ("device", "host", "hit", "miss")
BYTES_PER_FLOAT = 4


@dataclass(frozen=True)
class Workload:
    """The batch and the dense layers.

    Args:
        batch_size: Batch B of a rank.
        dense_flops: Floating-point operations of the dense layers per sample, both ways.
        bottom_frac: Share of them in the bottom layers, under which rows travel.
        num_dense_values: Parameters of the dense layers.
        is_routed_by_loader: Whether loader workers route ids, outside the step.
    """

    batch_size: int
    dense_flops: float
    bottom_frac: float
    num_dense_values: int
    is_routed_by_loader: bool = False


@dataclass
class Form:
    """``constant + sum of coefficient * quantity``."""

    constant: float = 0.0
    terms: dict[str, float] = field(default_factory=dict)

    def add(self, quantity: str, coefficient: float) -> Form:
        assert quantity in QUANTITIES, quantity
        if coefficient:
            self.terms[quantity] = self.terms.get(quantity, 0.0) + coefficient
        return self

    def add_line(self, line: Line, items: str, num_bytes: str | None, factor: float = 1) -> Form:
        """Seconds of a kernel, without its fixed part, which is the caller's to place."""
        self.add(items, line.per_item_s * factor)
        return self.add(num_bytes, line.per_byte_s * factor) if num_bytes else self

    def add_form(self, form: Form, factor: float = 1.0) -> Form:
        self.constant += form.constant * factor
        for quantity, coefficient in form.terms.items():
            self.add(quantity, coefficient * factor)
        return self

    def scale(self, factor: float) -> None:
        self.constant *= factor
        self.terms.update({q: c * factor for q, c in self.terms.items()})

    def value(self, quantities: Mapping[str, float]) -> float:
        return self.constant + sum(c * quantities.get(q, 0.0) for q, c in self.terms.items())


@dataclass(frozen=True)
class StageForm:
    """One stage: ``compute + max(0, wire - overlap * cover)`` seconds, and bytes sent.

    Of what travels, ``compute`` holds the share that nothing can hide, ``wire`` the rest.
    """

    compute: Form
    wire: Form
    cover: Form
    sent_bytes: Form


@dataclass(frozen=True)
class StepPrediction:
    """What a step is predicted to take on the mean rank.

    Args:
        step_s: The whole step.
        stage_s: Exposed seconds of each stage, which add up to ``step_s``.
        hidden_s: Seconds of each stage's communication that computation hides.
        sent_bytes: Bytes that a rank sends in each stage.
    """

    step_s: float
    stage_s: Mapping[str, float]
    hidden_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]

    @property
    def total_sent_bytes(self) -> float:
        return sum(self.sent_bytes.values())


# Optimizers with a state as long as a row, which FBGEMM keeps in host memory where the row is and
# never caches. Costs that were measured with one of them have it in the updates of host rows.
ELEMENT_WISE = ("adagrad", "adam")


def add_overhead(compute: Form, stage: str, seconds: float) -> None:
    """What a stage takes whatever it does, where it is there at all."""
    if stage in ("route", "pool"):
        _add_once(compute, seconds)
    elif stage in ("ids_exchange", "rows_exchange", "grads_exchange", "row_update"):
        compute.add("cold_groups", seconds).add("pooled_groups", seconds)
    elif stage == "hot_exchange":
        compute.add("hot_groups", seconds).add("replicated_groups", seconds)
    else:
        compute.constant += seconds


def _add_once(compute: Form, seconds: float) -> None:
    """Seconds of a call that hot and cold rows share; a form cannot say "if there is either"."""
    for group in ("cold_groups", "hot_groups"):
        compute.add(group, seconds * 2 / 3)


def add_compute(
    stages: Mapping[str, StageForm], costs: Costs, world: World, workload: Workload
) -> None:
    """Add the seconds of the kernels to the compute forms; hot rows as TorchRec exchanges them."""
    kernel = costs.kernels
    route, lookup, update = (stages[s].compute for s in ("route", "row_lookup", "row_update"))
    if not workload.is_routed_by_loader:
        route.add_line(kernel["route"], "lookups", None)
        _add_once(route, kernel["route"].fixed_s)
    for tier in TIERS:
        reading = kernel.get(f"read_{tier}")
        updating = kernel.get(f"update_{'hit' if tier == 'miss' else tier}")
        if reading is not None and updating is not None:
            lookup.add_line(reading, f"rows_{tier}", f"bytes_{tier}")
            update.add_line(updating, f"rows_{tier}", f"bytes_{tier}")
        reading = kernel.get(f"pooled_{tier}")
        updating = kernel.get(f"pooled_update_{'hit' if tier == 'miss' else tier}")
        if reading is not None and updating is not None:
            ids, num_bytes = f"pooled_ids_{tier}", f"pooled_bytes_{tier}"
            lookup.add_line(reading, ids, num_bytes)
            update.add_line(updating, ids, num_bytes)
    if "read_host" in kernel and costs.facts.get("optimizer") not in ELEMENT_WISE:
        # Read and written over the bus, both ways at once.
        update.add("state_bytes_host", kernel["read_host"].per_byte_s)
    lookup.add("cold_groups", kernel["read_device"].fixed_s)
    update.add("cold_groups", kernel["update_device"].fixed_s)
    lookup.add("pooled_groups", kernel["pooled_device"].fixed_s)
    update.add("pooled_groups", kernel["pooled_update_device"].fixed_s)
    lookup.add_line(kernel["hot_read"], "hot_rows", "hot_bytes")
    lookup.add("hot_groups", kernel["hot_read"].fixed_s)
    lookup.add_line(kernel["replicated_read"], "replicated_ids", "replicated_id_bytes")
    lookup.add("replicated_groups", kernel["replicated_read"].fixed_s)
    pool = stages["pool"].compute.add_line(kernel["pool"], "lookups", "lookup_bytes")
    _add_once(pool, kernel["pool"].fixed_s)
    dense = kernel["dense"].seconds(workload.dense_flops * workload.batch_size)
    stages["dense"].compute.constant += dense
    optimizer = stages["optimizer"].compute
    optimizer.add_line(kernel["hot_update"], "union_rows", "union_bytes")
    optimizer.add("hot_groups", kernel["hot_update"].fixed_s)
    optimizer.add_line(kernel["replicated_update"], "replicated_rows", "replicated_bytes")
    optimizer.add("replicated_groups", kernel["replicated_update"].fixed_s)
    optimizer.constant += kernel["dense_update"].seconds(workload.num_dense_values)
    hot = stages["hot_exchange"].compute
    if world.num_ranks > 1:
        hot.add_line(kernel["hot_pack"], "hot_rows", "hot_bytes")
        hot.add("hot_groups", kernel["hot_pack"].fixed_s)
        hot.add_line(kernel["hot_add"], "hot_rows", "hot_bytes", world.num_ranks)
