"""A wrong key or value fails before anything is done, and names the full key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.cli.app import run_command

UNKNOWN = [
    (["trainer.bach_size=3"], "trainer.bach_size: expected one of", "trainer.batch_size?"),
    (["+trainer.bach_size=3"], "trainer.bach_size: expected one of", "trainer.batch_size?"),
    (["+speed=3"], "speed: expected one of", "got 'speed'"),
    (["placemen=coverage"], "placemen: expected one of", "placement?"),
    (["placement.hot_frac=0.1"], "placement.hot_frac: expected one of", "placement=fraction"),
    (["optimizer=sgd", "optimizer.eps=1"], "optimizer.eps: expected one of", "optimizer=adagrad"),
    (
        ["optimizer.schedule.warmup=1"],
        "optimizer.schedule.warmup: expected one of",
        "optimizer.schedule.warmup_steps?",
    ),
    (
        ["data=synthetic", "data.synthetic.foo=1"],
        "data.synthetic.foo: expected one of",
        "got 'foo'",
    ),
    (
        ["data=synthetic", "+data.synthetic.foo=1"],
        "data.synthetic.foo: expected one of",
        "got 'foo'",
    ),
    (
        ["placement=coverage", "placement.overrides.t0=hot"],
        "placement.overrides.t0: expected an existing key",
        "+placement.overrides.t0=...",
    ),
]
WRONG_TYPE = [
    (["trainer.batch_size=abc"], "trainer.batch_size: Value 'abc'", "Integer"),
    (["trainer.batch_size=null"], "trainer.batch_size: ", "not Optional"),
    (["optimizer.learning_rate=[1]"], "optimizer.learning_rate: ", ""),
    (["model.dense_layer_sizes=[a,64]"], "model.dense_layer_sizes", "Integer"),
    (["data=synthetic", "data.synthetic.num_rows=x"], "data.synthetic.num_rows", ""),
    (["launch.num_ranks=two"], "launch.num_ranks: Value 'two'", "Integer"),
]
BAD_CHOICE = [
    (["model.pooling=max"], "model.pooling: Invalid value 'max'", "[sum, mean]"),
    (["trainer.precision=fp16"], "trainer.precision: Invalid value 'fp16'", "bf16"),
    (["optimizer.schedule.decay=cosin"], "optimizer.schedule.decay: Invalid", "cosine"),
    (
        ["placement=fae", "placement.cold_tier=hbm"],
        "placement.cold_tier: Invalid value 'hbm'",
        "fused_uvm",
    ),
    (["placement=coverag"], "placement: expected one of all_cold, ", "got 'coverag'"),
    (["experiment=quikstart"], "experiment: expected one of ", "quickstart"),
    (["placement.kind=budget"], "placement.kind: expected cost", "placement=budget"),
    (["trainer.eval_splits=[dev]"], "trainer.eval_splits: expected some of", "['dev']"),
    (
        ["placement=coverage", "+placement.overrides={t0: warm}"],
        "placement.overrides.t0: expected hot, cold",
        "'warm'",
    ),
]
OUT_OF_RANGE = [
    (["trainer.batch_size=0"], "trainer.batch_size: expected a value at least 1, got 0", ""),
    (
        ["model.embedding_dim=5", "model.dense_layer_sizes=[5]"],
        "model.embedding_dim: expected a multiple of 4",
        "got 5. Take 4 or 8.",
    ),
    (["trainer.grad_clip_norm=0"], "trainer.grad_clip_norm: expected a value above 0", "got 0"),
    (
        ["trainer.compile=true", "trainer.warmup_steps=0"],
        "trainer.warmup_steps: expected at least 1 with trainer.compile",
        "got 0",
    ),
    (
        ["trainer.precision=tf32", "trainer.device=cpu"],
        "trainer.precision: expected fp32 or bf16",
        "got tf32",
    ),
    (["trainer.max_steps=0"], "trainer.max_steps: expected a value at least 1", "got 0"),
    (["trainer.seed=-1"], "trainer.seed: expected a value at least 0", "got -1"),
    (["trainer.timeout_s=0"], "trainer.timeout_s: expected a value above 0", "got 0"),
    (["trainer.timeout_s=inf"], "trainer.timeout_s: expected a finite number", "inf"),
    (
        ["placement=coverage", "placement.coverage_frac=1.5"],
        "placement.coverage_frac: expected a value",
        "at most 1",
    ),
    (
        ["placement=budget", "placement.hot_budget_mib=???"],
        "placement.hot_budget_mib: expected",
        "got none",
    ),
    (["optimizer.learning_rate=0"], "optimizer.learning_rate: expected a value above 0", ""),
    (["optimizer=adam", "optimizer.beta2=1"], "optimizer.beta2: expected a value", "below 1"),
    (["profile.sample_frac=0"], "profile.sample_frac: expected a value above 0", ""),
    (["model.dense_layer_sizes=[64,32]"], "model.dense_layer_sizes: expected the last", "64"),
    (["model.over_layer_sizes=[]"], "model.over_layer_sizes: expected sizes", "[]"),
    (["model.over_layer_sizes=[8,2]"], "model.over_layer_sizes: expected the last", "1"),
    (
        ["data=synthetic", "data.synthetic.drift_frac=3"],
        "data.synthetic.drift_frac: expected",
        "3.0",
    ),
    (["data.source=null"], "data: expected exactly one of source and synthetic", "none"),
    (["launch.num_ranks=0"], "launch.num_ranks: expected a value at least 1", "got 0"),
]


@pytest.mark.parametrize(
    ("words", "start", "part"), [*UNKNOWN, *WRONG_TYPE, *BAD_CHOICE, *OUT_OF_RANGE]
)
def test_refused(
    words: list[str],
    start: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("prepare", words) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {start}")
    assert part in err
    assert err.count("\n") == 1, "one message, on one line, without a trace"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_sweep_runs_the_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--multirun", "data=synthetic", "data.synthetic.num_rows=[50]"]
    words += ["data.synthetic.mean_lengths=[1]"]
    words += ["data.synthetic.num_train=200", "data.synthetic.num_valid=0"]
    words += ["data.synthetic.num_test=0", "data.synthetic.signal=-1,1"]
    assert run_command("prepare", words) == 1
    out, err = capfd.readouterr()
    assert "error: data.synthetic.signal: expected >= 0, got -1.0" in err
    assert len(out.splitlines()) == 1, "the second job has run"
    assert (tmp_path / "data/synthetic/dataset/manifest.json").exists()


def test_trace_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_command("prepare", ["trainer.batch_size=0"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert err.rstrip().endswith("error: trainer.batch_size: expected a value at least 1, got 0.")


@pytest.mark.parametrize("name", ["profile", "plan", "report", "doctor"])
def test_commands_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(name, []) == 1
    expected = f"[rank 1] error: hotrec {name}: expected one process, got 2 ranks."
    assert expected in capfd.readouterr().err


def test_sweep_inside_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command("train", ["--multirun", "trainer.seed=1,2"]) == 1
    assert "[rank 0] error: --multirun: expected to start without" in capfd.readouterr().err
