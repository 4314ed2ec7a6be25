"""The faults of ``tests/mutants`` fit the code and the tests of today."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mutants.__main__ import RESULTS, read_results
from tests.mutants.judge import judge
from tests.mutants.mutant import Mutant
from tests.mutants.table import all_mutants
from tests.policy.source import REPOSITORY

NUM_CONTRACTS = 100


@pytest.mark.parametrize("fault", all_mutants(), ids=lambda fault: fault.name)
def test_a_fault_applies_and_its_tests_are_there(fault: Mutant) -> None:
    assert fault.change(REPOSITORY) != (REPOSITORY / fault.file).read_text()
    for test in fault.tests:
        file, *names = test.partition("[")[0].split("::")
        text = (REPOSITORY / "tests" / file).read_text()
        assert all(f"def {name}(" in text for name in names), test


def test_contracts_are_not_dropped() -> None:
    faults = all_mutants()
    assert len({fault.name for fault in faults}) == len(faults) >= NUM_CONTRACTS
    assert len({fault.contract for fault in faults}) == len(faults)


def test_no_fault_was_missed() -> None:
    results = read_results(RESULTS)
    assert results.keys() == {fault.name for fault in all_mutants()}, "python -m tests.mutants run"
    missed = {n: r.verdict for n, r in results.items() if r.verdict not in ("caught", "skipped")}
    assert missed == {}, "python -m tests.mutants run"


def failure(error: str, text: str) -> dict[str, Any]:
    return {"test": "test_a", "when": "call", "error": error, "text": text}


@pytest.mark.parametrize(
    ("exit_code", "failures", "verdict"),
    [
        (0, [], "survived"),
        (1, [failure("AssertionError", "assert 1 == 2")], "caught"),
        (1, [failure("Failed", "DID NOT RAISE ValueError")], "caught"),
        (1, [failure("RanksError", "[rank 0] raised:\nAssertionError: 1")], "caught"),
        (1, [failure("ArtifactError", "expected a, got b")], "caught"),
        (1, [failure("NameError", "name 'x' is not defined")], "broken"),
        (1, [failure("RanksError", "[rank 0] raised:\nNameError: name 'x'")], "broken"),
        (1, [failure("AssertionError", "ModuleNotFoundError: no module 'x'")], "broken"),
        (1, [failure("Failed", "Timeout (>300.0s) from pytest-timeout.")], "late"),
        (1, [failure("RanksError", "[rank 1] hung: killed after the limit of 60 s")], "late"),
        (2, [], "broken"),  # not collected
        (5, [], "broken"),  # no test
        (None, [], "late"),
    ],
)
def test_only_what_a_test_says_is_caught(
    exit_code: int | None, failures: list[dict[str, Any]], verdict: str
) -> None:
    assert judge(exit_code, failures, ["test_b"])[0] == verdict
    if exit_code == 0:
        assert judge(exit_code, failures, [])[0] == "skipped"
