"""Which runs may be compared by their plans."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotrec.runs.compare import _check_alike


def recorded(name: str, **changed: Any) -> Any:
    facts = {"dataset": "d", "batch_size": 8, "order": {"kind": "shuffled"}, **changed}
    return SimpleNamespace(run_dir=Path(name), facts=facts)


def test_runs_that_differ_in_more_than_their_plans_are_refused() -> None:
    _check_alike([recorded("a"), recorded("b")])
    others = {"dataset": "e", "batch_size": 16, "order": {"kind": "time"}}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"^b {name}: expected .*, as in a, got "):
            _check_alike([recorded("a"), recorded("b", **{name: value})])
