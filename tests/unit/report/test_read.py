import json

import pytest

from hotrec.report.read import read_runs
from tests.unit.report.runs import (
    CACHE,
    COMPARED,
    SUMMARY,
    eval_line,
    metrics_line,
    write_run,
    write_whole_run,
)


def test_whole_run(tmp_path):
    (run,) = read_runs([write_whole_run(tmp_path / "a")])
    assert run.name == "hot_cold"
    assert run.number("auc") == 0.78125
    assert run.number("step_p50_s") == 0.124
    assert run.series("loss") == ([100, 200, 300], pytest.approx([0.6, 0.5, 0.4]))
    assert run.splits == ["valid", "test"]
    assert run.eval_series("auc", "valid") == ([150, 300], [0.75, 0.78])
    assert run.eval_series("auc", "test") == ([300], [0.77])
    assert run.sent_bytes == {"cold_all_to_all": 2.5e6, "hot_gradients": 2.0e6}
    assert run.stage_s == pytest.approx({"data_wait": 0.002, "forward": 0.03, "backward": 0.05})
    assert list(run.stage_s) == ["data_wait", "forward", "backward"]
    assert list(run.texts) == ["config.yaml", "plan.txt", "environment.json"]
    assert run.notes == ()


def test_unfinished_run_takes_its_figures_from_the_last_lines(tmp_path):
    lines = [metrics_line(100, step_p50_s=0.2), metrics_line(200, step_p50_s=0.1)]
    path = write_run(
        tmp_path / "a", metrics=lines, evals=[eval_line(100, 0.7), eval_line(200, 0.71)]
    )
    (run,) = read_runs([path])
    assert run.name == "a"
    assert run.number("auc") == 0.71
    assert run.number("step_p50_s") == 0.1
    assert run.number("num_steps") == 200
    assert run.sent_bytes == pytest.approx({"cold_all_to_all": 2.6e6, "hot_gradients": 1.9e6})
    assert run.number("sent_bytes_total") == pytest.approx(4.5e6)
    assert "summary.json: not recorded." in run.notes
    assert "the run has not finished; its figures are those up to its last line." in run.notes
    assert any(note.startswith("from the last logged line") and "auc" in note for note in run.notes)


def test_summary_alone_is_enough(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", summary={"finished": True, "auc": 0.7})])
    assert run.number("auc") == 0.7
    assert run.number("step_p50_s") is None
    assert (run.metrics, run.evals, run.sent_bytes, run.stage_s, run.texts) == ((), (), {}, {}, {})
    assert run.notes == tuple(
        f"{name}: not recorded."
        for name in ("metrics.jsonl", "eval.jsonl", "config.yaml", "plan.txt", "environment.json")
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"stage_s": None, "stage_s.forward": 0.04},
            {"data_wait": 0.002, "forward": 0.04},
        ),
        ({"stage_s": {"data_wait": 0.01, "forward": 0.04}}, {"data_wait": 0.01, "forward": 0.04}),
        ({"stage_s": None}, {"data_wait": 0.002, "compute_and_communicate": 0.122}),
        ({"stage_s": None, "data_wait_s": None}, {}),
    ],
)
def test_stages_nested_flat_coarse_or_absent(tmp_path, changes, expected):
    path = write_run(tmp_path / "a", summary=SUMMARY, metrics=[metrics_line(1, **changes)])
    assert read_runs([path])[0].stage_s == pytest.approx(expected)


def test_stages_are_means_over_the_lines(tmp_path):
    lines = [metrics_line(s, stage_s={"forward": 0.01 * s}) for s in (1, 2, 3)]
    path = write_run(tmp_path / "a", summary=SUMMARY, metrics=lines)
    assert read_runs([path])[0].stage_s["forward"] == pytest.approx(0.02)


