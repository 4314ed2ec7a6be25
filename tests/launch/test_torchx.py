"""launch/torchx_component.py through torchx's own program, on this host."""

from __future__ import annotations

import importlib.util
import json
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


def test_two_hosts(place: Place, free_port: int) -> None:
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_port", str(free_port)]
    options += ["--python", sys.executable, "--run_dir", "runs/mine", "--command", "bench"]
    done = place.run([*RUN, "--wait", "--log", COMPONENT, *options, "a=1"])
    assert done.returncode == 0, done.stderr
    assert [facts["arguments"] for facts in place.seen()] == [["bench", "a=1"]] * 2
    assert place.seen_variable("RANK") == ["0", "1"]
    assert place.seen_variable("LOCAL_WORLD_SIZE") == ["1", "1"]
    assert place.seen_variable("HOTREC_RUN_DIR") == ["runs/mine", "runs/mine"]


def test_a_failing_rank_is_a_failed_application(place: Place) -> None:
    done = place.run([*RUN, "--wait", COMPONENT, "--command", "fail", "3"])
    assert done.returncode != 0
    assert "FAILED" in done.stderr


def test_resources_are_the_schedulers_to_see(place: Place) -> None:
    options = ["--gpu", "8", "--cpu", "96", "--memory_mib", "1000000", "--max_retries", "3"]
    options += ["--image", "hotrec:cuda", "--mounts", "type=bind,src=/data,dst=/data,readonly"]
    done = place.run([*RUN, "--dryrun", COMPONENT, *options, "a=1"])
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    for text in ("'gpu': 8", "'cpu': 96", "'memMB': 1000000", "'max_retries': 3", "hotrec:cuda"):
        assert text in shown, json.dumps(shown)
    mount = "'mounts': [ {'dst_path': '/data', 'read_only': True, 'src_path': '/data'}]"
    assert mount.replace(" ", "") in re.sub(r"\s", "", shown)
    assert place.seen() == []
