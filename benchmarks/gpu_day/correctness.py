"""Stage 1: steps in every memory with every optimizer against their references; ``tests/gpu``.

FBGEMM's tables are compared with the update rules in plain torch, hotrec's steps with each other.
Ids repeat from once to thousands of times: FBGEMM has a kernel for short runs of equal ids, one for
long ones, and one that splits very long ones.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from typing import Any

from benchmarks.gpu_day.kernels import TOLERANCE, all_steps, check_step, check_tables
from benchmarks.gpu_day.record import FAILED, Parts, Summary, Table
from benchmarks.gpu_day.stage import DASH, REPOSITORY, Day, free_memory, main
from benchmarks.gpu_day.tbe import DEVICE, LOCATIONS, Tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import process_group
from hotrec.types import OptimizerKind

TESTS = "tests/gpu"
STAGED = "test_staged_parity.py"  # see stage 5
# What a rehearsal runs of them; the suite runs them all on the stand-in.
REHEARSED = ("tests/gpu/test_routing.py",)
TESTS_LIMIT_S = 150
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


def losses_apart(parts: Parts) -> list[str]:
    """The steps whose losses are not those of the same optimizer in device memory."""
    losses = {name: part["losses"] for name, part in parts.items() if "losses" in part}
    apart = []
    for name, found in losses.items():
        expected = losses.get(f"step {name.split()[1]} hot_cold {DEVICE}", found)
        is_near = (abs(a - b) <= TOLERANCE for a, b in zip(found, expected, strict=True))
        if not all(is_near):  # NaN is not
            apart.append(name)
    return apart


def summarize(parts: Parts) -> Summary:
    checked = {name: part for name, part in parts.items() if not name.startswith(TESTS)}
    files = {name: part for name, part in parts.items() if "tests" in part}
    columns: dict[str, dict[str, str]] = {}
    apart = losses_apart(parts)
    for name, part in checked.items():
        kind, optimizer, rest = name.split(" ", 2)
        said = "failed" if part["status"] == FAILED else "ok"
        said = "loss differs" if name in apart else said
        columns.setdefault(f"{kind} {rest}", {})[optimizer] = said
    optimizers = sorted({name.split()[1] for name in checked})
    rows = [[row, *[of.get(o, DASH) for o in optimizers]] for row, of in columns.items()]
    tables = [Table("One step", ["what", *optimizers], rows)] if rows else []
    num_failed = sum(part["status"] == FAILED for part in checked.values()) + len(apart)
    verdict = (
        f"{len(checked) - num_failed} of {len(checked)} combinations of optimizer, tier and kernel "
        "make a step that equals the reference"
    )
    if files:
        tables.append(tests_table(files))
        results = [result for part in files.values() for result in part["tests"].values()]
        verdict += f"; {results.count('passed')} of {len(results)} tests of {TESTS} passed"
    return Summary(f"{verdict}.", tables, not apart)


def run(day: Day) -> None:
    dim, num_rows = day.pick(128, 8), day.pick(5000, 50)
    for kind in OptimizerKind:
        spec = OptimizerSpec(kind, learning_rate=0.05, eps=1e-3)
        for tier in LOCATIONS:
            for is_pooled in (False, True):
                tables = Tables(3, num_rows, dim, spec, tier, is_pooled=is_pooled)
                form = "pooled" if is_pooled else "rows"
                day.record.part(
                    f"fbgemm {kind.value} {form} {tier}",
                    lambda t=tables: check_tables(t, day.device),
                )
    free_memory()
    with process_group(device="cuda") as ranks:
        for kind, name, tier in all_steps(day.pick(list(OptimizerKind), [OptimizerKind.adam])):
            day.record.part(
                f"step {kind.value} {name} {tier}",
                lambda k=kind, n=name, t=tier: check_step(k, n, t, ranks),
            )
    files = sorted(path.name for path in (REPOSITORY / TESTS).glob("test_*.py"))
    whole = [f"{TESTS}/{name}" for name in files if name != STAGED]
    for path in day.pick(whole, REHEARSED):
        day.record.part(path, lambda p=path: run_tests(p))


if __name__ == "__main__":
    sys.exit(main(run, summarize))