def test_the_measured_stages_are_the_breakdown(tmp_path):
    (run,) = read_runs([write_whole_run(tmp_path / "a", {**SUMMARY, **COMPARED})])
    assert run.stage_s["data_wait"] == pytest.approx(0.002)
    assert run.stage_s["other"] == pytest.approx(0.003)  # without the waiting
    assert run.stage_s["dense"] == 0.095


def test_caches_of_an_unfinished_run_are_summed_over_its_lines(tmp_path):
    half = {name: value // 2 for name, value in CACHE.items()}
    lines = [metrics_line(100, cache=half), metrics_line(200, cache=half)]
    assert read_runs([write_run(tmp_path / "a", metrics=lines)])[0].cache == CACHE


def test_runs_of_one_name_are_numbered(tmp_path):
    paths = [write_whole_run(tmp_path / name) for name in ("a", "b")]
    paths.append(write_whole_run(tmp_path / "c", {**SUMMARY, "name": "other"}))
    assert [run.name for run in read_runs(paths)] == ["hot_cold (1)", "hot_cold (2)", "other"]


def test_a_cut_last_line_is_left_out_and_said(tmp_path):
    path = write_whole_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 400, "lo')
    (run,) = read_runs([path])
    assert run.series("loss")[0] == [100, 200, 300]
    assert run.notes == ("metrics.jsonl: the last line is incomplete and was left out.",)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("summary.json", '{"auc": ', r"summary\.json: expected JSON, got "),
        ("summary.json", "[1]", r"summary\.json: expected a JSON object, got list"),
        ("summary.json", '{"auc": "high"}', r"summary\.json auc: expected a number, got 'high'"),
        ("summary.json", '{"sent_bytes": 5}', r"sent_bytes: expected numbers by name, got 5"),
        ("summary.json", '{"measured_stage_s": {"a": "b"}}', "stage_s: expected numbers by name"),
        ("summary.json", '{"host_bytes_by_kind": {"a": "b"}}', "kind: expected numbers by name"),
        ("summary.json", '{"cache": {"num_hits": 3}}', r"json cache: expected .*, got"),
        ("summary.json", json.dumps({"cache": {**CACHE, "num_steps": 0}}), r"json cache: expected"),
        (
            "summary.json",
            json.dumps({"cache": {**CACHE, "num_rows": "x"}}),
            r"json cache: expected",
        ),
        ("metrics.jsonl", '{"step": 1}\n{"step"\n', r"metrics\.jsonl line 2: expected JSON"),
        ("metrics.jsonl", '{"loss": 1}\n', r"line 1: expected a numeric 'step', got None"),
        ("metrics.jsonl", '{"step": 1, "loss": "x"}\n', r"line 1 loss: expected a number, got 'x'"),
        ("metrics.jsonl", '{"step": 1, "stage_s": [2]}\n', r"stage_s: expected numbers by name"),
        ("eval.jsonl", "{}\n", r"eval\.jsonl line 1: expected a numeric 'step'"),
        ("environment.json", "{", r"environment\.json: expected JSON"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    path = write_whole_run(tmp_path / "a")
    (path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_runs([path])


def test_binary_rubbish_is_named(tmp_path):
    path = write_whole_run(tmp_path / "a")
    (path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"metrics\.jsonl: expected UTF-8 text"):
        read_runs([path])


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone: expected a run directory, got no such directory"):
        read_runs([tmp_path / "gone"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file: expected a run directory, got a file"):
        read_runs([tmp_path / "file"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: expected summary\.json or metrics\.jsonl, got"):
        read_runs([tmp_path / "empty"])
    with pytest.raises(ValueError, match="at least one run directory, got none"):
        read_runs([])


def test_nan_is_read_as_a_number(tmp_path):
    path = write_run(tmp_path / "a", metrics=[metrics_line(1, loss=float("nan"))])
    assert "NaN" in (path / "metrics.jsonl").read_text()
    assert json.dumps(read_runs([path])[0].series("loss")) == "[[1.0], [NaN]]"
