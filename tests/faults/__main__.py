"""``python -m tests.faults``: all cases, and a table of verdicts by class.

--class C and --case NAME choose some, --fast what the ordinary tests run. A workspace that is kept
(--workspace) is made once for many calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.faults.case import VERDICTS
from tests.faults.run import Result, import_program, make_workspace, run_cases, work_directory
from tests.faults.table import all_cases, fast_cases


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--class", dest="kinds", action="append", help="only cases of this class")
    parser.add_argument("--case", dest="names", action="append", help="only this case")
    parser.add_argument("--fast", action="store_true", help="only what the ordinary tests run")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--results", type=Path, help="a document to write")
    parser.add_argument("--workspace", type=Path, help="kept from run to run; made if absent")
    args = parser.parse_args(arguments)
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
        reference = make_workspace(directory, args.workspace, is_whole=not args.fast)
        cases = [
            case
            for case in (fast_cases if args.fast else all_cases)(reference)
            if (not args.kinds or case.kind in args.kinds)
            and (not args.names or case.name in args.names)
        ]
        # Those that start interpreters last: they take most of the time.
        cases.sort(key=lambda case: case.is_exec or "num_ranks=2" in case.words[-1])
        run_cases(cases, directory, jobs=args.jobs, report=report)
    if args.results is not None:
        args.results.write_text(json.dumps([vars(result) for result in results]))
    print_table(results)
    print(f"{len(results)} of {len(cases)} cases in {time.monotonic() - start_s:.0f} s")
    return int(len(results) < len(cases) or not all(result.is_ok for result in results))


def print_table(results: Sequence[Result]) -> None:
    """Counts of verdicts by class."""
    columns = [*reversed(VERDICTS), "skipped"]
    print(f"\n{'class':<12}{'cases':>8}" + "".join(f"{column:>8}" for column in columns))
    for kind in [*sorted({result.kind for result in results}), ""]:
        counts = Counter(result.verdict for result in results if kind in ("", result.kind))
        shown = "".join(f"{counts[column]:>8}" for column in columns)
        print(f"{kind or 'all':<12}{counts.total():>8}{shown}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
