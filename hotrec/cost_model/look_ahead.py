"""The step with exact look-ahead.

Only rows that some rank reads again in the next step are urgent: their gradients
must reach the owners, be applied, and the rows come back before the next forward pass. All other
rows and gradients, the ids and the dense layers' gradients travel in the background. With v bytes
a value on the wire (4, or 2 in 16 bits), U cold, u urgent and H hot distinct rows of a rank, all of
dimension D, a rank sends in a step

    ids_exchange    (W-1)/W U (4 + 1 + 1)     positions, and two flags in reply
    rows_exchange   (W-1)/W U v D             u of them urgent
    grads_exchange  (W-1)/W U v D             u of them urgent; 2 (W-1)/W v of each dense parameter
    hot_exchange    what sends least of       (W-1) H (v D + 4), gathered;
                                              (W-1)/W (H + union) (v D + 4), added up by owners;
                                              2 (W-1)/W replica (v D + 1), all of them reduced

and the step takes, o being the costs' overlap (what is sent takes processor time where o < 1),

    compute     all stages that compute, on whichever thread: the owner's lookups and updates share
                the cores (the device) with the layers, so they count in full; and what else the
                thread of communication takes of them, as measured in whole steps
    critical    hot exchange + urgent gradients + urgent rows, and what TorchRec exchanges pooled
    background  everything else that travels
    line        compute + waiting + critical - o min(critical', OVERLAPPABLE_DENSE_FRAC dense)
                + (1 - o) background
    link        critical + background
    step        max(line, link)

where critical' leaves out the pooled exchange, which nothing hides, and waiting is the time for
stragglers at the only synchronisation point of a step: the largest of any exchange in the costs.
With depth 0 all rows are urgent and nothing hides the ids. If the link is slower than the
computation, the difference is distributed over the exchanges in proportion to their hidden time.

Messages hold the rows of all dimensions, and travel one by one between pairs of ranks; gloo's
all_to_all is slower than that on a slow link. So they take what all_to_all or all_gather was
measured to take in this world, whichever is less. Corrections and overheads that were fitted to
TorchRec's exchanges do not apply to these; those of stages that compute do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotrec.cost_model.costs import Costs, Line, World
from hotrec.cost_model.forms import (
    BYTES_PER_FLOAT,
    BYTES_PER_ID,
    LOOK_AHEAD,
    TIERS,
    Form,
    PipelineSpec,
    StageForm,
    StepPrediction,
    Workload,
    add_compute,
    add_overhead,
)
from hotrec.types import STAGES

# Share of the dense layers' time, forward and backward, that is left when the gradients of rows are
# there: the bottom layers' backward pass, and the weight gradients of the others, which can wait.
# Weight gradients are a third of a layer's work (beside the forward pass and the gradients of its
# inputs), and interactions, which have none, take about a fourth of the time.
OVERLAPPABLE_DENSE_FRAC = 0.25
POSITION_BYTES, FLAGS_BYTES, SLOT_BYTES = 4, 2, 4
# Messages of a step, whatever their size: counts, positions, flags.
NUM_ID_MESSAGES = 3
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
# In the order in which they travel when backward has the gradients.
CRITICAL = ("hot_exchange", "grads_exchange", "rows_exchange")


@dataclass(frozen=True)
class _Traffic:
    """What one exchange sends, and its seconds on the link."""

    sent_bytes: float = 0.0
    background_s: float = 0.0
    critical_s: float = 0.0
    in_line_s: float = 0.0  # critical, and nothing hides it
    compute_s: float = 0.0


@dataclass(frozen=True)
class LookAheadModel:
    """The step of one machine, world, workload and hot exchange.

    Args:
        costs: Costs of the machine.
        world: Ranks and hosts.
        workload: Batch and dense layers.
        pipeline: The pipeline, for its wire type and depth.
        is_hot_dense: Always reduce all hot rows, not by the exchange that sends least.
        compute: Computation of each stage, without that of the hot exchange.
    """

    costs: Costs
    world: World
    workload: Workload
    pipeline: PipelineSpec
    is_hot_dense: bool
    compute: Mapping[str, Form]

    def predict(self, quantities: Mapping[str, float]) -> StepPrediction:
        """Seconds and bytes of a step that does ``quantities``, see the module."""
        stage_s = {name: form.value(quantities) for name, form in self.compute.items()}
        hidden_s = dict.fromkeys(STAGES, 0.0)
        sent = dict.fromkeys(STAGES, 0.0)
        if self.world.num_ranks == 1:
            return StepPrediction(sum(stage_s.values()), stage_s, hidden_s, sent)
        overlap = self.costs.overlap
        cover_s = OVERLAPPABLE_DENSE_FRAC * stage_s["dense"]
        traffic = self._traffic(quantities)
        waiting = max((self.costs.waiting_frac.get(name, 0.0) for name in EXCHANGES), default=0.0)
        stage_s["rows_exchange"] += waiting * self.compute["dense"].constant
        stage_s["rows_exchange"] += self.costs.look_ahead.seconds(num_bytes=_row_bytes(quantities))
        for name in (*CRITICAL, "ids_exchange"):
            of = traffic[name]
            covered_s = min(of.critical_s, cover_s)
            cover_s -= covered_s
            hidden_s[name] = overlap * (covered_s + of.background_s)
            travels_s = of.critical_s + of.in_line_s + of.background_s
            stage_s[name] += of.compute_s + travels_s - hidden_s[name]
            sent[name] = of.sent_bytes
        line_s = sum(stage_s.values())
        link_s = sum(t.critical_s + t.in_line_s + t.background_s for t in traffic.values())
        if link_s > line_s:
            # Computation cannot hide more than its own duration.
            shown_frac = (link_s - line_s) / sum(hidden_s.values())
            for name in EXCHANGES:
                stage_s[name] += shown_frac * hidden_s[name]
                hidden_s[name] *= 1 - shown_frac
        return StepPrediction(max(line_s, link_s), stage_s, hidden_s, sent)

    @property
    def _others(self) -> float:
        return (self.world.num_ranks - 1) / self.world.num_ranks

    def _traffic(self, quantities: Mapping[str, float]) -> dict[str, _Traffic]:
        rows = sum(quantities.get(f"rows_{tier}", 0.0) for tier in TIERS)
        row_bytes = _row_bytes(quantities) * self._others
        is_ahead = self.pipeline.depth > 0
        urgent_bytes = quantities.get("urgent_bytes", 0.0) * self._others if is_ahead else row_bytes
        requested_bytes = rows * self._others * (POSITION_BYTES + FLAGS_BYTES)
        ids_of_pooled = quantities.get("pooled_sent_ids", 0.0) * BYTES_PER_ID
        copy_s = row_bytes * self.costs.kernels["copy"].per_byte_s
        pooled_bytes = quantities.get("pooled_sent_bytes", 0.0)
        pooled_s = self._pooled_s(pooled_bytes, quantities.get("pooled_groups", 0.0))
        cold = _Traffic(
            sent_bytes=row_bytes * self.pipeline.narrow_frac + pooled_bytes,
            background_s=self._seconds((row_bytes - urgent_bytes) * self.pipeline.narrow_frac),
            critical_s=self._seconds(urgent_bytes * self.pipeline.narrow_frac),
            in_line_s=pooled_s,
            compute_s=copy_s + pooled_bytes * self.costs.kernels["copy"].per_byte_s,
        )
        dense_bytes = (
            2
            * self._others
            * BYTES_PER_FLOAT
            * self.workload.num_dense_values
            * self.pipeline.narrow_frac
        )
        dense_s = 0.0
        if dense_bytes:
            reduce = self.costs.collective("all_reduce", self.world, dense_bytes)
            dense_s = reduce.seconds(num_bytes=dense_bytes)
        grads = _Traffic(
            sent_bytes=cold.sent_bytes + dense_bytes,
            background_s=cold.background_s + dense_s,
            critical_s=cold.critical_s,
            in_line_s=cold.in_line_s,
            compute_s=cold.compute_s,
        )
        ids_s = self._seconds(requested_bytes, NUM_ID_MESSAGES)
        ids_s += self._pooled_s(ids_of_pooled, 3 * quantities.get("pooled_groups", 0.0))
        ids = _Traffic(
            sent_bytes=requested_bytes + ids_of_pooled,
            background_s=ids_s if is_ahead else 0.0,
            in_line_s=0.0 if is_ahead else ids_s,
        )
        return {
            "ids_exchange": ids,
            "rows_exchange": cold,
            "grads_exchange": grads,
            "hot_exchange": self._hot(quantities),
        }

    def _hot(self, quantities: Mapping[str, float]) -> _Traffic:
        def sized(rows: str, num_bytes: str, with_row: int) -> float:
            values = quantities.get(num_bytes, 0.0) * self.pipeline.narrow_frac
            return values + with_row * quantities.get(rows, 0.0)

        touched = sized("hot_rows", "hot_bytes", SLOT_BYTES)
        union = sized("union_rows", "union_bytes", SLOT_BYTES)
        gathered = (self.world.num_ranks - 1) * touched
        owned = self._others * (touched + union)
        reduced = 2 * self._others * sized("replica_rows", "replica_bytes", 1)
        add = self.costs.kernels["hot_add"]
        of_rank = add.seconds(quantities.get("hot_rows", 0.0), quantities.get("hot_bytes", 0.0))
        of_any = add.seconds(quantities.get("union_rows", 0.0), quantities.get("union_bytes", 0.0))
        if touched <= 0:
            return _Traffic()
        if self.is_hot_dense or reduced < min(gathered, owned):
            line = self.costs.collective("all_reduce", self.world, reduced)
            num_bytes, seconds, compute_s = reduced, line.seconds(num_bytes=reduced), 0.0
        elif gathered <= owned:
            num_bytes, seconds = gathered, self._seconds(gathered, 2)
            compute_s = self.world.num_ranks * of_rank
        else:
            num_bytes, seconds = owned, self._seconds(owned, 4)
            compute_s = of_rank + of_any
        compute_s += num_bytes * self.costs.kernels["copy"].per_byte_s
        return _Traffic(
            num_bytes,
            critical_s=seconds,
            compute_s=compute_s * self.costs.correction("hot_exchange"),
        )

    def _seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        """Seconds of hotrec's own messages; empty ones are not sent."""
        if num_bytes <= 0:
            return 0.0
        line = self._message_line(num_bytes / num_messages)
        return num_messages * line.fixed_s + line.per_byte_s * num_bytes

    def _message_line(self, num_bytes: float) -> Line:
        kinds = ["all_to_all"]
        measured = {curve.kind for curve in self.costs.curves if curve.world == self.world}
        if {"all_to_all", "all_gather"} <= measured:
            kinds.append("all_gather")
        lines = [self.costs.collective(kind, self.world, num_bytes) for kind in kinds]
        return min(lines, key=lambda line: line.seconds(num_bytes=num_bytes))

    def _pooled_s(self, num_bytes: float, num_messages: float) -> float:
        """Seconds of TorchRec's messages for pooled tables."""
        if num_bytes <= 0:
            return 0.0
        size = num_bytes / max(1.0, num_messages)
        line = self.costs.collective("all_to_all", self.world, size)
        return num_messages * line.fixed_s + line.per_byte_s * num_bytes


