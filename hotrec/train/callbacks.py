"""Callbacks of a training run, by import path, and writers for Weights & Biases and MLflow.

A callback is a class that derives from ``Callback``. It runs on rank 0 only, so it must not start a
collective. ``trainer.callbacks`` names its import path.

An exception in it ends the run on every rank. Its changes to random generators are undone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.models.plain import import_class
from hotrec.runtime.random_state import random_state, set_random_state
from hotrec.runtime.ranks import rank, same_verdict
from hotrec.train.run_log import numbers_of

Figures = Mapping[str, Any]


class Callback:
    """Receives the events of a run; override the methods that you need.

    Args:
        run_dir: The run's directory; None if it has none.
        description: The first entries of summary.json: name, placement, model, batch_size, ...
    """

    def __init__(self, run_dir: Path | None, description: Figures) -> None:
        self.run_dir, self.description = run_dir, description

    def on_log(self, line: Figures) -> None:
        """A line of metrics.jsonl was written; ``line["step"]`` is its step."""

    def on_evaluate(self, line: Figures) -> None:
        """A split was evaluated; the line of eval.jsonl, with step and split."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, summary: Figures) -> None:
        """The run has finished or was stopped; gets the content of summary.json."""


def import_callback(path: str) -> type[Callback]:
    """The class of a callback.

    Raises:
        ValueError: If it cannot be imported, or is not a ``Callback``.
    """
    kept = random_state()
    try:
        found = import_class(path, "trainer.callbacks")
    finally:
        set_random_state(kept)
    if not issubclass(found, Callback):
        raise ValueError(
            "trainer.callbacks: expected a class that derives from "
            f"hotrec.train.callbacks.Callback, got {path}. Derive it."
        )
    return found


class Callbacks:
    """The callbacks of a run; all methods are collectives if there are any.

    Args:
        paths: Their import paths, the same on every rank.
        run_dir, description: See ``Callback``.

    Raises:
        ValueError: If one cannot be imported.
        RuntimeError: As ``call``.
    """

    def __init__(
        self, paths: Sequence[str], run_dir: Path | None = None, description: Figures | None = None
    ) -> None:
        self._paths = paths
        self._made: list[Callback] = []
        for path in paths:
            made = same_verdict(lambda: self._make(path, run_dir, description or {}))  # noqa: B023
            self._made += [] if made is None else [made]

    def _make(self, path: str, run_dir: Path | None, description: Figures) -> Callback | None:
        kind = import_callback(path)
        return _run(path, "__init__", kind, run_dir, description) if rank() == 0 else None

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a method of every callback, on rank 0.

        Raises:
            RuntimeError: On rank 0, if a callback raises; RankError on the others.
        """

        def run() -> None:
            for path, callback in zip(self._paths, self._made, strict=False):
                _run(path, hook, getattr(callback, hook), *arguments)

        if self._paths:
            same_verdict(run)


def _run(path: str, hook: str, method: Callable[..., Any], *arguments: Any) -> Any:
    kept = random_state()
    try:
        return method(*arguments)
    except Exception as error:
        text = (str(error) or "no message").splitlines()[0]
        raise RuntimeError(
            f"trainer.callbacks {path}.{hook}: expected it to return, got "
            f"{type(error).__name__}: {text}. Fix or remove it."
        ) from error
    finally:
        set_random_state(kept)


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"it needs the extra {package}: pip install 'hotrec[{package}]'"
        ) from error


class WandbWriter(Callback):
    """Weights & Biases: a run of the same name, in the project of WANDB_PROJECT."""

    def __init__(self, run_dir: Path | None, description: Figures) -> None:
        super().__init__(run_dir, description)
        wandb = _require("wandb")
        kept = {"dir": str(run_dir)} if run_dir is not None else {}
        self._run = wandb.init(name=description.get("name"), config=dict(description), **kept)

    def on_log(self, line: Figures) -> None:
        self._run.log(numbers_of(line, "train"), step=line["step"])

    def on_evaluate(self, line: Figures) -> None:
        self._run.log(numbers_of(line, f"eval/{line['split']}"), step=line["step"])

    def on_end(self, summary: Figures) -> None:
        self._run.summary.update(numbers_of(summary, "summary"))
        self._run.finish()


class MlflowWriter(Callback):
    """MLflow: a run of the same name, at MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run_dir: Path | None, description: Figures) -> None:
        super().__init__(run_dir, description)
        self._mlflow = _require("mlflow")
        self._mlflow.start_run(run_name=description.get("name"))
        self._mlflow.log_params(dict(description))

    def on_log(self, line: Figures) -> None:
        self._mlflow.log_metrics(numbers_of(line, "train"), step=line["step"])

    def on_evaluate(self, line: Figures) -> None:
        self._mlflow.log_metrics(numbers_of(line, f"eval/{line['split']}"), step=line["step"])

    def on_end(self, summary: Figures) -> None:
        self._mlflow.log_metrics(numbers_of(summary, "summary"))
        self._mlflow.end_run("FINISHED" if summary["finished"] else "KILLED")
