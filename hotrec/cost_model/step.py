"""The seconds and bytes of a step, from the quantities of work of a rank.

A step is computation, by kernels, and exchanges between ranks. Both are the same in every pipeline;
the pipeline decides what hides behind what. Quantities may be arrays, of many plans or ranks, so
that prediction and search use one formula. Bytes are counted as ``hotrec.runtime.traffic`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from hotrec.cost_model.costs import AHEAD, IN_LINE, TORCHREC, Costs, Line, World
from hotrec.types import STAGES, Levels, PipelineKind, PipelineSpec, RowFetch

BYTES_PER_ID = 8
BYTES_PER_FLOAT = 4
SLOT_BYTES = 4
# Hot rows that a rank sends in the hot exchange: its own to their owners, and the sums.
HOT_ROWS = ("hot_rows", "union_rows")
# Slots and values to the owners, and back.
NUM_HOT_MESSAGES = 4
POSITION_BYTES, FLAGS_BYTES = 4, 2
# Counts, positions, and flags in reply; or split sizes, lengths and ids.
NUM_ID_MESSAGES = 3

# Share of the dense layers' time, forward and backward, that remains once the gradients of rows are
# ready: the bottom layers' backward pass, and the weight gradients of the others, which can be
# deferred. Weight gradients are a third of a layer's work (the others are the forward pass and the
# gradients of its inputs), and interactions, which have none, take about a quarter of the time.
OVERLAPPABLE_DENSE_FRAC = 0.25

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


@dataclass(frozen=True)
class StepPrediction:
    """The predicted step of the mean rank.

    Args:
        step_s: The whole step.
        stage_s: Exposed seconds of each stage, which add up to ``step_s``.
        hidden_s: Seconds of each stage's communication that computation hides.
        sent_bytes: Bytes that a rank sends in each stage.
        between_hosts_bytes: Of all these, bytes to ranks of other hosts.
        loader_s: Seconds that the loader adds to the step.
    """

    step_s: float
    stage_s: Mapping[str, float]
    hidden_s: Mapping[str, float]
    sent_bytes: Mapping[str, float]
    between_hosts_bytes: float = 0.0
    loader_s: float = 0.0

    @property
    def total_sent_bytes(self) -> float:
        return sum(self.sent_bytes.values())


# Optimizers with a state as long as a row, which FBGEMM keeps in host memory with the row and never
# caches. Costs measured with one of them include it in the updates of host rows.
ELEMENT_WISE = ("adagrad", "adam")
# Kernels of each stage: their items, and the calls that pay the fixed part.
KERNELS_OF_STAGE: tuple[tuple[str, str, str, str | None], ...] = (
    ("route", "route", "lookups", "any_groups"),
    ("row_lookup", "read_device", "cold_rows", "cold_groups"),
    *(
        ("row_lookup", f"pooled_{tier}", f"pooled_ids_{tier}", group)
        for tier, group in zip(TIERS, ("pooled_groups", None, None, None), strict=True)
    ),
    ("row_lookup", "read_device", "hot_rows", "hot_groups"),
    # A replicated table is read as another, and its gradient added up as another's rows are.
    ("row_lookup", "pooled_device", "replicated_ids", "replicated_groups"),
    ("row_lookup", "pooled_update_device", "replicated_ids", "replicated_groups"),
    ("pool", "pool", "lookups", "any_groups"),
    ("row_update", "update_device", "cold_rows", "cold_groups"),
    # A row that missed the cache is in the cache when it is updated.
    *(
        ("row_update", f"pooled_update_{tier.replace('miss', 'hit')}", f"pooled_ids_{tier}", group)
        for tier, group in zip(TIERS, ("pooled_groups", None, None, None), strict=True)
    ),
    *(("hot_exchange", "hot_add", rows, None) for rows in HOT_ROWS),
    ("optimizer", "update_device", "union_rows", "hot_groups"),
)
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
# Kinds of collectives as which hotrec sends.
OWN = ("all_to_all", "all_gather")
# Calls of a step that pay the fixed overhead of a stage; once in other stages.
CALLS = {
    "route": ("any_groups",),
    "ids_exchange": ("any_groups", "pooled_groups"),
    "pool": ("any_groups",),
    **dict.fromkeys(
        ("rows_exchange", "grads_exchange", "row_update"), ("cold_groups", "pooled_groups")
    ),
    "hot_exchange": ("hot_groups", "replicated_groups"),
}
# Kernels that move rows into slots and back, and the rows that each moves.
FETCHES = {RowFetch.staged: "fetch_slot", RowFetch.mapped: "fetch_mapped"}
MOVEMENTS = {
    FETCHES[RowFetch.staged]: "fetched_rows",
    FETCHES[RowFetch.mapped]: "mapped_rows",
    "return_slot": "returned_rows",
}


def predict_step(
    costs: Costs,
    world: World,
    workload: Workload,
    pipeline: PipelineSpec,
    quantities: Mapping[str, Any],
) -> StepPrediction:
    """Predicts seconds and bytes of a step.

    In TorchRec's pipelines each message is hidden by the computation during which it travels:

        ids                   the whole step (``base``: nothing)
        rows                  the bottom layers' forward pass, a third of their work
        gradients of rows     the bottom layers' backward pass
        other gradients       the update of cold rows

    Messages do not hide each other, since they share the link. ``Costs.overlap`` of the hidden time
    is saved.

    With look-ahead, only rows that some rank reads again in the next step are urgent: their
    gradients must reach the owners, be applied, and the rows come back before the next forward
    pass. All else travels in the background:

        line    compute + waiting + messages - overlap hidden
        link    all communication, serialized
        step    max(line, link)

    OVERLAPPABLE_DENSE_FRAC of the dense layers' time hides urgent rows and the hot exchange. If the
    link is slower, the difference is distributed over the exchanges in proportion to their
    hidden time. At depth 0 all rows are urgent and ids are not hidden.

    Args:
        costs: The costs of the machine.
        world: Ranks and hosts.
        workload: The batch and the dense layers.
        pipeline: The pipeline; ``base`` is sparse_dist without overlap of the ids. ``prefetch`` is
            sparse_dist whose device caches fetch the next batch's rows under the dense layers.
        quantities: Numbers by QUANTITIES, floats or arrays; 0 where absent.

    Raises:
        CostsError: If the costs lack the link between hosts, or moves into slots.
    """
    step = _Step(costs, world, workload, pipeline, quantities)
    return step.ahead() if pipeline.is_look_ahead else step.in_line()


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
    computing_s = sum(s for name, s in step.stage_s.items() if name not in EXCHANGES)
    sending_s = sum(step.stage_s.get(name, 0.0) for name in EXCHANGES) + sum(step.hidden_s.values())
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
    added_s = step_s - step.step_s
    stage_s = {**step.stage_s, "other": step.stage_s.get("other", 0.0) + added_s}
    return replace(step, step_s=step_s, stage_s=stage_s, loader_s=added_s)


@dataclass(frozen=True)
class _Traffic:
    """The bytes of one exchange, its seconds on the link, and the work around it.

    Args:
        sent_bytes: Bytes that a rank sends.
        between_hosts_bytes: Of these, bytes to other hosts.
        background_s: Seconds of messages that nothing waits for with look-ahead.
        urgent_s: Seconds of the others.
        torchrec_s: Seconds of TorchRec's messages, and of others that look-ahead does not hide.
        compute_s: Seconds of ordering and copying what is sent.
        torchrec_compute_s: The same for TorchRec's messages.
    """

    sent_bytes: Any = 0.0
    between_hosts_bytes: Any = 0.0
    background_s: Any = 0.0
    urgent_s: Any = 0.0
    torchrec_s: Any = 0.0
    compute_s: Any = 0.0
    torchrec_compute_s: Any = 0.0

    @property
    def link_s(self) -> Any:
        return self.background_s + self.urgent_s + self.torchrec_s


class _Step:
    """The work of a step, and its time in a pipeline."""

    def __init__(
        self,
        costs: Costs,
        world: World,
        workload: Workload,
        pipeline: PipelineSpec,
        quantities: Mapping[str, Any],
    ) -> None:
        self.costs, self.world, self.workload, self.pipeline = costs, world, workload, pipeline
        self.q = {**dict.fromkeys(QUANTITIES, 0.0), **quantities}
        # Calls that hot and cold rows share.
        self.q["any_groups"] = (self.q["cold_groups"] + self.q["hot_groups"]) * 2 / 3
        self.others = (world.num_ranks - 1) / world.num_ranks
        self.to_others = world.between_hosts_frac("all_to_all")
        self.is_ahead = pipeline.is_look_ahead
        # Look-ahead packs rows of all dimensions into one message.
        self.num_cold = 1.0 if self.is_ahead else self.q["cold_groups"]
        self.copy_s = costs.kernels["copy"].per_byte_s
        self.compute_s, self.torchrec_compute_s = self._computation()
        self.traffic = self._traffic() if world.num_ranks > 1 else {}

    def _computation(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Seconds of the kernels of each stage, and of those of TorchRec's tables."""
        q, kernels, workload = self.q, self.costs.kernels, self.workload
        own, torchrec = (dict[str, Any](dict.fromkeys(STAGES, 0.0)) for _ in range(2))
        absent = {"route"} if workload.is_routed_by_loader else set()
        absent |= {"hot_exchange"} if self.world.num_ranks == 1 else set()
        for stage, name, items, calls in KERNELS_OF_STAGE:
            line = kernels.get(name)
            if line is not None and stage not in absent:
                seconds = line.per_item_s * q[items] + line.per_byte_s * q[BYTES_OF[items]]
                found = torchrec if items.startswith(("pooled", "replicated")) else own
                found[stage] = found[stage] + seconds + line.fixed_s * (q[calls] if calls else 0.0)
        if "pooled_host" in kernels and self.costs.facts.get("optimizer") not in ELEMENT_WISE:
            # Read and written over the bus, both ways at once.
            torchrec["row_update"] += kernels["pooled_host"].per_byte_s * q["state_bytes_host"]
        own["dense"] += kernels["dense"].seconds(workload.dense_flops * workload.batch_size)
        update = kernels["dense_update"]
        own["optimizer"] += update.seconds(workload.num_dense_values)
        torchrec["optimizer"] += update.per_item_s * q["replicated_bytes"] / BYTES_PER_FLOAT
        torchrec["optimizer"] += update.fixed_s * q["replicated_groups"]
        return own, torchrec

    # ------------------------------------------------------------------ exchanges

    def _traffic(self) -> dict[str, _Traffic]:
        """The exchanges, in the order in which look-ahead sends them after backward.

        With v bytes a value on the wire, U cold and H hot distinct rows of a rank, all of dimension
        D, a rank sends in a step

            ids     (W-1)/W U 4                     positions; with look-ahead also two flags
            rows    (W-1)/W U v D                   and as much for their gradients
            hot     (W-1)/W (H + union) (v D + 4)   to owners, which add them up, and back
            dense   2 (W-1)/W v                     of each parameter, by all_reduce
            pooled  8 bytes an id; a vector a bag, or a row an id, and as much for its gradient

        In two levels, of the distinct rows of a host a rank relays 1/G: (H-1)/H of these cross, and
        (G-1)/G U 4 D are distributed inside.
        """
        dense_bytes = self.workload.num_dense_values * self._reduced_bytes(BYTES_PER_FLOAT)
        dense = _Traffic(
            sent_bytes=dense_bytes,
            between_hosts_bytes=dense_bytes * self.world.between_hosts_frac("all_reduce"),
            background_s=self._seconds(dense_bytes, 1, 1.0, ("all_reduce",)),
        )
        found = {"hot_exchange": self._hot(), "ids_exchange": self._ids()}
        found["rows_exchange"] = found["grads_exchange"] = self._rows()
        if not self.is_ahead:
            return {**found, "other": dense}
        # In the messages of the rows' gradients.
        grads = {
            name: getattr(found["rows_exchange"], name) + getattr(dense, name)
            for name in ("sent_bytes", "between_hosts_bytes", "background_s")
        }
        found["grads_exchange"] = replace(found["grads_exchange"], **grads)
        return {name: found[name] for name in reversed(EXCHANGES)}

    def _ids(self) -> _Traffic:
        q, is_ahead = self.q, self.is_ahead
        id_bytes = POSITION_BYTES + (FLAGS_BYTES if is_ahead else 0)
        num = NUM_ID_MESSAGES if is_ahead else NUM_ID_MESSAGES - 1
        of_rank, relayed = id_bytes * q["cold_rows"], id_bytes * q["relayed_rows"]
        sent, between, copied, ids_s = self._exchange(of_rank, relayed, num, 1.0)
        pooled = BYTES_PER_ID * q["pooled_sent_ids"]
        pooled_s = self._seconds(pooled, num, q["pooled_groups"], ("all_to_all",))
        found = _Traffic(sent + pooled, between + pooled * self.to_others)
        if is_ahead and self.pipeline.depth:
            return replace(found, background_s=ids_s + pooled_s)
        if is_ahead:
            return replace(found, torchrec_s=ids_s + pooled_s)
        # The main thread waits for the split sizes.
        split_s = self.costs.message_s("all_to_all", self.world, 0.0)
        groups = q["cold_groups"] + q["pooled_groups"]
        compute_s = split_s * groups + self.copy_s * (copied - sent)
        for kernel, calls, items in (
            ("order_row", q["cold_groups"], q["cold_rows"]),
            ("order_id", q["pooled_groups"], sum(q[f"pooled_ids_{tier}"] for tier in TIERS)),
        ):
            if (line := self.costs.kernels.get(kernel)) is not None:
                compute_s = compute_s + line.fixed_s * calls + line.per_item_s * items
        return replace(found, urgent_s=ids_s, torchrec_s=pooled_s, compute_s=compute_s)

    def _rows(self) -> _Traffic:
        """Rows one way, and their gradients the other."""
        q, narrow = self.q, self.pipeline.narrow_frac
        of_rank, relayed = q["cold_bytes"], q["relayed_bytes"]
        urgent, urgent_relayed = of_rank, relayed
        if self.is_ahead and self.pipeline.depth:
            urgent, urgent_relayed = q["urgent_bytes"], q["relayed_urgent_bytes"]
        sent, between, copied, _ = self._exchange(of_rank, relayed, 1, narrow)
        late = of_rank - urgent, relayed - urgent_relayed
        *_, late_s = self._exchange(*late, 1, narrow)
        *_, urgent_s = self._exchange(urgent, urgent_relayed, 1, narrow)
        pooled = q["pooled_sent_bytes"] * (1.0 if self.is_ahead else narrow)
        return _Traffic(
            sent + pooled,
            between + pooled * self.to_others,
            background_s=late_s,
            urgent_s=urgent_s,
            torchrec_s=self._seconds(pooled, 1, q["pooled_groups"], ("all_to_all",)),
            compute_s=self.copy_s * copied,
            torchrec_compute_s=self.copy_s * (pooled + q["permuted_bytes"]),
        )

    def _hot(self) -> _Traffic:
        """Hot rows to owners and back, and TorchRec's all-reduce of replicas."""
        q, world = self.q, self.world
        among, on_rails = hot_messages(world, self.pipeline.narrow_frac, q)
        groups = 1.0 if self.is_ahead else q["hot_groups"]
        if world.has_levels:
            hot_s = self._two_levels_s(among, on_rails, NUM_HOT_MESSAGES, groups)
            between = on_rails
        else:
            hot_s = self._seconds(among, NUM_HOT_MESSAGES, groups, OWN)
            between = among * self.to_others
        replicas = self._reduced_bytes(q["replicated_bytes"])
        reduced_frac = world.between_hosts_frac("all_reduce")
        return _Traffic(
            among + on_rails + replicas,
            between + replicas * reduced_frac,
            urgent_s=hot_s,
            torchrec_s=self._seconds(replicas, 1, q["replicated_groups"], ("all_reduce",)),
            compute_s=self.copy_s * (among + on_rails),
        )

    def _reduced_bytes(self, num_bytes: Any) -> Any:
        """Bytes that a rank sends to all-reduce these."""
        return 2 * self.others * self.pipeline.narrow_frac * num_bytes

    def _exchange(
        self, of_rank: Any, relayed: Any, num: float, narrow_frac: float
    ) -> tuple[Any, Any, Any, Any]:
        """Bytes sent, those between hosts, those copied, and seconds, of an exchange of rows.

        Of distinct rows of a rank, and of its share of those of a host, which relays gather or add
        up; in fp32 inside a host.
        """
        world = self.world
        if not (world.has_levels and self.pipeline.levels is Levels.two):
            sent = of_rank * self.others * narrow_frac
            kinds = OWN if self.is_ahead else ("all_to_all",)
            return sent, sent * self.to_others, sent, self._seconds(sent, num, self.num_cold, kinds)
        inside = of_rank * (world.ranks_per_host - 1) / world.ranks_per_host
        on_rails = relayed * (world.num_hosts - 1) / world.num_hosts * narrow_frac
        seconds = self._two_levels_s(inside, on_rails, num, self.num_cold)
        return inside + on_rails, on_rails, 2 * inside + on_rails, seconds

    def _two_levels_s(self, inside: Any, on_rails: Any, num: float, groups: Any) -> Any:
        """Seconds of exchanges inside hosts, and as many on the rails; none is empty."""

        def seconds(size: Any) -> Any:
            costs, world = self.costs, self.world
            rail_s = costs.message_s("all_to_all", world, size * on_rails, is_on_rails=True)
            return costs.message_s("all_to_all", world.inside, size * inside) + rail_s

        return np.where(inside > 0, self._in_turn(seconds, num, groups), 0.0)

    def _seconds(self, num_bytes: Any, num: float, groups: Any, kinds: Sequence[str]) -> Any:
        """Seconds of messages among all ranks, ``num`` of each group of tables; none is empty.

        hotrec's own are sent one by one between pairs of ranks, and gloo's all_to_all is slower
        than that on a slow link. So of several kinds the fastest counts, if all were measured.
        """
        if not all(self.costs.has_curve(kind, self.world) for kind in kinds[1:]):
            kinds = kinds[:1]

        def seconds(size: Any) -> Any:
            messages = (self.costs.message_s(k, self.world, size * num_bytes) for k in kinds)
            return reduce(np.minimum, messages)

        return np.where(np.asarray(num_bytes) > 0, self._in_turn(seconds, num, groups), 0.0)

    def _in_turn(self, seconds: Callable[[Any], Any], num: float, groups: Any) -> Any:
        """Seconds of ``num`` messages of each group, given those of a share of all bytes.

        With look-ahead they are alike; in TorchRec's pipelines all but the last are short.
        """
        share = 1 / np.maximum(groups, 1.0)
        if self.is_ahead:
            return groups * num * seconds(share / num)
        return groups * ((num - 1) * seconds(0.0) + seconds(share))

    # ------------------------------------------------------------------ what hides behind what

    def _overhead_s(self, stage: str) -> Any:
        """The fixed time of a stage, if there is one."""
        calls = CALLS.get(stage)
        num: Any = 1.0 if calls is None else sum(self.q[name] for name in calls)
        seconds = self.costs.stage_overhead_s.get(stage, 0.0) * num
        return seconds + (self.costs.overhead_s if stage == "other" else 0.0)

    def in_line(self) -> StepPrediction:
        """The step in a pipeline of TorchRec."""
        costs, compute_s, torchrec_compute_s = self.costs, self.compute_s, self.torchrec_compute_s
        kind, bottom = self.pipeline.kind, self.workload.bottom_frac
        dense_s = compute_s["dense"]
        update_s = compute_s["row_update"] + torchrec_compute_s["row_update"]
        cover_s = {
            "ids_exchange": 0.0 if kind is PipelineKind.base else dense_s + compute_s["pool"],
            "rows_exchange": dense_s * bottom / 3,
            "grads_exchange": dense_s * bottom * 2 / 3,
            "hot_exchange": update_s,
            "other": update_s,
        }
        is_unsplit = (self.q["cold_rows"] == 0) & (self.q["pooled_groups"] > 0)
        stage_s, hidden_s = {}, dict.fromkeys(STAGES, 0.0)
        for stage in STAGES:
            of = self.traffic.get(stage, _Traffic())
            own, torchrec = costs.correction(stage), costs.correction(stage, of_torchrec=True)
            link_s = own * (of.background_s + of.urgent_s) + torchrec * of.torchrec_s
            covered_s = np.where(is_unsplit, torchrec, own) * cover_s.get(stage, 0.0)
            hidden_s[stage] = costs.overlap * np.minimum(link_s, covered_s)
            stage_s[stage] = own * (compute_s[stage] + of.compute_s) + link_s - hidden_s[stage]
            stage_s[stage] += torchrec * (torchrec_compute_s[stage] + of.torchrec_compute_s)
            stage_s[stage] += self._overhead_s(stage)
            waiting_s = costs.waiting_frac.get(stage, 0.0) * costs.correction("dense") * dense_s
            stage_s[stage] += waiting_s * sum(self.q[name] for name in CALLS.get(stage, ()))
        if kind is PipelineKind.prefetch:
            fetching_s = self._fetching_s()
            hidden_s["row_lookup"] = np.minimum(fetching_s, costs.overlap * dense_s)
            stage_s["row_lookup"] -= hidden_s["row_lookup"]
        own, torchrec = (costs.factors.get(family, 1.0) for family in (IN_LINE, TORCHREC))
        is_torchrec = self.q["cold_rows"] + self.q["hot_rows"] == 0
        factor = np.where(is_torchrec, torchrec, own)
        return self._prediction(sum(stage_s.values()), stage_s, hidden_s, factor)

    def _fetching_s(self) -> Any:
        """The extra time of misses in FBGEMM's caches."""
        hit, miss = (self.costs.kernels.get(f"pooled_{of}", Line()) for of in ("hit", "miss"))
        fetch = max(miss.per_item_s - hit.per_item_s, 0.0) * self.q["pooled_ids_miss"]
        return fetch + max(miss.per_byte_s - hit.per_byte_s, 0.0) * self.q["pooled_bytes_miss"]

    def ahead(self) -> StepPrediction:
        """The step with look-ahead.

        Corrections and overheads that were fitted to TorchRec's exchanges do not apply; those of
        computing stages do. Ranks wait for stragglers once per step. Computation on any thread
        counts in full, and what else the step takes is in its factor.
        """
        costs, hidden_s = self.costs, dict.fromkeys(STAGES, 0.0)
        stage_s = {
            name: costs.correction(name) * s
            + costs.correction(name, of_torchrec=True) * self.torchrec_compute_s[name]
            for name, s in self.compute_s.items()
        }
        waiting = max(costs.waiting_frac.get(name, 0.0) for name in EXCHANGES)
        waiting_s = waiting * stage_s["dense"]
        for name in STAGES:
            stage_s[name] += 0.0 if name in EXCHANGES else self._overhead_s(name)
        if self.traffic:
            stage_s["rows_exchange"] += waiting_s
        cover_s = OVERLAPPABLE_DENSE_FRAC * stage_s["dense"]
        for name, of in self.traffic.items():
            covered_s = np.minimum(of.urgent_s, cover_s)
            cover_s = cover_s - covered_s
            hidden_s[name] = costs.overlap * (covered_s + of.background_s)
            stage_s[name] += of.compute_s + of.torchrec_compute_s + of.link_s - hidden_s[name]
        line_s = sum(stage_s.values())
        link_s = sum(of.link_s for of in self.traffic.values())
        # Computation cannot hide more than its own duration.
        all_hidden_s = sum(hidden_s.values())
        shown = np.maximum(link_s - line_s, 0.0) / np.where(all_hidden_s > 0, all_hidden_s, 1.0)
        for name in EXCHANGES:
            stage_s[name] = stage_s[name] + shown * hidden_s[name]
            hidden_s[name] = hidden_s[name] * (1 - shown)
        step_s = np.maximum(line_s, link_s)
        # Rows move between host memory and slots in both directions at once while the step
        # computes; the exchange of rows waits for the rest.
        moving_s = max(
            costs.kernel(kernel).seconds(self.q[items], self.q[BYTES_OF[items]])
            if np.any(self.q[items])
            else 0.0
            for kernel, items in MOVEMENTS.items()
        )
        moved_s = np.minimum(moving_s, costs.overlap * step_s)
        stage_s["rows_exchange"] += moving_s - moved_s
        hidden_s["rows_exchange"] += moved_s
        factor = costs.factors.get(AHEAD, 1.0)
        return self._prediction(step_s + moving_s - moved_s, stage_s, hidden_s, factor)

    def _prediction(
        self, step_s: Any, stage_s: Mapping[str, Any], hidden_s: Mapping[str, Any], factor: Any
    ) -> StepPrediction:
        """The prediction, times the factor that a run of this kind has measured."""
        sent = {stage: self.traffic.get(stage, _Traffic()).sent_bytes for stage in STAGES}
        between = sum(of.between_hosts_bytes for of in self.traffic.values())
        return StepPrediction(
            _plain(factor * step_s),
            {stage: _plain(factor * stage_s[stage]) for stage in STAGES},
            {stage: _plain(factor * hidden_s[stage]) for stage in STAGES},
            {stage: _plain(sent[stage]) for stage in STAGES},
            _plain(between),
        )


