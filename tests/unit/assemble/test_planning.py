"""The training plan of every kind of placement, and reading what a run recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotrec.artifact import ArtifactError
from hotrec.assemble.job import plan_job
from hotrec.assemble.plan_job import PlanJob
from hotrec.assemble.planning import (
    Proposal,
    SettledPlan,
    make_proposal,
    read_settled_plan,
)
from hotrec.cli.profile import blocks_of
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import Config
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.demand import expected_urgent
from hotrec.cost_model.look_ahead import MOVEMENTS
from hotrec.cost_model.profile import read_profile, write_profile
from hotrec.cost_model.reuse import TableReuse
from hotrec.data.chunks import Dataset
from hotrec.models.shape import ids_per_sample
from hotrec.planner.machine import Machine
from hotrec.planner.partition import read_placement
from hotrec.planner.plan import Plan, SplitTables, TorchrecTables
from hotrec.planner.situation import LoaderWorkers
from hotrec.planner.slots import LOAD_FRACS, SlotsError
from hotrec.planner.trial import Trial, write_trial
from hotrec.runtime.run_dir import PARTITION, PREDICTION
from hotrec.types import ColdTier, Exchange, PipelineKind, PipelineSpec, Table, TorchrecPlan
from tests.unit.data.logs import ONE_HOT_SCHEMA, write_dataset

# Made by a version that recorded plans by their labels.
BY_LABEL = Path(__file__).parents[2] / "data" / "prediction_by_label.json"
SPARSE_DIST, BASE = PipelineKind.sparse_dist, PipelineKind.base
HAND_TUNED = TorchrecPlan.hand_tuned
ON = Machine(2, 2, "cpu", 0, 8 << 30, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    write_dataset(path / "dataset", {"train": 90})
    dataset = Dataset.open(path / "dataset")
    dataset_hash = dataset.artifact.content_hash
    blocks = blocks_of(dataset, "train")
    write_profile(blocks, dataset.schema, path / "profile", dataset_hash=dataset_hash)
    return path


def config_of(folder: Path, *words: str) -> Config:
    names = ("dataset", "profile", "partition")
    paths = [f"paths.{name}={folder / name}" for name in names]
    given = ["trainer.batch_size=32", "planner.costs=cpu_1gbit", *paths, *words]
    config: Config = build_config(compose_config("config", given))
    return config


def job_of(folder: Path, *words: str) -> PlanJob:
    return plan_job(config_of(folder, *words), Dataset.open(folder / "dataset").schema)


def propose_plan(folder: Path, *words: str, is_plan: bool = True, on: Machine = ON) -> Proposal:
    dataset = Dataset.open(folder / "dataset")
    return make_proposal(job_of(folder, *words), dataset, on, is_plan=is_plan)


@pytest.mark.parametrize(
    ("cores", "words", "expected"),
    [(2, (), 0), (3, (), 1), (2, ("trainer.num_workers=4",), 4)],
)
def test_predictions_are_for_the_loader_workers_that_a_run_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cores: int, words: tuple[str, ...], expected: int
) -> None:
    """None where the ranks fill the cores, unless their number is configured."""
    costs = BUILTIN["cpu_1gbit"]
    facts = {**costs.facts, "cores_per_host": float(cores)}
    monkeypatch.setitem(BUILTIN, "cpu_1gbit", replace(costs, facts=facts))
    proposal = propose_plan(folder, *words, is_plan=False)
    assert proposal.situation is not None
    assert proposal.situation.loader == LoaderWorkers(expected, cores)
    assert proposal.situation.workload.is_routed_by_loader == (expected > 0)
    assert {plan.plan.num_workers for plan in proposal.candidates.values()} == {expected}


def test_sequences_are_not_pooled_and_compared_with_torchrecs_plans(folder: Path) -> None:
    words = ("model=hstu", "+model.history.bag=b")
    decision = propose_plan(folder, *words).decision
    assert decision is not None
    theirs = set()
    for plan in decision.predictions:
        if isinstance(plan.tables, SplitTables):
            assert {t.exchange for t in plan.tables.tables.values()} == {Exchange.ROWS}
        else:
            theirs.add(plan.tables.plan)
    # By hand small tables are replicated, which TorchRec does not look up rightly on a CPU.
    assert theirs == {TorchrecPlan.planner}
    given = propose_plan(folder, *words, "placement=torchrec").decision
    assert given is not None
    assert given.prediction.step_s > 0
    # The history at its full length.
    spec = job_of(folder, *words).spec
    assert ids_per_sample(spec.architecture, {"t_b": 2.4}) == {"a": 1, "b": 1, "bag": 50}


def make(folder: Path, *words: str, run: str = "run") -> SettledPlan:
    return propose_plan(folder, *words).settle(folder / run / PARTITION)


def record(run: Path, prediction: Any) -> None:
    run.mkdir(exist_ok=True)
    (run / PREDICTION).write_text(json.dumps(prediction))


@pytest.mark.parametrize(
    "words",
    [
        ("placement=cost", "placement.may_decline=false"),
        ("placement=cost",),
        ("placement=coverage",),
        ("placement=scars",),
        ("placement=torchrec",),
    ],
)
def test_a_plan_is_made_and_read(folder: Path, words: tuple[str, ...], one_rank: Any) -> None:
    run = folder / f"{words[0][10:]}_{len(words)}"
    made = make(folder, *words, run=run.name)
    assert made.prediction is not None
    assert {"torchrec planner"} <= set(made.prediction["plans"])
    assert made.predicted is not None
    assert made.predicted["digest"] == made.plan.digest
    assert bool(made.prediction["sensitivity"]) == ("placement=cost" in words)
    record(run, made.prediction)
    read = read_settled_plan(job_of(folder, *words), run, ON)
    assert read.prediction == json.loads(json.dumps(made.prediction))
    assert read.plan.pipeline == made.plan.pipeline
    assert read.plan.torchrec_plan is made.plan.torchrec_plan
    assert (read.partition is None) == (made.partition is None) == (not made.plan.is_hotrec)
    if made.partition is not None and read.partition is not None:
        assert read.placement is not None
        assert made.placement is not None
        assert read.placement.tables == made.placement.tables
        assert read.partition.digest == made.partition.digest
        assert read.partition.num_rows == made.partition.num_rows
        saved = ("placement=saved", f"placement.partition_dir={run / PARTITION}")
        assert make(folder, *saved).artifact == read.artifact


def test_a_plan_without_its_inputs_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="none"):
        make(folder, f"paths.profile={folder / 'none'}", "placement=coverage")
    made = make(folder, f"paths.profile={folder / 'none'}", "placement=torchrec")
    assert made.prediction is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("placement=cost",), {"hot_cold look_ahead", "hot_cold sparse_dist", "torchrec planner"}),
        (
            ("placement=cost", "placement.may_decline=false"),
            {"hot_cold look_ahead", "hot_cold sparse_dist", "hot_cold base"},
        ),
        (("placement=cost", "pipeline=base"), {"hot_cold base", "torchrec planner base"}),
        (("placement=coverage",), {"hot_cold look_ahead", "hot_cold sparse_dist"}),
        (("placement=coverage", "pipeline=look_ahead"), {"hot_cold look_ahead"}),
        (("placement=torchrec",), set()),
    ],
)
def test_candidates(
    folder: Path, words: tuple[str, ...], expected: set[str], one_rank: Any
) -> None:
    """Built-in costs leave most plans in doubt; each candidate is a plan to train."""
    candidates = propose_plan(folder, *words).candidates
    assert expected <= {settled.plan.label for settled in candidates.values()}
    for digest, settled in candidates.items():
        plan = settled.plan
        assert plan.digest == digest
        assert plan.pipeline.kind is not PipelineKind.auto
        assert (settled.placement is None) == (not plan.is_hotrec)
        if settled.partition is not None:
            assert settled.partition.total_hot == plan.num_hot


def test_a_trial_decides_and_is_read_back(folder: Path, one_rank: Any) -> None:
    proposal = propose_plan(folder, "placement=cost")
    digests = list(proposal.candidates)
    assert len(digests) > 1
    for number, (digest, candidate) in enumerate(proposal.candidates.items()):
        run, plan = folder / f"trial_{number}", candidate.plan
        trial = Trial({other: [0.01 + 0.01 * (other != digest)] * 3 for other in digests}, 5.0)
        made = proposal.settle(run / PARTITION, trial)
        assert made.plan == plan
        assert made.prediction is not None
        assert made.prediction["chosen"] == plan.label
        assert made.prediction["plan"] == plan.to_json()
        why = made.prediction["why"]
        # By names that a user knows.
        assert why.startswith(f"{plan.title} took 10 ms a step, the least of ")
        assert "hot_cold" not in why
        assert made.prediction["trial"]["plans"][plan.label]["step_s"] == pytest.approx(0.01)
        record(run, made.prediction)
        read = read_settled_plan(job_of(folder, "placement=cost"), run, ON)
        assert read.plan.pipeline == plan.pipeline
        assert read.plan.torchrec_plan is plan.torchrec_plan


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("torchrec planner", Plan(TorchrecTables(), PipelineSpec(SPARSE_DIST))),
        ("torchrec hand_tuned base", Plan(TorchrecTables(HAND_TUNED), PipelineSpec(BASE))),
        ("hot_cold look_ahead", None),
        ("hot_cold base", None),
    ],
)
def test_a_plan_that_was_recorded_by_its_label_is_read(
    folder: Path, chosen: str, expected: Plan | None, one_rank: Any
) -> None:
    """As versions before the plan was in the prediction recorded it."""
    prediction = json.loads(BY_LABEL.read_text()) | {"chosen": chosen}
    assert "plan" not in prediction
    words, run = ("placement=cost", "placement.may_decline=false"), folder / "by_label"
    if not (run / PARTITION).exists():
        make(folder, *words, run=run.name)
    record(run, prediction)
    read = read_settled_plan(job_of(folder, "placement=cost"), run, ON)
    assert read.prediction == prediction
    assert read.predicted == prediction["plans"][chosen]
    assert read.plan.label == chosen
    if expected is not None:
        assert (read.plan, read.placement) == (expected, None)
    else:
        placement, _ = read_placement(run / PARTITION)
        assert read.placement is not None
        assert read.placement.tables == placement.tables
        assert read.plan.num_hot == placement.partition.total_hot


def test_a_plan_of_a_host_tier_that_was_recorded_by_its_label_is_read(folder: Path) -> None:
    prediction, label = json.loads(BY_LABEL.read_text()), "torchrec planner fused_uvm"
    plans = {**prediction["plans"], label: prediction["plans"]["torchrec planner"]}
    record(folder / "on_host", prediction | {"chosen": label, "plans": plans})
    read = read_settled_plan(job_of(folder, "placement=cost"), folder / "on_host", ON)
    tables = TorchrecTables(tier=ColdTier.fused_uvm)
    assert read.plan == Plan(tables, PipelineSpec(SPARSE_DIST))


def test_a_plan_of_torchrec_is_read_where_look_ahead_was_asked_for(folder: Path) -> None:
    """Look-ahead was for a split, over which TorchRec's plan was chosen."""
    prediction = json.loads(BY_LABEL.read_text())
    plan = Plan(TorchrecTables(), PipelineSpec(SPARSE_DIST, depth=3))
    for number, document in enumerate((prediction, prediction | {"plan": plan.to_json()})):
        run = folder / f"declined_{number}"
        record(run, document)
        job = job_of(folder, "placement=cost", "pipeline=look_ahead", "pipeline.depth=3")
        assert read_settled_plan(job, run, ON).plan == plan


