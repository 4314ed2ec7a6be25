"""A plugin of pytest in the copy: writes what failed, and by what, where the harness reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

REPORT = "HOTREC_MUTANTS_REPORT"
_MOST_LETTERS = 8000
_failures: list[dict[str, str]] = []
_passed: list[str] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.passed and report.when == "call":
        _passed.append(item.nodeid)
    if report.failed and call.excinfo is not None:
        _failures.append(
            {
                "test": item.nodeid,
                "when": report.when or "",
                "error": call.excinfo.type.__name__,
                "text": f"{call.excinfo.value}"[-_MOST_LETTERS:],
            }
        )
    return report


def pytest_sessionfinish() -> None:
    Path(os.environ[REPORT]).write_text(json.dumps([_failures, _passed]))
