"""Correct measured kernels by whole training steps.

A kernel timed alone does not share the cache and the memory bandwidth, and has no Python around it.
So a few steps of hot/cold placements and of two of TorchRec's plans are measured at two batch
sizes, and steps of look-ahead, whose communication thread competes with the layers for the cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torchrec.distributed.types import ShardingPlan

from hotrec.assemble.model import build_unsharded
from hotrec.assemble.torchrec_plan import shardings_of
from hotrec.bench.cases import Case, Runner, Subject, build_runner, split_case
from hotrec.bench.samples import ZipfTables
from hotrec.calibrate.probes import row_spec
from hotrec.calibrate.timing import Budget, Point, Repeats, slowest_rank
from hotrec.calibrate.workload import CalibrationWorkload, cut_tables
from hotrec.cost_model.costs import (
    TORCHREC_STAGE,
    Costs,
    Floats,
    fit_bounded,
    ratio_interval,
)
from hotrec.cost_model.histogram import CountHistogram, build_histogram
from hotrec.data.batch import Batch
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import choose_all_cold, choose_all_hot, choose_coverage
from hotrec.planner.predict import Prediction, Shardings, predict
from hotrec.runtime.ranks import Ranks, all_gather_object, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.train.interleave import run_block, step_seconds
from hotrec.types import (
    STAGES,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Rows,
    TorchrecPlan,
)

# Hot and cold rows in every stage; and all rows hot, since a large replica is slower to read.
COVERAGES = (0.8, 1.0)
ALL_COLD = 0.0
# Coverages of the steps with look-ahead: its thread has the most work if all rows are cold.
AHEAD_COVERAGES = (ALL_COLD, 0.8)
# Steps of TorchRec's plans: two that send different numbers of bytes separate the time per byte of
# a message from the wait for other ranks. Ids are only exposed in base.
THEIR_STEPS = (
    (TorchrecPlan.hand_tuned, PipelineKind.sparse_dist),
    (TorchrecPlan.planner, PipelineKind.base),
)
PROFILE_SAMPLES = 200_000
# Timed steps of a batch size in a round, those before them, and batches that pipelines hold ahead.
NUM_STEPS, NUM_WARM, NUM_AHEAD = 10, 4, 3
# The same if steps are long for the budget. A few steps of the run's own batch are worth more than
# many of a smaller one, whose messages a shaped link may send in a burst.
MIN_STEPS, MIN_WARM = 3, 2
# Assumed for the first case; it shows the time to build the next ones.
FIRST_BUILD_S = 1.0
# Minimum share of the budget for the first round of steps, even if other measurements took longer:
# kernels alone predict large batches poorly.
MIN_FRAC = 0.2
# Parts of a round's steps whose medians are repeats of one another.
NUM_PARTS = 2
# The smaller batch shows the constant part of each stage.
BATCH_PARTS = (4, 1)
MIN_BATCH = 32
HOT_COLD, TORCHREC, AHEAD = "hot_cold", "torchrec", "look_ahead"
# Stages whose kernels differ between the families.
OF_KERNELS = ("row_lookup", "row_update", "optimizer")
# Credible range of measured over predicted seconds of a stage. Kernels that share caches, memory
# and cores with others are slower by a small factor, and so are messages. Kernels of tiny batches
# need less time than with a cold cache, and a shaped link sends the first bytes of each step at
# once, while messages were measured one after the other. Assumed.
COMPUTE_FACTORS, MESSAGE_FACTORS = (0.2, 4.0), (0.5, 4.0)
# Ranks wait for the slowest one for less than the time of the dense layers.
WAITING_FRACS = (0.0, 1.0)
# Stages with a smaller share of every step may have any factor.
MIN_STAGE_FRAC = 0.05
BOUND_TOLERANCE = 1e-3
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange", "hot_exchange")
# Exchanges of rows in one family and of pooled vectors in the other; in the third exchange, the
# first family gathers hot rows, and the other reduces replicas.
OF_VECTORS = ("rows_exchange", "grads_exchange")
OF_BOTH_FAMILIES = (*OF_VECTORS, "hot_exchange")


@dataclass(frozen=True)
class Anchor:
    """Predicted and measured steps of one case."""

    family: str
    coverage: float | None  # of lookups that are hot; None for TorchRec's plan
    predicted_s: Mapping[str, float]  # by stage, from the kernels alone
    measured_s: Mapping[str, float]  # by stage (``typical_stages``)
    step_s: float  # of the slowest rank


@dataclass(eq=False)
class MeasuredCase:
    """Measured steps of one case and batch size, and their prediction from any costs.

    Args:
        family: HOT_COLD, TORCHREC or AHEAD.
        coverage: Fraction of lookups that are hot; None for TorchRec's plan.
        predict: The case's prediction from costs.
        repeats: Seconds of each step, by round.
        stage_s: Seconds by stage of each round (``typical_stages``).
    """

    family: str
    coverage: float | None
    predict: Callable[[Costs], Prediction]
    repeats: Repeats = field(default_factory=lambda: Repeats(slowest_rank))
    stage_s: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """Seconds of a step of the slowest rank."""
        return self.repeats.result.seconds

    def parts_s(self) -> list[float]:
        """The same for parts of each round, whose differences are noise."""
        steps = (np.max(by_rank, axis=0) for by_rank in self.repeats.rounds)
        return [float(np.median(part)) for of in steps for part in np.array_split(of, NUM_PARTS)]

    def anchor(self, costs: Costs) -> Anchor:
        """The case as predicted from ``costs``."""
        measured = {s: float(np.median([of[s] for of in self.stage_s])) for s in STAGES}
        stage_s = dict(self.predict(costs).step.stage_s)
        return Anchor(self.family, self.coverage, stage_s, measured, self.step_s)


def correct_by_steps(costs: Costs, cases: Sequence[MeasuredCase]) -> tuple[Costs, list[Anchor]]:
    """The costs corrected by whole steps with their interval, and the steps as predicted before."""
    anchors = {case: case.anchor(costs) for case in cases}
    fitted = _correct(costs, cases, anchors)
    interval = ratio_interval(_ratios(costs, cases, anchors))
    shown = [case.anchor(fitted) if case.family == AHEAD else anchors[case] for case in cases]
    return replace(fitted, ratio_interval=interval), shown


def _correct(
    costs: Costs, cases: Sequence[MeasuredCase], anchors: Mapping[MeasuredCase, Anchor]
) -> Costs:
    """Costs corrected by ``cases``; ``anchors`` are predicted from ``costs``."""
    fitted = fit_steps(costs, [anchors[case] for case in cases if case.family != AHEAD])
    ahead = [case for case in cases if case.family == AHEAD]
    if not ahead:
        return fitted
    # Its thread competes with the layers for the cores, and nothing in it is waited for by itself.
    logs = [math.log(case.step_s / case.predict(fitted).step.step_s) for case in ahead]
    return replace(fitted, factors={AHEAD: math.exp(sum(logs) / len(logs))})


def _ratios(
    costs: Costs, cases: Sequence[MeasuredCase], anchors: Mapping[MeasuredCase, Anchor]
) -> list[list[float]]:
    """Measured over predicted step of each repeat of each case, from a fit to the other cases."""
    ratios = []
    for case in cases:
        others = [other for other in cases if other is not case]
        step_s = case.predict(_correct(costs, others, anchors)).step.step_s
        ratios.append([seconds / step_s for seconds in case.parts_s()])
    return ratios


def fit_steps(costs: Costs, anchors: list[Anchor]) -> Costs:
    """The costs that predict the anchors' stages best.

    Stages of computation take ``overhead + factor * predicted``, exchanges ``overhead + waiting *
    dense layers + factor * predicted``; there is one factor per family of kernels.
    """
    corrections: dict[str, float] = {}
    overheads, waiting = {}, {}
    beyond: list[str] = []
    settled = _with_delays(anchors)
    for stage in STAGES:
        if stage == "other":
            continue
        if stage in EXCHANGES:
            overheads[stage], waiting[stage], found = _fit_exchange(settled, stage)
            corrections |= found
            of_messages = [factor for name, factor in found.items() if name != "other"]
            beyond += _beyond(anchors, stage, of_messages, MESSAGE_FACTORS)
            # Waiting at its bound is noise of the same kind. It is a share of the dense layers,
            # which if small are negligible compared with the jitter of a slow link.
            shown = f"waiting in {stage}"
            beyond += _beyond(anchors, "dense", [waiting[stage]], WAITING_FRACS, shown)
            continue
        # A large replica costs more per row, but a line has one slope. Fitting the large one errs
        # towards fewer replicas.
        chosen = [a for a in anchors if stage != "optimizer" or a.coverage in (None, 1.0)]
        used = [_point(a, stage) for a in chosen if a.measured_s[stage] > 0 < a.predicted_s[stage]]
        if len(used) < 2:
            continue
        overheads[stage], factors = _fit_compute(used, _min_s(anchors, stage))
        beyond += _beyond(anchors, stage, factors, COMPUTE_FACTORS)
        corrections[stage] = factors[0]
        if stage in OF_KERNELS:
            corrections[TORCHREC_STAGE.format(stage)] = factors[1]
    doubts = [f"were corrected by more than is credible ({', '.join(beyond)})"] if beyond else []
    left = [a.step_s - sum(a.measured_s[s] for s in STAGES if s != "other") for a in anchors]
    return replace(
        costs,
        corrections=corrections,
        overhead_s=max(0.0, float(np.median(left))),
        stage_overhead_s=overheads,
        waiting_frac=waiting,
        doubts=(*costs.doubts, *doubts),
    )


def _min_s(anchors: Sequence[Anchor], stage: str) -> float:
    """The shortest time of the stage among the cases that have it: the bound of its overhead."""
    took = [a.measured_s[stage] for a in anchors if a.predicted_s[stage] > 0]
    return min((seconds for seconds in took if seconds > 0), default=math.inf)


def _fit_compute(points: Sequence[Point], max_s: float) -> tuple[float, list[float]]:
    """Overhead, and the factors of items and of bytes; 1 if not measured.

    Least squares of relative errors, with the overhead up to ``max_s`` and factors in
    COMPUTE_FACTORS.
    """
    seconds = np.array([point.seconds for point in points])
    columns = np.array([(1.0, point.num_items, point.num_bytes) for point in points])
    used = [at for at in range(min(3, len(points))) if columns[:, at].any()]
    low, high = COMPUTE_FACTORS
    found = fit_bounded(
        columns[:, used] / seconds[:, None],
        np.ones(seconds.size),
        [0.0 if at == 0 else low for at in used],
        [max_s if at == 0 else high for at in used],
    )
    factors = dict(zip(used, found.tolist(), strict=True))
    return factors[0], [factors.get(1, 1.0), factors.get(2, 1.0)]


def _beyond(
    anchors: Sequence[Anchor],
    stage: str,
    factors: Sequence[float],
    bounds: tuple[float, float],
    name: str | None = None,
) -> list[str]:
    """Factors of a stage at the upper bound of the credible range, if the stage matters.

    At the lower bound the stage takes the same time for any work, which is its overhead.
    """
    if max(a.measured_s[stage] / a.step_s for a in anchors) < MIN_STAGE_FRAC:
        return []
    _, high = bounds
    return [
        f"{name or stage} {factor:.2g}"
        for factor in factors
        if factor >= high * (1 - BOUND_TOLERANCE)
    ]


def _with_delays(anchors: list[Anchor]) -> list[Anchor]:
    """The anchors, with all delays by pooled vectors in TorchRec's exchanges of vectors.

    A rank that receives its vectors late enters the all-reduce of the dense layers late, and the
    others wait for it, on links of 1 Gbit/s and less for up to 8% of a step. So the time of this
    all-reduce in TorchRec's steps beyond the fit to those with hot rows, up to the transfer time of
    the vectors, counts in the exchanges of vectors and of their gradients.
    """
    of_rows = [anchor for anchor in anchors if anchor.family != TORCHREC]
    overhead, waiting, factors = _fit_exchange(of_rows, "hot_exchange")
    shown = []
    for anchor in anchors:
        measured_s = dict(anchor.measured_s)
        if anchor.family == TORCHREC:
            expected_s = overhead + waiting * measured_s["dense"]
            expected_s += sum(factor * anchor.predicted_s[s] for s, factor in factors.items())
            left_s = max(0.0, sum(measured_s[s] for s in factors) - expected_s)
            delay_s = min(left_s, sum(anchor.predicted_s[s] for s in OF_VECTORS))
            measured_s["hot_exchange"] -= delay_s
            for stage in OF_VECTORS:
                measured_s[stage] += delay_s / len(OF_VECTORS)
        shown.append(replace(anchor, measured_s=measured_s))
    return shown


def _fit_exchange(anchors: list[Anchor], stage: str) -> tuple[float, float, dict[str, float]]:
    """Overhead, waiting as a share of the dense layers, and factors of the prediction.

    TorchRec's messages of pooled vectors have a separate factor from those of rows, since TorchRec
    copies them once more, and so have its all-reduces of replicas and those of hot rows. Ranks wait
    for the dense layers' all-reduce in the exchange of hot gradients; the factor of "other" is its
    exposed fraction. Least squares within WAITING_FRACS, MESSAGE_FACTORS and 0..1. Errors are in
    seconds, so that the larger batch dominates, which is that of the run or nearest to it: on a
    shaped link no line fits both. In the exchange of hot gradients they are relative to the step,
    because only the smaller batch shows the part that does not grow with the batch.
    """

    def predicted_s(name: str) -> Floats:
        return np.array([a.predicted_s[name] for a in anchors])

    is_theirs = np.array([a.family == TORCHREC for a in anchors])
    stages, found = [stage], {stage: predicted_s(stage)}
    if stage == "hot_exchange":
        stages.append("other")
    measured = np.array([sum(a.measured_s[s] for s in stages) for a in anchors])
    used = (sum(map(predicted_s, stages)) > 0) & (measured > 0)
    sent = used & (found[stage] > 0)
    is_split = stage in OF_BOTH_FAMILIES and (sent & is_theirs).any() and (sent & ~is_theirs).any()
    if is_split:
        found = {
            stage: np.where(is_theirs, 0.0, found[stage]),
            TORCHREC_STAGE.format(stage): np.where(is_theirs, found[stage], 0.0),
        }
    bounds = [MESSAGE_FACTORS] * len(found)
    if stage == "hot_exchange":
        found["other"] = predicted_s("other")
        bounds.append((0.0, 1.0))
    if np.count_nonzero(used) < 3:
        return 0.0, 0.0, dict.fromkeys(found, 1.0)
    dense = np.array([a.measured_s["dense"] for a in anchors])
    step = np.array([a.step_s for a in anchors])
    unit = step if stage == "hot_exchange" else np.full_like(step, np.median(step))
    columns = np.column_stack([np.ones_like(dense), dense, *found.values()])
    matrix, wanted = (columns / unit[:, None])[used], (measured / unit)[used]
    errors = []
    if is_split:
        # There are few more steps than unknowns, so a difference between the factors counts as
        # an error of one more step.
        alike = float(np.median(matrix[:, 2:4].sum(axis=1)))
        errors.append([0.0, 0.0, alike, -alike])
    if stage == "hot_exchange":
        # The all-reduce takes the same time in every step, as an overhead does, but is also there
        # without hot rows. So an overhead counts as an error of one more step.
        errors.append([1 / float(np.median(step))])
    for error in errors:
        matrix = np.vstack([matrix, error + [0.0] * (matrix.shape[1] - len(error))])
        wanted = np.append(wanted, 0.0)
    low, high = zip((0.0, float(measured[used].min())), WAITING_FRACS, *bounds, strict=True)
    overhead, waiting, *factors = fit_bounded(matrix, wanted, low, high).tolist()
    return overhead, waiting, dict(zip(found, factors, strict=True))


def _point(anchor: Anchor, stage: str) -> Point:
    """The prediction as items, or of TorchRec's kernels as bytes."""
    predicted, measured = anchor.predicted_s[stage], anchor.measured_s[stage]
    if stage in OF_KERNELS and anchor.family == TORCHREC:
        return Point(0.0, predicted, measured, 0.0)
    return Point(predicted, 0.0, measured, 0.0)


