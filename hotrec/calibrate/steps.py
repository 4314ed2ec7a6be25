"""Correct measured kernels by whole training steps.

A kernel timed alone has the cache and the memory bandwidth to itself and no Python around it. So a
few steps of a hot/cold placement and of TorchRec's hand-tuned plan are measured at two batch sizes,
and those of look-ahead, whose communication thread competes with the layers for the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hotrec.bench.cases import Case, Runner, build_runner, case_scenario, step_seconds
from hotrec.bench.measure import run_block
from hotrec.bench.samples import ZipfTables
from hotrec.calibrate.kernels import Point, fit_line
from hotrec.calibrate.probes import row_spec
from hotrec.calibrate.workload import CalibrationWorkload, cut_tables
from hotrec.config.groups import FractionPlacement, Routing, TorchrecPlacement
from hotrec.config.roots import BenchConfig, BenchRootConfig, LaunchConfig, PlannerConfig
from hotrec.cost_model.costs import Costs, Line, fit_nonnegative
from hotrec.cost_model.forms import TIERS
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.interval import ratio_interval
from hotrec.planning.policies import choose_all_cold, choose_all_hot, choose_coverage
from hotrec.planning.predict import Predicted, predict_placement, predict_plan
from hotrec.planning.scenario import Scenario
from hotrec.runtime.ranks import Ranks, all_gather_object, barrier, broadcast_object
from hotrec.runtime.stages import StageClock
from hotrec.types import STAGES, Partition, PipelineKind, Rows, TablePlacement, TorchrecPlan

# Hot and cold rows in every stage; and all rows hot, since a large replica is slower to read.
COVERAGES = (0.8, 1.0)
ALL_COLD = 0.0
# Those of the steps with look-ahead: its thread has most to do where all rows are cold.
AHEAD_COVERAGES = (ALL_COLD, 0.8)
# With a smaller span of bytes, noise would decide the cost per byte.
MIN_SPAN_BYTES = 1 << 16
PROFILE_SAMPLES = 200_000
NUM_STEPS, NUM_WARM, NUM_AHEAD = 10, 4, 3
# Parts of the steps whose medians are repeats of one another.
NUM_REPEATS = 2
# The smaller batch shows the constant part of each stage.
BATCH_PARTS = (4, 1)
MIN_BATCH = 32
HOT_COLD, TORCHREC, AHEAD = "hot_cold", "torchrec", "look_ahead"
# The kernels of each family by stage; the other stages are the same for both.
KERNELS_OF: Mapping[tuple[str, str], tuple[str, ...]] = {
    (HOT_COLD, "route"): ("route",),
    (HOT_COLD, "pool"): ("pool",),
    (HOT_COLD, "row_lookup"): (*(f"read_{tier}" for tier in TIERS), "hot_read"),
    (HOT_COLD, "row_update"): tuple(f"update_{tier}" for tier in TIERS),
    (HOT_COLD, "hot_exchange"): ("hot_pack", "hot_add"),
    (HOT_COLD, "optimizer"): ("hot_update", "dense_update"),
    (TORCHREC, "row_lookup"): (*(f"pooled_{tier}" for tier in TIERS), "replicated_read"),
    (TORCHREC, "row_update"): tuple(f"pooled_update_{tier}" for tier in TIERS),
    (TORCHREC, "optimizer"): ("replicated_update",),
}
MIN_FACTOR = 1.0
HOT_STAGES = ("hot_exchange", "optimizer")
EXCHANGES = ("ids_exchange", "rows_exchange", "grads_exchange")


@dataclass(frozen=True)
class Anchor:
    """Predicted and measured steps of one case."""

    family: str
    coverage: float | None  # of lookups that are hot; None for TorchRec's plan
    predicted_s: Mapping[str, float]  # by stage, from the kernels alone
    measured_s: Mapping[str, float]  # by stage, median over the steps and mean over the ranks
    step_s: float  # of the slowest rank
    row_bytes: float = 0.0  # of a rank's distinct cold rows, predicted


@dataclass(frozen=True, eq=False)
class MeasuredCase:
    """Measured steps of one case, and its prediction from any costs.

    Args:
        family: HOT_COLD, TORCHREC or AHEAD.
        coverage: Fraction of lookups that are hot; None for TorchRec's plan.
        stage_s: Seconds by stage, median over the steps and mean over the ranks.
        step_s: Seconds of a step of the slowest rank.
        repeats_s: The same of each repeat.
        predict: The case's prediction from costs.
    """

    family: str
    coverage: float | None
    stage_s: Mapping[str, float]
    step_s: float
    repeats_s: Sequence[float]
    predict: Callable[[Costs], Predicted]

    def anchor(self, costs: Costs) -> Anchor:
        """The case as predicted from ``costs``."""
        predicted = self.predict(costs)
        row_bytes = sum(predicted.quantities.get(f"bytes_{tier}", 0.0) for tier in TIERS)
        stage_s = dict(predicted.step.stage_s)
        return Anchor(self.family, self.coverage, stage_s, self.stage_s, self.step_s, row_bytes)


def coverages(workload: CalibrationWorkload) -> tuple[float | None, ...]:
    """Coverages of the cases to run; None is TorchRec's plan. Adam has no cold rows on CPU."""
    has_cold = row_spec(workload) == workload.specs[0]
    return (*COVERAGES, None) if has_cold else (1.0,)


