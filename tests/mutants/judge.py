"""What the end of a run of tests says of the fault that was in the code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

VERDICTS = {
    "caught": "a test failed by an assertion, or by an error of the program",
    "survived": "the tests passed",
    "skipped": "all of the tests were skipped, as without a package that they need",
    "broken": "a test failed because the changed code cannot run, or could not be collected",
    "late": "a test ran into a time limit",
    "stale": "the fault does not apply to the code",
    "unsure": "the test that failed fails without the fault, too",
}
PASSED, FAILED = 0, 1  # exit codes of pytest
# Errors of code that cannot run, which any test would notice, whatever it is for.
_BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "UnboundLocalError")
# The last line of the trace of a rank, a child or a loader worker.
_OF_OTHERS = re.compile(rf"^(?:\w+\.)*({'|'.join(_BROKEN)}): ", re.MULTILINE)
_LATE = re.compile(r"Timeout [(>]|\] hung: killed after the limit")


def judge(
    exit_code: int | None, failures: Sequence[Mapping[str, str]], passed: Sequence[str]
) -> tuple[str, str]:
    """The verdict, and how the first test failed.

    Args:
        exit_code: That of pytest; None if it ran past the limit.
        failures: What the plugin wrote of those that failed.
        passed: Names of those that passed.
    """
    if exit_code is None:
        return "late", "the tests ran past their limit"
    if exit_code == PASSED:
        return ("survived", "") if passed else ("skipped", "")
    if exit_code != FAILED or not failures:
        return "broken", f"pytest ended with exit code {exit_code}"
    first = failures[0]
    error, text = first["error"], first["text"]
    line = f"{error}: {text.strip().splitlines()[0] if text.strip() else ''}"[:200]
    if error in _BROKEN or _OF_OTHERS.search(text):
        return "broken", line
    # A rank that waits for one that failed is killed, too; then the other says why.
    is_late = _LATE.search(text) is not None and "raised:" not in text
    return ("late" if is_late else "caught"), line
