"""Benchmark scripts: what they refuse, choose and write; the others have files of their own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import networks_page
from hotrec.bench.figures import Measured
from hotrec.types import STAGES
from tests.unit.bench.test_bench import document_of, figures_of, measured, one_step

REPOSITORY = Path(__file__).parents[2]


def networks_document(step_s: float, exposed_frac: float) -> dict[str, Any]:
    def case(step_s: float, exposed_s: float) -> list[Measured]:
        stages = {stage: np.zeros(1) for stage in STAGES}
        stages |= {"rows_exchange": np.full(1, exposed_s), "dense": np.ones(1)}
        return [measured(blocks={0: one_step(step_s)}, stage_s=stages)]

    cases = figures_of(
        look_ahead=case(step_s, exposed_frac * step_s),
        planner=case(4.2, 0.0),
        hand_tuned=case(2.4, 0.0),
    )
    return document_of(cases, partitions={"look_ahead": {"num_hot_rows": 77}})


def test_the_page_of_networks_says_which_targets_are_reached(tmp_path: Path) -> None:
    (tmp_path / "1gbit-w2-b2048.json").write_text(json.dumps(networks_document(1.0, 0.16)))
    (tmp_path / "1gbit-w4-b8192.json").write_text(json.dumps(networks_document(0.01, 0.0)))
    with pytest.raises(SystemExit, match="expected .*-w.*json of networks.sh, got none"):
        networks_page.main([str(tmp_path / "empty")])
    networks_page.main([str(tmp_path)])
    rows = networks_page.verdicts(networks_page.read(tmp_path))
    found = {(network, case, what): rest for network, case, what, *rest in rows}
    assert found[("1gbit", "look_ahead", "faster than planner")] == ["at least 4x", "4.20x", "yes"]
    assert found[("1gbit", "look_ahead", "faster than hand_tuned")][1:] == ["2.40x", "**no**"]
    assert found[("1gbit", "look_ahead", "exposed share of the step")][1:] == ["16.0%", "**no**"]
    assert found[("loopback", "look_ahead", "faster than planner")][1:] == ["-", "not measured"]
    page = (tmp_path / "networks.md").read_text()
    for text in ("1gbit, 2 ranks, B = 2,048", "1gbit, 4 ranks, B = 8,192", "**no**", " 77 |"):
        assert text in page, text
    assert (tmp_path / "networks.png").read_bytes().startswith(b"\x89PNG")


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
