"""Checks whether the defaults of `hotrec train` choose the fastest: trains all candidates in full.

    PYTHONPATH=. python benchmarks/choice_grid.py [--cells PATTERN] [--sample N] [--limit-s S] ...

A cell is a dataset, a batch size, a network and a number of ranks. In each cell the dataset is
prepared, and the machine is calibrated once. Then the defaults and every candidate are
trained one after the other as by `hotrec train`, with the run's own loader: --repeats times, and up
to --most-repeats if the ratios are noisy (MAX_ERROR) or the defaults lose more than the target. The
runs of a repeat share one start (choice_runs.py), since starting takes longer than the runs;
candidates that are CLEARLY_SLOWER than the fastest are not repeated. TorchRec's table-wise plan is
trained if it differs from the plan of its planner and from the hand-tuned one. Every run starts
from the calibrated costs; runs do not learn from each other. Results are added to
DIRECTORY/<cell>.json after every repeat, so the same command resumes an interrupted grid; at the
end choice_page.py writes the page of all existing cells.

Hosts are network namespaces (on_hosts.sh), one rank in each; this needs root. Loopback does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import median, stdev
from typing import Any

from benchmarks.choice_page import (
    BASELINES,
    DEFAULT,
    TABLE_WISE,
    WITHIN,
    alike,
    paired_ratio,
    steps_of,
    write_page,
)
from benchmarks.choice_runs import ERROR
from hotrec.bench.machine import machine_facts
from hotrec.runtime.run_dir import CHECKPOINTS, PARTITION, PLAN_JSON, PREDICTION, SUMMARY

ROOT = Path(__file__).parents[1]
LOOPBACK = "loopback"
NETWORKS = (LOOPBACK, "1gbit", "250mbit")
BATCH_SIZES = (512, 2048, 8192)
EXPONENTS = (0.8, 1.05, 1.2)
NUM_DENSE = {"dense": 13, "nodense": 0}
# Tables of Criteo Kaggle, cut to 200,000 rows; and fewer with bags, which read 160 rows a sample.
ONE_HOT_ROWS = (
    *(1460, 583, 200_000, 200_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 200_000, 3194, 27),
    *(14_992, 200_000, 10, 5652, 2173, 4, 200_000, 18, 15, 200_000, 105, 142_572),
)
BAG_ROWS = (200_000, 100_000, 50_000, 20_000, 5000, 1000, 200, 50)
# Name -> rows of the tables, mean ids of a bag, samples to train on.
SHAPES = {"onehot": (ONE_HOT_ROWS, 1, 524_288), "bags20": (BAG_ROWS, 20, 262_144)}
# The setting that disables trials of plans on the run's first batches.
NO_TRIAL = "plan.trial=false"
CANDIDATES: dict[str, tuple[str, ...]] = {
    **{
        f"hot_cold-{pipeline}": (
            *("placement=cost", "placement.may_decline=false"),
            f"pipeline={pipeline}",
        )
        for pipeline in ("look_ahead", "sparse_dist", "base")
    },
    **{
        f"{plan}-{pipeline}": (
            *("placement=torchrec", f"placement.plan={plan}"),
            f"pipeline={pipeline}",
        )
        for plan, pipeline in product((*BASELINES, TABLE_WISE), ("sparse_dist", "base"))
    },
}
# Of summary.json; also all that begins with "trial".
KEPT = (
    *("step_p50_s", "step_p90_s", "measured_step_s", "samples_per_s", "data_wait_frac", "loss"),
    *("predicted_step_s", "pipeline", "policy", "hot_rows", "sent_bytes_total", "elapsed_s"),
)
# Two runs of one plan differ by 2 to 4%, seldom by 10%. Candidates that took so many times the
# fastest's step, in one repeat or in the median of several, are not the best.
CLEARLY_SLOWER = (1.2, 1.08)
# Runs are repeated again while the defaults' ratio to a rival has a larger relative standard error:
# half of the least difference that is judged. Also while it is above what is wanted, since runs of
# short steps differ so much that three may agree by chance.
MAX_ERROR = 0.015
SKIPPED = 77  # exit code of on_hosts.sh where there are no namespaces
END_S = 60.0  # that ranks and namespaces get to end in order


@dataclass(frozen=True)
class Cell:
    """The dataset, batch size, network and number of ranks of a choice."""

    data: str
    batch_size: int
    network: str
    num_ranks: int

    @property
    def name(self) -> str:
        return f"{self.data}_b{self.batch_size}_{self.network}_w{self.num_ranks}"


def data_overrides() -> dict[str, tuple[str, ...]]:
    """Datasets by name, as words for `hotrec prepare`."""
    found: dict[str, tuple[str, ...]] = {"kuairand": ("data=kuairand",)}
    for exponent, shape, dense in product(EXPONENTS, SHAPES, NUM_DENSE):
        rows, mean_length, num_train = SHAPES[shape]
        found[f"zipf{exponent}-{shape}-{dense}"] = (
            "data=synthetic",
            f"data.synthetic.num_rows={list(rows)}".replace(" ", ""),
            f"data.synthetic.mean_lengths=[{mean_length}]",
            f"data.synthetic.zipf_exponent={exponent}",
            f"data.synthetic.num_dense={NUM_DENSE[dense]}",
            f"data.synthetic.num_train={num_train}",
            *("data.synthetic.num_valid=0", "data.synthetic.num_test=0"),
            *("data.synthetic.num_periods=1", "data.synthetic.drift_frac=0"),
        )
    return found


def all_cells() -> list[Cell]:
    """Every dataset, batch size and network; 4 ranks in a quarter of the cells, 2 in the others."""
    factors = (enumerate(data_overrides()), enumerate(BATCH_SIZES), enumerate(NETWORKS))
    return [
        Cell(data, batch_size, network, 4 if (i + j + k) % 4 == 3 else 2)
        for (i, data), (j, batch_size), (k, network) in product(*factors)
    ]


def sample_cells(cells: Sequence[Cell], number: int, seed: int) -> list[Cell]:
    """A random choice that has every dataset, batch size and network about as often."""
    rest, chosen, counts = list(cells), list[Cell](), Counter[str | int]()
    random.Random(seed).shuffle(rest)
    while rest and len(chosen) < number:
        # min takes the first of equals, in shuffled order.
        rarest = min(rest, key=lambda cell: sum(counts[level] for level in levels(cell)))
        rest.remove(rarest)
        chosen.append(rarest)
        counts.update(levels(rarest))
    return chosen


def levels(cell: Cell) -> tuple[str | int, ...]:
    return cell.data, cell.batch_size, cell.network


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns of names of cells")
    parser.add_argument("--sample", type=int, help="a balanced choice of this number of cells")
    parser.add_argument("--seed", type=int, default=0, help="of --sample")
    parser.add_argument("--list", action="store_true", help="print the chosen cells and exit")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of a run")
    parser.add_argument("--warmup-steps", type=int, default=20, help="steps before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each candidate")
    parser.add_argument(
        "--most-repeats",
        type=int,
        default=6,
        help="the same where the comparison with the best or TorchRec's plans is noisy or lost",
    )
    parser.add_argument(
        "--run-s",
        type=float,
        default=60.0,
        help="fewer timed steps, but 20, where the defaults' first run took longer than this",
    )
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one command")
    parser.add_argument(
        "--limit-s", type=float, default=float("inf"), help="start no command after this time"
    )
    parser.add_argument("--trial-s", type=float, default=5.0, help="seconds of a trial")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="keep one core busy with another process while the machine is calibrated",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/choice")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/choice_grid")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("overrides", nargs="*", help="more overrides for every command of hotrec")
    return parser.parse_args(arguments)


class OutOfTime(Exception):  # noqa: N818 (nothing is wrong)
    """The time limit of the grid is reached."""


class Failed(Exception):  # noqa: N818 (a result)
    """A command of hotrec failed; the text has its last lines."""


class Skipped(Exception):  # noqa: N818 (a result)
    """The machine cannot create a network."""


class Grid:
    """Runs the cells of the options, and keeps their results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + options.limit_s

    def run(self, cell: Cell) -> None:
        """Run the rest of a cell.

        Raises:
            OutOfTime: if the time limit is reached; what was done is kept.
            Failed: if it cannot be prepared or calibrated.
            Skipped: if its network cannot be made.
        """
        path = self._options.output / f"{cell.name}.json"
        document = read_cell(path, self._settings(cell))
        if not self._next(document["runs"]):
            return
        place = self._options.work / cell.name
        overrides = [*self._prepared(cell.data), f"trainer.batch_size={cell.batch_size}"]
        if "calibrated" not in document or not (place / "costs").exists():
            if document["runs"]:
                raise Failed(f"{path} has runs, but {place / 'costs'} is gone: remove the file")
            with busy_core(self._options.busy):
                document["calibrated"] = self._hotrec(
                    "calibrate",
                    cell,
                    place / "calibrate",
                    [*overrides, f"paths.costs={place}/costs"],
                )
            document["calibrated"].pop("costs", None)  # a path of this machine
            write_cell(path, document)
        while found := self._next(document["runs"]):
            repeat, todo = found
            length = self._length(document["runs"])
            # The first run determines the number of steps of the others.
            begun = todo if document["runs"] else todo[:1]
            words = {name: [*overrides, *self._words(name), *length] for name in begun}
            for candidate, run in self._train(cell, place / str(repeat), words).items():
                document["runs"].append({"repeat": repeat, "candidate": candidate, **run})
                say(f"{cell.name} {repeat} {candidate}: {describe(run)}")
            write_cell(path, document)

    def _next(self, runs: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]] | None:
        """The next repeat and its remaining candidates; None if nothing remains."""
        repeats = self._options.repeats
        for repeat in range(max(repeats, self._options.most_repeats)):
            is_begun = any(run["repeat"] == repeat for run in runs)
            if repeat >= repeats and not is_begun and is_settled(runs):
                return None
            if todo := left(runs, repeat):
                return repeat, todo
        return None

    def _settings(self, cell: Cell) -> dict[str, Any]:
        names = ("steps", "warmup_steps", "run_s", "trial_s", "busy", "overrides")
        candidates = list(CANDIDATES)
        return {
            **asdict(cell),
            "candidates": candidates,
            **{name: getattr(self._options, name) for name in names},
        }

    def _words(self, candidate: str) -> list[str]:
        # The grid's runs are too short for a trial by themselves; they stand for longer ones.
        if candidate == DEFAULT:
            return [f"plan.trial_s={self._options.trial_s:g}"]
        return [*CANDIDATES[candidate], NO_TRIAL]

    def _length(self, runs: Sequence[Mapping[str, Any]]) -> list[str]:
        options, steps = self._options, self._options.steps
        if runs and "step_p50_s" in runs[0]:
            steps = min(steps, max(20, int(options.run_s / runs[0]["step_p50_s"])))
        return [
            f"trainer.max_steps={options.warmup_steps + steps}",
            f"trainer.warmup_steps={options.warmup_steps}",
        ]

    def _prepared(self, data: str) -> list[str]:
        """Prepare a dataset unless it exists; returns its directory."""
        overrides = data_overrides()[data]
        digest = hashlib.sha256(repr((overrides, self._options.overrides)).encode()).hexdigest()[:8]
        place = self._options.work / "data" / f"{data}-{digest}"
        path = f"paths.dataset={place}/dataset"
        marker = place / "done.json"
        if not marker.exists():
            shutil.rmtree(place, ignore_errors=True)
            figures = self._hotrec("prepare", None, place / "prepare-run", [*overrides, path])
            marker.write_text(json.dumps(figures, indent=1) + "\n")
        return [overrides[0], path]

    def _train(
        self, cell: Cell, place: Path, words: Mapping[str, Sequence[str]]
    ) -> dict[str, dict[str, Any]]:
        """Train candidates until one fails, which is a result too; returns those by name."""
        runs = {name: place / name for name in words}
        for name, run_dir in runs.items():
            shutil.rmtree(run_dir, ignore_errors=True)
            run_dir.mkdir(parents=True)
            shutil.rmtree(place / f"{name}-costs", ignore_errors=True)
            shutil.copytree(place.parent / "costs", place / f"{name}-costs")
        of_all = [
            *("trainer.num_epochs=1000000", "trainer.eval_splits=[]", "trainer.resume=none"),
            *("trainer.log_every_steps=1000000", *self._options.overrides),
        ]
        spec = [
            [str(to), [*words[n], *of_all, f"paths.costs={to}-costs", f"paths.trials={to}/trials"]]
            for n, to in runs.items()
        ]
        file = place / "runs.json"
        file.write_text(json.dumps(spec, indent=1) + "\n")
        load, failure = os.getloadavg()[0], None
        say(f"{len(runs)} runs -> {place}", indent=True)
        line = [*self._launcher(cell), "-m", "benchmarks.choice_runs", str(file)]
        try:
            self._run("train", line, place, len(runs) * self._options.timeout_s)
        except Failed as error:
            failure = str(error)
        found: dict[str, dict[str, Any]] = {}
        for name, run_dir in runs.items():
            if (run_dir / SUMMARY).exists():
                found[name] = read_run(run_dir)
            elif (run_dir / ERROR).exists():
                found[name] = {"error": (run_dir / ERROR).read_text().strip()}
            else:
                found[name] = {"error": failure or "left no summary"}
            found[name]["load_average"] = load
            # They are as large as the tables.
            for large in (run_dir / CHECKPOINTS, run_dir / PARTITION, place / f"{name}-costs"):
                shutil.rmtree(large, ignore_errors=True)
            if failure is not None and "error" in found[name]:
                break  # the others were not begun
        return found

    def _launcher(self, cell: Cell) -> list[str]:
        """The command line that starts a module on the cell's ranks."""
        if cell.network != LOOPBACK:
            return [str(ROOT / "benchmarks/on_hosts.sh"), cell.network, str(cell.num_ranks)]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--local-addr", "localhost", "--nproc-per-node", str(cell.num_ranks)]

    def _hotrec(
        self, command: str, cell: Cell | None, run_dir: Path, words: Sequence[str]
    ) -> dict[str, Any]:
        """Run a command of hotrec on the cell's ranks, or on one; returns its figures."""
        line = [sys.executable, "-m", "hotrec", command, *words, *self._options.overrides]
        if cell is not None and cell.network == LOOPBACK:
            line.append(f"launch.num_ranks={cell.num_ranks}")
        elif cell is not None:
            line[:1] = self._launcher(cell)
        say(f"hotrec {command} -> {run_dir}", indent=True)
        out = self._run(command, line, run_dir, self._options.timeout_s)
        figures: dict[str, Any] = json.loads(out.splitlines()[-1])
        return figures

    def _run(self, command: str, line: Sequence[str], run_dir: Path, timeout_s: float) -> str:
        if time.monotonic() >= self._end:
            raise OutOfTime
        run_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "HOTREC_RUN_DIR": str(run_dir),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        code, out, err = run_command(line, environment, timeout_s)
        if code == SKIPPED:
            raise Skipped(err.strip())
        if code != 0:
            lines = [text for text in err.splitlines() if "error: " in text] or [err[-300:]]
            # The first one; then other ranks say that they lost a rank.
            raise Failed(f"{command} ended with {code}: {' '.join(lines[:1])}")
        return out


