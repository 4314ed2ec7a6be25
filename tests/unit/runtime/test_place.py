"""Looking at a thread's stack leaves garbage collection as it was."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hotrec.runtime.watchdog.place import place_of


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


def test_nothing_is_collected_under_the_lock_of_thread_states(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    look = sys._current_frames

    def noted() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", noted)
    assert place_of(threading.get_ident()).line.startswith("test_place.py:")
    assert seen == [False]
    assert gc.isenabled() is is_enabled
