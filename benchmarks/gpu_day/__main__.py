"""Runs the stages one after the other, each in a separate process with a time limit.

A stage that fails or exceeds its limit does not stop the others; the exit code is then 1. All
results are archived after every stage, and ``--from`` continues from an archive: results of
finished stages are kept, and failed stages are repeated without their successful parts.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.record import (
    BROKEN,
    FAILED,
    OK,
    Document,
    read_document,
    render,
    write_document,
)

REPOSITORY = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("on_stand_in")
TAIL_LINES = 25


@dataclass(frozen=True)
class Stage:
    """A stage: module ``benchmarks.gpu_day.<name>``, its page's title, and its time."""

    number: int
    name: str
    title: str
    limit_s: float = 240.0

    @property
    def stem(self) -> str:
        return f"{self.number}_{self.name}"


# What would make later stages worthless comes first, then what can only be had here, and last what
# explains.
STAGES = (
    Stage(0, "facts", "Stage 0: the machine, pinned memory, and one default step of each", 180),
    Stage(1, "correctness", "Stage 1: steps against their references"),
    Stage(2, "tiers", "Stage 2: GPU memory, host memory, FBGEMM's cache of it, and slots", 480),
    Stage(3, "whole", "Stage 3: a whole model whose tables exceed the device's budget", 300),
    Stage(4, "machinery", "Stage 4: what hot and cold rows cost where nothing can be gained"),
    Stage(5, "prediction", "Stage 5: predicted against measured", 360),
    Stage(6, "suite", "Stage 6: the tests of tests/gpu", 480),
    Stage(7, "ranks", "Stage 7: parity of two and three ranks on one GPU", 360),
    Stage(8, "curve", "Stage 8: losses on the GPU and on the CPU", 100),
    Stage(9, "profiles", "Stage 9: where a step's time goes, and who waits for the GPU", 100),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_day.sh", description=__doc__.splitlines()[0])
    numbers = ",".join(str(stage.number) for stage in STAGES)
    parser.add_argument("--stages", default=numbers, help="which, such as 0,2")
    parser.add_argument("--out", type=Path, default=None, help="where documents and pages go")
    parser.add_argument("--archive", type=Path, default=None, help="of them; by default OUT.tar.gz")
    parser.add_argument(
        "--from", type=Path, default=None, dest="begun", help="an archive to continue from"
    )
    parser.add_argument("--again", action="store_true", help="also what is finished")
    parser.add_argument("--code", default=None, help="the commit, where there is no git")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--limit-s", type=float, default=None, help="of every stage")
    options = parser.parse_args(arguments)
    known = {str(stage.number): stage for stage in STAGES}
    wanted = options.stages.split(",")
    unknown = [word for word in wanted if word not in known]
    if unknown:
        parser.error(f"--stages: expected some of {numbers}, got {','.join(unknown)}")
    options.stages = [known[word] for word in sorted(set(wanted))]
    if options.out is None:
        options.out = (
            Path(tempfile.mkdtemp(prefix="gpu_day_"))
            if options.rehearse
            else REPOSITORY / "benchmarks" / "results" / "gpu_day"
        )
    options.out = options.out.resolve()
    if options.archive is None:
        options.archive = options.out.with_name(f"{options.out.name}.tar.gz")
    return options


def pack(folder: Path, archive: Path) -> None:
    """Put all files of a directory into an archive, in one go."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(f".{archive.name}")
    with tarfile.open(partial, "w:gz") as packed:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                packed.add(path, path.name)
    partial.replace(archive)


def unpack(archive: Path, folder: Path) -> None:
    """Put what an archive holds into a directory that holds nothing of the kind.

    Raises:
        ValueError: if there is no such archive, or the directory has documents.
    """
    found = [path.name for path in folder.glob("*.json")]
    if found or not archive.is_file():
        raise ValueError(
            f"--from {archive}: expected a file, and {folder} without documents, got "
            f"{', '.join(found) or 'no such file'}. Give an archive and another --out."
        )
    # Python 3.11.3 and older has no filters; this script wrote the archive.
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **safely)


def check_out(options: argparse.Namespace) -> None:
    """Refuse to mix a rehearsal with measurements.

    Raises:
        ValueError: if the directory holds documents of the other kind.
    """
    for stage in STAGES:
        document = read_document(options.out / f"{stage.stem}.json")
        if document is not None and document["facts"]["is_rehearsal"] != options.rehearse:
            kinds = ("measurements", "a rehearsal")
            raise ValueError(
                f"--out {options.out}: expected documents of {kinds[options.rehearse]}, got "
                f"{stage.stem}.json of {kinds[not options.rehearse]}. Choose another directory."
            )


def run_stage(stage: Stage, options: argparse.Namespace) -> Document:
    """Run a stage in a process group of its own; the document it left, with how it ended."""
    path = options.out / f"{stage.stem}.json"
    found = read_document(path)
    if found is not None and found["status"] == OK and not options.again:
        print(f"== {stage.title}: kept, of code {found['facts']['code']}", file=sys.stderr)
        return found
    if options.again:
        path.unlink(missing_ok=True)
    print(f"== {stage.title}", file=sys.stderr)
    words = [sys.executable, "-m", f"benchmarks.gpu_day.{stage.name}", str(path)]
    words += ["--rehearse"] * options.rehearse
    words += ["--code", options.code] if options.code else []
    log_path = options.out / f"{stage.stem}.log"
    limit_s = options.limit_s or stage.limit_s
    start_s = time.monotonic()
    num_parts, num_before = 0, -1
    with log_path.open("w") as log:
        exit_code: int | None = BROKEN
        # Also of a process that a signal ended, such as that of a failed destructor.
        while exit_code is not None and (exit_code == BROKEN or exit_code < 0):
            if num_parts == num_before:
                break
            left_s = start_s + limit_s - time.monotonic()
            exit_code = _run(words, log, left_s, options.rehearse)
            num_parts, num_before = len((read_document(path) or {}).get("parts", ())), num_parts
            # What broke the device was recorded; a new process makes the other parts.
            words += ["--keep-failed"] * ("--keep-failed" not in words)
    document = read_document(path) or _no_document(options)
    tail = ""
    if exit_code != 0 or document["status"] != OK:
        document["status"] = FAILED
        if exit_code is None:
            document["error"] = f"ended after its limit of {limit_s:g} s"
        elif exit_code != 1 or "error" not in document:
            document.setdefault("error", f"exit code {exit_code}")
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        document["log_tail"] = tail
    document["elapsed_s"] = time.monotonic() - start_s
    write_document(path, document)
    (options.out / f"{stage.stem}.md").write_text(render(stage.title, document, tail))
    print(f"   {document['status']} in {document['elapsed_s']:.0f} s", file=sys.stderr)
    return document


def _run(words: list[str], log: Any, limit_s: float, is_rehearsal: bool) -> int | None:
    """The exit code of a stage's process; None if its time was over."""
    environment = dict(os.environ)
    # Else `import fbgemm_gpu` asks CUDA for devices, and no fork of that process can use CUDA.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # One host, which may have no other interface.
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if is_rehearsal:
        environment["PYTHONPATH"] = f"{STAND_IN}:{os.environ.get('PYTHONPATH', REPOSITORY)}"
        environment.setdefault("OMP_NUM_THREADS", "1")
    # A signal between the start of the process and the block that ends it would leave it behind.
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    process = subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, signals),
    )  # fmt: skip
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Whatever it started goes with it, also when this script is interrupted.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _no_document(options: argparse.Namespace) -> Document:
    facts: dict[str, Any] = {"is_rehearsal": options.rehearse, "code": options.code}
    return {
        "facts": facts, "machine": {}, "parts": {}, "tables": [], "status": FAILED,
        "verdict": "The stage ended before it measured anything.", "elapsed_s": 0.0,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        if options.begun is not None:
            unpack(options.begun, options.out)
        check_out(options)
    except ValueError as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return 1
    # So that a stage under way is ended with this script, as by Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    documents = {}
    for stage in options.stages:
        documents[stage] = run_stage(stage, options)
        pack(options.out, options.archive)
    print(f"\npages: {options.out}, all of it: {options.archive}")
    for stage, document in documents.items():
        said = document["verdict"] if document["status"] == OK else document.get("error", "")
        print(f"{stage.stem:<13}  {document['status']:<7}  {document['elapsed_s']:5.0f} s  {said}")
    return 0 if all(document["status"] == OK for document in documents.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
