import pytest

from hotrec.report.figures import (
    draw_coverage,
    draw_learning,
    draw_predicted,
    draw_steps,
    draw_traffic,
)
from hotrec.report.read import read_runs
from hotrec.report.style import RUN_COLORS, legend_columns, run_color, run_line, to_svg
from tests.unit.report.runs import (
    COMPARED,
    SUMMARY,
    TORCHREC,
    metrics_line,
    partition_content,
    profile_content,
    write_run,
    write_whole_run,
)


@pytest.fixture
def runs(tmp_path):
    return read_runs([write_whole_run(tmp_path / "a"), write_whole_run(tmp_path / "b", TORCHREC)])


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_learning_draws_what_was_logged(runs):
    loss, auc = draw_learning(runs).axes
    assert [line.get_label() for line in loss.lines] == ["hot_cold", "planner"]
    assert [line.get_color() for line in loss.lines] == list(RUN_COLORS[:2])
    assert loss.lines[0].get_xdata().tolist() == [100, 200, 300]
    assert loss.lines[0].get_ydata() == pytest.approx([0.6, 0.5, 0.4])
    assert auc.lines[1].get_ydata().tolist() == [0.75, 0.78]
    assert auc.get_title(loc="left") == "AUC on valid"
    # Later runs are thinner, so that the first shows under them.
    assert loss.lines[0].get_linewidth() > loss.lines[1].get_linewidth()


