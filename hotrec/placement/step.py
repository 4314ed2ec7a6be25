"""The step: seconds by stage, linear in what a rank does.

Each stage takes ``compute + wire - overlap * min(wire, cover)`` seconds, all three linear in the
quantities of QUANTITIES; ``cover`` is computation under which the stage's messages travel, and
``overlap`` the share of that time that is really saved (sending takes processor time on CPU). The
same forms serve prediction and optimisation, so what the optimiser proves is what is predicted.
Measured collectives are no lines; they are made lines at the message sizes of the step in question.

All quantities are of one rank and one step, in the mean over ranks. Bytes on the wire are counted
as ``hotrec.traffic`` counts them (W ranks, n bytes):

    ids         all_to_all, 8 bytes an id asked of another rank
    rows        all_to_all of the distinct rows, 4 D (W-1)/W each, and as much for their gradients
    pooled      all_to_all of one vector a bag, and as much for its gradient
    hot rows    all_gather of (slot, gradient row), (W-1) (4 D + 4) each; or all_reduce of them all
    dense       all_reduce of every parameter, 2 (W-1)/W 4 each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrec.costs import STAGES, Costs, Line, World

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
    "cold_groups",  # dimensions with cold rows
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
BYTES_PER_FLOAT = 4
COVERED = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")


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


@dataclass(frozen=True)
class StepModel:
    """The forms of all stages for one machine, world, workload and hot exchange.

    Args:
        stages: by name, in the order of STAGES.
        overlap: share of a cover that hides what travels.
    """

    stages: Mapping[str, StageForm]
    overlap: float

    def predict(self, quantities: Mapping[str, float]) -> StepPrediction:
        """Seconds and bytes of a step that does ``quantities``."""
        stage_s, hidden_s, sent = {}, {}, {}
        for name, form in self.stages.items():
            wire_s = form.wire.value(quantities)
            hidden_s[name] = min(wire_s, self.overlap * form.cover.value(quantities))
            stage_s[name] = form.compute.value(quantities) + wire_s - hidden_s[name]
            sent[name] = form.sent_bytes.value(quantities)
        return StepPrediction(sum(stage_s.values()), stage_s, hidden_s, sent)


def predict_step(
    costs: Costs,
    world: World,
    workload: Workload,
    quantities: Mapping[str, float],
    *,
    is_hot_dense: bool = False,
) -> StepPrediction:
    """Predict one step, with measured collectives as they are at its message sizes."""
    model = make_step_model(costs, world, workload, is_hot_dense=is_hot_dense, at=quantities)
    return model.predict(quantities)


def make_step_model(
    costs: Costs,
    world: World,
    workload: Workload,
    *,
    is_hot_dense: bool = False,
    at: Mapping[str, float] | None = None,
) -> StepModel:
    """The forms of a step.

    Args:
        costs: of the machine.
        world: ranks and hosts.
        workload: batch and dense layers.
        is_hot_dense: the hot exchange is a dense all-reduce.
        at: quantities of a step at whose message sizes measured collectives become lines; None: the
            lines that fit all sizes best.

    Raises:
        CostsError: if the costs know nothing of several hosts.
    """
    stages = {name: StageForm(Form(), Form(), Form(), Form()) for name in STAGES}
    _add_compute(stages, costs, world, workload)
    _add_messages(stages, costs, world, workload, is_hot_dense, at)
    for name, form in stages.items():
        factor = costs.correction(name)
        form.compute.scale(factor)
        form.wire.scale(factor)
    for name in STAGES:
        waiting_s = costs.waiting_frac.get(name, 0.0) * stages["dense"].compute.constant
        overhead_s = costs.stage_overhead_s.get(name, 0.0) + waiting_s
        if name == "other":
            overhead_s += costs.overhead_s
        _add_overhead(stages[name].compute, name, overhead_s)
    _add_covers(stages, workload)
    for name in COVERED:
        # The share that cannot be hidden counts as computation.
        stages[name].compute.add_form(stages[name].wire, 1 - costs.overlap)
        stages[name].wire.scale(costs.overlap)
    return StepModel(stages, costs.overlap)


def _add_overhead(compute: Form, stage: str, seconds: float) -> None:
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


def _add_compute(
    stages: Mapping[str, StageForm], costs: Costs, world: World, workload: Workload
) -> None:
    kernel = costs.kernels
    route, lookup, update = (stages[s].compute for s in ("route", "row_lookup", "row_update"))
    if not workload.is_routed_by_loader:
        route.add_line(kernel["route"], "lookups", None)
        _add_once(route, kernel["route"].fixed_s)
    for tier in ("device", "host", "hit", "miss"):
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


def _add_messages(
    stages: Mapping[str, StageForm],
    costs: Costs,
    world: World,
    workload: Workload,
    is_hot_dense: bool,
    at: Mapping[str, float] | None,
) -> None:
    if world.num_ranks == 1:
        return
    others = (world.num_ranks - 1) / world.num_ranks
    copy = costs.kernels["copy"]
    ids = stages["ids_exchange"]
    for tier in ("device", "host", "hit", "miss"):
        ids.sent_bytes.add(f"rows_{tier}", BYTES_PER_ID * others)
    ids.sent_bytes.add("pooled_sent_ids", BYTES_PER_ID)
    line = costs.collective("all_to_all", world, _message_bytes(ids.sent_bytes, at))
    ids.wire.add_form(ids.sent_bytes, line.per_byte_s)
    for group in ("cold_groups", "pooled_groups"):
        # Split sizes, then lengths and ids; the main thread waits for the first.
        ids.compute.add(group, line.fixed_s)
        ids.wire.add(group, 2 * line.fixed_s)
    for name in ("rows_exchange", "grads_exchange"):
        stage = stages[name]
        for tier in ("device", "host", "hit", "miss"):
            stage.sent_bytes.add(f"bytes_{tier}", others)
        stage.sent_bytes.add("pooled_sent_bytes", 1.0)
        line = costs.collective("all_to_all", world, _message_bytes(stage.sent_bytes, at))
        stage.wire.add_form(stage.sent_bytes, line.per_byte_s)
        stage.compute.add_form(stage.sent_bytes, copy.per_byte_s)
        for group in ("cold_groups", "pooled_groups"):
            stage.wire.add(group, line.fixed_s)
    dense_bytes = 2 * others * BYTES_PER_FLOAT * workload.num_dense_values
    stages["other"].sent_bytes.constant = dense_bytes
    line = costs.collective("all_reduce", world, dense_bytes or None)
    stages["other"].wire.constant = line.seconds(num_bytes=dense_bytes)
    _add_hot_exchange(stages["hot_exchange"], costs, world, is_hot_dense, at)


def _add_hot_exchange(
    hot: StageForm,
    costs: Costs,
    world: World,
    is_hot_dense: bool,
    at: Mapping[str, float] | None,
) -> None:
    others = (world.num_ranks - 1) / world.num_ranks
    reduced, gathered = Form(), Form()
    reduced.add("replicated_bytes", 2 * others)
    peers = world.num_ranks - 1
    if is_hot_dense:
        reduced.add("replica_bytes", 2 * others)
        gathered.add("hot_rows", BYTES_PER_ID * peers)
    else:
        gathered.add("hot_bytes", peers).add("hot_rows", BYTES_PER_FLOAT * peers)
    hot.sent_bytes.add_form(reduced).add_form(gathered)
    reduce = costs.collective("all_reduce", world, _message_bytes(reduced, at))
    gather = costs.collective("all_gather", world, _message_bytes(gathered, at))
    hot.wire.add_form(gathered, gather.per_byte_s).add_form(reduced, reduce.per_byte_s)
    hot.wire.add("hot_groups", 2 * gather.fixed_s + (reduce.fixed_s if is_hot_dense else 0.0))
    hot.wire.add("replicated_groups", reduce.fixed_s)
    hot.compute.add_form(gathered, costs.kernels["copy"].per_byte_s)


def _message_bytes(sent_bytes: Form, at: Mapping[str, float] | None) -> float | None:
    """What one message of a step sends; messages of several groups are of one size here."""
    if at is None:
        return None
    groups = ("cold_groups", "pooled_groups", "hot_groups")
    num_messages = max(1.0, *(at.get(group, 0.0) for group in groups))
    num_bytes = sent_bytes.value(at) / num_messages
    return num_bytes if num_bytes > 0 else None


def _add_covers(stages: Mapping[str, StageForm], workload: Workload) -> None:
    """What is computed while the messages of a stage travel.

    The next batch's ids travel during the whole step (TorchRec's pipeline); rows during the bottom
    layers' forward pass, a third of their work; gradients of rows during its backward pass;
    gradients of hot rows during the update of the cold ones; those of the dense layers while ranks
    wait for gradients of rows, and during that update.
    """
    dense = stages["dense"].compute
    stages["ids_exchange"].cover.add_form(dense).add_form(stages["pool"].compute)
    stages["rows_exchange"].cover.add_form(dense, workload.bottom_frac / 3)
    stages["grads_exchange"].cover.add_form(dense, workload.bottom_frac * 2 / 3)
    stages["hot_exchange"].cover.add_form(stages["row_update"].compute)
    cover = stages["other"].cover.add_form(stages["row_update"].compute)
    cover.add_form(stages["grads_exchange"].wire)
