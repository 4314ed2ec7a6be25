"""Stage 6: the tests of ``tests/gpu``, test by test."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

from benchmarks.gpu_day.record import FAILED, Parts, Summary, Table
from benchmarks.gpu_day.stage import REPOSITORY, Day, main

TESTS = "tests/gpu"
STAGED = "test_staged_parity.py"  # see stage 7
LONGEST = "test_parity.py"  # minutes
# What a rehearsal runs of them; the suite runs them all on the stand-in.
REHEARSED = ("tests/gpu/test_routing.py",)
TESTS_LIMIT_S = 400
MOST_NAMED = 20
TEST_LINE = re.compile(r"^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)


def run_tests(path: str) -> dict[str, Any]:
    """Run the tests of a file in a process of their own; what each came to. None may skip.

    Raises:
        RuntimeError: if pytest ended without a single result.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", path]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TESTS_LIMIT_S,
        )  # fmt: skip
        output, how = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as late:
        # As bytes, also where text was asked for.
        output = late.stdout.decode(errors="replace") if late.stdout else ""
        how = f"ended after {TESTS_LIMIT_S} s"
    print(output)
    results = {name: result.lower() for name, result in TEST_LINE.findall(output)}
    if not results:
        last = " / ".join(output.splitlines()[-5:])
        raise RuntimeError(f"pytest {path}: expected results of tests, got {last}")
    wrong = [name for name, result in results.items() if result not in ("passed", "xfail")]
    if not wrong and how == "exit code 0":
        return {"tests": results}
    named = ", ".join(name.rpartition("::")[2] for name in wrong[:MOST_NAMED])
    error = f"{how}; {len(wrong)} of {len(results)} tests not passed: {named}"
    return {"tests": results, "status": FAILED, "error": error}


def tests_table(files: Parts) -> Table:
    """The tests by file."""
    counts = {name: Counter(part["tests"].values()) for name, part in files.items()}
    results = sorted({result for of in counts.values() for result in of})
    rows = [[name, *[str(of[result]) for result in results]] for name, of in counts.items()]
    return Table("Tests", ["file", *results], rows)


def summarize(parts: Parts) -> Summary:
    files = {name: part for name, part in parts.items() if "tests" in part}
    results = [result for part in files.values() for result in part["tests"].values()]
    verdict = f"{results.count('passed')} of {len(results)} tests of {TESTS} passed."
    return Summary(verdict, [tests_table(files)] if files else [])


def run(day: Day) -> None:
    files = sorted(
        (path.name for path in (REPOSITORY / TESTS).glob("test_*.py")),
        key=lambda name: (name == LONGEST, name),
    )
    whole = [f"{TESTS}/{name}" for name in files if name != STAGED]
    for path in day.pick(whole, REHEARSED):
        day.record.part(path, lambda p=path: run_tests(p))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