def test_learning_says_what_is_missing(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", summary=SUMMARY, metrics=[metrics_line(1)])])
    loss, auc = draw_learning([run]).axes
    assert texts(loss) == []
    assert texts(auc) == ["not recorded"]
    (run,) = read_runs([write_run(tmp_path / "b", summary=SUMMARY)])
    assert draw_learning([run]) is None


def bars(axes):
    """{part: [width per run]} and {part: [start per run]}, by legend label."""
    widths, starts = {}, {}
    for container in axes.containers:
        widths[container.get_label()] = [bar.get_width() for bar in container]
        starts[container.get_label()] = [bar.get_x() for bar in container]
    return widths, starts


def test_steps_stack_the_stages_and_the_rest(runs):
    (axes,) = draw_steps(runs).axes
    widths, starts = bars(axes)
    assert list(widths) == ["data wait", "forward", "backward", "other"]
    assert widths["backward"] == pytest.approx([0.05, 0.05])
    assert starts["backward"] == pytest.approx([0.032, 0.032])
    assert widths["other"] == pytest.approx([0.124 - 0.082, 0.248 - 0.082])
    assert texts(axes) == ["p50 124 ms, p90 139 ms", "p50 248 ms, p90 139 ms"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["hot_cold", "planner"]


def test_traffic_stacks_collectives_and_marks_the_bound(runs):
    (axes,) = draw_traffic(runs).axes
    widths, starts = bars(axes)
    assert widths == {
        "cold all to all": [2.5e6, 0.0],
        "hot gradients": [2.0e6, 0.0],
        "embedding all to all": [0.0, 15.0e6],
    }
    assert starts["hot gradients"][0] == 2.5e6
    assert texts(axes) == ["4.50 MB, 1.12x the lower bound", "15.0 MB, 3.75x the lower bound"]
    assert [set(line.get_xdata()) for line in axes.lines[:2]] == [{4.0e6}, {4.0e6}]
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()][-1] == "lower bound"
    assert axes.get_xlabel() == "bytes sent per step and rank"
    assert axes.xaxis.get_major_formatter()(2.5e6) == "2.5 MB"
    assert axes.xaxis.get_major_formatter()(10e6) == "10 MB"


def test_a_run_without_records_is_said_beside_the_others(tmp_path, runs):
    (bare,) = read_runs([write_run(tmp_path / "bare", summary={"finished": True})])
    assert texts(draw_traffic([*runs, bare]).axes[0])[2] == "not recorded"
    assert texts(draw_steps([*runs, bare]).axes[0])[2] == "not recorded"
    assert draw_traffic([bare]) is None
    assert draw_steps([bare]) is None


def test_predictions_are_drawn_on_one_scale(tmp_path):
    slower = {**COMPARED, "predicted_stage_s": {"route": 0.4, "dense": 0.08}}
    summaries = [{**SUMMARY, **changes} for changes in (COMPARED, slower)]
    paths = [write_whole_run(tmp_path / str(i), s) for i, s in enumerate(summaries)]
    first, second = draw_predicted(read_runs(paths)).axes
    predicted, measured = first.containers
    assert [bar.get_height() for bar in predicted] == [0.010, 0.080, 0.010, 0.0]
    assert [bar.get_height() for bar in measured] == [0.005, 0.095, 0.020, 0.005]
    assert list(first.lines[0].get_ydata()) == [0.006, 0.097, 0.030, 0.01]
    assert "step predicted 100 ms, measured 125 ms, error -20.0%" in first.get_title("left")
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > 0.4


def test_one_rank_sends_nothing(tmp_path):
    summary = {**SUMMARY, "sent_bytes": {"cold_all_to_all": 0}, "sent_bytes_total": 0}
    (run,) = read_runs([write_run(tmp_path / "a", summary=summary)])
    assert draw_traffic([run]) is None


def test_coverage_curves_and_the_mark():
    curves, tables = draw_coverage(profile_content(), partition_content()).axes
    by_label = {line.get_label(): line for line in curves.lines}
    assert by_label["train"].get_xdata().tolist() == [0.01, 0.1, 1.0]
    assert by_label["train"].get_ydata().tolist() == [0.5, 0.8, 1.0]
    assert by_label["held out, later"].get_ydata().tolist() == [0.4, 0.7, 1.0]
    assert texts(curves) == [
        "chosen: 10 hot rows (10.0%)\n81.2% of the train lookups\n70.0% of the held-out lookups"
    ]
    assert curves.get_title(loc="left") == "All 2 tables, 100 rows"
    assert [label.get_text() for label in tables.get_yticklabels()] == [
        "user  (10.0%)",
        "<item>  (10.0%)",
    ]


def test_coverage_without_partition_or_heldout():
    (curves,) = draw_coverage(profile_content(heldout=False), None).axes
    assert [line.get_label() for line in curves.lines] == ["train"]
    assert texts(curves) == []


def test_coverage_of_an_all_cold_partition():
    curves, _ = draw_coverage(profile_content(), partition_content(hot=False)).axes
    assert curves.get_title(loc="right") == "no hot rows"


def test_many_tables_show_the_most_read():
    profile, partition = profile_content(), partition_content()
    for i in range(40):
        profile["tables"][f"t{i}"] = {**profile["tables"]["user"], "num_lookups": i}
        partition["tables"][f"t{i}"] = partition["tables"]["user"]
    _, tables = draw_coverage(profile, partition).axes
    labels = [label.get_text() for label in tables.get_yticklabels()]
    assert len(labels) == 30
    assert labels[:3] == ["user  (10.0%)", "<item>  (10.0%)", "t39  (10.0%)"]
    assert tables.get_title(loc="left") == "Each table, 30 of 42"


def test_svg_is_inline_scalable_and_the_same_each_time(runs):
    first, second = (to_svg(draw_traffic(runs), "Bytes") for _ in range(2))
    assert first == second
    assert first.startswith('<svg role="img" aria-label="Bytes"')
    assert "<?xml" not in first
    head = first[: first.index(">")]
    assert " width=" not in head
    assert " height=" not in head
    assert "viewBox=" in head


def test_legends_stay_inside_the_figure():
    assert legend_columns([]) == 1
    assert legend_columns(["short"] * 5) == 5
    assert legend_columns(["x" * 40] * 8) == 2
    assert legend_columns(["x" * 500] * 3) == 1
    assert legend_columns(["a", "b" * 60, "c"]) == 3


def test_colours_that_come_again_have_another_line():
    looks = {(run_color(i), run_line(i)) for i in range(3 * len(RUN_COLORS))}
    assert len(looks) == 3 * len(RUN_COLORS)


def test_a_name_with_dollars_is_no_formula(tmp_path):
    summary = {**SUMMARY, "name": r"$\bad{$"}
    runs = read_runs([write_whole_run(tmp_path / "a", summary)])
    for draw in (draw_learning, draw_steps, draw_traffic):
        assert to_svg(draw(runs), "x").startswith("<svg")
