"""Runs the tests of faults in copies of the checkout, each in a fork that has imported torch."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from tests.faults.process import REPOSITORY, adopt_orphans, end_descendants
from tests.mutants.judge import FAILED, PASSED, judge
from tests.mutants.mutant import Mutant, applied
from tests.mutants.plugin import REPORT

LIMIT_S = 900.0
# What most tests import, and nothing of the project.
_PRELOADED = ("torch", "torchrec", "hypothesis", "scipy.optimize", "pyarrow.compute")
_PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin")


@dataclass(frozen=True)
class Result:
    """What came of a fault; ``digest`` is of all that it depends on."""

    name: str
    verdict: str
    by: str
    how: str
    seconds: float
    digest: str


def digest_of(fault: Mutant) -> str:
    """A digest of the fault, the program and the tests that are to catch it."""
    found = hashlib.sha256(repr(fault).encode())
    for path in [REPOSITORY / test.partition("::")[0] for test in _paths(fault.tests)]:
        found.update(path.read_bytes() if path.is_file() else b"")
    return f"{_digest_of_program()[:8]}-{found.hexdigest()[:8]}"


def _digest_of_program() -> str:
    found = hashlib.sha256()
    for path in sorted(p for top in ("hotrec", "conf") for p in (REPOSITORY / top).rglob("*.*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


def _paths(tests: Iterable[str]) -> list[str]:
    return [f"tests/{test}" for test in tests]


def run_mutants(
    faults: Sequence[Mutant], *, jobs: int, limit_s: float, report: Callable[[Result], None]
) -> None:
    """Run the tests of each fault, ``jobs`` at a time, and report each as it ends."""
    with _workers(jobs) as pool:
        # The copies have the tests as they are now, whatever is edited meanwhile.
        running = [pool.submit(_run_mutant, one, limit_s, digest_of(one)) for one in faults]
        for done in as_completed(running):
            report(done.result())


def failing_without(tests: Sequence[str], limit_s: float) -> set[str]:
    """Those of the tests that fail, or are not there, in the checkout as it is."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    failing: set[str] = set()
    with _workers(1) as pool:
        running = {
            file: pool.submit(_run_tests, of_file, limit_s) for file, of_file in by_file.items()
        }
        for file, done in running.items():
            exit_code, failures, _ = done.result()
            found = {failure["test"] for failure in failures}
            if exit_code != PASSED:
                failing |= found if exit_code == FAILED else set(by_file[file])
    return failing


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        spawn = get_context("spawn")
        pool = ProcessPoolExecutor(jobs, spawn, initializer=_start_worker, initargs=(folder,))
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker(folder: str) -> None:
    """Make this worker's copy, and import what its forks need."""
    adopt_orphans()
    root = Path(folder) / str(os.getpid())
    (root / "tmp").mkdir(parents=True)
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (root / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, root / "copy" / name)
    os.environ.update(
        PYTHONPATH=str(root / "copy"),
        TMPDIR=str(root / "tmp"),
        OMP_NUM_THREADS="1",
        **{REPORT: str(root / "report.json")},
    )
    # Forks share the compiled files of the copy.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    tempfile.tempdir = None
    os.chdir(root / "copy")
    for name in _PRELOADED:
        importlib.import_module(name)


def _run_mutant(fault: Mutant, limit_s: float, digest: str) -> Result:
    start_s = time.monotonic()
    try:
        with applied(fault, Path.cwd()):
            exit_code, failures, passed = _run_tests(["-x", *_paths(fault.tests)], limit_s)
    except ValueError as error:
        return Result(fault.name, "stale", "", str(error), 0.0, digest)
    verdict, how = judge(exit_code, failures, passed)
    by = failures[0]["test"] if failures and exit_code == FAILED else ""
    seconds = round(time.monotonic() - start_s, 1)
    return Result(fault.name, verdict, by, how, seconds, digest)


def _run_tests(
    words: Sequence[str], limit_s: float
) -> tuple[int | None, list[dict[str, str]], list[str]]:
    """Pytest's exit code, None if it ran past the limit, what failed, and what passed."""
    report = Path(os.environ[REPORT])
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = _run_pytest(words)
        finally:
            os._exit(code)
    until_s = time.monotonic() + limit_s
    status = 0
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
        time.sleep(0.05)
    status = ended[1]
    end_descendants()
    if ended[0] == 0:
        return None, [], []
    failures, passed = json.loads(report.read_text()) if report.is_file() else ([], [])
    return os.waitstatus_to_exitcode(status), failures, passed


def _run_pytest(words: Sequence[str]) -> int:
    """In a fork: the copy's modules in place of this checkout's."""
    os.setsid()
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "hotrec")]:
        del sys.modules[name]
    sys.path[:] = [os.getcwd(), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    import pytest

    return int(pytest.main([*_PYTEST, *words]))
