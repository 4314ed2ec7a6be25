"""``python -m tests.faults run``: all cases, a table by class, and a document of results.

run [--class C] [--case NAME] [--fast] [--jobs 2]
disk                      the cases of a full disk
kill --times N            kills at random moments, each made good by the same command
page                      docs/faults.md from the document of results
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.faults.page import results_table, write_page
from tests.faults.process import REPOSITORY
from tests.faults.run import Result, import_program, make_workspace, run_cases, work_directory
from tests.faults.table import all_cases
from tests.faults.workspace import STEPS

RESULTS = REPOSITORY / "build" / "faults" / "results.json"
PAGE = REPOSITORY / "docs" / "faults.md"


def main(arguments: Sequence[str]) -> int:
    args = _arguments(arguments)
    match args.action:
        case "page":
            write_page(json.loads(args.results.read_text()), PAGE)
            return 0
        case "kill":
            from tests.faults.kill import run_kills

            return run_kills(args.times, seed=args.seed, kept=args.workspace)
        case _:
            return _run(args)


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["run", "disk", "kill", "page"])
    parser.add_argument("--class", dest="kinds", action="append", help="only cases of this class")
    parser.add_argument("--case", dest="names", action="append", help="only this case")
    parser.add_argument("--fast", action="store_true", help="only what the ordinary tests run")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the document to write")
    parser.add_argument("--workspace", type=Path, help="kept from run to run; made if absent")
    parser.add_argument("--times", type=int, default=20, help="number of kills")
    parser.add_argument("--seed", type=int, default=None, help="of the random moments")
    return parser.parse_args(arguments)


def _run(args: argparse.Namespace) -> int:
    kinds = ["disk"] if args.action == "disk" else args.kinds
    cases = [
        case
        for case in all_cases()
        if (not kinds or case.kind in kinds)
        and (not args.names or case.name in args.names)
        and (not args.fast or case.is_fast)
    ]
    # Those that start interpreters last: they take most of the time.
    cases.sort(key=lambda case: case.is_exec or "num_ranks=2" in case.words[-1])
    start_s = time.monotonic()
    results: list[Result] = []

    def report(result: Result) -> None:
        results.append(result)
        count = f"{len(results):4}/{len(cases)}"
        print(f"{count} {result.verdict:8} {result.seconds:6.1f} s {result.name}", flush=True)
        for reason in result.reasons:
            print(f"{'':14}{reason}", flush=True)

    import_program()
    with work_directory() as directory, suppress(KeyboardInterrupt):
        # The run of two ranks takes longer than all others together; no fast case reads it.
        make_workspace(directory, args.workspace, steps=STEPS[:-1] if args.fast else STEPS)
        run_cases(cases, directory, jobs=args.jobs, report=report)
    seconds = time.monotonic() - start_s
    document = {
        "commit": _commit(),
        "seconds": round(seconds, 1),
        "cpu_s": round(sum(result.cpu_s for result in results), 1),
        "results": [vars(result) for result in sorted(results, key=lambda result: result.name)],
    }
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.results.write_text(json.dumps(document, indent=1) + "\n")
    print(f"\n{results_table(document)}")
    print(f"{len(results)} of {len(cases)} cases in {seconds:.0f} s: {args.results}")
    return int(len(results) < len(cases) or not all(result.is_ok for result in results))


def _commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
