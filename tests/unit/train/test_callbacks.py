"""Callbacks: what they are told, what ends the run, and the writers for other programs."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hotrec.train.callbacks
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


class Unrelated:
    pass


class Exits(Callback):
    def on_log(self, line: Any) -> None:
        sys.exit(0)


class ExitsAtOnce(Callback):
    def on_evaluate(self, line: Any) -> None:
        os._exit(0)


class Interrupts(Callback):
    def on_checkpoint(self, step: int, path: Path) -> None:
        raise KeyboardInterrupt


class Stops(Callback):
    def __init__(self, run_dir: Path | None, description: Any) -> None:
        raise GeneratorExit


class Meddles(Callback):
    """Draws random numbers, takes signals, and changes the directory."""

    def on_log(self, line: Any) -> None:
        torch.manual_seed(line["step"])
        np.random.seed(1)  # noqa: NPY002
        random.seed(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: None)
        os.chdir("/")


class Forks(Callback):
    """Starts a process as multiprocessing does, which ends by os._exit."""

    def on_log(self, line: Any) -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        TOLD.append(("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


class Leaves(Callback):
    """Leaves a thread that ends when it is told to."""

    told_to_end = threading.Event()

    def on_log(self, line: Any) -> None:
        threading.Thread(target=self.told_to_end.wait, name="uploads").start()


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


def test_an_exception_in_a_callback_names_it(one_rank: Ranks, tmp_path: Path) -> None:
    name = f"{__name__}.Failing.on_log".replace(".", r"\.")
    with pytest.raises(RuntimeError, match=rf"^trainer\.callbacks {name}: .* got KeyError: "):
        run(one_rank, tmp_path, Listener, Failing)
    assert ("log", 2) in TOLD
    assert ("end", True) not in TOLD


@pytest.mark.parametrize(
    ("kind", "hook", "text"),
    [
        (Exits, "on_log", "SystemExit: 0"),
        (ExitsAtOnce, "on_evaluate", r"os\._exit\(0\)"),
        (Interrupts, "on_checkpoint", "KeyboardInterrupt: no message"),
        (Stops, "__init__", "GeneratorExit: no message"),
    ],
)
def test_a_callback_cannot_end_the_process(
    kind: type, hook: str, text: str, one_rank: Ranks, tmp_path: Path
) -> None:
    before = os._exit
    with pytest.raises(RuntimeError, match=rf"\.{kind.__name__}\.{hook}: .* got {text}"):
        run(one_rank, tmp_path, kind)
    assert os._exit is before


def test_a_signal_ends_the_process_in_a_callback_too(one_rank: Ranks, tmp_path: Path) -> None:
    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    end.__globals__["__name__"], name = "hotrec.cli.app", __name__
    try:
        before = signal.signal(signal.SIGHUP, end)
        callbacks = Callbacks([f"{name}.Raises"], None, {"name": "tiny"})
        with pytest.raises(SystemExit) as caught:
            callbacks.call("on_log", LINE)
        assert caught.value.code == 128 + signal.SIGHUP
    finally:
        end.__globals__["__name__"] = name
        signal.signal(signal.SIGHUP, before)


class Raises(Callback):
    def on_log(self, line: Any) -> None:
        signal.raise_signal(signal.SIGHUP)


def test_what_a_callback_changes_is_undone(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def state() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        draws = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].sum()]  # noqa: NPY002
        return [*handlers, *draws, Path.cwd()]

    callbacks = Callbacks([f"{__name__}.Meddles"], None, {"name": "tiny"})
    before = state()
    callbacks.call("on_log", LINE)
    assert state() == before


def test_processes_of_a_callback_end_as_they_like(one_rank: Ranks) -> None:
    Callbacks([f"{__name__}.Forks"], None, {"name": "tiny"}).call("on_log", LINE)
    assert TOLD == [("child", 7)]


def test_a_thread_that_is_left_is_named(
    one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotrec.train.callbacks, "THREADS_S", 0.1)
    registered: list[Any] = []
    monkeypatch.setattr(threading, "_register_atexit", registered.append)
    Leaves.told_to_end.clear()
    try:
        with pytest.raises(RuntimeError, match=r"Leaves: .* to finish with the run, got 'uploads'"):
            run(one_rank, tmp_path, Leaves)
        assert len(registered) == 1
    finally:
        Leaves.told_to_end.set()


def test_threads_that_end_are_waited_for(one_rank: Ranks, tmp_path: Path) -> None:
    Leaves.told_to_end.set()
    run(one_rank, tmp_path, Leaves)


@pytest.mark.parametrize("last_line", ["sys.exit(0)", "os._exit(0)", "raise KeyboardInterrupt"])
def test_an_import_that_ends_the_process_is_refused(
    last_line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending.py").write_text(f"import os\nimport sys\n\n{last_line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"got ending\.Told, whose import exits the process"):
        import_callback("ending.Told")


@pytest.mark.parametrize(
    "path", ["no_such_package.Told", f"{__name__}.TOLD", f"{__name__}.Unrelated"]
)
def test_what_is_no_callback_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.callbacks: expected "):
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


@pytest.mark.parametrize(
    ("writer", "package", "expected"),
    [
        (
            WandbWriter,
            "wandb",
            [
                ("log", {"train/loss": 0.5, "train/sent_bytes/all_reduce": 8.0}, {"step": 5}),
                ("log", {"eval/valid/auc": 0.75}, {"step": 5}),
                ("finish", {}),
            ],
        ),
        (
            MlflowWriter,
            "mlflow",
            [
                ("log_params", {"name": "tiny"}, {}),
                (
                    "log_metrics",
                    {"train/loss": 0.5, "train/sent_bytes/all_reduce": 8.0},
                    {"step": 5},
                ),
                ("log_metrics", {"eval/valid/auc": 0.75}, {"step": 5}),
                ("log_metrics", {"summary/auc": 0.7, "summary/finished": 1.0}, {}),
                ("end_run", "FINISHED", {}),
            ],
        ),
    ],
)
def test_writers(
    writer: type[Callback],
    package: str,
    expected: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    one_rank: Ranks,
) -> None:
    path = f"{writer.__module__}.{writer.__name__}"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RuntimeError, match=rf"{writer.__name__}.*hotrec\[{package}\]"):
        Callbacks([path], None, {"name": "tiny"})
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, package, fake)
    callbacks = Callbacks([path], None, {"name": "tiny"})
    for hook, told in (("on_log", LINE), ("on_evaluate", EVALUATED), ("on_end", SUMMARY)):
        callbacks.call(hook, told)
    assert fake.calls[0][0] in ("init", "start_run")
    assert fake.calls[1:] == expected
