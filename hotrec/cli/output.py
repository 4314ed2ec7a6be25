"""Output of a command: its log, and one line with advice for an error.

Standard output stays free for the line of figures. Errors that hotrec raises on purpose, refusals
of the operating system and configurations that do not compose explain themselves. The trace of
anything else, a bug in hotrec or in a library, is in the run's log, or printed where there is none.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import select
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from hydra.errors import HydraException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hotrec.cli.launch import environment_rank, rank_prefix
from hotrec.config.fields import VARIANTS
from hotrec.runtime.progress import Progress, is_line_of_progress

OF_HYDRA = (HydraException, OmegaConfBaseException)
FULL_TRACE = "HYDRA_FULL_ERROR"
LOG_FILE = "log.txt"
_open_handlers: list[logging.Handler] = []


class CommandFailed(Exception):  # noqa: N818 (an exit code, not an error)
    """A command failed and its error has been printed; Hydra passes this through."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class EndedEarly(Exception):  # noqa: N818 (nothing is wrong)
    """A command ended in good order and has figures, but its exit code is not 0."""

    def __init__(self, figures: dict[str, Any], exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.figures = figures
        self.exit_code = exit_code


def is_reader_gone(error: BaseException) -> bool:
    """Whether an error means that stdout was closed, as after ``| head``."""
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def print_error(error: BaseException, *, wants_trace: bool) -> None:
    """Print an error on stderr, once for the ranks of a host that end with it.

    In one write, so that the lines of several ranks do not mix.
    """
    first = int(os.environ.get("RANK", 0)) - int(os.environ.get("LOCAL_RANK", 0))
    here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if getattr(error, "of_rank", None) in here:  # that rank prints it
        return
    lines = []
    is_logged = any(isinstance(handler, logging.FileHandler) for handler in _open_handlers)
    if wants_trace or not (_explains_itself(error) or is_logged):
        lines += "".join(traceback.format_exception(error)).rstrip().splitlines()
    lines.append(f"error: {describe(error)}")

    def write() -> None:
        sys.stderr.write("".join(f"{rank_prefix()}{line}\n" for line in lines))
        sys.stderr.flush()

    print_once("\n".join(lines), write)


def print_once(text: str, show: Callable[[], None]) -> None:
    """Call ``show``, unless another rank of this host has printed the same text."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # <attempt>/<rank>/error.json
        name = hashlib.sha256(text.encode()).hexdigest()
        try:
            (Path(error_file).parents[1] / name).touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:  # a full disk: better twice than never
            pass
    show()


def describe(error: BaseException) -> str:
    """One line, starting with the full configuration key if the error has one."""
    text = " ".join(_describe_kind(error).split())
    # Refusals of a single value are clear without advice.
    is_without_advice = re.search(r": expected .*, got (?!.*\. [A-Z])", text)
    return f"{text.removesuffix('.')}. Correct it and run again." if is_without_advice else text


def _describe_kind(error: BaseException) -> str:
    of_key: BaseException | None = error if isinstance(error, OF_HYDRA) else None
    while of_key is not None and not isinstance(of_key, OmegaConfBaseException):
        of_key = of_key.__cause__ or of_key.__context__
    message = _message_of_worker(error) or str(error)
    if of_key is not None:
        return _describe_key_error(of_key)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError):
        what = error.filename2 or error.filename or "a file"  # a copy writes the second file
        message = f"{what}: expected access and free space, got {error.strerror!r}. Check both."
        return error.strerror if ": expected " in error.strerror else message
    if ": expected " in message:
        return message
    if isinstance(error, OF_HYDRA):
        return f"command line: expected no error, got {message.removesuffix('.')}. See --help."
    first = message.strip().partition("\n")[0].removesuffix(".") or "one"
    where = "Its trace is above, or in log.txt of the run"
    return f"{type(error).__name__}: expected no error, got {first}. {where}."


def _explains_itself(error: BaseException) -> bool:
    """Whether the message is enough without a trace."""
    is_refusal = ": expected " in (_message_of_worker(error) or str(error))
    is_of_rank = hasattr(error, "of_rank")  # another rank prints its trace
    return is_refusal or is_of_rank or isinstance(error, (*OF_HYDRA, OSError))


def _message_of_worker(error: BaseException) -> str | None:
    """The message of hotrec's error in a loader's worker process, after torch's trace of it."""
    text = str(error)
    _, is_of_worker, trace = text.partition("Original Traceback")
    if not is_of_worker:
        return None
    rank = re.match(r"\[rank \d+\] ", text)
    last = trace.rstrip().rpartition("\n")[2].partition(": ")[2]
    return f"{rank.group() if rank else ''}{last}"


def _describe_key_error(error: OmegaConfBaseException) -> str:
    key = str(error.full_key or "").rstrip("_")  # of run.from_
    parent, _, name = key.rpartition(".")
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: expected a value, got none. Set {key}=..."
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and is_dataclass(error.object_type):
        return describe_unknown_field(parent, name, error.object_type)
    message = (error.msg or str(error)).strip().partition("\n")[0]
    is_new = isinstance(error, ConfigKeyError | ConfigAttributeError)
    advice = f"Add an entry of a mapping by +{key}=..." if is_new else "See --help."
    return f"{key or 'configuration'}: expected another value, got {message!r}. {advice}"


def describe_unknown_field(parent: str, name: str, kind: Any) -> str:
    """The message for a key that a dataclass of the configuration does not have."""
    prefix = f"{parent}." if parent else ""
    owners = [
        f"{group}={choice}"
        for group, variants in VARIANTS.items()
        if kind in variants.values()
        for choice, variant in variants.items()
        if name in {item.name for item in fields(variant)}
    ]
    known = owners or [f"{prefix}{key}" for key in close_keys(name, kind)]
    meant = " or ".join(known) or "an existing key"
    return f"{prefix}{name}: expected {meant}, got {name!r}. `--cfg job` prints every key."


def close_keys(name: str, kind: Any) -> list[str]:
    """The keys of a dataclass, and of its sections, that are most like a name; none if unlike."""
    found: dict[str, list[str]] = {}
    for item, hint in zip(fields(kind), get_type_hints(kind).values(), strict=True):
        found.setdefault(item.name, []).append(item.name)
        for section in VARIANTS.get(item.name, {}).values() or [hint]:
            for of_section in fields(section) if is_dataclass(section) else ():
                key = f"{item.name}.{of_section.name}"
                if key not in found.setdefault(of_section.name, []):
                    found[of_section.name].append(key)
    close = difflib.get_close_matches(name, found, n=1)
    return found[close[0]] if close else []


def start_logging(run_dir: Path, *, is_brief: bool = False) -> None:
    """Send log records to stderr and rank 0's also to ``run_dir``; replaces earlier handlers.

    Other ranks only show warnings: they would repeat rank 0. If a table follows, ``is_brief`` only
    keeps warnings and progress.
    """
    is_first = environment_rank() == 0
    form = f"%(asctime)s {rank_prefix()}%(levelname).1s %(name)s: %(message)s"
    formatter = logging.Formatter(form, datefmt="%H:%M:%S")
    console = _Console(sys.stderr)
    console.setLevel(logging.INFO if is_first else logging.WARNING)
    console.addFilter(_is_for_console)
    if is_brief:
        console.addFilter(lambda r: r.levelno > logging.INFO or is_line_of_progress(r))
    handlers: list[logging.Handler] = [console]
    if is_first:
        handlers.append(logging.FileHandler(run_dir / LOG_FILE))
    stop_logging()
    root = logging.getLogger()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    _open_handlers.extend(handlers)
    root.setLevel(logging.ERROR)  # of other libraries: the planner warns of every hot table
    logging.getLogger("hotrec").setLevel(logging.INFO)
    logging.captureWarnings(True)
    # A full disk is reported by other failed writes, not by a trace for each record.
    logging.raiseExceptions = False
    threading.excepthook = _log_thread_error


class _Console(logging.StreamHandler[Any]):
    """Standard error, with records above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with Progress.external_write_mode(file=self.stream):
            super().emit(record)


def _log_thread_error(args: threading.ExceptHookArgs) -> None:
    """Write an error of a library's thread into the log file; users of the thread fail too."""
    if args.exc_value is not None:
        log_trace(args.exc_value)


def quiet_torch() -> None:
    """Limit torch's own log handlers to errors; call this after torch is imported."""
    logging.getLogger("torch").setLevel(logging.ERROR)


def _is_for_console(record: logging.LogRecord) -> bool:
    """Whether the console shows a record; the file has all of them.

    Traces are omitted, because the exception is printed once, at the end of the command, and lines
    of progress if there is a bar.
    """
    return not (record.exc_info or (is_line_of_progress(record) and sys.stderr.isatty()))


def stop_logging() -> None:
    """Undo ``start_logging``: the next job has another directory, or the process is a user's."""
    for handler in _open_handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _open_handlers.clear()
    logging.captureWarnings(False)
    logging.getLogger().setLevel(logging.WARNING)
    logging.raiseExceptions, threading.excepthook = True, threading.__excepthook__


def log_trace(error: BaseException) -> None:
    """Write an error with its trace into the run's log file, if there is one."""
    trace = (type(error), error, error.__traceback__)
    message = "the command failed"
    record = logging.LogRecord("hotrec", logging.ERROR, __file__, 0, message, (), trace)
    for handler in _open_handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