@pytest.mark.parametrize(
    "prediction",
    ["", [], {}, {"chosen": "gone", "plans": {}}, {"plan": {}}, {"plan": {"is_hotrec": True}}],
)
def test_a_recorded_plan_that_is_damaged_is_refused(folder: Path, prediction: Any) -> None:
    record(folder / "damaged", prediction)
    with pytest.raises(
        ArtifactError, match=r"prediction\.json: expected the recorded plan of the run"
    ):
        read_settled_plan(job_of(folder, "placement=cost"), folder / "damaged", ON)


def test_a_run_by_cost_without_a_recorded_plan_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file. Start a new run"):
        read_settled_plan(job_of(folder, "placement=cost"), folder / "nothing", ON)
    words = ("placement=torchrec", "placement.plan=hand_tuned", "pipeline=base")
    read = read_settled_plan(job_of(folder, *words), folder / "nothing", ON)
    assert read.plan == Plan(TorchrecTables(HAND_TUNED), PipelineSpec(BASE))
    assert read.prediction is None


def test_predictions_have_the_reuse_of_the_order(folder: Path) -> None:
    """Of the log for its order, of shuffled chunks for theirs, of neither for all-hot batches."""
    profile, _ = read_profile(folder / "profile")
    in_order = {"t_b": TableReuse(32, (0.9, 0.95), is_of_log=True)}
    shuffled = {"t_b": TableReuse(32, (0.5, 0.6), is_of_log=True)}
    profile = replace(profile, reuse=in_order, shuffled_reuse=shuffled)
    urgent = {}
    for words in (("order=time",), (), ("order=all_hot", "placement=fraction")):
        job = job_of(folder, *words)
        costs = BUILTIN["cpu_1gbit"], None
        situation = job.situation(ON, profile, profile.build_histograms(), costs)
        demand = next(demand for demand in situation.demands if demand.name == "t_b")
        urgent[job.order.kind.name] = expected_urgent(demand)
    assert urgent["time"] > 1.2 * urgent["shuffled"]
    older = replace(profile, reuse={}, shuffled_reuse={})
    [*_, of_older] = job_of(folder).situation(ON, older, older.build_histograms(), costs).demands
    assert urgent["all_hot"] == expected_urgent(of_older) != urgent["shuffled"]


