"""Callbacks: what they are told, what ends the run, and the writers for other programs."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotrec.runtime.ranks import Ranks
from hotrec.train.callbacks import Callback, Callbacks, MlflowWriter, WandbWriter, import_callback
from hotrec.train.checkpoint import Checkpoints
from hotrec.train.schedule import Schedule
from tests.helpers.tiny import TinyLoader, TinySplit, build_tiny
from tests.helpers.training import Cadence, train_model

TOLD: list[tuple[Any, ...]] = []
LINE = {"step": 5, "loss": 0.5, "sent_bytes": {"all_reduce": 8}, "stage_s": None}
EVALUATED = {"step": 5, "split": "valid", "auc": 0.75}
SUMMARY = {"auc": 0.7, "finished": True, "name": "tiny"}


class Listener(Callback):
    """Tells what it was told."""

    def __init__(self, run_dir: Path | None, description: Any) -> None:
        super().__init__(run_dir, description)
        TOLD.append(("start", run_dir, description["name"]))

    def on_log(self, line: Any) -> None:
        TOLD.append(("log", line["step"]))

    def on_evaluate(self, line: Any) -> None:
        TOLD.append(("evaluate", line["step"], line["split"]))

    def on_checkpoint(self, step: int, path: Path) -> None:
        TOLD.append(("checkpoint", step, path.name))

    def on_end(self, summary: Any) -> None:
        TOLD.append(("end", summary["finished"]))


class Failing(Callback):
    def on_log(self, line: Any) -> None:
        raise KeyError("no such figure")


class Meddles(Callback):
    def on_log(self, line: Any) -> None:
        torch.manual_seed(line["step"])
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    TOLD.clear()


def run(ranks: Ranks, folder: Path, *callbacks: type) -> None:
    model, optimizer = build_tiny()
    train_model(
        model,
        optimizer,
        TinyLoader(num_batches=4),
        ranks,
        num_steps=4,
        cadence=Cadence(log_every=2, eval_every=2),
        lr_factor=Schedule(),
        pipeline_kind="base",
        eval_batches={"valid": TinySplit(1, seed=1)},
        checkpoints=Checkpoints(folder / "checkpoints", facts={}),
        run_dir=folder,
        description={"name": "tiny"},
        callbacks=[f"{kind.__module__}.{kind.__name__}" for kind in callbacks],
    )


def test_a_run_tells_its_callbacks(one_rank: Ranks, tmp_path: Path) -> None:
    run(one_rank, tmp_path, Listener)
    assert [
        ("start", tmp_path, "tiny"),
        ("log", 2),
        ("evaluate", 2, "valid"),
        ("log", 4),
        ("checkpoint", 4, "step-00000004"),
        ("evaluate", 4, "valid"),
        ("end", True),
    ] == TOLD


def test_what_a_callback_raises_names_it(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"trainer\.callbacks .*\bFailing\.on_log"):
        run(one_rank, tmp_path, Listener, Failing)
    assert ("log", 2) in TOLD
    assert ("end", True) not in TOLD


def test_random_numbers_of_a_callback_change_none_of_the_run(one_rank: Ranks) -> None:
    def state() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].sum()]  # noqa: NPY002

    callbacks = Callbacks([f"{__name__}.Meddles"], None, {"name": "tiny"})
    before = state()
    callbacks.call("on_log", LINE)
    assert state() == before


@pytest.mark.parametrize("path", ["no_such_package.Told", f"{__name__}.TOLD"])
def test_what_is_no_callback_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=rf"^trainer\.callbacks: .*{path}"):
        import_callback(path)


class FakePackage(SimpleNamespace):
    """Stands in for wandb and mlflow; remembers each call."""

    def __init__(self) -> None:
        super().__init__(calls=[], summary={})

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> FakePackage:
            self.calls.append((name, *arguments, named))
            return self

        return call


@pytest.mark.parametrize(("writer", "package"), [(WandbWriter, "wandb"), (MlflowWriter, "mlflow")])
def test_writers(
    writer: type[Callback], package: str, monkeypatch: pytest.MonkeyPatch, one_rank: Ranks
) -> None:
    path = f"{writer.__module__}.{writer.__name__}"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf"hotrec\[{package}\]"):
        Callbacks([path], None, {"name": "tiny"})
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, package, fake)
    callbacks = Callbacks([path], None, {"name": "tiny"})
    for hook, told in (("on_log", LINE), ("on_evaluate", EVALUATED), ("on_end", SUMMARY)):
        callbacks.call(hook, told)
    said = [arguments[0] for name, *arguments, _ in fake.calls if name in ("log", "log_metrics")]
    assert said[0] == {"train/loss": 0.5, "train/sent_bytes/all_reduce": 8.0}
    assert said[1] == {"eval/valid/auc": 0.75}
    assert fake.calls[-1][0] in ("finish", "end_run")
