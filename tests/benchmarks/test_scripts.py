"""Benchmark scripts: what they refuse, choose and write; the others have files of their own."""

from __future__ import annotations

import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_two_hosts_says_why_it_is_skipped(tmp_path: Path) -> None:
    script = REPOSITORY / "benchmarks" / "two_hosts.sh"
    (tmp_path / "bin").mkdir()
    for name in ("ip", "tc"):
        program = tmp_path / "bin" / name
        program.write_text('#!/bin/sh\necho "Operation not permitted" >&2\nexit 1\n')
        program.chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run([script], env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 77
    assert "skipped: network namespaces cannot be made here" in done.stderr
    assert "Operation not permitted" in done.stderr
