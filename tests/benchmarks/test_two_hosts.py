"""`hotrec compare` on two hosts, which are network namespaces of this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import REPOSITORY, environment


def test_two_hosts(tmp_path: Path) -> None:
    done = subprocess.run(
        ["benchmarks/two_hosts.sh", "-c", "smoke", "-o", str(tmp_path), "-r", "500mbit"],
        cwd=REPOSITORY,
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["smoke"]
    assert (figures["num_hosts"], figures["world_size"]) == (2, 2)
    for name, case in figures["cases"].items():
        # The kernel's count of the same steps: headers and acknowledgements come on top.
        assert 1.0 <= case["wire_bytes"] / case["sent_bytes"] < 1.1, name
    assert "shaped to 500mbit" in (tmp_path / "smoke.md").read_text()
    hosts = re.findall(r"hotrec-\d+-[01]", done.stderr)
    assert len(hosts) == 2
    left = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert [host for host in hosts if host in left] == []