def _plain(number: Any) -> Any:
    """A float, or an array of several."""
    return float(number) if np.ndim(number) == 0 else number


def hot_messages(
    world: World, narrow_frac: float, quantities: Mapping[str, Any]
) -> tuple[Any, Any]:
    """The bytes of the hot exchange among all ranks, or those of a host; and on rails.

    With W ranks, R_r hot rows read by a rank, R_h by a host and ``union`` by any, a rank sends
    (W-1)/W (R_r + union) rows and slots. On H hosts of G ranks it sends (G-1)/G of these in fp32
    inside its host, and (H-1)/H (R_h + union) / G on its rail.
    """

    def num_bytes(rows: str, narrow: float) -> Any:
        return quantities[BYTES_OF[rows]] * narrow + quantities[rows] * SLOT_BYTES

    peers = world.ranks_per_host if world.has_levels else world.num_ranks
    narrow = 1.0 if world.has_levels else narrow_frac
    among = (peers - 1) / peers * sum(num_bytes(rows, narrow) for rows in HOT_ROWS)
    if not world.has_levels:
        return among, 0.0
    of_rails = (
        num_bytes("relayed_hot_rows", narrow_frac) + num_bytes("union_rows", narrow_frac) / peers
    )
    return among, (world.num_hosts - 1) / world.num_hosts * of_rails
