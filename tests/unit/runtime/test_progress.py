"""A bar on terminals, even on one without a size; lines in the log."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys

import pytest

from hotrec.runtime import progress
from hotrec.runtime.progress import Progress

COUNT = (
    "from hotrec.runtime.progress import Progress\n"
    "with Progress('count', 20, unit='steps') as bar:\n"
    "    for _ in range(20):\n"
    "        bar.update()\n"
    "        bar.refresh()\n"
)


@pytest.fixture
def _lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)


def test_a_terminal_without_a_size_shows_a_bar() -> None:
    ours, theirs = pty.openpty()  # as schedulers and containers make them: 0 by 0
    assert os.get_terminal_size(theirs) == (0, 0)
    os.set_blocking(ours, False)
    subprocess.run([sys.executable, "-c", COUNT], stderr=theirs, check=True, timeout=60)
    shown = os.read(ours, 1 << 16).decode()  # before the other end closes, which discards it
    os.close(theirs)
    os.close(ours)
    assert "count:  50%|" in shown


@pytest.mark.usefixtures("_lines_at_once")
def test_a_log_gets_lines_with_the_time_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress("count", 400, unit="steps", initial=200) as bar:
        bar.set_postfix_str("loss 0.5", refresh=False)
        bar.update(100)
        bar.start_t -= 8
        line = bar.line()
    for said in ("300 of 400 steps", "12 steps/s", "00:08 left", "loss 0.5"):
        assert said in line
    assert {record.name for record in caplog.records} == {"hotrec.runtime.progress"}
