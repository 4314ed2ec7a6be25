"""Pictures draw what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotrec.report.pictures import (
    MIN_AUC_RANGE,
    draw_coverage,
    draw_learning,
    draw_steps,
    draw_traffic,
)
from hotrec.report.read import Run, read_runs
from tests.unit.report.runs import (
    PROFILE,
    SPLIT,
    SUMMARY,
    TORCHREC,
    eval_line,
    metrics_line,
    write_run,
    write_whole_run,
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    summaries = [{**SUMMARY, "name": r"$\bad{$"}, TORCHREC]  # dollars are no formula
    return read_runs([write_whole_run(tmp_path / s["placement"], s) for s in summaries])


def bars(axes: Any) -> list[list[tuple[float, float]]]:
    """Start and length of each run's part, by container."""
    return [[(bar.get_x(), bar.get_width()) for bar in container] for container in axes.containers]


def test_curves(runs: list[Run], tmp_path: Path) -> None:
    loss, auc = draw_learning(runs).axes
    assert [line.get_label() for line in loss.lines] == [r"$\bad{$", "planner"]
    assert loss.lines[0].get_xdata().tolist() == [100, 200, 300]
    assert loss.lines[0].get_ydata() == pytest.approx([0.6, 0.5, 0.4])
    assert auc.lines[1].get_ydata().tolist() == [0.75, 0.78]
    # An axis does not enlarge noise.
    evals = [[eval_line(1, auc), eval_line(2, auc + 1e-5)] for auc in (0.75, 0.7501)]
    near = read_runs([write_run(tmp_path / f"{n}", {}, evals=of) for n, of in enumerate(evals)])
    low, high = draw_learning(near).axes[0].get_ylim()
    assert high - low == pytest.approx(MIN_AUC_RANGE)
    (curves,) = draw_coverage(PROFILE, SPLIT).axes
    train, heldout = curves.lines[:2]
    assert train.get_xdata().tolist() == [0.01, 0.1, 1.0]
    assert train.get_ydata().tolist() == [0.5, 0.8, 1.0]
    assert heldout.get_ydata().tolist() == [0.4, 0.7, 1.0]


def test_bars_stack_what_was_measured(runs: list[Run], tmp_path: Path) -> None:
    (axes,) = draw_steps(runs).axes
    wait, forward, backward, rest = bars(axes)
    assert backward[1] == pytest.approx((0.032, 0.05))
    assert [width for _, width in rest] == pytest.approx([0.124 - 0.082, 0.248 - 0.082])
    (axes,) = draw_traffic(runs).axes
    assert bars(axes) == [
        [(0, 2.5e6), (0, 0)],
        [(2.5e6, 2.0e6), (0, 0)],
        [(4.5e6, 0), (0, 15.0e6)],
    ]
    assert [set(line.get_xdata()) for line in axes.lines[:2]] == [{4.0e6}, {4.0e6}]  # the bound
    silent = {**SUMMARY, "sent_bytes": {"cold_all_to_all": 0}, "sent_bytes_total": 0}
    paths = [write_run(tmp_path / "c", {}), write_run(tmp_path / "d", silent, [metrics_line(1)])]
    bare, one_rank = read_runs(paths)
    for draw in (draw_steps, draw_traffic):
        assert "not recorded" in [text.get_text() for text in draw([*runs, bare]).axes[0].texts]
        assert draw([bare]) is None
    assert draw_traffic([one_rank]) is None
    assert draw_learning([bare, one_rank]) is None  # a single line each
