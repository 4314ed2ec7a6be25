"""launch/torchx_component.py through torchx's own program, on this host."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.launch.conftest import Place

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchx") is None,
    reason="torchx, an optional extra, is not installed: pip install 'hotrec[torchx]'",
)

RUN = [sys.executable, "-m", "torchx.cli.main", "run", "-s", "local_cwd"]
COMPONENT = "launch/torchx_component.py:train"


def test_one_host(place: Place) -> None:
    overrides = ["experiment=quickstart", "names=[a, b]", 'text="$HOME ${app_id}"']
    options = ["--nproc_per_node", "2", "--env", "MARK=set"]
    done = place.run([*RUN, "--wait", "--log", COMPONENT, *options, *overrides])
    assert done.returncode == 0, done.stderr
    assert [facts["arguments"] for facts in place.seen()] == [["train", *overrides]] * 2
    assert place.seen_variable("WORLD_SIZE") == ["2", "2"]
    assert place.seen_variable("MARK") == ["set", "set"]
    first, second = place.seen_variable("HOTREC_RUN_DIR")
    assert first == second
    assert re.fullmatch(r"runs/torchx/\d{8}-\d{6}-[0-9a-f]{6}", first or "")


def test_a_failing_rank_is_a_failed_application(place: Place) -> None:
    done = place.run([*RUN, "--wait", COMPONENT, "--command", "fail", "3"])
    assert done.returncode != 0
    assert "FAILED" in done.stderr
