"""Linear forms: seconds by stage of a step, as functions of a rank's quantities of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrec.cost_model.costs import Costs, Line, World
from hotrec.types import PipelineSpec

BYTES_PER_ID = 8
BYTES_PER_FLOAT = 4
SLOT_BYTES = 4
# Hot rows that a rank sends in the hot exchange: its own to their owners, and the sums.
HOT_ROWS = ("hot_rows", "union_rows")
# Slots and values to the owners, and back.
NUM_HOT_MESSAGES = 4


SPARSE_DIST = PipelineSpec()

# Tiers from which TorchRec's unsplit tables are read, in the names of quantities and kernels.
TIERS = ("device", "host", "hit", "miss")
# A rank's work in a step: items, and the quantity of their bytes, 4 D each.
BYTES_OF = {
    "lookups": "lookup_bytes",  # ids that are routed, and pooled or expanded from rows
    "cold_rows": "cold_bytes",  # distinct cold rows of this rank
    "urgent_rows": "urgent_bytes",  # those that some rank also reads in the next step
    "hot_rows": "hot_bytes",  # distinct hot rows of this rank
    # Distinct rows of the ranks of a host, of which a rank relays its share; 0 in one level.
    "relayed_rows": "relayed_bytes",  # cold
    "relayed_urgent_rows": "relayed_urgent_bytes",
    "relayed_hot_rows": "relayed_hot_bytes",
    "union_rows": "union_bytes",  # distinct hot rows of any rank
    # ids that this rank looks up for all ranks in TorchRec's kernel, which pools them, if they are
    **{f"pooled_ids_{tier}": f"pooled_bytes_{tier}" for tier in TIERS},
    "replicated_ids": "replicated_id_bytes",  # of TorchRec's data-parallel tables
    "replicated_rows": "replicated_bytes",
    "fetched_rows": "fetched_bytes",  # with their state, from host memory into slots
    "mapped_rows": "mapped_bytes",  # the same, read by the device
    "returned_rows": "returned_bytes",  # changed rows written back
}
QUANTITIES = (
    *BYTES_OF,
    *BYTES_OF.values(),
    "state_bytes_host",  # element-wise optimizer state of rows in host tiers, cached or not
    "pooled_sent_ids",  # ids that this rank requests from others
    "pooled_sent_bytes",  # bytes of pooled vectors, or of a row per id, that this rank sends
    "permuted_bytes",  # of a row per id, which TorchRec reorders before or after it is sent
    "cold_groups",  # sets of tables that share messages: one per dimension
    "hot_groups",
    "pooled_groups",
    "replicated_groups",
)


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

    def add_line(self, line: Line, items: str, factor: float = 1.0) -> Form:
        """Add the variable time of a kernel; the caller adds the fixed part."""
        self.add(items, line.per_item_s * factor)
        return self.add(BYTES_OF[items], line.per_byte_s * factor)

    def add_form(self, form: Form, factor: float = 1.0) -> Form:
        self.constant += form.constant * factor
        for quantity, coefficient in form.terms.items():
            self.add(quantity, coefficient * factor)
        return self

    def scale(self, factor: float, of: Mapping[str, float] | None = None) -> None:
        """Scale all terms; those of the quantities in ``of`` by their own factors."""
        self.constant *= factor
        own = of or {}
        self.terms.update({q: c * own.get(q, factor) for q, c in self.terms.items()})

    def value(self, quantities: Mapping[str, float]) -> float:
        return self.constant + sum(c * quantities.get(q, 0.0) for q, c in self.terms.items())


@dataclass(frozen=True)
class StageForm:
    """One stage: ``compute + max(0, wire - overlap * cover)`` seconds, and bytes sent.

    ``compute`` includes the share of communication that cannot be hidden, ``wire`` the rest. Of the
    bytes, ``between_hosts_bytes`` go to other hosts.
    """

    compute: Form = field(default_factory=Form)
    wire: Form = field(default_factory=Form)
    cover: Form = field(default_factory=Form)
    sent_bytes: Form = field(default_factory=Form)
    between_hosts_bytes: Form = field(default_factory=Form)

    def send(self, form: Form, line: Line, between_hosts_frac: float) -> None:
        """Add the bytes of a collective, and their seconds without its fixed part."""
        self.sent_bytes.add_form(form)
        self.between_hosts_bytes.add_form(form, between_hosts_frac)
        self.wire.add_form(form, line.per_byte_s)


@dataclass(frozen=True)
class StepPrediction:
    """The predicted step of the mean rank.

    Args:
        step_s: The whole step.
        stage_s: Exposed seconds of each stage, which add up to ``step_s``.
        hidden_s: Seconds of each stage's communication that computation hides.
        sent_bytes: Bytes that a rank sends in each stage.
        between_hosts_bytes: Of all these, bytes to ranks of other hosts.
    """

    step_s: float
    stage_s: Mapping[str, float]
    hidden_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]
    between_hosts_bytes: float = 0.0

    @property
    def total_sent_bytes(self) -> float:
        return sum(self.sent_bytes.values())


# Optimizers with a state as long as a row, which FBGEMM keeps in host memory with the row and never
# caches. Costs measured with one of them include it in the updates of host rows.
ELEMENT_WISE = ("adagrad", "adam")
# Kernels of a stage: their items, and the groups with one call each.
KERNELS_OF_STAGE: tuple[tuple[str, str, str, str | None], ...] = (
    ("row_lookup", "read_device", "cold_rows", None),
    *(("row_lookup", f"pooled_{tier}", f"pooled_ids_{tier}", None) for tier in TIERS),
    ("row_lookup", "hot_read", "hot_rows", "hot_groups"),
    ("row_lookup", "replicated_read", "replicated_ids", "replicated_groups"),
    ("row_update", "update_device", "cold_rows", None),
    *(("row_update", f"pooled_update_{tier}", f"pooled_ids_{tier}", None) for tier in TIERS),
    ("optimizer", "hot_update", "union_rows", "hot_groups"),
    ("optimizer", "replicated_update", "replicated_rows", "replicated_groups"),
)


def add_overhead(compute: Form, stage: str, seconds: float) -> None:
    """Add the fixed time of a stage, if the stage exists."""
    if stage in ("route", "pool"):
        _add_once(compute, seconds)
    elif stage == "ids_exchange":
        _add_once(compute, seconds)
        compute.add("pooled_groups", seconds)
    elif stage in ("rows_exchange", "grads_exchange", "row_update"):
        compute.add("cold_groups", seconds).add("pooled_groups", seconds)
    elif stage == "hot_exchange":
        compute.add("hot_groups", seconds).add("replicated_groups", seconds)
    else:
        compute.constant += seconds


def _add_once(compute: Form, seconds: float) -> None:
    """Seconds of a call that hot and cold rows share; a form cannot say "if there is either"."""
    for group in ("cold_groups", "hot_groups"):
        compute.add(group, seconds * 2 / 3)


def add_compute(stages: Mapping[str, StageForm], costs: Costs, workload: Workload) -> None:
    """Add the seconds of the kernels to the compute forms, except those of the hot exchange."""
    kernel = costs.kernels
    if not workload.is_routed_by_loader:
        stages["route"].compute.add("lookups", kernel["route"].per_item_s)
        _add_once(stages["route"].compute, kernel["route"].fixed_s)
    for stage, name, items, group in KERNELS_OF_STAGE:
        # A row that missed the cache is in the cache when it is updated.
        line = kernel.get(name.replace("update_miss", "update_hit"))
        if line is not None:
            form = stages[stage].compute.add_line(line, items)
            if group:
                form.add(group, line.fixed_s)
    lookup, update = stages["row_lookup"].compute, stages["row_update"].compute
    lookup.add("cold_groups", kernel["read_device"].fixed_s)
    lookup.add("pooled_groups", kernel["pooled_device"].fixed_s)
    update.add("cold_groups", kernel["update_device"].fixed_s)
    update.add("pooled_groups", kernel["pooled_update_device"].fixed_s)
    if "pooled_host" in kernel and costs.facts.get("optimizer") not in ELEMENT_WISE:
        # Read and written over the bus, both ways at once.
        update.add("state_bytes_host", kernel["pooled_host"].per_byte_s)
    _add_once(stages["pool"].compute.add_line(kernel["pool"], "lookups"), kernel["pool"].fixed_s)
    dense_s = kernel["dense"].seconds(workload.dense_flops * workload.batch_size)
    stages["dense"].compute.constant += dense_s
    update_s = kernel["dense_update"].seconds(workload.num_dense_values)
    stages["optimizer"].compute.constant += update_s


def add_hot_pack(compute: Form, costs: Costs) -> Form:
    """Add the seconds of putting touched hot rows into messages."""
    line = costs.kernels["hot_pack"]
    return compute.add_line(line, "hot_rows").add("hot_groups", line.fixed_s)


def hot_messages(world: World, narrow_frac: float) -> tuple[Form, Form]:
    """The bytes of the hot exchange among all ranks, or those of a host; and on rails.

    With W ranks, R_r hot rows read by a rank, R_h by a host and ``union`` by any, a rank sends
    (W-1)/W (R_r + union) rows and slots. On H hosts of G ranks it sends (G-1)/G of these in fp32
    inside its host, and (H-1)/H (R_h + union) / G on its rail.
    """
    peers = world.ranks_per_host if world.has_levels else world.num_ranks
    among, on_rails = Form(), Form()
    for rows in HOT_ROWS:
        frac = (peers - 1) / peers
        narrow = 1.0 if world.has_levels else narrow_frac
        among.add(BYTES_OF[rows], frac * narrow).add(rows, frac * SLOT_BYTES)
    if world.has_levels:
        frac = (world.num_hosts - 1) / world.num_hosts
        for rows, share in (("relayed_hot_rows", frac), ("union_rows", frac / peers)):
            on_rails.add(BYTES_OF[rows], share * narrow_frac).add(rows, share * SLOT_BYTES)
    return among, on_rails
