"""``python -m tests.mutants run``: faults in a copy of the code, and whether tests notice them.

run [NAMES]    the faults of these names, or whose names begin so; what has a result for just this
               code and these tests is not run again
check          that the tests which caught faults pass without them, as run does for those it ran
summary        of the results so far
list           the faults, their contracts and tests
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.faults.process import REPOSITORY
from tests.mutants.judge import VERDICTS
from tests.mutants.mutant import Mutant
from tests.mutants.run import LIMIT_S, Result, digest_of, failing_without, run_mutants
from tests.mutants.table import all_mutants

_USUAL_S = {"unit": 10.0, "policy": 10.0, "distributed": 100.0, "e2e": 200.0}
RESULTS = REPOSITORY / "tests" / "mutants" / "results.json"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=["run", "check", "summary", "list"])
    parser.add_argument("names", nargs="*", help="only these faults")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for the tests of a fault")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the document to go on with")
    args = parser.parse_args(arguments)
    faults = [one for one in all_mutants() if _is_meant(one, args.names)]
    if not faults:
        parser.error(f"expected names of faults, got {args.names}; see the action list")
    match args.action:
        case "list":
            for one in faults:
                print(f"{one.name}\n    {one.contract}\n    {one.file}: {', '.join(one.tests)}")
            return 0
        case "summary":
            return _summarize(faults, read_results(args.results))
        case "check":
            results = read_results(args.results)
            _check(faults, results, args)
            return _summarize(faults, results)
        case _:
            return _run(faults, args)


def _is_meant(fault: Mutant, names: Sequence[str]) -> bool:
    return not names or any(fault.name.startswith(name) for name in names)


def _run(faults: Sequence[Mutant], args: argparse.Namespace) -> int:
    results = read_results(args.results)
    due = [
        one
        for one in faults
        if args.again or one.name not in results or results[one.name].digest != digest_of(one)
    ]
    due.sort(key=lambda one: _expected_s(one, results))
    done = 0

    def report(result: Result) -> None:
        nonlocal done
        done += 1
        results[result.name] = result
        _write(results, args.results)
        print(f"{done:4}/{len(due)} {result.verdict:9}{result.seconds:6.1f} s {result.name}")
        print(f"{'':26}{result.by or result.how}", flush=True)

    run_mutants(due, jobs=args.jobs, limit_s=args.limit_s, report=report)
    _check(due, results, args)
    return _summarize(faults, results)


def _check(faults: Sequence[Mutant], results: dict[str, Result], args: argparse.Namespace) -> None:
    """Run the tests that caught these faults on the code as it is."""
    found = [results[one.name] for one in faults if one.name in results]
    caught = [result for result in found if result.verdict in ("caught", "unsure")]
    failing = failing_without(sorted({result.by for result in caught}), args.limit_s)
    for result in caught:
        verdict = "unsure" if result.by in failing else "caught"
        results[result.name] = replace(result, verdict=verdict)
    _write(results, args.results)


def _expected_s(fault: Mutant, results: dict[str, Result]) -> float:
    """The seconds that its tests took before, or about what those of their folder take."""
    if fault.name in results:
        return results[fault.name].seconds
    return _USUAL_S.get(fault.tests[0].partition("/")[0], 20.0)


def read_results(path: Path) -> dict[str, Result]:
    """What was recorded, by the name of the fault."""
    if not path.exists():
        return {}
    return {name: Result(name, **of) for name, of in json.loads(path.read_text()).items()}


def _write(results: dict[str, Result], path: Path) -> None:
    known = {one.name for one in all_mutants()}
    document = {name: asdict(results[name]) for name in sorted(known & results.keys())}
    for of in document.values():
        del of["name"]
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def _summarize(faults: Sequence[Mutant], results: dict[str, Result]) -> int:
    found = [results[one.name] for one in faults if one.name in results]
    counts = Counter(result.verdict for result in found)
    for verdict, meaning in VERDICTS.items():
        print(f"{counts[verdict]:4} {verdict:9} {meaning}")
    for result in found:
        if result.verdict != "caught":
            print(f"{result.verdict}: {result.name} {result.how}")
    total_s = sum(result.seconds for result in found)
    print(f"{len(found)} of {len(faults)} faults were tried, in {total_s / 60:.0f} minutes")
    return int(counts["caught"] < len(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