@dataclass(eq=False)
class _Run:
    """A case to measure, and its measurements.

    Args:
        case: The case that is built in each round.
        coverage: Fraction of lookups that are hot; None for TorchRec's plans.
        shardings: How TorchRec's plan shards the tables; None for placements with hot rows.
        sizes: Batch sizes, increasing.
        num_warm: Untimed steps of each size in a round.
        num_steps: Timed steps after them.
        took_s: Seconds of the last round.
        build_s: Seconds of building the case, included in ``took_s``.
        measured: Measurements by batch size.
    """

    case: Case
    coverage: float | None = None
    shardings: Shardings | None = None
    sizes: Sequence[int] = ()
    num_warm: int = 0
    num_steps: int = 0
    took_s: float = 0.0
    build_s: float = 0.0
    measured: list[MeasuredCase] = field(default_factory=list)


@dataclass(frozen=True)
class StepTarget:
    """The data of whole steps: tables, and how often each row is looked up."""

    workload: CalibrationWorkload
    samples: ZipfTables
    counts: Mapping[str, Rows]
    histograms: Mapping[str, CountHistogram]

    @staticmethod
    def of(workload: CalibrationWorkload) -> StepTarget:
        """The target, with tables cut to its memory cap on each rank."""
        target = workload.target
        max_rows = workload.ranks.world_size * target.cap_bytes // (4 * workload.dim)
        samples = target.samples(cut_tables(target.table_rows, max_rows))
        counts = samples.count(PROFILE_SAMPLES)
        histograms = {table: build_histogram(rows) for table, rows in counts.items()}
        return StepTarget(workload, samples, counts, histograms)

    def subject(self, batch_size: int) -> Subject:
        """The subject of the cases, in batches of this size."""
        subject = self.workload.target.subject.on(self.samples.schema)
        return replace(subject, batch_size=batch_size)

    def case(self, family: str, coverage: float) -> Case:
        """The case in which a fraction of the lookups is hot."""
        partition = choose_hot(self.counts, coverage)
        kind = PipelineKind.look_ahead if family == AHEAD else PipelineKind.sparse_dist
        return split_case(family, Placement.alike(partition), PipelineSpec(kind))

    def runs(self) -> list[_Run]:
        """The cases to measure."""
        # Adam has no cold rows on CPU.
        if row_spec(self.workload) != self.workload.target.spec.embedding:
            return [_Run(self.case(HOT_COLD, 1.0), 1.0)]
        # TorchRec's plans of sequences are predicted by the probes' prices alone.
        theirs = () if self.workload.target.spec.architecture.reads_sequences else THEIR_STEPS
        found = [
            _Run(case, shardings=self.shardings(case))
            for case in (
                Case(TORCHREC, Plan(TorchrecTables(plan), PipelineSpec(kind)))
                for plan, kind in theirs
            )
        ]
        found += [_Run(self.case(HOT_COLD, coverage), coverage) for coverage in COVERAGES]
        # On one rank there is nothing to exchange ahead, but a device has rows to fetch.
        if self.workload.ranks.device.type == "cuda" or self.workload.ranks.world_size > 1:
            found += [_Run(self.case(AHEAD, coverage), coverage) for coverage in AHEAD_COVERAGES]
        return found

    def shardings(self, case: Case) -> Shardings:
        """How TorchRec's plan of the case shards the tables; collective."""
        subject = self.subject(self.workload.target.batch_size)
        # Free memory differs between ranks, but all must plan the same.
        machine = broadcast_object(subject.machine(self.workload.ranks))
        unsharded = build_unsharded(subject.spec, case.plan, None, machine)
        return self.shardings_of(unsharded.plan(machine))

    def shardings_of(self, plan: ShardingPlan) -> Shardings:
        return shardings_of(plan, self.counts.keys())

    def predict(
        self, case: Case, batch_size: int, shardings: Shardings | None, costs: Costs
    ) -> Prediction:
        """The prediction of a case with hot rows, or of a plan of TorchRec."""
        workload = self.workload
        situation = self.subject(batch_size).situation(
            self.histograms, PROFILE_SAMPLES, costs, workload.ranks, workload.hosts
        )
        return predict(case.plan, situation, shardings)

    def batches(self, batch_size: int, num_batches: int) -> list[Batch]:
        ranks = self.workload.ranks
        return self.samples.batches(
            num_batches, batch_size=batch_size, rank=ranks.rank, world_size=ranks.world_size
        )