def run_command(
    line: Sequence[str], environment: Mapping[str, str], timeout_s: float
) -> tuple[int, str, str]:
    """Exit code, standard output and errors; after ``timeout_s`` all its processes are ended."""
    child = subprocess.Popen(
        line,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = end_session(child)
        err += f"error: expected an end within {timeout_s:.0f} s, got none.\n"
        return 124, out, err
    except BaseException:
        end_session(child)
        raise
    return child.returncode, out, err


def end_session(child: subprocess.Popen[str]) -> tuple[str, str]:
    os.killpg(child.pid, signal.SIGTERM)
    try:
        return child.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()


@contextmanager
def busy_core(is_wanted: bool) -> Iterator[None]:
    """Keep one core busy in another process during the block."""
    if not is_wanted:
        yield
        return
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def turn(repeat: int) -> list[str]:
    """The order of the runs: the defaults first in the first repeat, then each a place later."""
    names = [DEFAULT, *CANDIDATES]
    shift = repeat % len(names)
    return [*names[-shift:], *names[:-shift]] if shift else names


def left(runs: Sequence[Mapping[str, Any]], repeat: int) -> list[str]:
    """The remaining candidates of a repeat, in its order."""
    done = {run["candidate"] for run in runs if run["repeat"] == repeat}
    return [name for name in turn(repeat) if name not in done | slow(runs) | alike(runs)]


def slow(runs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The candidates that the repeats have ruled out; never the defaults."""
    steps = steps_of(runs)
    if not steps:
        return set()
    # Those with fewer repeats may have missed one in which the machine was slow.
    repeats = max(map(len, steps.values()))
    whole = [name for name, of in steps.items() if len(of) == repeats]
    fastest = min(whole, key=lambda name: median(steps[name].values()))
    found = set()
    for name in steps.keys() - {DEFAULT, fastest}:
        shared = steps[name].keys() & steps[fastest].keys()
        ratio = paired_ratio(steps[name], steps[fastest])
        if ratio is not None and ratio > CLEARLY_SLOWER[len(shared) > 1]:
            found.add(name)
    return found


def is_settled(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the ratios by which the defaults are judged are known to MAX_ERROR, and good."""
    steps, out = steps_of(runs), slow(runs)
    default = steps.pop(DEFAULT, {})
    steps = {name: of for name, of in steps.items() if name not in out}
    rivals = {min(names, key=lambda name: median(steps[name].values())) for names in groups(steps)}
    return all(
        ratio_error(default, steps[name]) <= MAX_ERROR
        and (paired_ratio(default, steps[name]) or math.inf) <= 1 + WITHIN
        for name in rivals
    )


def groups(names: Iterable[str]) -> list[list[str]]:
    """All candidates, and those of each of TorchRec's plans; none is empty."""
    of_plans = ([n for n in names if n.startswith(f"{plan}-")] for plan in BASELINES)
    return [group for group in (list(names), *of_plans) if group]


def ratio_error(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Standard error of the median of ours / theirs over the repeats; infinite of fewer than two.

    Of normal logarithms, whose median has 1.25 times the error of their mean.
    """
    logs = [math.log(ours[repeat] / theirs[repeat]) for repeat in ours if repeat in theirs]
    return 1.25 * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf


def read_run(run_dir: Path) -> dict[str, Any]:
    """The stored result of a run: its figures, the chosen plan, and the prediction for it."""
    summary = json.loads((run_dir / SUMMARY).read_text())
    found = {k: v for k, v in summary.items() if k in KEPT or k.startswith("trial")}
    if (run_dir / PREDICTION).exists():
        prediction = json.loads((run_dir / PREDICTION).read_text())
        chosen = prediction["plans"][prediction["chosen"]]
        found |= {name: prediction[name] for name in ("chosen", "why")}
        found["step_low_s"], found["step_high_s"] = chosen["interval_s"]
        found["cost_note"] = prediction["costs"]["note"]
        found["predicted"] = list(prediction["plans"])
        found["trial"] = prediction["trial"]
        found["trial_s"] = (prediction["trial"] or {}).get("seconds")
    plan = (run_dir / PLAN_JSON).read_bytes() + repr(summary.get("hot_rows")).encode()
    found["plan"] = hashlib.sha256(plan + summary["pipeline"].encode()).hexdigest()[:12]
    return found


def read_cell(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results so far, or none yet.

    Raises:
        SystemExit: if they were made with other settings.
    """
    if not path.exists():
        return {"settings": settings, "machine": machine_facts(), "runs": []}
    document: dict[str, Any] = json.loads(path.read_text())
    for name, value in settings.items():
        before = document["settings"].get(name)
        if before != value:
            raise SystemExit(
                f"{path}: expected {name} {before}, with which its runs were made, got {value}. "
                "Choose another --output and --work, or remove the file."
            )
    return document


def write_cell(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(document, indent=1) + "\n")
    written.replace(path)


def describe(run: Mapping[str, Any]) -> str:
    if "error" in run:
        return str(run["error"])
    predicted = run.get("predicted_step_s")
    text = f"{1e3 * run['step_p50_s']:.1f} ms a step"
    return f"{text}, {1e3 * predicted:.1f} predicted" if predicted else text


def say(text: str, *, indent: bool = False) -> None:
    print(f"{'    ' if indent else 'choice_grid: '}{text}", file=sys.stderr, flush=True)


def choose_cells(options: argparse.Namespace) -> list[Cell]:
    cells = [c for c in all_cells() if any(fnmatch(c.name, pattern) for pattern in options.cells)]
    if options.sample is not None:
        cells = sample_cells(cells, options.sample, options.seed)
    if not cells:
        raise SystemExit(
            f"--cells: expected patterns of some cells, got {options.cells}. See --list."
        )
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    cells = choose_cells(options)
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return
    grid = Grid(options)
    for number, cell in enumerate([] if options.page else cells, 1):
        say(f"cell {number} of {len(cells)}: {cell.name}")
        try:
            grid.run(cell)
        except OutOfTime:
            say(f"{options.limit_s:.0f} s are over; run the same command again to continue")
            break
        except (Failed, Skipped) as error:
            say(f"{cell.name} left out: {error}")
    print(json.dumps(write_page(options.output)))


if __name__ == "__main__":
    main()
