"""The commands: what each does, where its code is, which root configuration it reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        summary: one line for the list of commands.
        config_name: the root configuration in ``conf/``. Commands that share one accept the same
            overrides, so one ``experiment=`` describes a whole chain of them.
        sections: the parts of that configuration that the command reads.
        description: what it reads, does and writes.
        examples: three command lines, each with a line that says what it is for.
        is_parallel: whether several ranks can share the work.
    """

    summary: str
    config_name: str
    sections: tuple[str, ...]
    description: str
    examples: tuple[tuple[str, str], ...]
    is_parallel: bool = False


COMMANDS = {
    "prepare": Command(
        summary="turn raw click logs into a dataset of memory-mapped chunks",
        config_name="config",
        sections=("data", "paths", "launch"),
        description=(
            "Reads the raw log twice in bounded memory: first to build a vocabulary per feature, "
            "then to write rows, dense values and labels as Arrow chunks with a manifest. "
            "Writes the dataset to paths.dataset; an interrupted run leaves what was there before."
        ),
        examples=(
            ("the click log that comes with the project", "hotrec prepare experiment=quickstart"),
            (
                "Criteo Kaggle",
                "hotrec prepare data=criteo_kaggle 'data.source.files=[/data/train.txt]'",
            ),
            ("two processes", "hotrec prepare experiment=quickstart launch.num_ranks=2"),
        ),
        is_parallel=True,
    ),
    "profile": Command(
        summary="count how often every row is looked up",
        config_name="config",
        sections=("profile", "paths"),
        description=(
            "Counts the lookups of every row of every table in the training split, exactly or on "
            "a seeded sample, and again on a held-out split, so that drift shows. Reads "
            "paths.dataset; writes counts, coverage curves and a picture to paths.profile."
        ),
        examples=(
            ("exact counts", "hotrec profile experiment=quickstart"),
            (
                "a 5% sample, as FAE does",
                "hotrec profile experiment=criteo_terabyte "
                "profile.mode=sample profile.sample_frac=0.05",
            ),
            ("another dataset", "hotrec profile paths.dataset=/data/ds paths.profile=/data/prof"),
        ),
    ),
    "calibrate": Command(
        summary="measure what the machine takes for each part of a step",
        config_name="config",
        sections=("calibrate", "model", "optimizer", "trainer", "paths", "launch"),
        description=(
            "Times collectives over sizes, lookups and updates of rows, routing, and the dense "
            "layers, on all ranks at once and with the functions that training uses; a minute or "
            "two. Reads the tables' sizes from paths.dataset if it is there; writes the costs to "
            "paths.costs, which placement=cost plans with. Run it with the ranks and on the "
            "machines that will train."
        ),
        examples=(
            ("two processes on this host", "hotrec calibrate launch.num_ranks=2"),
            (
                "under torchrun, for the model to be trained",
                "torchrun --standalone --nproc-per-node 8 -m hotrec calibrate "
                "experiment=criteo_kaggle",
            ),
            (
                "correct the costs by what a run measured",
                "hotrec calibrate calibrate.from_run=runs/quickstart/20260101-120000",
            ),
        ),
        is_parallel=True,
    ),
    "plan": Command(
        summary="choose the hot rows and the sharding plan for a number of ranks",
        config_name="config",
        sections=("placement", "plan", "planner", "model", "optimizer", "trainer", "paths"),
        description=(
            "Chooses the hot rows from the profile by the placement's policy, and makes TorchRec's "
            "ShardingPlan for plan.world_size ranks; predicts the step, its bytes and memory, and "
            "compares with TorchRec's own plans. Needs no GPU and no other process. Writes the "
            "partition to paths.partition, plan.json, plan.txt, prediction.json and plan.html to "
            "the run directory; a sweep also makes a page of its points."
        ),
        examples=(
            ("what the quickstart trains with", "hotrec plan experiment=quickstart"),
            (
                "hot rows in 2 GiB a device, for 16 GPUs",
                "hotrec plan experiment=criteo_terabyte placement=budget "
                "placement.hot_budget_mib=2048 plan.world_size=16 plan.device=cuda",
            ),
            (
                "what if: the cheapest machine that runs at 1 million samples/s",
                "hotrec plan --multirun experiment=quickstart placement=cost plan.device=cuda "
                "plan.world_size=2,4,8 trainer.batch_size=1024,4096 plan.min_samples_per_s=1e6",
            ),
        ),
    ),
    "train": Command(
        summary="train a model; one process, or many under torchrun",
        config_name="config",
        sections=(
            "trainer",
            "model",
            "placement",
            "optimizer",
            "order",
            "pipeline",
            "profiler",
            "planner",
            "launch",
            "paths",
        ),
        description=(
            "Trains on paths.dataset with hot rows replicated and cold rows sharded, evaluates, "
            "saves checkpoints, and writes metrics, plan and summary into one run directory. The "
            "hot rows are chosen from paths.profile by the placement's policy; placement=saved "
            "takes the partition that `hotrec plan` wrote."
        ),
        examples=(
            ("two processes on this host", "hotrec train experiment=quickstart launch.num_ranks=2"),
            (
                "under torchrun",
                "torchrun --standalone --nproc-per-node 8 -m hotrec train experiment=criteo_kaggle",
            ),
            (
                "a sweep, two processes a job",
                "hotrec train --multirun experiment=quickstart launch.num_ranks=2 "
                "placement=coverage,all_cold,torchrec",
            ),
        ),
        is_parallel=True,
    ),
    "evaluate": Command(
        summary="evaluate a run's checkpoint on a split of its dataset",
        config_name="evaluate",
        sections=("", "launch"),
        description=(
            "Loads a checkpoint of a training run, with the configuration that the run recorded, "
            "and measures AUC, log loss and normalised entropy over a split. The number of ranks "
            "must be that of the training run."
        ),
        examples=(
            ("the latest checkpoint", "hotrec evaluate run_dir=runs/quickstart/20260101-120000"),
            (
                "another split, two processes",
                "hotrec evaluate run_dir=runs/a/b split=valid launch.num_ranks=2",
            ),
            ("one checkpoint", "hotrec evaluate run_dir=runs/a/b checkpoint=step-00001000"),
        ),
        is_parallel=True,
    ),
    "bench": Command(
        summary="time hot/cold against TorchRec's plans, interleaved in one run",
        config_name="bench",
        sections=("bench", "model", "optimizer", "planner", "launch"),
        description=(
            "Runs hot/cold, all cold, all hot and three TorchRec plans on unsplit tables in turn, "
            "step by step, on the same samples; prints step times, bytes sent per rank and step, "
            "the least that exact training must send, and ratios to TorchRec's plans. Writes "
            "bench.json and a page to the run directory, the page also to bench.page."
        ),
        examples=(
            ("two processes on this host", "hotrec bench launch.num_ranks=2"),
            (
                "a larger batch, with a profile of where the time goes",
                "hotrec bench bench=criteo_like_b8192 bench.profile=true launch.num_ranks=2",
            ),
            (
                "two cases, another rule for the hot rows",
                "hotrec bench 'bench.cases=[hot_cold,hand_tuned]' bench.hot_rows=break_even "
                "launch.num_ranks=2",
            ),
        ),
        is_parallel=True,
    ),
    "report": Command(
        summary="make one HTML page and one JSON of run directories",
        config_name="report",
        sections=("",),
        description=(
            "Reads run directories, and the profiles they were made from, and writes a "
            "self-contained page with coverage curves, loss and AUC, time and bytes per step, and "
            "the runs side by side; and the same figures as JSON."
        ),
        examples=(
            ("one run", "hotrec report 'runs=[runs/quickstart/20260101-120000]'"),
            ("a sweep side by side", "hotrec report 'runs=[runs/sweep/0,runs/sweep/1]'"),
            ("another place", "hotrec report 'runs=[runs/a/b]' output=/tmp/report"),
        ),
    ),
    "doctor": Command(
        summary="check the installed versions and the machine",
        config_name="doctor",
        sections=(),
        description=(
            "Checks that torch, torchrec and fbgemm-gpu belong together and that no two builds of "
            "one package overlap, and says which pip line mends what is wrong."
        ),
        examples=(
            ("check", "hotrec doctor"),
            ("the figures alone", "hotrec doctor 2>/dev/null"),
            ("on every host", "srun --ntasks-per-node 1 hotrec doctor"),
        ),
    ),
}
