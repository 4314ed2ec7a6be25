"""Values of the step models: quantities, linear forms of them, the workload, a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrec.costs import Line

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
    "pooled_sent_ids",  # ids that this rank asks of others
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
    """What is trained, apart from the tables.

    Args:
        batch_size: B, per rank.
        dense_flops: floating-point operations of the dense layers per sample, both ways.
        bottom_frac: share of them in the bottom layers, under which rows travel.
        num_dense_values: parameters of the dense layers.
        is_routed_by_loader: ids are routed in loader workers, off the step's time line.
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
        step_s: the whole step.
        stage_s: by stage, what is not hidden; adds up to ``step_s``.
        hidden_s: by stage, communication that travels under computation.
        sent_bytes: by stage, of a rank.
    """

    step_s: float
    stage_s: Mapping[str, float]
    hidden_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]

    @property
    def total_sent_bytes(self) -> float:
        return sum(self.sent_bytes.values())
