"""The step of TorchRec's pipelines: seconds by stage, linear in the quantities of the mean rank.

Prediction and search use the same forms, so the search minimises the predicted step. Measured
collectives are not linear in the message size and are linearised at the sizes of a given step.
Bytes on the wire are counted as ``hotrec.runtime.traffic`` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from hotrec.cost_model.costs import Costs, Line, World
from hotrec.cost_model.forms import (
    BYTES_PER_FLOAT,
    BYTES_PER_ID,
    HOT_ROWS,
    NUM_HOT_MESSAGES,
    SPARSE_DIST,
    TIERS,
    Form,
    StageForm,
    StepPrediction,
    Workload,
    add_compute,
    add_hot_pack,
    add_overhead,
    hot_messages,
)
from hotrec.cost_model.look_ahead import POSITION_BYTES, LookAheadModel
from hotrec.types import STAGES, Levels, PipelineKind, PipelineSpec

COVERED = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
# TorchRec's messages of pooled vectors, of rows and of replicas, which have separate corrections.
THEIR_MESSAGES = (
    *("pooled_sent_bytes", "pooled_groups", "permuted_bytes"),
    *("replicated_bytes", "replicated_groups"),
)


def with_loader(
    step: StepPrediction,
    *,
    loader_s: tuple[float, float],
    num_workers: int,
    ranks_per_host: int,
    cores_per_host: float,
    overlap: float,
    slowdown: float = 1.0,
) -> StepPrediction:
    """Returns the step with a loader that shares the host's cores.

    The maximum of

        step + main + delay                                the main thread gets or makes the batch
        worker / workers                                   each worker makes every n-th batch
        ranks (busy / slowdown + main + worker) / cores    a host's work, on all of its cores

    where a rank is busy while its main thread computes, and for the share of communication that
    uses processor time, 1 - ``overlap``. Workers without a core besides the ranks' cores do not
    wait until a rank is idle: they delay it for the share of the step for which it is busy,

        delay = busy / step max(0, worker - step max(0, cores - ranks) / ranks)

    The difference is added to the stage "other".

    Args:
        step: Step without a loader.
        loader_s: Processor seconds of a batch, main thread and worker (``Costs.loader_s``).
        num_workers: Loader workers of a rank.
        ranks_per_host: Ranks of a host.
        cores_per_host: Cores of a host that they share.
        overlap: ``Costs.overlap``.
        slowdown: Factor by which the step's computation is longer than on a dedicated core, because
            ranks shared cores in the measurement.
    """
    computing_s = sum(s for name, s in step.stage_s.items() if name not in COVERED)
    sending_s = sum(step.stage_s.get(name, 0.0) for name in COVERED) + sum(step.hidden_s.values())
    busy_s = min(computing_s + (1 - overlap) * sending_s, step.step_s)
    main_s, worker_s = loader_s
    spare_cores = max(0.0, cores_per_host - ranks_per_host) / ranks_per_host
    unserved_s = max(0.0, worker_s - spare_cores * step.step_s)
    delay_s = busy_s / step.step_s * unserved_s if unserved_s > 0 else 0.0
    step_s = max(
        step.step_s + main_s + delay_s,
        worker_s / max(1, num_workers),
        ranks_per_host * (busy_s / slowdown + main_s + worker_s) / cores_per_host,
    )
    stage_s = {**step.stage_s, "other": step.stage_s.get("other", 0.0) + step_s - step.step_s}
    return replace(step, step_s=step_s, stage_s=stage_s)


@dataclass(frozen=True)
class StepModel:
    """The forms of all stages, in order; ``overlap`` of computation hides communication."""

    stages: Mapping[str, StageForm]
    overlap: float

    def predict(self, quantities: Mapping[str, float]) -> StepPrediction:
        """Predicts seconds and bytes of a step with these quantities."""
        stage_s, hidden_s, sent = {}, {}, {}
        for name, form in self.stages.items():
            wire_s = form.wire.value(quantities)
            hidden_s[name] = min(wire_s, self.overlap * form.cover.value(quantities))
            stage_s[name] = form.compute.value(quantities) + wire_s - hidden_s[name]
            sent[name] = form.sent_bytes.value(quantities)
        between = sum(form.between_hosts_bytes.value(quantities) for form in self.stages.values())
        return StepPrediction(sum(stage_s.values()), stage_s, hidden_s, sent, between)


def make_model(
    costs: Costs,
    world: World,
    workload: Workload,
    *,
    pipeline: PipelineSpec,
    at: Mapping[str, float] | None = None,
) -> StepModel | LookAheadModel:
    """Creates the model of a pipeline's step with hot and cold rows, see ``make_step_model``.

    Look-ahead ignores ``at``: it reads measured collectives at the predicted message sizes.
    """
    if pipeline.is_look_ahead:
        return LookAheadModel(costs, world, workload, pipeline)
    return make_step_model(costs, world, workload, pipeline=pipeline, at=at)


def _prefetched(lookup: StageForm, dense: Form) -> StageForm:
    """Returns the lookup stage with the extra time of cache misses under the dense layers."""
    compute, wire = Form().add_form(lookup.compute), Form()
    for kind in ("pooled_ids", "pooled_bytes"):
        miss, hit = (lookup.compute.terms.get(f"{kind}_{tier}", 0.0) for tier in ("miss", "hit"))
        fetch = max(miss - hit, 0.0)
        compute.add(f"{kind}_miss", -fetch)
        wire.add(f"{kind}_miss", fetch)
    return replace(lookup, compute=compute, wire=wire, cover=Form().add_form(dense))


def make_step_model(
    costs: Costs,
    world: World,
    workload: Workload,
    *,
    pipeline: PipelineSpec = SPARSE_DIST,
    at: Mapping[str, float] | None = None,
) -> StepModel:
    """Creates the linear model of a step of TorchRec's pipeline.

    Args:
        pipeline: ``base`` is sparse_dist without overlap of the ids. ``prefetch`` is sparse_dist
            whose device caches fetch the next batch's rows under the dense layers; FBGEMM's
            backward waits for them. Any other counts as sparse_dist.
        at: Quantities of a step at whose message sizes measured collectives are linearised; None
            for the line that fits all sizes best.

    Raises:
        CostsError: If the costs lack the link between hosts.
    """
    stages = {name: StageForm() for name in STAGES}
    add_compute(stages, costs, workload)
    if world.num_ranks > 1:
        _add_messages(stages, costs, world, workload, at, pipeline)
    _add_covers(stages, workload)
    for name in COVERED:
        # The share that cannot be hidden counts as computation.
        stages[name].compute.add_form(stages[name].wire, 1 - costs.overlap)
        stages[name].wire.scale(costs.overlap)
    if pipeline.kind is PipelineKind.base:
        stages["ids_exchange"] = replace(stages["ids_exchange"], cover=Form())
    elif pipeline.kind is PipelineKind.prefetch:
        stages["row_lookup"] = _prefetched(stages["row_lookup"], stages["dense"].compute)
    is_pooled = (at or {}).get("cold_rows", 0.0) == 0 and (at or {}).get("pooled_groups", 0.0) > 0
    for name, stage in stages.items():
        # Factors are fitted to the exposed time of a stage, so they scale that.
        own, theirs = costs.correction(name), costs.correction(name, of_torchrec=True)
        for form in (stage.compute, stage.wire):
            form.scale(own, dict.fromkeys(THEIR_MESSAGES, theirs))
        stage.cover.scale(theirs if is_pooled else own)
    for name in STAGES:
        waiting_s = costs.waiting_frac.get(name, 0.0) * stages["dense"].compute.constant
        overhead_s = costs.stage_overhead_s.get(name, 0.0) + waiting_s
        if name == "other":
            overhead_s += costs.overhead_s
        add_overhead(stages[name].compute, name, overhead_s)
    return StepModel(stages, costs.overlap)


def _add_messages(
    stages: Mapping[str, StageForm],
    costs: Costs,
    world: World,
    workload: Workload,
    at: Mapping[str, float] | None,
    pipeline: PipelineSpec,
) -> None:
    """Adds the messages, and the kernels of the hot exchange.

    ids       all_to_all, 4 bytes for each row requested from another rank, 8 for each id of
              pooled tables; every id is sorted before and after
    rows      all_to_all of the distinct rows, 4 D (W-1)/W each, and their gradients
    pooled    all_to_all of one vector a bag, or one row an id of unpooled tables, which are
              reordered at the price of a copy; and as much for its gradient
    hot rows  (slot, gradient row) to the owners, and their sums back, (W-1)/W (4 D + 4) each
    dense     all_reduce of every parameter, 2 (W-1)/W 4 each

    On H hosts of G ranks, hot rows are added up inside hosts and then among them, see
    ``LookAheadModel``. In two levels, requests and rows cross inside hosts, (G-1)/G, and on rails,
    (H-1)/H of the rows that a rank relays.
    """
    others = (world.num_ranks - 1) / world.num_ranks
    narrow_frac, copy = pipeline.narrow_frac, costs.kernels["copy"]
    ids = stages["ids_exchange"]
    add_all_to_all = partial(_add_all_to_all, costs, world, pipeline, at)
    fixed = add_all_to_all(
        ids,
        {"cold_rows": POSITION_BYTES},
        relayed=("relayed_rows", POSITION_BYTES),
        pooled=("pooled_sent_ids", BYTES_PER_ID),
    )
    for kernel, items, group in (
        ("order_row", ("cold_rows",), "cold_groups"),
        ("order_id", tuple(f"pooled_ids_{tier}" for tier in TIERS), "pooled_groups"),
    ):
        order = costs.kernels.get(kernel, Line())  # costs of earlier versions lack these
        ids.compute.add(group, order.fixed_s)
        for of in items:
            ids.compute.add(of, order.per_item_s)
    for group, fixed_s in fixed.items():
        # Split sizes, then lengths and ids; the main thread waits for the split sizes.
        ids.compute.add(group, fixed_s)
        ids.wire.add(group, 2 * fixed_s)
    for name in ("rows_exchange", "grads_exchange"):
        stage = stages[name]
        fixed = add_all_to_all(
            stage,
            {"cold_bytes": narrow_frac},
            relayed=("relayed_bytes", narrow_frac),
            pooled=("pooled_sent_bytes", narrow_frac),
        )
        stage.compute.add_form(stage.sent_bytes, copy.per_byte_s)
        stage.compute.add("permuted_bytes", copy.per_byte_s)
        for group, fixed_s in fixed.items():
            stage.wire.add(group, fixed_s)
    dense_bytes = 2 * others * BYTES_PER_FLOAT * workload.num_dense_values * narrow_frac
    reduced_frac = world.between_hosts_frac("all_reduce")
    line = costs.collective("all_reduce", world, dense_bytes or None)
    stages["other"].send(Form(dense_bytes), line, reduced_frac)
    stages["other"].wire.constant += line.fixed_s
    hot = stages["hot_exchange"]
    add_hot_pack(hot.compute, costs)
    for rows in HOT_ROWS:
        hot.compute.add_line(costs.kernels["hot_add"], rows)
    among, on_rails = hot_messages(world, narrow_frac)
    num_bytes = _message_bytes(among, at)
    if world.has_levels:
        lines = [
            (among, costs.collective("all_to_all", world.inside, num_bytes), 0.0),
            (on_rails, costs.on_rails("all_to_all", world, _message_bytes(on_rails, at)), 1.0),
        ]
    else:
        # Sent one by one between pairs of ranks, as gloo's all_gather is.
        line = costs.collective("all_gather", world, num_bytes)
        lines = [(among, line, world.between_hosts_frac("all_to_all"))]
    for form, line, to_others in lines:
        hot.send(form, line, to_others)
        hot.compute.add_form(form, copy.per_byte_s)
        hot.wire.add("hot_groups", NUM_HOT_MESSAGES * line.fixed_s)
    replicated = Form().add("replicated_bytes", 2 * others * narrow_frac)
    reduce = costs.collective("all_reduce", world, _message_bytes(replicated, at))
    hot.send(replicated, reduce, reduced_frac)
    hot.wire.add("replicated_groups", reduce.fixed_s)


def _add_all_to_all(
    costs: Costs,
    world: World,
    pipeline: PipelineSpec,
    at: Mapping[str, float] | None,
    stage: StageForm,
    of_rank: Mapping[str, float],
    relayed: tuple[str, float],
    pooled: tuple[str, float],
) -> dict[str, float]:
    """Adds the bytes of an all_to_all, and their seconds.

    Args:
        of_rank: Bytes of each item that a rank requests or serves, by quantity.
        relayed: The same of an item that it relays.
        pooled: The same of an item of pooled tables that it sends.

    Returns:
        Seconds of an empty exchange, by group.
    """
    others = (world.num_ranks - 1) / world.num_ranks
    to_others = world.between_hosts_frac("all_to_all")
    theirs = Form().add(*pooled)
    if not (world.has_levels and pipeline.levels is Levels.two):
        sent = Form()
        for quantity, num_bytes in of_rank.items():
            sent.add(quantity, num_bytes * others)
        sent.add_form(theirs)
        line = costs.collective("all_to_all", world, _message_bytes(sent, at))
        stage.send(sent, line, to_others)
        return {"cold_groups": line.fixed_s, "pooled_groups": line.fixed_s}
    inside, on_rails = Form(), Form()
    for quantity, num_bytes in of_rank.items():
        # In fp32 inside a host.
        whole = 1.0 if quantity.startswith("bytes_") else num_bytes
        inside.add(quantity, whole * (world.ranks_per_host - 1) / world.ranks_per_host)
    on_rails.add(relayed[0], relayed[1] * (world.num_hosts - 1) / world.num_hosts)
    line = costs.collective("all_to_all", world.inside, _message_bytes(inside, at))
    rail = costs.on_rails("all_to_all", world, _message_bytes(on_rails, at))
    flat = costs.collective("all_to_all", world, _message_bytes(theirs, at))
    stage.send(inside, line, 0.0)
    stage.send(on_rails, rail, 1.0)
    stage.send(theirs, flat, to_others)
    # The relay gathers rows, or adds them up.
    stage.compute.add_form(inside, costs.kernels["copy"].per_byte_s)
    return {"cold_groups": line.fixed_s + rail.fixed_s, "pooled_groups": flat.fixed_s}


def _message_bytes(sent_bytes: Form, at: Mapping[str, float] | None) -> float | None:
    """Bytes of one message of a step, with equal sizes for all groups of tables."""
    if at is None:
        return None
    groups = ("cold_groups", "pooled_groups", "hot_groups")
    num_messages = max(1.0, *(at.get(group, 0.0) for group in groups))
    num_bytes = sent_bytes.value(at) / num_messages
    return num_bytes if num_bytes > 0 else None


def _add_covers(stages: Mapping[str, StageForm], workload: Workload) -> None:
    """Adds the computation that covers the messages of each stage.

    The next batch's ids are sent during the whole step (TorchRec's pipeline); rows during the
    bottom layers' forward pass, a third of their work; gradients of rows during its backward pass;
    gradients of hot rows and of the dense layers during the update of cold rows. Messages do not
    hide each other, since they share the link.
    """
    dense = stages["dense"].compute
    stages["ids_exchange"].cover.add_form(dense).add_form(stages["pool"].compute)
    stages["rows_exchange"].cover.add_form(dense, workload.bottom_frac / 3)
    stages["grads_exchange"].cover.add_form(dense, workload.bottom_frac * 2 / 3)
    stages["hot_exchange"].cover.add_form(stages["row_update"].compute)
    stages["other"].cover.add_form(stages["row_update"].compute)
