"""The step with exact look-ahead: only rows that some rank reads again in the next step are urgent.

Their gradients must reach the owners, be applied, and the rows come back before the next forward
pass. All other rows and gradients, ids and the dense layers' gradients travel in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hotrec.cost_model.costs import Costs, World
from hotrec.cost_model.forms import (
    BYTES_OF,
    BYTES_PER_FLOAT,
    BYTES_PER_ID,
    HOT_ROWS,
    NUM_HOT_MESSAGES,
    Form,
    StageForm,
    StepPrediction,
    Workload,
    add_compute,
    add_hot_pack,
    add_overhead,
    hot_messages,
)
from hotrec.types import STAGES, Levels, PipelineSpec, RowFetch

# Share of the dense layers' time, forward and backward, that remains once the gradients of rows are
# ready: the bottom layers' backward pass, and the weight gradients of the others, which can be
# deferred. Weight gradients are a third of a layer's work (the others are the forward pass and the
# gradients of its inputs), and interactions, which have none, take about a quarter of the time.
OVERLAPPABLE_DENSE_FRAC = 0.25
POSITION_BYTES, FLAGS_BYTES = 4, 2
# Number of messages of a step: counts, positions, flags.
NUM_ID_MESSAGES = 3
# Kernels that move rows into slots and back, and the rows that each moves.
FETCHES = {RowFetch.staged: "fetch_slot", RowFetch.mapped: "fetch_mapped"}
MOVEMENTS = {
    FETCHES[RowFetch.staged]: "fetched_rows",
    FETCHES[RowFetch.mapped]: "mapped_rows",
    "return_slot": "returned_rows",
}
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")


@dataclass(frozen=True)
class _Traffic:
    """The bytes of one exchange, and its seconds on the link."""

    sent_bytes: float = 0.0
    between_hosts_bytes: float = 0.0
    background_s: float = 0.0
    critical_s: float = 0.0
    in_line_s: float = 0.0  # critical and not hidden
    compute_s: float = 0.0

    @property
    def link_s(self) -> float:
        return self.critical_s + self.in_line_s + self.background_s


@dataclass(frozen=True)
class LookAheadModel:
    """The step of one machine, world and workload.

    With v bytes a value on the wire, U cold, u urgent and H hot distinct rows of a rank, all of
    dimension D, a rank sends in a step

        ids_exchange    (W-1)/W U (4 + 1 + 1)     positions, and two flags in reply
        rows_exchange   (W-1)/W U v D             u of them urgent
        grads_exchange  (W-1)/W U v D             and 2 (W-1)/W v of each dense parameter
        hot_exchange    (W-1)/W (H + union) (v D + 4)   added up by owners

    On several hosts of several ranks, see ``hot_messages``. In two levels, of the distinct rows of
    a host a rank relays 1/G: (H-1)/H of these cross, and (G-1)/G U 4 D are distributed inside.

    Messages contain the rows of all dimensions, and are sent one by one between pairs of ranks;
    gloo's all_to_all is slower than that on a slow link. So their time is the smaller of those
    measured for all_to_all and all_gather in this world. Corrections and overheads that were fitted
    to TorchRec's exchanges do not apply; those of computing stages do.
    """

    costs: Costs
    world: World
    workload: Workload
    pipeline: PipelineSpec

    @cached_property
    def compute(self) -> Mapping[str, Form]:
        """Computation of each stage; of the hot exchange only the packing of rows."""
        stages = {name: StageForm() for name in STAGES}
        add_compute(stages, self.costs, self.workload)
        if self.world.num_ranks > 1:
            add_hot_pack(stages["hot_exchange"].compute, self.costs)
        compute = {name: form.compute for name, form in stages.items()}
        for name, form in compute.items():
            form.scale(self.costs.correction(name))
            if name not in EXCHANGES:
                overhead_s = self.costs.stage_overhead_s.get(name, 0.0)
                overhead_s += self.costs.overhead_s if name == "other" else 0.0
                add_overhead(form, name, overhead_s)
        return compute

    def predict(self, quantities: Mapping[str, float]) -> StepPrediction:
        """Seconds and bytes of a step with these quantities.

            line    compute + waiting + travels - overlap hidden
            link    all communication, serialized
            step    max(line, link)

        Computation on any thread counts in full, plus the measured use of cores by the
        communication thread. Background communication is hidden; of critical communication (except
        the pooled exchange), OVERLAPPABLE_DENSE_FRAC of the dense layers' time is hidden. Ranks
        wait for stragglers once per step. If the link is slower than the computation, the
        difference is distributed over the exchanges in proportion to their hidden time. The result
        is scaled by the measured factor of a run with look-ahead, if the costs were fitted to one.

        Rows move between host memory and slots in both directions at once during the step's
        computation; the exchange of rows waits for the rest.

        Raises:
            CostsError: If the costs lack the link between hosts, or moves into slots.
        """
        step = self._predict_in_slots(quantities)
        moving_s = max(
            self.costs.kernel(kernel).seconds(number, quantities[BYTES_OF[items]])
            if (number := quantities.get(items, 0.0)) > 0
            else 0.0
            for kernel, items in MOVEMENTS.items()
        )
        if moving_s == 0:
            return step
        hidden_s = min(moving_s, self._overlap * step.step_s)
        added = {"rows_exchange": moving_s - hidden_s}
        return replace(
            step,
            step_s=step.step_s + moving_s - hidden_s,
            stage_s={n: s + added.get(n, 0.0) for n, s in step.stage_s.items()},
            hidden_s={n: s + (hidden_s if n in added else 0.0) for n, s in step.hidden_s.items()},
        )

    def _predict_in_slots(self, quantities: Mapping[str, float]) -> StepPrediction:
        """As ``predict``, with all rows in device memory."""
        stage_s = {name: form.value(quantities) for name, form in self.compute.items()}
        hidden_s = dict.fromkeys(STAGES, 0.0)
        sent = dict.fromkeys(STAGES, 0.0)
        if self.world.num_ranks == 1:
            return StepPrediction(sum(stage_s.values()), stage_s, hidden_s, sent)
        cover_s = OVERLAPPABLE_DENSE_FRAC * stage_s["dense"]
        waiting = max(self.costs.waiting_frac.get(name, 0.0) for name in EXCHANGES)
        stage_s["rows_exchange"] += waiting * self.compute["dense"].constant
        cold_bytes = quantities.get("cold_bytes", 0.0)
        stage_s["rows_exchange"] += self.costs.look_ahead.seconds(num_bytes=cold_bytes)
        traffic = self._traffic(quantities)
        for name, of in traffic.items():
            covered_s = min(of.critical_s, cover_s)
            cover_s -= covered_s
            hidden_s[name] = self._overlap * (covered_s + of.background_s)
            stage_s[name] += of.compute_s + of.link_s - hidden_s[name]
            sent[name] = of.sent_bytes
        line_s = sum(stage_s.values())
        link_s = sum(of.link_s for of in traffic.values())
        if link_s > line_s:
            # Computation cannot hide more than its own duration.
            shown_frac = (link_s - line_s) / sum(hidden_s.values())
            for name in EXCHANGES:
                stage_s[name] += shown_frac * hidden_s[name]
                hidden_s[name] *= 1 - shown_frac
        factor = self.costs.look_ahead_factor
        return StepPrediction(
            factor * max(line_s, link_s),
            {name: factor * seconds for name, seconds in stage_s.items()},
            {name: factor * seconds for name, seconds in hidden_s.items()},
            sent,
            sum(of.between_hosts_bytes for of in traffic.values()),
        )

    @property
    def _overlap(self) -> float:
        overlap = self.costs.look_ahead_overlap
        return self.costs.overlap if overlap is None else overlap

    @property
    def _others(self) -> float:
        return (self.world.num_ranks - 1) / self.world.num_ranks

    def _traffic(self, quantities: Mapping[str, float]) -> dict[str, _Traffic]:
        """The exchanges, in the order in which they are sent once backward has the gradients."""
        narrow = self.pipeline.narrow_frac
        is_ahead = self.pipeline.depth > 0
        of_rank, relayed = quantities.get("cold_bytes", 0.0), quantities.get("relayed_bytes", 0.0)
        urgent, urgent_relayed = of_rank, relayed
        if is_ahead:
            urgent = quantities.get("urgent_bytes", 0.0)
            urgent_relayed = quantities.get("relayed_urgent_bytes", 0.0)
        sent_bytes, between, _ = self._of_rows(of_rank, relayed)
        *_, late_s = self._of_rows(of_rank - urgent, relayed - urgent_relayed)
        *_, urgent_s = self._of_rows(urgent, urgent_relayed)
        copied_bytes = of_rank * self._others + (relayed + of_rank if self._is_relayed else 0.0)
        pooled_bytes = quantities.get("pooled_sent_bytes", 0.0)
        num_pooled = quantities.get("pooled_groups", 0.0)
        rows = _Traffic(
            sent_bytes=sent_bytes + pooled_bytes,
            between_hosts_bytes=between + pooled_bytes * self._to_others,
            background_s=late_s,
            critical_s=urgent_s,
            in_line_s=self._seconds(pooled_bytes, num_pooled, is_pooled=True),
            compute_s=(copied_bytes + pooled_bytes) * self.costs.kernels["copy"].per_byte_s,
        )
        dense_bytes = 2 * self._others * BYTES_PER_FLOAT * self.workload.num_dense_values * narrow
        dense_s = 0.0
        if dense_bytes:
            reduce = self.costs.collective("all_reduce", self.world, dense_bytes)
            dense_s = reduce.seconds(num_bytes=dense_bytes)
        grads = replace(
            rows,
            sent_bytes=rows.sent_bytes + dense_bytes,
            between_hosts_bytes=rows.between_hosts_bytes
            + dense_bytes * self.world.between_hosts_frac("all_reduce"),
            background_s=rows.background_s + dense_s,
        )
        num_rows = quantities.get("cold_rows", 0.0)
        row_flags = POSITION_BYTES + FLAGS_BYTES
        requested_bytes = num_rows * self._others * row_flags
        between = requested_bytes * self._to_others
        ids_of_pooled = quantities.get("pooled_sent_ids", 0.0) * BYTES_PER_ID
        ids_s = self._seconds(requested_bytes, NUM_ID_MESSAGES)
        if self._is_relayed:
            inside = num_rows * self._inside_frac * row_flags
            between = quantities.get("relayed_rows", 0.0) * self._rail_frac * row_flags
            requested_bytes = inside + between
            ids_s = self._two_levels_s(inside, between, NUM_ID_MESSAGES)
        ids_s += self._seconds(ids_of_pooled, 3 * num_pooled, is_pooled=True)
        ids = _Traffic(
            sent_bytes=requested_bytes + ids_of_pooled,
            between_hosts_bytes=between + ids_of_pooled * self._to_others,
            background_s=ids_s if is_ahead else 0.0,
            in_line_s=0.0 if is_ahead else ids_s,
        )
        return {
            "hot_exchange": self._hot(quantities),
            "grads_exchange": grads,
            "rows_exchange": rows,
            "ids_exchange": ids,
        }

    @property
    def _to_others(self) -> float:
        """Share of an exchange between all ranks that goes to other hosts."""
        return self.world.between_hosts_frac("all_to_all")

    @property
    def _is_relayed(self) -> bool:
        return self.world.has_levels and self.pipeline.levels is Levels.two

    @property
    def _inside_frac(self) -> float:
        """(G-1)/G."""
        return (self.world.ranks_per_host - 1) / self.world.ranks_per_host

    @property
    def _rail_frac(self) -> float:
        """(H-1)/H."""
        return (self.world.num_hosts - 1) / self.world.num_hosts

    def _of_rows(self, rank_bytes: float, relayed_bytes: float) -> tuple[float, float, float]:
        """Bytes sent, those between hosts, and seconds.

        Of distinct rows of a rank, and of its share of those of a host.
        """
        narrow = self.pipeline.narrow_frac
        if not self._is_relayed:
            sent = rank_bytes * self._others * narrow
            return sent, sent * self._to_others, self._seconds(sent)
        inside = rank_bytes * self._inside_frac
        on_rails = relayed_bytes * self._rail_frac * narrow
        return inside + on_rails, on_rails, self._two_levels_s(inside, on_rails)

    def _two_levels_s(
        self, inside_bytes: float, rail_bytes: float, num_messages: float = 1
    ) -> float:
        """Seconds of an exchange inside hosts and one on the rails; none is empty."""
        if inside_bytes <= 0:
            return 0.0
        num = max(1.0, num_messages)
        inside = self.costs.collective("all_to_all", self.world.inside, inside_bytes / num)
        rail = self.costs.on_rails("all_to_all", self.world, rail_bytes / num or None)
        lines = ((inside, inside_bytes), (rail, rail_bytes))
        return sum(num_messages * line.fixed_s + line.per_byte_s * size for line, size in lines)

    def _hot(self, quantities: Mapping[str, float]) -> _Traffic:
        forms = hot_messages(self.world, self.pipeline.narrow_frac)
        among, on_rails = (form.value(quantities) for form in forms)
        add = self.costs.kernels["hot_add"]
        compute_s = (among + on_rails) * self.costs.kernels["copy"].per_byte_s
        for rows in HOT_ROWS:
            compute_s += add.seconds(quantities.get(rows, 0.0), quantities.get(BYTES_OF[rows], 0.0))
        if among <= 0:
            return _Traffic()
        between, seconds = among * self._to_others, self._seconds(among, NUM_HOT_MESSAGES)
        if self.world.has_levels:
            between, seconds = on_rails, self._two_levels_s(among, on_rails, NUM_HOT_MESSAGES)
        return _Traffic(
            among + on_rails,
            between,
            critical_s=seconds,
            compute_s=compute_s * self.costs.correction("hot_exchange"),
        )

    def _seconds(
        self, num_bytes: float, num_messages: float = 1, *, is_pooled: bool = False
    ) -> float:
        """Seconds of hotrec's own messages, or TorchRec's for pooled tables; none is empty."""
        if num_bytes <= 0:
            return 0.0
        size = num_bytes / max(1.0, num_messages)
        kinds = ["all_to_all"]
        measured = {
            curve.kind
            for curve in self.costs.curves
            if curve.world == self.world and curve.num_rails == 1
        }
        if not is_pooled and {"all_to_all", "all_gather"} <= measured:
            kinds.append("all_gather")
        lines = [self.costs.collective(kind, self.world, size) for kind in kinds]
        line = min(lines, key=lambda line: line.seconds(num_bytes=size))
        return num_messages * line.fixed_s + line.per_byte_s * num_bytes
