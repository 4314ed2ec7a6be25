"""``hotrec run``: from a log to a report; stages with a current result are skipped."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from hotrec.artifact import ArtifactError, read_artifact, read_record
from hotrec.cli.closing import print_closing, shown
from hotrec.cli.launch import BRIEF, PARENT, RUN_DIR, wait_for_child
from hotrec.cli.made import (
    Figures,
    command_text,
    content_hash,
    describe_files,
    digest_of,
    find_artifact,
    read_made,
    write_made,
)
from hotrec.cli.output import CommandFailed
from hotrec.cli.store import quoted
from hotrec.config.data import SourceSpec
from hotrec.config.fields import VARIANTS
from hotrec.config.groups import PlacementKind, TorchrecPlacement
from hotrec.config.roots import Config
from hotrec.cost_model.profile import KIND as PROFILE
from hotrec.cost_model.store import KIND as COSTS
from hotrec.cost_model.store import check_host, read_costs
from hotrec.data.chunks import DATASET
from hotrec.data.readers import find_files
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
    "prepare": "convert the log to memory-mapped chunks",
    "profile": "count the lookups of each row",
    "calibrate": "time the parts of a step on this machine",
    "plan": "choose hot rows and pipeline by predicted time",
    "train": "train with the fastest plan, possibly after a trial",
    "torchrec": "train the same model with the plan of TorchRec's planner",
    "counterpart": "train the same model with hot rows, or without if the chosen plan has some",
    "evaluate": "evaluate the checkpoint on held-out samples",
    "compare": "interleave the plans and compare their speed",
    "report": "write the report",
}
REPORT_PAGE, TEST = "report.html", "test"
PLANNER = f"{TORCHREC} planner"  # the placement that a run of TorchRec's planner records


def run(
    config: Config, run_dir: Path, words: Sequence[str], environment: Mapping[str, str]
) -> Figures:
    """Run the stages that are not current, as separate commands, and sum up.

    Args:
        config: The configuration of all stages.
        run_dir: Directory of this command. The stages of an equal command in a sibling directory
            are reused and continued.
        words: Overrides and flags of this command, for the stages.
        environment: The environment of the stages.

    Raises:
        CommandFailed: If a stage fails, after its error message; with its exit code.
        ValueError: If the dataset is to be extended.
    """
    if config.prune is not None:
        raise ValueError(
            f"prune: expected none for `hotrec run`, got {config.prune}. Run `hotrec prepare "
            "prune=...`."
        )
    if config.append:
        raise ValueError(
            f"append: expected no files for `hotrec run`, which makes its dataset, got "
            f"{config.append}. Run `hotrec prepare append=...`, then the commands after it."
        )
    chain = _Chain(config, run_dir, [w for w in words if not w.startswith("run.")], environment)
    return chain.run()


@dataclass(frozen=True)
class _CostsInUse:
    """The identity of the plans' costs, and warnings about them."""

    digest: str
    caveat: str | None


