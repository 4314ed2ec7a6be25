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
    ("summary", "lines", "expected"),
    [
        ({}, [{}], {"data_wait": 0.002, "forward": 0.03, "backward": 0.05}),
        ({}, [{"stage_s": {"forward": 0.01 * s}} for s in (1, 3)], {"forward": 0.02}),
        ({}, [{"stage_s": None}], {}),
        ({}, [{"data_wait_s": None}], {"forward": 0.03, "backward": 0.05}),
        # "other" without the waiting, which is a part of it.
        (COMPARED, [{}], {"data_wait": 0.002, "dense": 0.095, "other": 0.003}),
    ],
)
def test_stages(tmp_path, summary, lines, expected):
    metrics = [metrics_line(1, **changes) for changes in lines]
    found = read_runs([write_run(tmp_path / "a", summary=summary, metrics=metrics)])[0].stage_s
    assert {stage: found[stage] for stage in expected} == pytest.approx(expected)
    assert bool(found) == bool(expected)


def test_caches_of_an_unfinished_run_are_summed_over_its_lines(tmp_path):
    half = {name: value // 2 for name, value in CACHE.items()}
    lines = [metrics_line(100, cache=half), metrics_line(200, cache=half)]
    (run,) = read_runs([write_run(tmp_path / "a", metrics=lines)])
    assert run.by_name("cache") == CACHE
    assert run.number("cache_hit_frac") == 0.875
    assert run.number("cache.num_misses") == 625


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
        ("metrics.jsonl", b"\xff\xfe\x00", r"metrics\.jsonl: expected UTF-8 text"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    path = write_whole_run(tmp_path / "a")
    (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_runs([path])


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for paths, message in (
        ([tmp_path / "gone"], r"gone: expected a run directory, got no such directory"),
        ([tmp_path / "file"], r"file: expected a run directory, got a file"),
        ([tmp_path / "empty"], r"empty: expected summary\.json or metrics\.jsonl, got"),
        ([], "at least one run directory, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            read_runs(paths)
