"""Runs cases, two at a time, each in a process of its own that has imported the program already."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.faults import workspace
from tests.faults.case import Case, Made
from tests.faults.judge import (
    Findings,
    judge_files,
    judge_latest,
    judge_output,
    judge_scratch,
    list_files,
    read_figures,
)
from tests.faults.process import (
    SHM,
    SMALL,
    Running,
    adopt_orphans,
    can_mount,
    end_descendants,
    isolate_mounts,
    start,
)

COMMANDS = (
    *("app", "prepare", "calibrate", "plan", "train", "evaluate", "report"),
    *("export", "predict"),
)


@dataclass(frozen=True)
class Result:
    """What came of a case; ``reasons`` are empty if all is as it should be."""

    name: str
    verdict: str
    reasons: list[str]
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.verdict in ("ok", "skipped")

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def import_program() -> None:
    """Import what every command needs, once for all cases."""
    for name in COMMANDS:
        importlib.import_module(f"hotrec.cli.{name}")
    # A command sets its handlers before torch is imported, which then adds none.
    for handler in list(logging.getLogger().handlers):
        logging.getLogger().removeHandler(handler)


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """A directory for all cases, with a short path: sockets are made below it."""
    directory = Path(tempfile.mkdtemp(prefix="faults-"))
    directory.chmod(0o755)
    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield directory
    finally:
        end_descendants()
        remove(directory)


def remove(directory: Path) -> None:
    """Remove a directory in which some modes were taken away."""
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(stat.S_IRWXU)
    shutil.rmtree(directory, ignore_errors=True)


def make_workspace(directory: Path, kept: Path | None, *, is_whole: bool) -> Path:
    """Make the workspace that every case starts from, or copy the one that was kept.

    Raises:
        RuntimeError: if a command that makes it fails.
    """
    reference, answer = directory / "reference", directory / "made.json"
    if kept is not None and kept.exists():
        workspace.copy(kept, reference)
        return reference
    (reference / "runs").mkdir(parents=True)
    workspace.make_log(reference)
    for step in workspace.STEPS if is_whole else workspace.STEPS[:-1]:
        os.waitpid(fork_into(partial(_make, step, reference, directory), answer), 0)
        take_answer(answer)
    workspace.make_costs(reference)
    for command in ("prepare", "plan", "export"):
        shutil.rmtree(reference / "runs" / command)
    if kept is not None:
        workspace.copy(reference, kept)
    return reference


def _make(step: Case, reference: Path, directory: Path) -> None:
    """One command of those that make the workspace."""
    adopt_orphans()
    scratch = directory / "make"
    remove(scratch)
    (scratch / "tmp").mkdir(parents=True)
    running = start(step, step.words[0], reference, scratch)
    code = running.wait(step.limit_s)
    end_descendants()
    if code != 0:
        raise RuntimeError(f"{step.name}: exit code {code}: {(scratch / 'err').read_text()}")


def fork_into(action: Callable[[], Result | None], answer: Path) -> int:
    """Start an action in a fork; its result, or its traceback, goes into a file."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            result = action()
            text = json.dumps({"result": None if result is None else asdict(result)})
        except BaseException:
            text = json.dumps({"error": traceback.format_exc()})
        answer.write_text(text)
        os._exit(0)
    return pid


def take_answer(answer: Path) -> Result | None:
    document = json.loads(answer.read_text())
    answer.unlink()
    if "error" in document:
        raise RuntimeError(document["error"])
    return None if document["result"] is None else Result(**document["result"])


def run_cases(
    cases: Sequence[Case], directory: Path, *, jobs: int, report: Callable[[Result], None]
) -> None:
    """Run cases in copies of the workspace, ``jobs`` at a time, and report each as it ends."""
    reference = directory / "reference"
    waiting, under_way = list(enumerate(cases)), dict[int, tuple[Case, Path]]()
    while waiting or under_way:
        while waiting and len(under_way) < jobs:
            number, case = waiting.pop(0)
            answer = directory / f"{number}.json"
            pid = fork_into(
                partial(run_case, case, reference, directory / str(number)),
                answer,
            )
            under_way[pid] = case, answer
        pid, _ = os.wait()
        if pid not in under_way:
            continue  # an orphan of a case
        case, answer = under_way.pop(pid)
        try:
            result = take_answer(answer)
        except (RuntimeError, OSError) as error:
            result = Result(case.name, "unclear", [f"the harness failed: {error}"])
        assert result is not None
        report(result)


def run_case(case: Case, reference: Path, directory: Path) -> Result:
    """One case from its copy of the workspace to its verdict; in a process of its own."""
    if case.disk_bytes is not None and not can_mount():
        reason = "mounting a small file system needs root"
        return Result(case.name, "skipped", [reason])
    start_s = time.monotonic()
    adopt_orphans()
    folder, scratch = directory / "ws", directory / "s"
    workspace.copy(reference, folder)
    (scratch / "tmp").mkdir(parents=True)
    if can_mount():
        isolate_mounts(folder / SMALL, case.disk_bytes)
    os.chdir(folder)
    case.change(folder)
    findings = Findings()
    before, shm_before = list_files(folder), set(os.listdir(SHM))
    code, left = _run_commands(case, folder, scratch, findings)
    out, err = (_text(scratch / name) for name in ("out", "err"))
    judge_output(case, findings, code, out, err)
    judge_files(case, findings, before, list_files(folder), code)
    # Where /dev/shm is everyone's, a new name may be anyone's.
    judge_latest(findings, folder, before)
    judge_scratch(
        case, findings, scratch, shm_before if can_mount() else set(os.listdir(SHM)), left
    )
    # A command that a signal ended leaves the old artifact or the new one.
    if (code == 0 or not case.speaks) and case.check is not None:
        complaint = case.check(Made(folder, reference, read_figures(out)))
        if complaint is not None:
            findings.add(*(("silent", complaint) if isinstance(complaint, str) else complaint))
    remove(directory)
    said = [f"it said: {line[:500]}" for line in err.strip().splitlines()[-1:] if findings.found]
    return Result(
        case.name,
        findings.verdict,
        [f"{verdict}: {text}" for verdict, text in findings.found] + said,
        time.monotonic() - start_s,
    )


def _run_commands(
    case: Case, folder: Path, scratch: Path, findings: Findings
) -> tuple[int, list[str]]:
    """The exit code of the last command that was reached, and the processes that outlive one."""
    left: list[str] = []
    code: int | None = None
    for words in case.words:
        running: Running = start(case, words, folder, scratch)
        try:
            complaint = None if case.act is None else case.act(running)
            if complaint is not None:
                findings.add(*complaint)
            code = running.wait(case.limit_s)
            if code is None:
                findings.add("hang", f"hotrec {words.split()[0]} runs after {case.limit_s:g} s")
            else:
                left += running.left(case.grace_s)
        finally:
            end_descendants()
        if code != 0:
            # A name that prepare accepts, and that a later command trips over.
            if words != case.words[0] and len(case.exit_codes) > 1:
                findings.add("unclear", f"only hotrec {words.split()[0]} refused it")
            break
    return (137 if code is None else code), left


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