def correct_by_steps(workload: CalibrationWorkload, costs: Costs) -> tuple[Costs, list[Anchor]]:
    """The costs corrected by whole steps, and the measured steps; collective."""
    sizes = [max(MIN_BATCH, workload.target.batch_size // part) for part in BATCH_PARTS]
    cases = coverages(workload)
    runs = [(HOT_COLD if c is not None else TORCHREC, c, size) for size in sizes for c in cases]
    # On CUDA steps with look-ahead have not been run yet.
    ranks = workload.ranks
    if ranks.device.type == "cpu" and ranks.world_size > 1 and None in cases:
        runs += [(AHEAD, coverage, size) for size in sizes for coverage in AHEAD_COVERAGES]
    measured = [_run(workload, *run) for run in runs]
    anchors = {case: case.anchor(costs) for case in measured}
    fitted = _correct(costs, measured, anchors)
    interval = ratio_interval(_ratios(costs, measured, anchors))
    shown = [case.anchor(fitted) if case.family == AHEAD else anchors[case] for case in measured]
    return replace(fitted, ratio_interval=interval), shown


def _correct(
    costs: Costs, cases: Sequence[MeasuredCase], anchors: Mapping[MeasuredCase, Anchor]
) -> Costs:
    """Costs corrected by ``cases``, whose anchors predicted from ``costs`` are given."""
    fitted = fit_steps(costs, [anchors[case] for case in cases if case.family != AHEAD])
    ahead = [case.anchor(fitted) for case in cases if case.family == AHEAD]
    return replace(fitted, look_ahead=fit_look_ahead(ahead))


def _ratios(
    costs: Costs, cases: Sequence[MeasuredCase], anchors: Mapping[MeasuredCase, Anchor]
) -> list[list[float]]:
    """Measured over predicted step of each repeat of each case, from a fit to the other cases."""
    ratios = []
    for case in cases:
        others = [other for other in cases if other is not case]
        step_s = case.predict(_correct(costs, others, anchors)).step.step_s
        ratios.append([seconds / step_s for seconds in case.repeats_s])
    return ratios


def fit_look_ahead(anchors: list[Anchor]) -> Line:
    """``measured step - predicted step = fixed + per_byte * bytes of cold rows``."""
    left = [(a.row_bytes, a.step_s - sum(a.predicted_s.values())) for a in anchors]
    points = [Point(0.0, num_bytes, seconds, 0.0) for num_bytes, seconds in left if seconds > 0]
    if not points:
        return Line() if anchors else Line(source="not measured")
    span_bytes = max(p.num_bytes for p in points) - min(p.num_bytes for p in points)
    return fit_line(points, is_by_items=False, is_by_bytes=span_bytes >= MIN_SPAN_BYTES)


def fit_steps(costs: Costs, anchors: list[Anchor]) -> Costs:
    """The costs that predict the anchors' stages best.

    Stages that compute take ``overhead + factor * predicted``, those that exchange ``overhead +
    waiting * dense layers + factor * predicted``; there is one factor per family of kernels.
    """
    kernels = dict(costs.kernels)
    corrections, overheads, waiting = {}, {}, {}
    for stage in STAGES:
        if stage == "other":
            continue
        if stage in EXCHANGES:
            overheads[stage], waiting[stage], corrections[stage] = _fit_exchange(anchors, stage)
            continue
        is_own = any((family, stage) in KERNELS_OF for family in (HOT_COLD, TORCHREC))
        # A large replica costs more per row, but a line has one slope. Fitting the large one errs
        # towards fewer replicas.
        chosen = [a for a in anchors if stage not in HOT_STAGES or a.coverage in (None, 1.0)]
        points = [_point(anchor, stage, is_own) for anchor in chosen]
        used = [point for point in points if point.seconds > 0]
        if len(used) < 2:
            continue
        is_by_bytes = is_own and any(point.num_bytes for point in used)
        line = fit_line(used, is_by_bytes=is_by_bytes and len(used) > 2)
        overheads[stage] = line.fixed_s
        if not is_own:
            corrections[stage] = line.per_item_s
            continue
        for family, factor in ((HOT_COLD, line.per_item_s), (TORCHREC, line.per_byte_s)):
            for name in KERNELS_OF.get((family, stage), ()):
                if name in kernels and factor > 0:
                    scaled = kernels[name]
                    kernels[name] = replace(
                        scaled,
                        fixed_s=scaled.fixed_s * factor,
                        per_item_s=scaled.per_item_s * factor,
                        per_byte_s=scaled.per_byte_s * factor,
                    )
    corrections["other"] = _fit_dense_exchange(anchors)
    left = [a.step_s - sum(a.measured_s[s] for s in STAGES if s != "other") for a in anchors]
    return replace(
        costs,
        kernels=kernels,
        corrections=corrections,
        overhead_s=max(0.0, float(np.median(left))),
        stage_overhead_s=overheads,
        waiting_frac=waiting,
    )


def _fit_dense_exchange(anchors: list[Anchor]) -> float:
    """Exposed fraction of the dense layers' all-reduce.

    Its wait is part of the stage of replicated rows' gradients, of which TorchRec's plan has few.
    """
    shares = [
        (sum(a.measured_s[s] for s in ("hot_exchange", "other")) - a.predicted_s["hot_exchange"])
        / a.predicted_s["other"]
        for a in anchors
        if a.family == TORCHREC and a.predicted_s["other"] > 0
    ]
    return float(np.clip(np.median(shares), 0.0, 1.0)) if shares else 1.0


def _fit_exchange(anchors: list[Anchor], stage: str) -> tuple[float, float, float]:
    """Overhead, waiting as a share of the dense layers, and the factor of the prediction.

    Least squares of the errors relative to the step. Overhead and waiting are not negative, and the
    factor is at least MIN_FACTOR, since a message is never faster than when it is sent alone.
    """
    measured = np.array([a.measured_s[stage] for a in anchors])
    predicted = np.array([a.predicted_s[stage] for a in anchors])
    used = (predicted > 0) & (measured > 0)
    if np.count_nonzero(used) < 3:
        return 0.0, 0.0, 1.0
    dense = np.array([a.measured_s["dense"] for a in anchors])
    step = np.array([a.step_s for a in anchors])
    columns = np.stack([np.ones_like(dense), dense, predicted], axis=1)
    matrix = (columns / step[:, None])[used]
    overhead, waiting, more = fit_nonnegative(
        matrix, (measured / step)[used] - MIN_FACTOR * matrix[:, 2]
    )
    return float(overhead), float(waiting), MIN_FACTOR + float(more)


def _point(anchor: Anchor, stage: str, is_own: bool) -> Point:
    """The prediction of HOT_COLD (or of both families) as items, that of TORCHREC as bytes."""
    predicted, measured = anchor.predicted_s[stage], anchor.measured_s[stage]
    if is_own and (anchor.family, stage) not in KERNELS_OF:
        return Point(0.0, 0.0, 0.0, 0.0)
    if is_own and anchor.family == TORCHREC:
        return Point(0.0, predicted, measured, 0.0)
    return Point(predicted, 0.0, measured, 0.0)


def _run(
    workload: CalibrationWorkload, family: str, coverage: float | None, batch_size: int
) -> MeasuredCase:
    """Measure steps with a fraction of the lookups hot, or of TorchRec's hand-tuned plan."""
    target, ranks = workload.target, workload.ranks
    samples = ZipfTables(
        cut_tables(target.table_rows, ranks.world_size * target.cap_bytes // (4 * workload.dim)),
        exponent=target.zipf_exponent,
        num_dense=target.num_dense,
        seed=target.seed,
    )
    config = BenchRootConfig(
        bench=BenchConfig(name="calibrate", batch_size=batch_size, seed=target.seed),
        model=target.model,
        optimizer=target.optimizer,
        planner=PlannerConfig(),
        launch=LaunchConfig(),
    )
    counts = samples.count(PROFILE_SAMPLES)
    partition = None
    if coverage is None:
        case = Case(TORCHREC, TorchrecPlacement(plan=TorchrecPlan.hand_tuned), None)
    else:
        partition = choose_hot(counts, coverage)
        kind = PipelineKind.look_ahead if family == AHEAD else PipelineKind.sparse_dist
        case = Case(family, FractionPlacement(routing=Routing.device), partition, kind)
    batches = samples.batches(
        1 + NUM_WARM + NUM_STEPS + NUM_AHEAD,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    runner = build_runner(config, case, samples.schema, batches, ranks)
    stage_s, times = (_time_ahead if family == AHEAD else _time_steps)(runner, ranks)
    runner.pipeline.close()
    histograms = {table: build_histogram(rows) for table, rows in counts.items()}
    plan = broadcast_object(runner.sharded.plan)

    def predict(costs: Costs) -> Predicted:
        scenario = case_scenario(
            config, case, samples.schema, histograms, PROFILE_SAMPLES, costs, ranks
        )
        return predict_plan(scenario, plan) if partition is None else _predict(scenario, partition)

    repeats_s = [float(np.median(part)) for part in np.array_split(times, NUM_REPEATS)]
    return MeasuredCase(family, coverage, stage_s, float(np.median(times)), repeats_s, predict)


def choose_hot(counts: Mapping[str, Rows], coverage: float) -> Partition:
    """The hot rows that take a fraction of the lookups."""
    if coverage == ALL_COLD:
        return choose_all_cold(counts)
    return choose_coverage(counts, coverage=coverage) if coverage < 1 else choose_all_hot(counts)


def _time_steps(runner: Runner, ranks: Ranks) -> tuple[dict[str, float], npt.NDArray[np.float64]]:
    """Seconds by stage and of each step, with a barrier before each step; collective."""
    for _ in range(NUM_WARM):
        runner.step()
    clock, times = StageClock(ranks.device), []
    for _ in range(NUM_STEPS):
        barrier()
        with clock.step():
            runner.step()
        times.append(sum(float(s[-1]) for s in clock.seconds().values()))
    gathered = all_gather_object((clock.medians(), times))
    return _mean_stages([medians for medians, _ in gathered]), np.max(
        [times for _, times in gathered], axis=0
    )


def _time_ahead(runner: Runner, ranks: Ranks) -> tuple[dict[str, float], npt.NDArray[np.float64]]:
    """The same for consecutive steps, since a barrier would end their overlap; collective."""
    block = run_block(runner, NUM_WARM + NUM_STEPS, NUM_WARM, ranks)
    gathered = all_gather_object((runner.clock.medians(), block))
    return _mean_stages([medians for medians, _ in gathered]), step_seconds(
        [block for _, block in gathered]
    )


def _mean_stages(medians: list[dict[str, float]]) -> dict[str, float]:
    return {stage: float(np.mean([of[stage] for of in medians])) for stage in STAGES}


def _predict(scenario: Scenario, partition: Partition) -> Predicted:
    num_hot = {table: partition.num_hot(table) for table in partition.num_rows}
    return predict_placement(scenario, num_hot, dict.fromkeys(num_hot, TablePlacement()))