def _row_bytes(quantities: Mapping[str, float]) -> float:
    """Bytes of a rank's distinct cold rows."""
    return sum(quantities.get(f"bytes_{tier}", 0.0) for tier in TIERS)


def make_look_ahead_model(
    costs: Costs,
    world: World,
    workload: Workload,
    *,
    pipeline: PipelineSpec = LOOK_AHEAD,
    is_hot_dense: bool = False,
) -> LookAheadModel:
    """The model of a step with look-ahead.

    Raises:
        CostsError: On prediction, if the costs lack the link between hosts.
    """
    stages = {name: StageForm(Form(), Form(), Form(), Form()) for name in STAGES}
    # Of one rank: what hot rows take to be exchanged depends on how they are.
    add_compute(stages, costs, World(1, 1), workload)
    if world.num_ranks > 1:
        pack = costs.kernels["hot_pack"]
        packing = stages["hot_exchange"].compute.add_line(pack, "hot_rows", "hot_bytes")
        packing.add("hot_groups", pack.fixed_s)
    compute = {name: form.compute for name, form in stages.items()}
    for name, form in compute.items():
        form.scale(costs.correction(name))
        if name not in EXCHANGES:
            overhead_s = costs.stage_overhead_s.get(name, 0.0)
            add_overhead(form, name, overhead_s + (costs.overhead_s if name == "other" else 0.0))
    return LookAheadModel(costs, world, workload, pipeline, is_hot_dense, compute)
