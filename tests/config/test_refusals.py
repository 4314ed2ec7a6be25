"""A wrong key or value is refused in one line, before anything is done, and names the full key."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotrec.cli.app import run_command
from hotrec.cli.commands import COMMANDS
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS
from hotrec.config.validate import validate

# Of each class of refusal: the words, the key that the error begins with, and what else it has.
REFUSED = [
    ("trainer.bach_size=3", "trainer.bach_size", "trainer.batch_size"),
    ("batch_size=64", "batch_size", "trainer.batch_size"),
    ("placemen=coverage", "placemen", "placement"),
    ("placement.hot_frac=0.1", "placement.hot_frac", "placement=fraction"),
    ("data=synthetic +data.synthetic.foo=1", "data.synthetic.foo", "'foo'"),
    ("placement=coverage placement.overrides.t0=hot", "placement.overrides.t0", "+placement.over"),
    ("trainer.batch_size=abc", "trainer.batch_size", "'abc'"),
    ("trainer.batch_size=null", "trainer.batch_size", "not Optional"),
    ("model.pooling=max", "model.pooling", "'max'"),
    ("placement=coverag", "command line", "'placement/coverag'"),
    ("placement.kind=budget", "placement.kind", "placement=budget"),
    ("trainer.eval_splits=[dev]", "trainer.eval_splits", "['dev']"),
    ("placement=coverage +placement.overrides={t0: warm}", "placement.overrides.t0", "'warm'"),
    # Of two keys that do not fit.
    (
        "optimizer.schedule.warmup_steps=5 optimizer.schedule.decay_start_step=3",
        *("optimizer.schedule.decay_start_step", "got 3"),
    ),
    ("trainer.best_by=gauc", "trainer.best_by", "got gauc"),
    (
        "model=two_tower model.item_columns=[a] model.loss=sampled_softmax",
        *("model.item_id", "got none"),
    ),
    (
        "model=hstu +model.history={seen: a, of: b} model.item_id=a model.negatives=uniform",
        *("model.negatives", "['a', 'b']"),
    ),
    (
        "model=two_tower model.item_columns=[a] model.item_id=a model.loss=sampled_softmax "
        "pipeline=micro_batches",
        *("pipeline.micro_batches", "got true"),
    ),
    ("experiment=kuairand_hstu trainer.compile=true", "trainer.compile", "got true"),
    ("model=hstu", "model.history", "at least one"),
    ("model.embedding_dim=5 model.dense_layer_sizes=[5]", "model.embedding_dim", "got 5"),
    ("trainer.compile=true trainer.warmup_steps=0", "trainer.warmup_steps", "got 0"),
    ("model.dense_layer_sizes=[64,32]", "model.dense_layer_sizes", "64"),
    ("dataset_name=a/../../b", "dataset_name", "'a/../../b'"),
    ("trainer.batch_size=0", "trainer.batch_size", "got 0"),
    ("trainer.timeout_s=inf", "trainer.timeout_s", "inf"),
    ("placement=budget placement.hot_budget_mib=???", "placement.hot_budget_mib", "got none"),
    # What is no override.
    ("trainer.batch_size={a:", "command line", "{a:"),
    (f"trainer.batch_size={'9' * 5000}", "command line", "4300 digits"),
    ("=1", "command line", "Got int"),
    ("model=null", "command line", "group"),
    ("--batch_size=64", "--batch_size=64", "trainer.batch_size="),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "key", "part"), REFUSED)
def test_refused(
    words: str, key: str, part: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Overrides, some with spaces.
    assert run_command("prepare", re.split(r" (?=[+]?[a-z_0-9.]+=)", words)) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {key}")
    assert ": expected " in err
    assert part in err
    assert err.count("\n") == 1, "one message, on one line, without a trace"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def sections() -> set[type]:
    """Every dataclass of the configuration."""
    found: set[type] = set()
    pending = [*ROOTS.values(), *(kind for of in VARIANTS.values() for kind in of.values())]
    while pending:
        kind = pending.pop()
        if kind not in found:
            found.add(kind)
            made = [item.default_factory for item in dataclasses.fields(kind)]
            pending += [of for of in made if isinstance(of, type) and dataclasses.is_dataclass(of)]
    return found


def beyond(limits: dict[str, float]) -> Iterator[float]:
    """Just outside each limit, and what is no finite number."""
    for name, limit in limits.items():
        if name in ("gt", "lt"):
            yield limit
        elif name in ("ge", "le") and math.isfinite(limit):
            yield limit - 1 if name == "ge" else limit + 1
    if limits.get("le") != math.inf:
        yield from (math.inf, math.nan)
    yield 2**63


def test_every_limit_of_every_key_is_kept() -> None:
    num_limits = 0
    for kind in sections():
        for item in dataclasses.fields(kind):
            limits = {name: at for name, at in item.metadata["limits"].items() if name != "size"}
            # Of the keys before it, none is there to be found wrong first.
            alone: Any = dataclasses.make_dataclass("Alone", [(item.name, Any, item)], bases=())
            for value in beyond(limits) if limits else ():
                num_limits += 1
                with pytest.raises(ValueError, match=rf"^at\.{item.name}: expected .* got"):
                    validate(alone(value), "at")
                with pytest.raises(ValueError, match=rf"^at\.{item.name}\[0\]: expected .* got"):
                    validate(alone([value]), "at")
    assert num_limits > 200


def test_sweep_runs_the_other_jobs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["num_rows=[50]", "mean_lengths=[1]", "num_train=200", "num_valid=0", "num_test=0"]
    keys = [f"data.synthetic.{word}" for word in (*words, "signal=-1,1")]
    assert run_command("prepare", ["--multirun", "data=synthetic", *keys]) == 1
    out, err = capfd.readouterr()
    assert "error: data.synthetic.signal: expected" in err
    assert len(out.splitlines()) == 1, "the second job has run"
    assert (tmp_path / "data/synthetic/dataset/manifest.json").exists()


def test_trace_on_request(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_command("prepare", ["trainer.batch_size=0"]) == 1
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "\nerror: trainer.batch_size: expected" in err


READERS = [name for name, command in COMMANDS.items() if command.config_name == "config"]


@pytest.mark.parametrize("name", sorted({*READERS} - {"calibrate"}))
def test_no_dataset_is_taken_unasked(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/data").mkdir(parents=True)
    (tmp_path / "conf/data/mine.yaml").write_text("synthetic: {num_rows: [3]}\n")
    # As in a checkout, where the sample may have been prepared.
    (tmp_path / "data/kuairand/dataset").mkdir(parents=True)
    assert run_command(name, ["paths.dataset=data/kuairand/dataset"]) == 1
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: data: expected a dataset, got none.")
    assert "mine, criteo_kaggle, " in err


def test_a_dataset_without_a_choice_needs_a_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    own = "# @package _global_\ndata: {synthetic: {num_rows: [3], num_train: 9}}\n"
    (tmp_path / "conf/experiment/own.yaml").write_text(own)
    assert run_command("prepare", ["experiment=own"]) == 1
    assert "error: dataset_name: expected" in capfd.readouterr().err
    assert run_command("prepare", ["experiment=own", "dataset_name=x"]) == 0
    assert (tmp_path / "data/x/dataset/manifest.json").exists()


@pytest.mark.parametrize("words", [["plan"], ["train", "--multirun", "trainer.seed=1,2"]])
def test_what_needs_one_process(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run_command(words[0], words[1:]) == 1
    assert re.search(r"^\[rank 0\] error: .*: expected ", capfd.readouterr().err)
