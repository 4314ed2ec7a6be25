from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from hotrec.report.pictures import (
    MIN_AUC_RANGE,
    draw_coverage,
    draw_learning,
    draw_steps,
    draw_traffic,
)
from hotrec.report.read import Run, read_runs
from hotrec.report.style import RUN_COLORS, legend_columns, to_svg
from tests.unit.report.runs import (
    SUMMARY,
    TORCHREC,
    eval_line,
    metrics_line,
    partition_content,
    profile_content,
    write_run,
    write_whole_run,
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    summaries = [{**SUMMARY, "name": r"$\bad{$"}, TORCHREC]  # dollars are no formula
    return read_runs([write_whole_run(tmp_path / s["placement"], s) for s in summaries])


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def bars(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """Start and length of each run's part, by legend label."""
    return {
        container.get_label(): [(bar.get_x(), bar.get_width()) for bar in container]
        for container in axes.containers
    }


def test_learning_draws_what_was_logged(runs: list[Run]) -> None:
    loss, auc = draw_learning(runs).axes
    assert [line.get_label() for line in loss.lines] == [r"$\bad{$", "planner"]
    assert [line.get_color() for line in loss.lines] == list(RUN_COLORS[:2])
    assert loss.lines[0].get_xdata().tolist() == [100, 200, 300]
    assert loss.lines[0].get_ydata() == pytest.approx([0.6, 0.5, 0.4])
    assert auc.lines[1].get_ydata().tolist() == [0.75, 0.78]
    assert auc.get_title(loc="left") == "AUC on valid"
    # Later runs are thinner, so that the first shows under them.
    assert loss.lines[0].get_linewidth() > loss.lines[1].get_linewidth()


def test_auc_axis_does_not_enlarge_noise(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / str(auc), {}, evals=[eval_line(1, auc), eval_line(2, auc + 1e-5)])
        for auc in (0.75, 0.7501)
    ]
    (auc,) = draw_learning(read_runs(paths)).axes  # and no panel for the loss
    low, high = auc.get_ylim()
    assert high - low == pytest.approx(MIN_AUC_RANGE)
    assert (high + low) / 2 == pytest.approx(0.750055)


def test_steps_stack_the_stages_and_the_rest(runs: list[Run]) -> None:
    (axes,) = draw_steps(runs).axes
    found = bars(axes)
    assert list(found) == ["data wait", "forward", "backward", "other"]
    assert found["backward"][1] == pytest.approx((0.032, 0.05))
    assert [width for _, width in found["other"]] == pytest.approx([0.124 - 0.082, 0.248 - 0.082])
    assert texts(axes) == ["p50 124 ms, p90 139 ms", "p50 248 ms, p90 139 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [r"$\bad{$", "planner"]


def test_traffic_stacks_collectives_and_marks_the_bound(runs: list[Run]) -> None:
    (axes,) = draw_traffic(runs).axes
    assert bars(axes) == {
        "cold all to all": [(0, 2.5e6), (0, 0)],
        "hot gradients": [(2.5e6, 2.0e6), (0, 0)],
        "embedding all to all": [(4.5e6, 0), (0, 15.0e6)],
    }
    assert texts(axes) == ["4.50 MB, 1.12x the bound", "15.0 MB, 3.75x the bound"]
    assert [set(line.get_xdata()) for line in axes.lines[:2]] == [{4.0e6}, {4.0e6}]
    on_hosts = replace(runs[0], summary={**runs[0].summary, "between_hosts_bytes": 2.1e6})
    assert texts(draw_traffic([on_hosts]).axes[0]) == [
        "4.50 MB, 1.12x the bound, 2.10 MB between hosts"
    ]
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert labels.count("lower bound of exchanging rows") == 1
    assert [axes.xaxis.get_major_formatter()(x) for x in (2.5e6, 10e6)] == ["2.5 MB", "10 MB"]


def test_a_run_without_records_is_said_beside_the_others(tmp_path: Path, runs: list[Run]) -> None:
    silent = {**SUMMARY, "sent_bytes": {"cold_all_to_all": 0}, "sent_bytes_total": 0}
    paths = [write_run(tmp_path / "c", {}), write_run(tmp_path / "d", silent, [metrics_line(1)])]
    bare, one_rank = read_runs(paths)
    for draw in (draw_steps, draw_traffic):
        assert texts(draw([*runs, bare]).axes[0])[2] == "not recorded"
        assert draw([bare]) is None
    assert draw_traffic([one_rank]) is None
    assert draw_learning([bare, one_rank]) is None  # a single line each


def test_coverage_curves_and_the_mark() -> None:
    (curves,) = draw_coverage(profile_content(), partition_content()).axes
    by_label = {line.get_label(): line for line in curves.lines}
    assert by_label["train"].get_xdata().tolist() == [0.01, 0.1, 1.0]
    assert by_label["train"].get_ydata().tolist() == [0.5, 0.8, 1.0]
    assert by_label["held out, later"].get_ydata().tolist() == [0.4, 0.7, 1.0]
    assert "10 hot rows (10.0%)\n81.2% of the train" in texts(curves)[0]
    assert curves.get_title(loc="left") == "All 2 tables, 100 rows"
    (curves,) = draw_coverage(profile_content(heldout=False), partition_content(hot=False)).axes
    assert [line.get_label() for line in curves.lines] == ["train"]
    assert curves.get_title(loc="right") == "no hot rows"


def test_svg_is_inline_scalable_and_the_same_each_time(runs: list[Run]) -> None:
    first, second = (to_svg(draw_traffic(runs), "Bytes") for _ in range(2))
    assert first == second
    assert first.startswith('<svg role="img" aria-label="Bytes"')
    head = first[: first.index(">")]
    assert [name for name in (" width=", " height=", "viewBox=") if name in head] == ["viewBox="]


@pytest.mark.parametrize(("lengths", "columns"), [([], 1), ([5] * 5, 5), ([40] * 8, 2), ([500], 1)])
def test_legends_stay_inside_the_figure(lengths: list[int], columns: int) -> None:
    assert legend_columns(["x" * length for length in lengths]) == columns