def test_a_recorded_trial_is_of_these_candidates(
    folder: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By digest; one of labels, as earlier versions recorded it, is made again."""
    words = ("placement=cost", f"paths.trials={folder / 'trials'}", "pipeline.depth=3")
    proposal = propose_plan(folder, *words)
    assert proposal.recorded_trial is None
    assert "record of a trial" not in caplog.text
    first, second, *_ = proposal.candidates
    trial = Trial({first: [1.0, 1.0], second: [2.0, 2.0]}, 5.0)
    write_trial(trial, proposal.trial_file)
    assert propose_plan(folder, *words).recorded_trial == replace(trial, is_recorded=True)
    labels = [proposal.candidates[digest].plan.label for digest in (first, second)]
    write_trial(Trial(dict.fromkeys(labels, [1.0, 1.0]), 5.0), proposal.trial_file)
    assert proposal.recorded_trial is None
    assert "expected the record of a trial" in caplog.text


@pytest.mark.slow
def test_a_trial_is_recorded_for_its_situation(folder: Path, one_rank: Any) -> None:
    file = propose_plan(folder, "placement=cost").trial_file
    rates = ("optimizer.learning_rate=0.5", "optimizer.schedule.decay=cosine")
    for same in ((), rates):
        assert propose_plan(folder, "placement=cost", *same).trial_file == file
    for change in ("trainer.num_workers=2", "trainer.batch_size=16", "optimizer=adagrad"):
        assert propose_plan(folder, "placement=cost", change).trial_file != file


def test_a_saved_partition_of_another_situation_is_told(
    folder: Path, one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder, "placement=coverage", run="there")
    saved = ("placement=saved", f"placement.partition_dir={folder / 'there' / PARTITION}")
    propose_plan(folder, *saved)
    assert "different conditions" not in caplog.text
    propose_plan(folder, *saved, on=replace(ON, world_size=4, local_world_size=4))
    assert "num_ranks 4 instead of 2, ranks_per_host 4 instead of 2. Another" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("slower", [1, 100_000])
def test_the_planner_chooses_the_number_of_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: int
) -> None:
    """The fewest that are as fast as all that fit, found among all, also with a slow link."""
    costs = BUILTIN["cpu_1gbit"]
    known = MOVEMENTS.keys() & costs.kernels.keys()
    moves = {name: replace(costs.kernels[name], per_byte_s=slower * 530e-12) for name in known}
    monkeypatch.setitem(BUILTIN, "cpu_1gbit", replace(costs, kernels={**costs.kernels, **moves}))
    schema = replace(ONE_HOT_SCHEMA, tables=(Table("t_a", 10), Table("t_b", 2000)))
    write_dataset(tmp_path / "dataset", {"train": 1000}, rows_per_chunk=500, schema=schema)
    dataset = Dataset.open(tmp_path / "dataset")
    blocks = blocks_of(dataset, "train")
    content = dataset.artifact.content_hash
    write_profile(blocks, dataset.schema, tmp_path / "profile", dataset_hash=content)
    words = [
        "placement=all_cold", "placement.cold_tier=cached", "pipeline=look_ahead",
        "pipeline.depth=1", "trainer.batch_size=4", "trainer.eval_batch_size=4",
    ]  # fmt: skip
    seconds = {}
    for load_frac in LOAD_FRACS:
        try:
            given = propose_plan(
                tmp_path, *words, f"placement.cache_load_frac={load_frac}", is_plan=False
            )
        except SlotsError:
            continue
        seconds[load_frac] = given.predicted_s(1)[0]
    assert len(LOAD_FRACS) > len(seconds) > 3
    least = min(f for f in seconds if seconds[f] <= 1.01 * seconds[LOAD_FRACS[-1]])
    proposal = propose_plan(tmp_path, *words, is_plan=False)
    assert proposal.placement is not None
    assert {t.cache_load_frac for t in proposal.placement.tables.values()} == {least}
    assert proposal.predicted_s(1)[0] == pytest.approx(seconds[least])
    assert proposal.decision is not None
    assert f"cache_load_frac={least:.3f} gives the fewest" in proposal.decision.why
    assert (least > min(seconds)) == (slower > 1)
