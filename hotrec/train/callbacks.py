"""Callbacks of a training run, by import path, and writers for Weights & Biases and MLflow.

A callback is a class that derives from ``Callback``. It runs on rank 0 only, so it must not start a
collective. ``trainer.callbacks`` names its import path.

An exception in it ends the run on every rank, and so does an attempt to exit the process. Its
changes to random generators, signal handlers and the working directory are undone, and its
remaining threads do not block the process's exit.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hotrec.models.plain import import_class
from hotrec.runtime.random_state import random_state, set_random_state
from hotrec.runtime.ranks import rank, same_verdict
from hotrec.train.run_log import numbers_of

Figures = Mapping[str, Any]
# Time limit for threads of callbacks at the end, for example to send queued data.
THREADS_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    with _contained() as ends:
        try:
            found = import_class(path, "trainer.callbacks")
        except BaseException as error:
            if isinstance(error, Exception) or not ends(error):
                raise
            raise ValueError(
                f"trainer.callbacks: expected a class, got {path}, whose import exits the process "
                f"({_text_of(error)}). Fix its module, or remove it."
            ) from error
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
        self._threads: dict[threading.Thread, str] = {}  # with the path of the callback
        for path in paths:
            made = same_verdict(lambda: self._make(path, run_dir, description or {}))  # noqa: B023
            self._made += [] if made is None else [made]

    def _make(self, path: str, run_dir: Path | None, description: Figures) -> Callback | None:
        kind = import_callback(path)
        return self._run(path, "__init__", kind, run_dir, description) if rank() == 0 else None

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a method of every callback, on rank 0.

        Raises:
            RuntimeError: On rank 0, if a callback raises; RankError on the others.
        """

        def run() -> None:
            for path, callback in zip(self._paths, self._made, strict=False):
                self._run(path, hook, getattr(callback, hook), *arguments)
            if hook == "on_end" and (left := self._left_threads()):
                thread, path = left.popitem()
                raise RuntimeError(
                    f"trainer.callbacks {path}: expected all threads to finish with the run, got "
                    f"{thread.name!r} still running after {THREADS_S:g} s. Join it in on_end, or "
                    "make it a daemon."
                )

        if self._paths:
            same_verdict(run)

    def close(self) -> None:
        """Make sure that the process can exit, even after a failure."""
        if self._left_threads():
            # Before the interpreter waits for them, which may be forever.
            register: Any = threading._register_atexit  # type: ignore[attr-defined]
            register(_end_without_threads)

    def _left_threads(self) -> dict[threading.Thread, str]:
        until_s = time.monotonic() + THREADS_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return {thread: path for thread, path in self._threads.items() if thread.is_alive()}

    def _run(self, path: str, hook: str, method: Any, *arguments: Any) -> Any:
        before = set(threading.enumerate())
        with _contained() as ends:
            try:
                return method(*arguments)
            except BaseException as error:
                if not ends(error):
                    raise
                raise RuntimeError(
                    f"trainer.callbacks {path}.{hook}: expected it to return, got "
                    f"{_text_of(error)}. Fix or remove it."
                ) from error
            finally:
                new = (t for t in threading.enumerate() if t not in before and not t.daemon)
                self._threads.update(dict.fromkeys(new, path))


class _ProcessEnd(BaseException):
    """A callback called ``os._exit``."""


@contextmanager
def _contained() -> Iterator[Callable[[BaseException], bool]]:
    """Undo changes of user code to this process, and prevent it from exiting inside the block.

    Yields:
        Whether an exception is from that code; otherwise it is from a signal.
    """
    kept, folder = random_state(), os.getcwd()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    process, thread, end = os.getpid(), threading.current_thread(), os._exit

    def refuse(status: int) -> NoReturn:
        # Processes forked by the callback exit this way.
        if os.getpid() != process or threading.current_thread() is not thread:
            end(status)
        raise _ProcessEnd(f"os._exit({status})")

    os._exit = refuse
    try:
        yield _is_of_others
    finally:
        os._exit = end
        set_random_state(kept)
        os.chdir(folder)
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)


def _is_of_others(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return isinstance(error, _ProcessEnd | Exception) or module.partition(".")[0] != "hotrec"


def _text_of(error: BaseException) -> str:
    if isinstance(error, _ProcessEnd):
        return str(error)
    return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _end_without_threads() -> None:
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
