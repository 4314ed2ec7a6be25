"""After ``--multirun`` of plan, train or run: the table and the page that compare its jobs.

Hydra makes a ``Sweep`` for every command (conf/hydra/default.yaml); it acts on sweeps of these,
and records each job's overrides before the job, so that the page shows failed jobs too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hotrec.cli.output import print_error
from hotrec.config.roots import ReportConfig
from hotrec.runtime.run_dir import COMPARISON, COUNTERPART, METRICS, POINT, SUMMARY, TRAINED

PLAN, TRAIN, RUN = "plan", "train", "run"
# Facts of each job that the page of a sweep of plan needs besides its overrides.
FIELDS = {
    "num_ranks": "plan.world_size",
    "ranks_per_host": "plan.ranks_per_host",
    "batch_size": "trainer.batch_size",
}
MIN_SAMPLES_PER_S = "min_samples_per_s"


# Left in its directory by a job that a launcher ran in another process, perhaps on another host.
EXIT_CODE = "exit_code"
_exit_codes: list[int] = []


def leave_exit_code(run_dir: Path, exit_code: int) -> None:
    """Record a job's exit code for the process of the sweep."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / EXIT_CODE).write_text(f"{exit_code}\n")


def _collect_exit_codes(sweep_dir: Path) -> list[int]:
    left = sorted(sweep_dir.rglob(EXIT_CODE))
    codes = [int(path.read_text()) for path in left]
    for path in left:
        path.unlink()
    return codes


def take_exit_codes() -> list[int]:
    """The exit codes recorded by the jobs of the finished sweep."""
    taken = list(_exit_codes)
    _exit_codes.clear()
    return taken


class Sweep(Callback):
    """Hydra callback that records each job of a sweep, and writes the page at its end.

    Args:
        command: The command of the sweep, set by ``hotrec.cli.app``.
    """

    def __init__(self, command: str) -> None:
        self._command = command

    def on_job_start(self, config: DictConfig, **_kwargs: Any) -> None:
        """Write point.json into the directory of a job of the sweep."""
        if not self._is_compared(config):
            return
        with _exit_on_error():
            overrides = dict(map(_split_override, config.hydra.overrides.task))
            point: dict[str, Any] = {"overrides": overrides}
            if self._command == PLAN:
                point |= {name: OmegaConf.select(config, key) for name, key in FIELDS.items()}
                point[MIN_SAMPLES_PER_S] = config.plan.min_samples_per_s
            job_dir = Path(config.hydra.runtime.output_dir)
            points = {job_dir: point}
            if self._command == RUN:  # it trains in separate directories
                points = {job_dir / TRAINED: point}
                if config.run.compare:
                    for name in (COMPARISON, COUNTERPART):
                        points[job_dir / name] = {"overrides": {**overrides, "placement": name}}
            for folder, content in points.items():
                folder.mkdir(exist_ok=True)
                text = json.dumps(content, indent=2) + "\n"
                (folder / POINT).write_text(text, encoding="utf-8")

    def on_multirun_end(self, config: DictConfig, **_kwargs: Any) -> None:
        """Write the page and its data into the sweep's directory; the table to stderr."""
        _exit_codes.extend(_collect_exit_codes(Path(config.hydra.sweep.dir)))
        if not self._is_compared(config):
            return
        with _exit_on_error():
            sweep_dir = Path(config.hydra.sweep.dir)
            if self._command == PLAN:
                write_what_if_of_sweep(sweep_dir)
            else:
                write_report_of_sweep(sweep_dir)

    def _is_compared(self, config: DictConfig) -> bool:
        return config.hydra.mode == RunMode.MULTIRUN and self._command in (PLAN, TRAIN, RUN)


def write_report_of_sweep(sweep_dir: Path) -> None:
    """Compare the jobs of a sweep of train or run in report.html, report.json and sweep.csv.

    The table is printed on stderr. Nothing is written if no job has recorded a figure: their errors
    have been printed.
    """
    from hotrec.cli.report import make_report_of
    from hotrec.report.read import find_jobs
    from hotrec.report.runs import HTML_NAME

    if not find_jobs(sweep_dir, SUMMARY, METRICS):
        return
    report = make_report_of(ReportConfig(runs=[str(sweep_dir)]), f"Sweep {sweep_dir}")
    report.write(sweep_dir)
    page = sweep_dir / HTML_NAME
    print(report.text(is_whole=False), f"sweep: {page}", sep="\n", file=sys.stderr)


def write_what_if_of_sweep(sweep_dir: Path) -> None:
    """Read a sweep's jobs, write what_if.json and print the table on stderr.

    Raises:
        ValueError: If the directory has no jobs, or they disagree on the required rate.
    """
    from hotrec.report.what_if import WHAT_IF_JSON, read_predictions, write_what_if

    points = read_predictions(sweep_dir)
    text = write_what_if(points, sweep_dir, _read_required_rate(sweep_dir))
    print(text, f"what if: {sweep_dir / WHAT_IF_JSON}", sep="\n", file=sys.stderr)


def _split_override(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lstrip("+~"), value


def _read_required_rate(sweep_dir: Path) -> float | None:
    found = {
        json.loads(path.read_text(encoding="utf-8")).get(MIN_SAMPLES_PER_S)
        for path in sweep_dir.rglob(POINT)
    }
    if len(found) > 1:
        raise ValueError(
            f"plan.{MIN_SAMPLES_PER_S}: expected one value for all jobs of a sweep, got "
            f"{sorted(found, key=str)}. Vary something else."
        )
    return found.pop() if found else None


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Exit the process on an error, because Hydra turns a callback's exceptions into warnings."""
    try:
        yield
    except Exception as error:
        print_error(error, wants_trace=False)
        raise SystemExit(1) from error