class _Chain:
    def __init__(
        self, config: Config, run_dir: Path, words: list[str], environment: Mapping[str, str]
    ) -> None:
        self.config = config
        self.words = words
        self.run_dir = self.folder = run_dir
        self.environment = environment
        self.measures = config.planner.costs in ("auto", "measured")
        compares = ("torchrec", "counterpart", "compare")
        is_left_out = {"calibrate": not self.measures}
        is_left_out |= dict.fromkeys(compares, not config.run.compare)
        self.names = [name for name in PURPOSE if not is_left_out.get(name)]
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

    def run(self) -> Figures:
        from hotrec.assemble.job import chosen_device
        from hotrec.data.chunks import Dataset
        from hotrec.runs.check import check_settings, check_with_data

        config, words = self.config, self.words
        num_ranks, device = config.launch.num_ranks, chosen_device(config.trainer.device)
        check_settings(config, device=device)
        if config.run.compare:
            theirs = replace(config, placement=TorchrecPlacement(PlacementKind.torchrec))
            check_settings(theirs, device=device)
        num_files = _num_files(config.data.source)
        # More ranks than files would be idle.
        few = [f"launch.num_ranks={min(config.launch.num_ranks, num_files)}"]
        self.do("prepare", ["prepare", *words, *few], lambda: find_artifact("prepare", config))
        check_with_data(config, Dataset.open(config.paths.dataset), world_size=num_ranks)
        self.do("profile", ["profile", *words], lambda: find_artifact("profile", config))
        if self.measures:
            self.do("calibrate", ["calibrate", *words], self.find_costs)
        costs = self.read_costs()
        self.folder = self.find_folder(costs)
        size = f"plan.world_size={config.launch.num_ranks}"
        self.do_recorded("plan", ["plan", *words, size], digest_of(self.inputs(), costs.digest))
        self.train(TRAINED, ["train", *words])
        if config.run.compare:
            self.train_others()
        self.evaluate()
        if config.run.compare:
            self.compare()
        self.report()
        return self.sum_up()

    def do(self, name: str, words: Sequence[str], find: Callable[[], Figures | None]) -> None:
        """Make a stage, unless it is current."""
        number = self.number(name)
        figures = None if name in self.anew else find()
        if figures is None:
            logger.info("%s: %s", number, PURPOSE[name])
            figures = self.start(name, words)
            self.made.append(name)
        else:
            logger.info("%s: current, nothing to do", number)
        self.figures[name] = figures

    def number(self, name: str) -> str:
        """The stage and its number among all."""
        return f"{self.names.index(name) + 1}/{len(self.names)} {name}"

    def do_recorded(self, name: str, words: Sequence[str], digest: str) -> None:
        """Make a stage, unless its directory has a record of exactly these inputs."""
        folder = self.folder / name
        self.do(name, words, lambda: read_made(folder / RECORD, digest))
        self.record(name, digest)

    def record(self, name: str, digest: str) -> None:
        """Record a stage that was made, and all its files."""
        if name in self.made:
            folder = self.folder / name
            files = describe_files(folder)
            write_made(folder / RECORD, digest, self.figures[name], files=files)

    def train(self, name: str, words: Sequence[str]) -> None:
        """Train, unless the run is finished and has all its files; continue one that is not."""
        folder = self.folder / name

        def find() -> Figures | None:
            figures, record = read_finished(folder), folder / RECORD
            if figures is not None and not record.exists() and _has_checkpoint(folder):
                # This program was killed when the run had ended.
                write_made(record, name, figures, files=describe_files(folder))
            if figures is None or read_made(record, name) is not None:
                return figures
            aside = folder.with_name(f"{name}.incomplete")
            logger.warning("%s lacks files that it had: moved to %s", folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            return None

        self.do(name, words, find)
        self.record(name, name)

    def start(self, name: str, words: Sequence[str]) -> Figures:
        """Run a command in a separate process; returns its figures."""
        output = self.run_dir / f"{name}.json"
        variables = {
            **self.environment,
            RUN_DIR: str(self.folder / name),
            PARENT: str(os.getpid()),
            BRIEF: "1",
        }
        with output.open("w") as stream:
            exit_code = wait_for_child(
                [sys.executable, "-m", "hotrec", *words], variables, stdout=stream
            )
        if exit_code != 0:
            raise CommandFailed(exit_code)
        return dict(json.loads(output.read_text().splitlines()[-1]))

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

    def read_costs(self) -> _CostsInUse:
        """The costs used by plans."""
        if not self.measures:
            return _CostsInUse(self.config.planner.costs, None)
        path = self.config.paths.costs
        costs = read_costs(Path(path))
        return _CostsInUse(content_hash(path, COSTS), costs.caveat)

    def inputs(self) -> str:
        """The digest of what is planned and trained."""
        settings = asdict(self.config)
        for name in ("run", "overwrite"):  # these do not affect training
            del settings[name]
        paths = self.config.paths
        made_from = [content_hash(paths.dataset, DATASET), content_hash(paths.profile, PROFILE)]
        return digest_of(settings, made_from)

    def find_folder(self, costs: _CostsInUse) -> Path:
        """The directory of an equal command next to this one, or this command's own.

        A run planned with other costs is repeated, unless the new costs are untrusted, or it is
        unfinished: its training is not lost.
        """
        digest = self.inputs()
        mine = self.run_dir / RECORD
        if mine.exists() and read_made(mine, digest) is None:
            raise ValueError(
                f"{RUN_DIR}: expected a new directory, or that of the same configuration and data, "
                f"got {self.run_dir} of others. Use another directory."
            )
        beside = sorted(self.run_dir.parent.glob(f"*/{RECORD}"), key=lambda p: p.stat().st_mtime)
        found: list[Path] = []
        if TRAINED in self.anew:  # the earlier run is kept
            beside = []
        for path in beside:
            made = read_made(path, digest)
            trained = path.parent / TRAINED
            is_half = (trained / CHECKPOINTS).exists() and read_finished(trained) is None
            is_same = made is not None and made.get("costs", costs.digest) == costs.digest
            if made is not None and (is_same or is_half or costs.caveat is not None):
                found.append(path.parent)
        if not found:
            write_made(mine, digest, {"costs": costs.digest})
            return self.run_dir
        if found[-1].resolve() != self.run_dir.resolve():
            logger.info("continuing %s, of the same configuration and data", found[-1])
        return found[-1]

    def train_others(self) -> None:
        """Train the baselines of the run: TorchRec's planner, and the other kind of plan.

        The pipeline with hot rows and without is the same, so that only hot rows differ.
        """
        trained = self.figures[TRAINED]
        words = self.without_placement()
        if trained["placement"] == PLANNER:
            logger.info("%s: done by train", self.number(COMPARISON))
        else:
            again = ["train", *words, "placement=torchrec"]
            self.train(COMPARISON, again)
        kind = PlacementKind.all_cold if trained["hot_rows"] else PlacementKind.coverage
        again = ["train", *words, f"placement={kind.name}", *self.settings_for(kind)]
        if not str(trained["placement"]).startswith(TORCHREC):
            again += [f"pipeline={trained['pipeline']}", "plan.trial=false"]
        self.train(COUNTERPART, again)

    def without_placement(self) -> list[str]:
        """The words of this command except for its placement."""
        groups = ("placement=", "placement.", "pipeline=")
        return [word for word in self.words if not word.startswith(groups)]

    def settings_for(self, kind: PlacementKind) -> list[str]:
        """The placement's settings that another placement has too, such as its tier."""
        keys = {f"placement.{item.name}" for item in fields(VARIANTS["placement"][kind.name])}
        return [word for word in self.words if word.partition("=")[0] in keys]

    @property
    def trained(self) -> list[Path]:
        """The directories of the trained runs: the run and its baselines."""
        names = (TRAINED, COMPARISON, COUNTERPART)
        return [self.folder / name for name in names if name in self.figures]

    def compare(self) -> None:
        """Compare the plans in interleaved blocks."""
        runs = f"runs=[{','.join(quoted(str(run)) for run in self.trained)}]"
        config = self.config
        words = ["compare", runs, f"launch.num_ranks={config.launch.num_ranks}"]
        words += [f"device={config.trainer.device.name}"]
        self.do_recorded(
            "compare", words, digest_of([(r / SUMMARY).read_text() for r in self.trained])
        )

    def evaluate(self) -> None:
        """Evaluate on the test split, or the validation split, unless training has done that."""
        trained = self.figures["train"]
        has = self.figures["prepare"].get("num_samples", {})
        split = TEST if has.get(TEST) else "valid"
        if not has.get(split):
            self.figures["evaluate"] = {}
            logger.info("no evaluation: the dataset has no %s split", TEST)
            return
        ranks = f"launch.num_ranks={self.config.launch.num_ranks}"
        run_dir = f"run_dir={quoted(str(self.folder / 'train'))}"
        words = ["evaluate", run_dir, f"split={split}", ranks]
        is_known = trained.get("eval_split") == split and trained.get("auc") is not None
        if is_known and TRAINED in self.made:
            logger.info("%s: done by train", self.number("evaluate"))
            self.made.append("evaluate")
            self.figures["evaluate"] = {**trained, "split": split}
        elif is_known:
            self.do("evaluate", words, lambda: {**trained, "split": split})
        else:
            self.do_recorded("evaluate", words, digest_of(trained, split))

    def report(self) -> None:
        made_from = [(run / SUMMARY).read_text() for run in self.trained]
        words = ["report", f"runs=[{','.join(quoted(str(run)) for run in self.trained)}]"]
        if self.config.run.compare:
            made_from.append((self.folder / "compare" / COMPARED_JSON).read_text())
            words.append(f"compared={quoted(str(self.folder / 'compare'))}")
        self.do_recorded("report", words, digest_of(made_from))

    def sum_up(self) -> Figures:
        figures, folder = self.figures, self.folder
        trained, quality = figures["train"], figures["evaluate"]
        why: str | None = None
        with suppress(OSError, ValueError, LookupError):
            why = json.loads((folder / "train" / PREDICTION).read_text())["why"]
        document = {
            "command": "run",
            "run_dir": folder,
            "made": self.made,
            "current": [name for name in self.names if name in figures and name not in self.made],
            "split": quality.get("split"),
            "auc": quality.get("auc"),
            "log_loss": quality.get("log_loss"),
            "auc_by_label": trained.get("auc_by_label"),
            "best_step": trained.get("best_step"),
            "suspicious": quality.get("suspicious"),
            "why": why,
            "caveat": self.read_costs().caveat,
            "samples_per_s": trained.get("samples_per_s"),
            "step_p50_s": trained.get("step_p50_s"),
            "checkpoints": folder / "train" / "checkpoints",
            "page": shown(folder / "report" / REPORT_PAGE),
        }
        more = {
            "trained": trained,
            "quality": quality,
            "verdict": figures["report"]["verdict"],
            "is_compared": self.config.run.compare,
            "next": self.next_step(),
        }
        print_closing("run", {**document, **more})
        return document

    def next_step(self) -> str:
        if not self.config.run.compare:
            again = command_text("run", [*self.words, "run.compare=true"])
            return f"`{again}` also trains with TorchRec's planner and compares the plans"
        return "docs/sweeps.md compares other models, batches and machines"


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
