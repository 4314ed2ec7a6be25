"""A wrong key or value fails before anything is done, and names the full key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from hotrec.cli.app import run_command
from hotrec.cli.commands import COMMANDS

# Words of the command line, the key that the error begins with, and what else it says.
UNKNOWN = [
    ("trainer.bach_size=3", "trainer.bach_size: expected one of", "trainer.batch_size?"),
    ("+trainer.bach_size=3", "trainer.bach_size: expected one of", "trainer.batch_size?"),
    ("batch_size=64", "batch_size: expected", "Did you mean trainer.batch_size?"),
    ("learning_rate=0.1", "learning_rate: expected", "Did you mean optimizer.learning_rate?"),
    ("num_epoch=3", "num_epoch: expected", "Did you mean trainer.num_epochs?"),
    ("+speed=3", "speed: expected one of", "got 'speed'"),
    ("placemen=coverage", "placemen: expected one of", "placement?"),
    ("placement.hot_frac=0.1", "placement.hot_frac: expected one of", "placement=fraction"),
    ("optimizer=sgd optimizer.eps=1", "optimizer.eps: expected one of", "optimizer=adagrad"),
    ("optimizer.schedule.warmup=1", "optimizer.schedule.warmup:", "schedule.warmup_steps?"),
    ("data=synthetic data.synthetic.foo=1", "data.synthetic.foo: expected one of", "got 'foo'"),
    ("data=synthetic +data.synthetic.foo=1", "data.synthetic.foo: expected one of", "got 'foo'"),
    (
        "placement=coverage placement.overrides.t0=hot",
        *("placement.overrides.t0: expected an existing key", "+placement.overrides.t0=..."),
    ),
]  # fmt: skip
WRONG_TYPE = [
    ("trainer.batch_size=abc", "trainer.batch_size: expected a value of type Integer", "'abc'"),
    ("trainer.batch_size=null", "trainer.batch_size: ", "expected a value, got null"),
    ("optimizer.learning_rate=[1]", "optimizer.learning_rate: ", ""),
    ("model.dense_layer_sizes=[a,64]", "model.dense_layer_sizes", "Integer"),
    ("data=synthetic data.synthetic.num_rows=x", "data.synthetic.num_rows", ""),
]
BAD_CHOICE = [
    ("model.pooling=max", "model.pooling: expected one of sum, mean", "'max'"),
    ("trainer.precision=fp16", "trainer.precision: expected one of fp32, tf32, bf16", "'fp16'"),
    ("placement=coverag", "placement: expected one of all_cold, ", "got 'coverag'"),
    ("experiment=quikstart", "experiment: expected one of ", "quickstart"),
    ("placement.kind=budget", "placement.kind: expected cost", "placement=budget"),
    ("trainer.eval_splits=[dev]", "trainer.eval_splits: expected some of", "['dev']"),
    ("placement=coverage +placement.overrides={t0: warm}", "placement.overrides.t0:", "'warm'"),
]
OUT_OF_RANGE = [
    (
        "optimizer.schedule.warmup_steps=5 optimizer.schedule.decay_start_step=3",
        *("optimizer.schedule.decay_start_step: expected 0 or at least warmup_steps 5", "got 3"),
    ),
    (
        "optimizer.schedule.num_decay_steps=9",
        *("optimizer.schedule.num_decay_steps: expected 0 with decay=constant", "got 9"),
    ),
    ("trainer.best_by=gauc", "trainer.best_by: expected log_loss or auc without", "got gauc"),
    ("trainer.best_by=ndcg_at", "trainer.best_by: expected log_loss, auc or gauc", "got ndcg_at"),
    (
        "trainer.eval_ranking_without=seen",
        *("trainer.eval_ranking_without: expected none without trainer.eval_ranking", "'seen'"),
    ),
    ("trainer.eval_ranking=[5]", "trainer.eval_ranking: expected none without", "got [5]"),
    (
        "model=two_tower model.item_columns=[a] model.loss=sampled_softmax",
        *("model.item_id: expected the column of the item with loss=sampled_softmax", "got none"),
    ),
    (
        "model=two_tower model.item_columns=[a] model.item_id=b",
        *("model.item_id: expected one of the item's columns ['a']", "got 'b'"),
    ),
    (
        "model=two_tower model.item_columns=[a,b] model.item_id=a model.negatives=uniform",
        *("model.negatives: expected in_batch for a model that reads more", "['a', 'b']"),
    ),
    (
        "model=sasrec +model.history.seen=a model.item_id=seen",
        *("model.item_id: expected one of the item's columns ['a']", "got 'seen'"),
    ),
    (
        "model=hstu +model.history={seen: a, of: b} model.item_id=a model.negatives=uniform",
        *("model.negatives: expected in_batch for a model that reads more", "['a', 'b']"),
    ),
    (
        "model=hstu +model.history.seen=a model.item_id=a trainer.eval_ranking=[5]",
        *("trainer.eval_ranking: expected none for hstu with model.loss=cross_entropy", "got [5]"),
    ),
    (
        "model=two_tower model.item_columns=[a] model.item_id=a model.loss=sampled_softmax "
        "pipeline=micro_batches",
        *("pipeline.micro_batches: expected false with model.loss=sampled_softmax", "got true"),
    ),
    (
        "model=two_tower model.item_columns=[a] model.item_id=a model.loss=sampled_softmax "
        "model.negatives=uniform order=all_hot",
        *("model.negatives: expected in_batch with order=all_hot", "got uniform"),
    ),
    (
        "experiment=kuairand_hstu trainer.compile=true",
        *("trainer.compile: expected false for models of histories", "got true for hstu"),
    ),
    ("experiment=kuairand_sasrec model.num_heads=3", "model.num_heads: ", "64, got 3"),
    ("experiment=kuairand_hstu model.pooling=mean", "model.pooling: ", "got mean"),
    ("model=hstu", "model.history: expected at least one value", ""),
    ("trainer.batch_size=0", "trainer.batch_size: expected a value at least 1, got 0", ""),
    ("optimizer=adam optimizer.beta2=1", "optimizer.beta2: expected a value", "below 1"),
    ("placement=coverage placement.coverage_frac=1.5", "placement.coverage_frac:", "at most 1"),
    ("trainer.max_steps=0", "trainer.max_steps: expected a value at least 1", "got 0"),
    ("trainer.timeout_s=0", "trainer.timeout_s: expected a value above 0", "got 0"),
    ("trainer.timeout_s=inf", "trainer.timeout_s: expected a finite number", "inf"),
    ("placement=budget placement.hot_budget_mib=???", "placement.hot_budget_mib:", "got none"),
    (
        "model.embedding_dim=5 model.dense_layer_sizes=[5]",
        *("model.embedding_dim: expected a multiple of 4", "got 5. Take 4 or 8."),
    ),
    (
        "trainer.compile=true trainer.warmup_steps=0",
        *("trainer.warmup_steps: expected at least 1 with trainer.compile", "got 0"),
    ),
    ("trainer.precision=tf32 trainer.device=cpu", "trainer.precision: expected fp32", "got tf32"),
    ("model.dense_layer_sizes=[64,32]", "model.dense_layer_sizes: expected the last", "64"),
    ("run.from=bogus", "run.from: expected one of prepare, ", "'bogus'"),
    ("model.over_layer_sizes=[]", "model.over_layer_sizes: expected at least one value", "[]"),
    ("model.over_layer_sizes=[0,1]", "model.over_layer_sizes[0]: expected a value", "got 0"),
    ("model.over_layer_sizes=[8,2]", "model.over_layer_sizes: expected the last", "1"),
    ("data=synthetic data.synthetic.drift_frac=3", "data.synthetic.drift_frac: expected", "3.0"),
    ("model.over_layer_sizes=[4611686018427387904,1]", "model.over_layer_sizes[0]:", "at most"),
    ("paths.dataset=", "paths.dataset: expected a directory", "empty"),
    ("paths.profile='s3://bucket/p'", "paths.profile: expected a directory of this host", "s3://"),
    ("dataset_name=", "dataset_name: expected the name", "''"),
    ("dataset_name=a/../../b", "dataset_name: expected the name", "'a/../../b'"),
    ("data=kuairand data.source=null", "data: expected a dataset, got none", "data=kuairand,"),
]
UNREADABLE = [
    ("trainer.batch_size={a:", "trainer.batch_size: expected an override", "'{a:'"),
    (f"trainer.batch_size={'9' * 5000}", "trainer.batch_size: expected an override", "4300 digits"),
    ("=1", "=1: expected key=value", "no key"),
    ("trainer=5", "trainer: expected one of", "got 5"),
    ("model=null", "model: expected one of", "got None"),
    ("--no-cake=3", "--no-cake=3: expected a flag listed by", "dashes: no_cake=<value>."),
    ("--batch_size=64", "--batch_size=64: expected a flag", "trainer.batch_size=<value>"),
    ("--learning-rate=3", "--learning-rate=3: expected a flag", "optimizer.learning_rate=<value>"),
    ("--config-dir", "flags --config-dir: expected those of", "argument"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "start", "part"), [*UNKNOWN, *WRONG_TYPE, *BAD_CHOICE, *OUT_OF_RANGE, *UNREADABLE]
)
def test_refused(
    words: str, start: str, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Overrides, some with spaces.
    assert run_command("prepare", re.split(r" (?=[+]?[a-z_0-9.]+=)", words)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {start}")
    assert part in err
    assert err.count("\n") == 1, "one message, on one line, without a trace"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_sweep_runs_the_other_jobs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["num_rows=[50]", "mean_lengths=[1]", "num_train=200", "num_valid=0", "num_test=0"]
    keys = [f"data.synthetic.{word}" for word in (*words, "signal=-1,1")]
    assert run_command("prepare", ["--multirun", "data=synthetic", *keys]) == 1
    out, err = capfd.readouterr()
    assert "error: data.synthetic.signal: expected a value at least 0, got -1.0" in err
    assert len(out.splitlines()) == 1, "the second job has run"
    assert (tmp_path / "data/synthetic/dataset/manifest.json").exists()


@pytest.mark.parametrize(
    ("choice", "extra"),
    [
        ("hydra/launcher=joblib", "joblib"),
        ("hydra/launcher=slurm", "submitit"),
        ("hydra/sweeper=auc", "optuna"),
    ],
)
def test_a_missing_plugin_names_its_extra(
    choice: str, extra: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Plugins.instance()  # registers what the installed ones can be asked for
    kinds = ConfigStore.instance().repo["hydra"]
    for kind, plugin in (
        ("launcher", "joblib"),
        ("launcher", "submitit_slurm"),
        ("sweeper", "optuna"),
    ):
        monkeypatch.delitem(kinds.get(kind, {}), f"{plugin}.yaml", raising=False)
    assert run_command("prepare", ["--multirun", choice]) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"error: {choice.split('=')[0]}: expected Hydra's plugin for ")
    assert f"Run `pip install 'hotrec[{extra}]'`." in err


def test_trace_on_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_command("prepare", ["trainer.batch_size=0"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "\nerror: trainer.batch_size: expected a value at least 1, got 0. " in err


READERS = [name for name, command in COMMANDS.items() if command.config_name == "config"]


@pytest.mark.parametrize("name", sorted({*READERS} - {"calibrate"}))
def test_no_dataset_is_taken_unasked(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text("synthetic: {num_rows: [3]}\n")
    # As in a checkout, where the sample may have been prepared.
    (tmp_path / "data/kuairand/dataset").mkdir(parents=True)
    for words in ([], ["paths.dataset=data/kuairand/dataset"]):
        assert run_command(name, words) == 1
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("error: data: expected a dataset, got none. Choose experiment=quick")
        assert "data= with one of mine, criteo_kaggle, " in err


def test_a_sweep_takes_no_dataset_unasked(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("train", ["--multirun", "trainer.seed=1,2"]) == 1
    assert capfd.readouterr().err.count("error: data: expected a dataset, got none.") == 2


def test_questions_need_no_dataset(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["--cfg", "job"], ["--cfg", "job", "--resolve"], ["--info", "defaults-tree"]):
        assert run_command("train", words) == 0
        assert "kuairand" not in capfd.readouterr().out


def test_a_dataset_without_a_choice_needs_a_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    own = "# @package _global_\ndata: {synthetic: {num_rows: [3], num_train: 9}}\n"
    (tmp_path / "conf/experiment/own.yaml").write_text(own)
    assert run_command("prepare", ["experiment=own"]) == 1
    assert "error: dataset_name: expected the name of a directory" in capfd.readouterr().err
    assert run_command("prepare", ["experiment=own", "dataset_name=x"]) == 0
    assert (tmp_path / "data/x/dataset/manifest.json").exists()


@pytest.mark.parametrize(
    ("words", "rank", "expected"),
    [
        (["plan"], 1, "hotrec plan: expected one process, got 2 ranks."),
        (["report"], 1, "hotrec report: expected one process, got 2 ranks."),
        (["train", "--multirun", "trainer.seed=1,2"], 0, "--multirun: expected no torchrun"),
    ],
)
def test_what_needs_one_process(
    words: list[str],
    rank: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(words[0], words[1:]) == 1
    assert f"[rank {rank}] error: {expected}" in capfd.readouterr().err
