"""``hotrec run``: from a log to a report; stages with a current result are skipped."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from tempfile import TemporaryFile

from hydra.core.hydra_config import HydraConfig

from hotrec.artifact import ArtifactError, read_artifact, read_record
from hotrec.cli.closing import print_closing, shown
from hotrec.cli.commands import COMMANDS
from hotrec.cli.launch import BRIEF, RUN_DIR
from hotrec.cli.made import (
    Figures,
    command_text,
    content_hash,
    digest_of,
    find_dataset,
    read_made,
    write_made,
)
from hotrec.cli.output import EndedEarly, log_trace, start_logging
from hotrec.cli.stage import plain, run_stage
from hotrec.cli.store import build_config, compose_config, quoted, without_flags
from hotrec.config.data import SourceSpec
from hotrec.config.fields import VARIANTS
from hotrec.config.groups import PlacementKind, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.store import KIND as COSTS
from hotrec.cost_model.store import check_host, read_costs
from hotrec.data.chunks import DATASET
from hotrec.data.files import find_files
from hotrec.planner.names import TORCHREC
from hotrec.report.compared import COMPARED_JSON
from hotrec.runtime.run_dir import (
    CHECKPOINTS,
    COMPARISON,
    COUNTERPART,
    PREDICTION,
    RECORD,
    SUMMARY,
    TRAINED,
    read_finished,
)

logger = logging.getLogger(__name__)

PURPOSE = {
    "prepare": "convert the log to memory-mapped chunks, and count the lookups of each row",
    "calibrate": "time the parts of a step on this machine",
    "plan": "choose hot rows and pipeline by predicted time",
    "train": "train with the fastest plan, possibly after a trial",
    "torchrec": "train the same model with the plan of TorchRec's planner",
    "counterpart": "train the same model with hot rows, or without if the chosen plan has some",
    "evaluate": "evaluate the checkpoint on held-out samples",
    "compare": "interleave the plans and compare their speed",
    "report": "write the report",
}
OF_COMPARISON = ("torchrec", "counterpart", "compare")
REPORT_PAGE, TEST = "report.html", "test"
PLANNER = f"{TORCHREC} planner"  # the placement that a run of TorchRec's planner records
# What does not affect training.
_OF_OTHERS = ("run", "overwrite")


def run(
    config: Config, run_dir: Path, words: Sequence[str], environment: Mapping[str, str]
) -> Figures:
    """Run the stages that are not current, and sum up.

    Args:
        config: The configuration of all stages.
        run_dir: Directory of this command. The stages of an equal command in a sibling directory
            are reused and continued.
        words: Overrides and flags of this command, for the stages.
        environment: The environment of the stages' ranks.

    Raises:
        CommandFailed: If the ranks of a stage fail, after their error message.
        SystemExit: If a signal ended a stage.
        ValueError: If the dataset is to be extended.
    """
    for name in ("append", "prune"):
        if (got := getattr(config, name)) not in (None, []):
            raise ValueError(
                f"{name}: expected none for `hotrec run`, which makes its dataset, got {got}. Run "
                f"`hotrec prepare {name}=...`, then the commands after it."
            )
    chain = _Chain(config, run_dir, [w for w in words if not w.startswith("run.")], environment)
    os.environ[BRIEF] = "1"
    try:
        chain.run()
    finally:
        del os.environ[BRIEF]
    return chain.sum_up()


class _Chain:
    """The stages of one command.

    Attributes:
        names: Its stages, in order.
        anew: Those that are made even if they are current.
        folder: The directory of the stages after ``calibrate``.
        figures: Of the stages so far.
        made: Those of them that were not current.
    """

    def __init__(
        self, config: Config, run_dir: Path, words: list[str], environment: Mapping[str, str]
    ) -> None:
        self.config, self.words, self.environment = config, words, environment
        self.run_dir = self.folder = run_dir
        self.ranks = f"launch.num_ranks={config.launch.num_ranks}"
        self.measures = config.planner.costs in ("auto", "measured")
        left_out = () if config.run.compare else OF_COMPARISON
        left_out = left_out if self.measures else (*left_out, "calibrate")
        self.names = [name for name in PURPOSE if name not in left_out]
        first = config.run.from_
        if first is not None and first.name not in self.names:
            raise ValueError(
                f"run.from: expected one of the stages {', '.join(self.names)}, got {first.name}. "
                "Choose another, or set run.compare=true for the stages of the comparison."
            )
        at = len(self.names) if first is None else self.names.index(first.name)
        self.anew = set(self.names[at:])
        self.figures: dict[str, Figures] = {}
        self.made: list[str] = []

    def run(self) -> None:
        from hotrec.assemble.job import chosen_device
        from hotrec.data.chunks import Dataset
        from hotrec.runs.check import check_settings, check_with_data

        config, words = self.config, self.words
        num_ranks, device = config.launch.num_ranks, chosen_device(config.trainer.device)
        check_settings(config, device=device)
        if config.run.compare:
            theirs = replace(config, placement=TorchrecPlacement(PlacementKind.torchrec))
            check_settings(theirs, device=device)
        # More ranks than files would be idle.
        few = f"launch.num_ranks={min(num_ranks, _num_files(config.data.source))}"
        self.do("prepare", ["prepare", *words, few], self.find_dataset)
        check_with_data(config, Dataset.open(config.paths.dataset), world_size=num_ranks)
        if self.measures:
            self.do("calibrate", ["calibrate", *words], self.find_costs)
        costs, caveat = self.read_costs()
        self.find_folder(costs, is_kept=caveat is not None)
        size = f"plan.world_size={num_ranks}"
        self.do_recorded("plan", ["plan", *words, size], digest_of(self.inputs(), costs))
        self.train(TRAINED, ["train", *words])
        if config.run.compare:
            self.train_others()
        self.evaluate()
        trained = ",".join(quoted(str(run)) for run in self.trained)
        summaries = [(run / SUMMARY).read_text() for run in self.trained]
        report = ["report", f"runs=[{trained}]"]
        if config.run.compare:
            words = [f"runs=[{trained}]", self.ranks, f"device={config.trainer.device.name}"]
            self.do_recorded("compare", ["compare", *words], digest_of(summaries))
            summaries.append((self.folder / "compare" / COMPARED_JSON).read_text())
            report.append(f"compared={quoted(str(self.folder / 'compare'))}")
        self.do_recorded("report", report, digest_of(summaries))

    def do(self, name: str, words: Sequence[str], find: Callable[[], Figures | None]) -> None:
        """Make a stage, unless it is current."""
        figures = None if name in self.anew else find()
        if figures is None:
            logger.info("%s: %s", self.number(name), PURPOSE[name])
            figures = self.start(name, words)
            self.made.append(name)
        else:
            logger.info("%s: current, nothing to do", self.number(name))
        self.figures[name] = figures

    def number(self, name: str) -> str:
        """The stage and its number among all."""
        return f"{self.names.index(name) + 1}/{len(self.names)} {name}"

    def do_recorded(self, name: str, words: Sequence[str], digest: str) -> None:
        """Make a stage, unless its directory has a record of exactly these inputs."""
        record = self.folder / name / RECORD
        self.do(name, words, lambda: read_made(record, digest))
        if name in self.made:
            write_made(record, digest, self.figures[name])

    def train(self, name: str, words: Sequence[str]) -> None:
        """Train, unless the run is finished and has its checkpoint; continue one that is not."""
        folder = self.folder / name

        def find() -> Figures | None:
            figures = read_finished(folder)
            if figures is None or _has_checkpoint(folder):
                return figures
            aside = folder.with_name(f"{name}.incomplete")
            logger.warning("%s lacks files of its checkpoint: moved to %s", folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            return None

        self.do(name, words, find)

    def start(self, name: str, words: Sequence[str]) -> Figures:
        """Run a command in its directory, here or on its ranks; returns its figures."""
        folder, (command, *own) = self.folder / name, words
        folder.mkdir(parents=True, exist_ok=True)
        hydra, of_chain = HydraConfig.instance(), HydraConfig.instance().cfg
        environment = {**self.environment, BRIEF: "1"}
        try:
            composed = compose_config(COMMANDS[command].config_name, without_flags(own))
            with TemporaryFile("w+") as output:
                config = build_config(composed)
                figures = run_stage(command, config, folder, own, environment, output)
                if figures is None:
                    output.seek(0)
                    figures = json.loads(output.read().splitlines()[-1])
        except EndedEarly as ended:  # by a signal, after training has saved
            raise SystemExit(ended.exit_code) from ended
        except Exception as error:
            log_trace(error)
            raise
        finally:
            hydra.cfg = of_chain
            start_logging(self.run_dir)
            _free_memory()
        return dict(plain(figures))

    def find_dataset(self) -> Figures | None:
        """Figures of the dataset, if it is current."""
        from hotrec.cli.prepare import figures_of

        dataset = find_dataset(self.config)
        return None if dataset is None else figures_of(dataset)

    def find_costs(self) -> Figures | None:
        """Reliable costs measured on this machine for the same number of ranks and samples."""
        from hotrec.assemble.job import chosen_device
        from hotrec.runtime.memory import read_fingerprint

        config = self.config
        with suppress(ArtifactError, ValueError):
            costs = read_costs(Path(config.paths.costs))
            asked = {
                "num_ranks": config.launch.num_ranks,
                "batch_size": config.trainer.batch_size,
            }
            is_same = all(costs.facts.get(name) == value for name, value in asked.items())
            here = read_fingerprint(chosen_device(config.trainer.device))
            is_of_here = costs.origin == "measured" and check_host(costs, here) is None
            if is_same and is_of_here and costs.is_trusted:
                return {"costs": config.paths.costs}
        return None

    def read_costs(self) -> tuple[str, str | None]:
        """The identity of the costs used by plans, and a warning about them."""
        if not self.measures:
            return self.config.planner.costs, None
        path = self.config.paths.costs
        return content_hash(path, COSTS), read_costs(Path(path)).caveat

    def inputs(self) -> str:
        """The digest of what is planned and trained."""
        settings = {k: v for k, v in asdict(self.config).items() if k not in _OF_OTHERS}
        return digest_of(settings, content_hash(self.config.paths.dataset, DATASET))

    def find_folder(self, costs: str, *, is_kept: bool) -> None:
        """Continue in the directory of an equal command next to this one, if there is one.

        A run planned with other costs is repeated, unless the new costs are untrusted, or it is
        unfinished: its training is not lost.

        Args:
            costs: The identity of the costs.
            is_kept: Whether a run planned with other costs is.
        """
        digest = self.inputs()
        mine = self.run_dir / RECORD
        if mine.exists() and read_made(mine, digest) is None:
            raise ValueError(
                f"{RUN_DIR}: expected a new directory, or that of the same configuration and data, "
                f"got {self.run_dir} of others. Use another directory."
            )
        found = None
        beside = sorted(self.run_dir.parent.glob(f"*/{RECORD}"), key=lambda p: p.stat().st_mtime)
        for path in beside if TRAINED not in self.anew else []:  # the earlier run is kept
            made, trained = read_made(path, digest), path.parent / TRAINED
            is_half = (trained / CHECKPOINTS).exists() and read_finished(trained) is None
            if made is not None and (made["costs"] == costs or is_half or is_kept):
                found = path.parent
        if found is None:
            write_made(mine, digest, {"costs": costs})
        elif not found.samefile(self.run_dir):
            logger.info("continuing %s, of the same configuration and data", found)
        self.folder = found or self.run_dir

    def train_others(self) -> None:
        """Train the baselines of the run: TorchRec's planner, and the other kind of plan.

        The pipeline with hot rows and without is the same, so that only hot rows differ.
        """
        trained = self.figures[TRAINED]
        of_plan = ("placement=", "placement.", "pipeline=")
        words = ["train", *(word for word in self.words if not word.startswith(of_plan))]
        if trained["placement"] == PLANNER:
            logger.info("%s: done by train", self.number(COMPARISON))
        else:
            self.train(COMPARISON, [*words, "placement=torchrec"])
        kind = PlacementKind.all_cold if trained["hot_rows"] else PlacementKind.coverage
        # The placement's settings that this one has too, such as its tier.
        keys = {f"placement.{item.name}" for item in fields(VARIANTS["placement"][kind.name])}
        words += [f"placement={kind.name}"]
        words += [word for word in self.words if word.partition("=")[0] in keys]
        if not str(trained["placement"]).startswith(TORCHREC):
            words += [f"pipeline={trained['pipeline']}", "plan.trial=false"]
        self.train(COUNTERPART, words)

    @property
    def trained(self) -> list[Path]:
        """The directories of the trained runs: the run and its baselines."""
        names = (TRAINED, COMPARISON, COUNTERPART)
        return [self.folder / name for name in names if name in self.figures]

    def evaluate(self) -> None:
        """Evaluate on the test split, or the validation split, unless training has done that."""
        trained = self.figures[TRAINED]
        has = self.figures["prepare"].get("num_samples", {})
        split = TEST if has.get(TEST) else "valid"
        if not has.get(split):
            self.figures["evaluate"] = {}
            logger.info("no evaluation: the dataset has no %s split", TEST)
        elif trained.get("eval_split") == split and trained.get("auc") is not None:
            logger.info("%s: done by train", self.number("evaluate"))
            self.figures["evaluate"] = {**trained, "split": split}
            if TRAINED in self.made or "evaluate" in self.anew:
                self.made.append("evaluate")
        else:
            run_dir = f"run_dir={quoted(str(self.folder / TRAINED))}"
            words = ["evaluate", run_dir, f"split={split}", self.ranks]
            self.do_recorded("evaluate", words, digest_of(trained, split))

    def sum_up(self) -> Figures:
        """The figures of all stages, and the closing lines."""
        figures, folder = self.figures, self.folder
        trained, quality = figures[TRAINED], figures["evaluate"]
        why: str | None = None
        with suppress(OSError, ValueError, LookupError):
            why = json.loads((folder / TRAINED / PREDICTION).read_text())["why"]
        of_quality = ("split", "auc", "log_loss", "suspicious")
        of_training = ("auc_by_label", "best_step", "samples_per_s", "step_p50_s")
        document = {
            "command": "run",
            "run_dir": folder,
            "made": self.made,
            "current": [name for name in self.names if name in figures and name not in self.made],
            **{name: quality.get(name) for name in of_quality},
            **{name: trained.get(name) for name in of_training},
            "why": why,
            "caveat": self.read_costs()[1],
            "checkpoints": folder / TRAINED / "checkpoints",
            "page": shown(folder / "report" / REPORT_PAGE),
        }
        next_step = "docs/sweeps.md compares other models, batches and machines"
        if not self.config.run.compare:
            again = command_text("run", [*self.words, "run.compare=true"])
            next_step = f"`{again}` also trains with TorchRec's planner and compares the plans"
        verdict = figures["report"]["verdict"] if self.config.run.compare else ()
        more = {"trained": folder / TRAINED, "verdict": verdict, "next": next_step}
        print_closing("run", {**trained, **quality, **document, **more})
        return document


def _free_memory() -> None:
    """Return the device memory of a stage, so that the next one finds all of it free."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _has_checkpoint(folder: Path) -> bool:
    """Whether a run has all files of its last checkpoint."""
    checkpoints = folder / CHECKPOINTS
    with suppress(ArtifactError, OSError):
        read_artifact(checkpoints / read_record(checkpoints / "latest").strip(), kind="checkpoint")
        return True
    return False


def _num_files(source: SourceSpec | None) -> int:
    """Files of a log; 1 if they are gone, which only matters for preparing them."""
    with suppress(ValueError):
        return 1 if source is None else len(find_files(source.files, source.format))
    return 1
