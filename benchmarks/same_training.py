"""Proves that a change does not affect training: short runs, compared bit for bit with a record.

    python benchmarks/same_training.py record OUT.json
    python benchmarks/same_training.py check benchmarks/results/same_training.json

`record` trains every case for a few steps and writes the loss of every step, the bytes by
collective, the evaluations and a hash of the final weights. `check` trains the cases again and
compares. Both only use the program's command line and never import it, so the same script runs on
commits whose modules have moved; --checkout selects another work tree.

Nothing may depend on the speed of the machine: costs are a built-in set, the memory is configured,
and each rank computes with one thread. Bits do depend on the processor and on torch's version, so
record and check on the same machine; a warning is printed if they differ. An interrupted record, or
check with --found, continues when it is started again.

Not covered: optimizer=adam with cold rows, pipeline=prefetch and FBGEMM's host tiers, which need
CUDA; trainer.compile, whose kernels depend on the compiler; trainer.trace_step, which changes no
value.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")
COMMAND_TIMEOUT_S = 900
Figures = dict[str, Any]

# Every step is logged; no choice can depend on the machine, its memory or an earlier calibration.
FIXED = (
    "trainer.device=cpu",
    "trainer.log_every_steps=1",
    "trainer.num_workers=0",
    "trainer.max_steps=16",
    "planner.costs=cpu_1gbit",
    "planner.host_gib=16",
)
SYNTHETIC = ("experiment=synthetic_smoke", *FIXED, "placement=coverage")
QUICKSTART = (
    *("experiment=quickstart", "model.embedding_dim=16", "trainer.batch_size=256"),
    *FIXED,
)
LOOK_AHEAD = (*SYNTHETIC, "pipeline=look_ahead")
SPARSE_DIST = (*SYNTHETIC, "pipeline=sparse_dist")
BASES = {"look_ahead": LOOK_AHEAD, "sparse_dist": SPARSE_DIST}
# Short blocks, which the validation loss lengthens and shortens: 16 steps see several of each kind.
ALL_HOT_ORDER = (
    "order=all_hot",
    "order.start_rate=0.1",
    "order.patience=1",
    "placement.coverage_frac=0.95",
    "trainer.eval_every_steps=4",
)

# What is prepared once, before the cases.
PREPARATION = (
    ("prepare", "experiment=synthetic_smoke"),
    (
        *("plan", "experiment=synthetic_smoke", "plan.world_size=2"),
        *("placement=coverage", "placement.coverage_frac=0.5"),
    ),
    ("prepare", "experiment=quickstart"),
)


@dataclass(frozen=True)
class Case:
    """A training run.

    Args:
        words: What `hotrec train` gets.
        ranks: The number of ranks.
        first_steps: Where the run stops at first, to be resumed; None trains it in one go.
        evaluate: Whether `hotrec evaluate` reads the checkpoint afterwards.
    """

    words: tuple[str, ...]
    ranks: int = 2
    first_steps: int | None = None
    evaluate: bool = False


def all_cases() -> dict[str, Case]:
    """Every case by name: two bases, and variants that differ from them in one setting."""
    cases: dict[str, Case] = {}
    for pipeline, base in BASES.items():
        for ranks in (1, 2, 3):
            cases[f"{pipeline}/ranks={ranks}"] = Case(base, ranks=ranks, evaluate=ranks == 2)
    for pipeline, name, *changes in variants():
        cases[f"{pipeline}/{name}"] = Case((*BASES[pipeline], *changes))
    for pipeline, base in BASES.items():
        cases[f"{pipeline}/resume"] = Case(base, first_steps=7)
    cases["look_ahead/resume_all_hot_order"] = Case((*LOOK_AHEAD, *ALL_HOT_ORDER), first_steps=8)
    cases["sparse_dist/resume_torchrec"] = Case(
        (*SPARSE_DIST, "placement=torchrec", "placement.plan=table_wise"), first_steps=7
    )
    cases["quickstart/cost"] = Case(QUICKSTART, evaluate=True)
    cases["quickstart/torchrec"] = Case((*QUICKSTART, "placement=torchrec"))
    cases["quickstart/look_ahead"] = Case(
        (*QUICKSTART, "pipeline=look_ahead", "placement=coverage")
    )
    return cases


def variants() -> Iterator[tuple[str, ...]]:
    """Pipeline of the base, name, and the words that differ from the base."""
    for pipeline in BASES:
        for name in ("sgd", "adagrad"):
            yield pipeline, f"optimizer={name}", f"optimizer={name}"
        yield pipeline, "wire=bf16", "pipeline.wire=bf16"
        for name in ("all_hot", "all_cold"):
            yield pipeline, f"placement={name}", f"placement={name}"
        yield pipeline, "order=all_hot", *ALL_HOT_ORDER
        yield pipeline, "assign=by_owner", "order.assign=by_owner"
        yield pipeline, "grad_clip_norm", "trainer.grad_clip_norm=0.05"

    # A placement chooses rows before training starts, whatever the pipeline; one is enough.
    policies = ("cost", "fraction", "fae", "freq_cache", "scars", "saved")
    for name in policies:
        yield "sparse_dist", f"placement={name}", f"placement={name}"
    budget = ("placement=budget", "placement.hot_budget_mib=0.02")
    yield "sparse_dist", "placement=budget", *budget
    for name in ("planner", "table_wise", "hand_tuned"):
        words = ("placement=torchrec", f"placement.plan={name}")
        yield "sparse_dist", f"torchrec={name}", *words
    yield "sparse_dist", "optimizer=adam", "placement=all_hot", "optimizer=adam"
    yield "sparse_dist", "pipeline=base", "pipeline=base"
    yield "sparse_dist", "routing=device", "placement.routing=device"

    split = ("placement=cost", "placement.may_decline=false")
    yield "look_ahead", "placement=cost_split", *split
    yield "look_ahead", "model=dcnv2", "model=dcnv2"
    yield "look_ahead", "depth=0", "pipeline.depth=0"
    yield "look_ahead", "micro_batches", "pipeline=micro_batches"
    yield "look_ahead", "micro_batches_depth=1", "pipeline.micro_batches=true"
    yield "look_ahead", "adapt", "placement.adapt_every_steps=4"
    # Fewer samples a step, whose rows fit the slots.
    slots = ("placement.cold_tier=cached", "placement.cache_load_frac=0.5", "pipeline.window=4")
    yield "look_ahead", "slots", *slots, "trainer.batch_size=64", "trainer.eval_batch_size=64"
    yield "look_ahead", "dense_adam", "optimizer.dense_kind=adam"
    schedule = ("warmup_steps=4", "decay=linear", "decay_start_step=8", "num_decay_steps=8")
    yield "look_ahead", "schedule", *(f"optimizer.schedule.{word}" for word in schedule)
    yield "look_ahead", "pooling=mean", "model.pooling=mean"
    yield "look_ahead", "precision=bf16", "trainer.precision=bf16"
    # Eight steps an epoch, and a last batch that is not full.
    epochs = ("trainer.num_epochs=2", "trainer.batch_size=1000", "trainer.num_workers=2")
    yield "look_ahead", "epochs", *epochs
    yield "look_ahead", "auto", "pipeline=auto", "trainer.num_epochs=4", "trainer.batch_size=2048"


class CommandError(RuntimeError):
    """A command of the program ended with an exit code other than 0, or not in time."""


@dataclass(frozen=True)
class Program:
    """The program of one work tree, run in a folder."""

    checkout: Path
    folder: Path

    def run(self, *words: str, run_dir: Path | None = None) -> Figures:
        """Run a command and return the JSON object that it prints last."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HOTREC_")}
        environment |= {"PYTHONPATH": str(self.checkout), "OMP_NUM_THREADS": "1"}
        if run_dir is not None:
            environment["HOTREC_RUN_DIR"] = str(run_dir)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "hotrec", *words],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            message = f"hotrec {words[0]}: no end after {COMMAND_TIMEOUT_S} s"
            raise CommandError(message) from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CommandError(f"hotrec {words[0]}: exit code {done.returncode}: {last}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def prepare(self) -> None:
        """Make the datasets and the saved partition that the cases read."""
        (self.folder / "samples").symlink_to(self.checkout / "samples")
        for words in PREPARATION:
            if words[0] == "plan":
                words = (*words, "planner.costs=cpu_1gbit", "planner.host_gib=16")
            self.run(*words)

    def train(self, name: str, case: Case) -> Figures:
        """Train a case and read back all that is compared."""
        run_dir = self.folder / "runs" / name.replace("/", "_").replace("=", "_")
        words = (*merge_words(case.words), f"launch.num_ranks={case.ranks}")
        if case.first_steps is not None:
            shorter = merge_words((*words, f"trainer.max_steps={case.first_steps}"))
            self.run("train", *shorter, run_dir=run_dir)
        summary = self.run("train", *words, run_dir=run_dir)
        metrics, evaluations = read_lines(run_dir / "metrics.jsonl"), run_dir / "eval.jsonl"
        found: Figures = {
            "losses": [line["loss"] for line in metrics],
            "sent_bytes": {k: v for k, v in summary["sent_bytes"].items() if v},
            "hot_rows": summary["hot_rows"],
            "hot_lookup_frac": summary["hot_lookup_frac"],
            "evaluations": [
                [line["step"], line["split"], line["auc"], line["log_loss"]]
                for line in read_lines(evaluations)
            ],
            "weights": hash_weights(run_dir / "checkpoints"),
        }
        if case.evaluate:
            ranks = f"launch.num_ranks={case.ranks}"
            figures = self.run("evaluate", f"run_dir={run_dir}", ranks, "split=test")
            line = [figures["step"], "test again", figures["auc"], figures["log_loss"]]
            found["evaluations"].append(line)
        shutil.rmtree(run_dir)
        return found


def say(line: str) -> None:
    """Print progress and tables, apart from the JSON on stdout."""
    print(line, file=sys.stderr, flush=True)


def merge_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words with each key once, the last value given to it: Hydra refuses a group twice."""
    return tuple({word.split("=")[0]: word for word in words}.values())


def read_lines(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hash_weights(checkpoints: Path) -> str:
    """Hash the model's tensors of the newest checkpoint, independent of parameter names."""
    # torch takes a second to import, which printing the help need not wait for.
    from hotrec.train.checkpoint import open_tensors

    newest = checkpoints / (checkpoints / "latest").read_text().strip()
    with open_tensors(newest) as tensors:
        digests = sorted(
            hashlib.sha256(f"{shape}".encode() + tensors.whole(name).numpy().tobytes()).hexdigest()
            for name, shape in tensors.shapes.items()
            if "/" not in name
        )
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def describe(checkout: Path) -> Figures:
    """Facts that the bits may depend on: the commit, the machine and the packages."""
    import torch

    git = ["git", "-C", str(checkout)]
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "-s", "--", "hotrec", "conf"], text=True)
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # FBGEMM's package has another name for each device
    return {
        "commit": commit + (" with changes" if changed else ""),
        "processor": _processor(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "packages": installed,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not on Linux
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def record(path: Path, cases: Mapping[str, Case], *, checkout: Path, num_jobs: int) -> Figures:
    """Train the cases that the record at ``path`` lacks, saving it after each.

    Returns:
        The whole record. A case that failed has ``error`` in place of figures.
    """
    made_on = describe(checkout)
    document: Figures = {"made_on": made_on, "cases": {}}
    if path.exists():
        document = json.loads(path.read_text())
        if document["made_on"] != made_on:
            raise SystemExit(
                f"{path}: expected a record of {made_on}, got one of {document['made_on']}. "
                "Remove the file, or give another name."
            )
    # Without those that are no longer cases.
    done = {name: figures for name, figures in document["cases"].items() if name in all_cases()}
    document["cases"] = done
    write_record(path, document)
    missing = {name: case for name, case in cases.items() if "losses" not in done.get(name, {})}
    if not missing:
        return document
    with tempfile.TemporaryDirectory(prefix="same_training-") as folder:
        program = Program(checkout, Path(folder))
        start = time.monotonic()
        program.prepare()
        say(f"prepared in {time.monotonic() - start:.0f} s")
        with ThreadPoolExecutor(num_jobs) as pool:
            running = [pool.submit(_timed, program, name, case) for name, case in missing.items()]
            for number, future in enumerate(as_completed(running), 1):
                name, figures, elapsed_s = future.result()
                done[name] = figures
                document["cases"] = {key: done[key] for key in all_cases() if key in done}
                write_record(path, document)
                result = figures.get("error") or f"last loss {figures['losses'][-1]:.6f}"
                say(f"{number}/{len(missing)} {name}: {elapsed_s:.0f} s, {result}")
    return document


def _timed(program: Program, name: str, case: Case) -> tuple[str, Figures, float]:
    start = time.monotonic()
    try:
        figures = program.train(name, case)
    except CommandError as error:
        figures = {"error": str(error)}
    return name, figures, time.monotonic() - start


def write_record(path: Path, document: Figures) -> None:
    """Write JSON with one line for each case, so that a changed case is a changed line."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in document["cases"].items()
    ]
    made_on = json.dumps(document["made_on"])
    text = f'{{"made_on": {made_on},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    # In one go: the record may be interrupted at any time.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


@dataclass(frozen=True)
class Comparison:
    """The differences between a case of the record and the same case trained now."""

    steps: str
    losses: bool
    evaluations: bool
    largest_difference: float
    weights: bool
    bytes_equal: bool
    hot_rows: bool

    def is_same(self, tolerance: float) -> bool:
        """Bit for bit, or within a tolerance of losses, AUC and log loss."""
        if not (self.bytes_equal and self.hot_rows):
            return False
        if tolerance:
            return self.largest_difference <= tolerance
        return self.losses and self.evaluations and self.weights


def compare(expected: Figures, found: Figures) -> Comparison:
    """Compare two records of one case; values of JSON are the doubles that were written."""
    num_expected, num_found = len(expected["losses"]), len(found["losses"])
    pairs = list(zip(expected["losses"], found["losses"], strict=False))
    for old, new in zip(expected["evaluations"], found["evaluations"], strict=False):
        pairs += zip(old[2:], new[2:], strict=True)
    is_whole = num_expected == num_found and [line[:2] for line in expected["evaluations"]] == [
        line[:2] for line in found["evaluations"]
    ]
    largest = max((abs(old - new) for old, new in pairs), default=0.0)
    hot = ("hot_rows", "hot_lookup_frac")
    return Comparison(
        steps=str(num_expected) if num_expected == num_found else f"{num_expected}->{num_found}",
        losses=expected["losses"] == found["losses"],
        evaluations=expected["evaluations"] == found["evaluations"],
        largest_difference=largest if is_whole else float("inf"),
        weights=expected["weights"] == found["weights"],
        bytes_equal=expected["sent_bytes"] == found["sent_bytes"],
        hot_rows=[expected[key] for key in hot] == [found[key] for key in hot],
    )


def check(
    expected: Figures, found: Figures, patterns: Sequence[str], tolerance: float
) -> list[str]:
    """Print a table of the cases whose names match a pattern.

    Returns:
        The names of those that differ, failed, or are in one of the records alone.
    """
    columns = ("losses", "evaluations", "weights", "bytes", "hot rows")
    head = "".join(f"{column:>13}" for column in columns)
    say(f"{'case':<36}{'steps':>7}{head}{'largest diff':>14}")
    different = []
    for name in select([*expected["cases"], *all_cases()], patterns):
        old, new = expected["cases"].get(name), found["cases"].get(name)
        if old is None or new is None:
            say(f"{name:<36}  {'new: not in the record' if old is None else 'no longer a case'}")
            different.append(name)
            continue
        if "error" in old or "error" in new:
            say(f"{name:<36}  failed: {new.get('error') or old.get('error')}")
            different.append(name)
            continue
        result = compare(old, new)
        values = (
            *(result.losses, result.evaluations, result.weights),
            *(result.bytes_equal, result.hot_rows),
        )
        words = "".join(f"{'equal' if value else 'DIFFERENT':>13}" for value in values)
        say(f"{name:<36}{result.steps:>7}{words}{result.largest_difference:>14.3g}")
        if not result.bytes_equal:
            say(f"    bytes: recorded {old['sent_bytes']}, now {new['sent_bytes']}")
        if not result.hot_rows:
            say(f"    hot rows: recorded {old['hot_rows']}, now {new['hot_rows']}")
        if not result.is_same(tolerance):
            different.append(name)
    return different


def select(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern, each once, in order."""
    return [
        name
        for name in dict.fromkeys(names)
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def main() -> int:
    arguments = parse_arguments()
    known = all_cases()
    cases = {name: known[name] for name in select(known, arguments.cases)}
    if not cases:
        raise SystemExit(f"--cases: expected names of cases, got {arguments.cases}. See list.")
    if arguments.verb == "list":
        print("\n".join(cases))
        return 0
    checkout: Path = arguments.checkout.resolve()
    start = time.monotonic()
    if arguments.verb == "record":
        document = record(arguments.out, cases, checkout=checkout, num_jobs=arguments.jobs)
        failed = [name for name, figures in document["cases"].items() if "error" in figures]
        say(f"{len(document['cases'])} cases in {time.monotonic() - start:.0f} s")
        print(json.dumps({"cases": len(document["cases"]), "failed": failed}))
        return int(bool(failed))

    expected = json.loads(arguments.record.read_text())
    with tempfile.TemporaryDirectory(prefix="same_training-") as folder:
        path = arguments.found or Path(folder) / "found.json"
        found = record(path, cases, checkout=checkout, num_jobs=arguments.jobs)
    for key, value in expected["made_on"].items():
        if key != "commit" and value != found["made_on"][key]:
            say(f"warning: {key} was {value}, is {found['made_on'][key]}: bits may differ by it")
    different = check(expected, found, arguments.cases, arguments.tolerance)
    commits = [document["made_on"]["commit"] for document in (expected, found)]
    how = f"within {arguments.tolerance:g}" if arguments.tolerance else "bit for bit"
    if different:
        say(f"DIFFERENT: {len(different)} cases, {how}: {', '.join(different)}")
    else:
        say(f"the same: {len(cases)} cases, {how}, at {commits[0]} and {commits[1]}")
    print(json.dumps({"cases": len(cases), "different": different, "commits": commits}))
    return int(bool(different))


def parse_arguments() -> argparse.Namespace:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="only these, e.g. '*/wire=*'"
    )
    shared.add_argument("--jobs", type=int, default=2, help="cases that run at a time")
    shared.add_argument(
        "--checkout", type=Path, default=REPOSITORY, help="the work tree whose program is run"
    )
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", parents=[shared], help="print the names of the cases")
    recorder = verbs.add_parser("record", parents=[shared], help="train all cases and write them")
    recorder.add_argument("out", type=Path, metavar="OUT.json")
    checker = verbs.add_parser("check", parents=[shared], help="train all cases and compare them")
    checker.add_argument("record", type=Path, metavar="RECORD.json")
    checker.add_argument("--found", type=Path, help="keep what was trained, as a record")
    checker.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="largest difference of losses and evaluations, where a sum's order changed; 0: bits",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