def measure_steps(
    workload: CalibrationWorkload,
    costs: Costs,
    budget: Budget,
    *,
    max_repeats: int = NUM_STEPS,
    after_turn: Callable[[], object] = lambda: None,
) -> tuple[list[MeasuredCase], int]:
    """Measure steps of every case, in rounds until all are exact enough or time is up; collective.

    Returns the cases, and the largest batch size with which all of them were measured.

    Args:
        workload: Tables, model and ranks.
        costs: Costs before any correction, to fit the steps into the budget.
        budget: Clock of all measurements.
        max_repeats: Maximum number of timed steps of each case and batch size, in whole rounds of
            NUM_STEPS.
        after_turn: Called after each case.
    """
    target = StepTarget.of(workload)
    runs = target.runs()
    start_s = time.perf_counter()
    target.batches(workload.target.batch_size, 1)
    draw_s = (time.perf_counter() - start_s) / workload.target.batch_size
    for number in range(-(-max_repeats // NUM_STEPS)):
        for at, run in enumerate(runs):
            start_s = budget.spent_s()
            if number == 0:
                share_s = (budget.seconds - start_s) / (len(runs) - at)
                share_s = max(share_s, MIN_FRAC * budget.seconds / len(runs))
                build_s = runs[at - 1].build_s if at else min(FIRST_BUILD_S, share_s / 2)
                _fit_in(target, run, costs, share_s - build_s, draw_s)
            elif (
                all(case.repeats.is_enough for case in run.measured)
                or start_s + run.took_s > budget.seconds
            ):
                continue
            _measure(target, run)
            run.took_s = budget.spent_s() - start_s
            after_turn()
    cases = [case for run in runs for case in run.measured]
    return cases, min(max(run.sizes) for run in runs)


def _fit_in(target: StepTarget, run: _Run, costs: Costs, seconds: float, draw_s: float) -> None:
    """Choose batch sizes and numbers of steps that fit the given seconds; collective.

    Batches become smaller only if MIN_WARM and MIN_STEPS do not fit. Drawing a sample takes
    ``draw_s``.
    """
    batch_size = target.workload.target.batch_size
    while True:
        sizes = [max(MIN_BATCH, batch_size // part) for part in BATCH_PARTS]
        of_sizes_s = [
            target.predict(run.case, size, run.shardings, costs).step.step_s + draw_s * size
            for size in sizes
        ]
        num_steps = int((seconds - NUM_AHEAD * of_sizes_s[0]) / sum(of_sizes_s))
        if num_steps >= MIN_WARM + MIN_STEPS or batch_size // 2 < BATCH_PARTS[0] * MIN_BATCH:
            num_warm = min(max(num_steps // 2, MIN_WARM), NUM_WARM)
            num_steps = min(max(num_steps - num_warm, MIN_STEPS), NUM_STEPS)
            # Rank 0's own costs decide, since those of other ranks differ by counts of their rows.
            run.sizes, run.num_warm, run.num_steps = broadcast_object((sizes, num_warm, num_steps))
            return
        batch_size //= 2


def _measure(target: StepTarget, run: _Run) -> None:
    """Build a case, and measure a round of its steps with each batch size."""
    ranks, sizes = target.workload.ranks, run.sizes
    num_batches = run.num_warm + run.num_steps + NUM_AHEAD
    batches = target.batches(sizes[0], 1) + [
        batch for size in sizes for batch in target.batches(size, num_batches)
    ]
    subject = target.subject(target.workload.target.batch_size)
    start_s = time.perf_counter()
    runner = build_runner(subject, run.case, batches, ranks)
    run.build_s = time.perf_counter() - start_s
    if not run.measured:
        # The previous plan, unless another amount of memory was free.
        shardings = run.shardings and target.shardings_of(
            broadcast_object(runner.trainable.sharding)
        )
        run.measured += [
            MeasuredCase(
                run.case.name, run.coverage, partial(target.predict, run.case, size, shardings)
            )
            for size in sizes
        ]
    num_ahead = 0  # of the other size, which the pipeline holds
    for found in run.measured:
        runner.clock = StageClock(ranks.device)
        stage_s, times = _time_steps(runner, ranks, num_ahead + run.num_warm, run.num_steps)
        found.stage_s.append(stage_s)
        found.repeats.rounds.append(times)
        num_ahead = NUM_AHEAD
    runner.pipeline.close()


def choose_hot(counts: Mapping[str, Rows], coverage: float) -> Partition:
    """The hot rows that serve a fraction of the lookups."""
    if coverage == ALL_COLD:
        return choose_all_cold(counts)
    return choose_coverage(counts, coverage=coverage) if coverage < 1 else choose_all_hot(counts)


# Seconds by stage, and of each step of the ranks together, as if they were one rank.
Times = tuple[dict[str, float], list[list[float]]]


def _time_steps(runner: Runner, ranks: Ranks, num_warm: int, num_steps: int) -> Times:
    """Time consecutive steps; collective. The seconds are those of the ranks together.

    A barrier before each step would end the overlap of look-ahead, and make ranks enter TorchRec's
    exchanges at the same moment, unlike in training. In that case, gloo's all-to-all between two
    ranks sends first in one direction and then in the other: it announces that it can receive only
    after its own send.
    """
    runner.drain()  # so that the ranks begin together
    block = run_block(runner, num_warm + num_steps, num_warm, ranks.device, clock=runner.clock)
    gathered = all_gather_object((runner.clock.seconds(), block))
    steps = step_seconds([block for _, block in gathered]).tolist()
    return typical_stages([seconds for seconds, _ in gathered]), [steps]


def typical_stages(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean over the ranks, and over the half of the steps that are neither short nor long.

    The stages add up to such a step; medians would not, if the speed of messages varies.

    Args:
        of_ranks: Seconds of each step (steps,) by stage.
    """
    seconds = {s: np.mean([of_rank[s] for of_rank in of_ranks], axis=0) for s in STAGES}
    by_length = np.argsort(np.sum([*seconds.values()], axis=0))
    quarter = by_length.size // 4
    middle = by_length[quarter : by_length.size - quarter]
    return {stage: float(of_steps[middle].mean()) for stage, of_steps in seconds.items()}
