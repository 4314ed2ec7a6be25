"""Output of a command: its log, and one line with advice for an error.

Standard output stays free for the line of figures. Errors that hotrec raises on purpose, refusals
of the operating system and configurations that do not compose explain themselves. Anything else is
a bug, in hotrec or in a library, and is printed with its trace.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
import select
import sys
import threading
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, get_type_hints

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hotrec.cli.launch import environment_rank, rank_prefix
from hotrec.cli.print_once import print_once
from hotrec.config.fields import VARIANTS
from hotrec.runtime.progress import Progress, is_line_of_progress

PACKAGE = Path(__file__).resolve().parents[1]
HYDRA = Path(hydra.__file__).resolve().parent
FULL_TRACE = "HYDRA_FULL_ERROR"
LOG_FILE = "log.txt"
_EXHAUSTED = re.compile(
    "Resource temporarily unavailable|can't (?:start new thread|allocate memory)|std::bad_alloc|"
    "[Cc]annot allocate memory|failed to map segment"
)
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
    """Print an error on stderr, once for the ranks of a host that raise the same.

    In one write, so that the lines of several ranks do not mix.
    """
    lines = []
    if wants_trace or not _explains_itself(error):
        lines += "".join(traceback.format_exception(error)).rstrip().splitlines()
    lines.append(f"error: {describe(error)}")

    def write() -> None:
        sys.stderr.write("".join(f"{rank_prefix()}{line}\n" for line in lines))
        sys.stderr.flush()

    print_once("\n".join(lines), write, origin=getattr(error, "of_rank", None))


def describe(error: BaseException) -> str:
    """One line, starting with the full configuration key if the error has one."""
    text = " ".join(_describe_kind(error).split())
    # Refusals of a single value are clear without advice.
    is_without_advice = re.search(r": expected .*, got (?!.*\. [A-Z])", text)
    return f"{text.removesuffix('.')}. Correct it and run again." if is_without_advice else text


def _describe_kind(error: BaseException) -> str:
    if isinstance(error, OmegaConfBaseException):
        return _describe_key_error(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _describe_missing_option(error)
    if isinstance(error, HydraException):
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OmegaConfBaseException):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            return _describe_key_error(cause)
        return _describe_command_line(error)
    if isinstance(error, OSError):
        return _describe_os_error(error)
    if _raised_in(error.__traceback__, HYDRA):
        return _describe_command_line(error)
    return (
        _message_of_worker(error)
        or _describe_lost_worker(error)
        or _describe_exhausted(error)
        or str(error)
        or type(error).__name__
    )


def _explains_itself(error: BaseException) -> bool:
    """Whether the message is enough without a trace."""
    if isinstance(error, HydraException | OmegaConfBaseException | OSError):
        return True
    describers = (_message_of_worker, _describe_lost_worker, _describe_exhausted)
    if any(describe(error) is not None for describe in describers):
        return True
    trace = error.__traceback__
    is_plain = isinstance(error, ValueError | RuntimeError)
    return is_plain and (_raised_in(trace, PACKAGE) or _raised_in(trace, HYDRA))


def _message_of_worker(error: BaseException) -> str | None:
    """The message of hotrec's error in a loader's worker process, extracted from torch's trace.

    None for other errors, and for those of libraries.
    """
    text = str(error)
    _, is_of_worker, trace = text.partition("Original Traceback")
    files = re.findall(r'^  File "(.+?)", line', trace, re.MULTILINE)
    if not is_of_worker or not files or PACKAGE not in Path(files[-1]).resolve().parents:
        return None
    rank = re.match(r"\[rank \d+\] ", text)
    _, _, message = trace.rstrip().rpartition("\n")[2].partition(": ")
    return f"{rank.group() if rank else ''}{message}"


def _describe_command_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).removesuffix(".")
    return (
        f"command line: expected overrides of the form key=value, got an error: {text}. See --help."
    )


def _describe_lost_worker(error: BaseException) -> str | None:
    found = re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (.*)", str(error))
    if found is None:
        return None
    end = found[2].split(".")[0].removesuffix(":")
    return (
        f"loader worker (process {found[1]}): expected to read until the end, got one that {end}. "
        "Check memory, /dev/shm and open files (ulimit -n), or set trainer.num_workers=0."
    )


def _describe_exhausted(error: BaseException) -> str | None:
    """A resource that the system refused to a library, in any wording."""
    text = str(error).split("\n")[0].removesuffix(".")
    if not isinstance(error, MemoryError) and not _EXHAUSTED.search(text):
        return None
    return (
        f"system: expected memory and threads for this process, got {text or 'no memory'}. Use a "
        "host with more memory, raise ulimit -v and ulimit -u, or choose a smaller model."
    )


def _describe_os_error(error: OSError) -> str:
    if error.errno is None or error.strerror is None or ": expected " in str(error.strerror):
        return str(error.strerror or error)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # A copy writes the second file.
    what = (is_full and error.filename2) or error.filename or "a file or connection"
    advice = "Free space on its file system" if is_full else "Check the path and its permissions"
    return f"{what}: expected access, got the system's error {error.strerror!r}. {advice}."


def _describe_key_error(error: OmegaConfBaseException) -> str:
    message = (error.msg or str(error)).split("\n")[0].strip()
    key = str(error.full_key or "").rstrip("_")  # of run.from_
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: expected a value, got none. Set {key}=..."
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _describe_unknown_key(key, error.object_type)
    return f"{key or 'configuration'}: expected another value, got {message!r}. {_see_help(key)}"


def _see_help(key: str) -> str:
    section = key.partition(".")[0]
    return f"See --help {section}." if section else "See --help."


def _describe_unknown_key(full_key: str, kind: Any) -> str:
    parent, _, name = full_key.rpartition(".")
    if not is_dataclass(kind):
        return (
            f"{full_key}: expected an existing key, got {name!r}. To add an entry to a mapping, "
            f"put a plus before it: +{full_key}=..."
        )
    return describe_unknown_field(parent, name, kind)


def describe_unknown_field(parent: str, name: str, kind: Any) -> str:
    """The message for a key that a dataclass of the configuration does not have."""
    known = [item.name for item in fields(kind)]
    prefix = f"{parent}." if parent else ""
    close = close_keys(name, kind)
    meant = " or ".join(f"{prefix}{key}" for key in close)
    advice = f"Did you mean {meant}?" if close else _see_help(parent)
    for group, variants in VARIANTS.items():
        if kind in variants.values():
            owners = [choice for choice, variant in variants.items() if _has_field(variant, name)]
            if owners:
                advice = f"It is a key of {', '.join(f'{group}={owner}' for owner in owners)}."
    return f"{prefix}{name}: expected one of {', '.join(known)}, got {name!r}. {advice}"


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


def _has_field(kind: type, name: str) -> bool:
    return any(item.name == name for item in fields(kind))


def _describe_missing_option(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return (
            f"{error.missing_cfg_file}: expected a file in the configuration, got none. See --help."
        )
    options = ", ".join(sorted(error.options))
    return f"{group}: expected one of {options}, got {choice!r}. Choose one of them."


def _raised_in(trace: TracebackType | None, package: Path) -> bool:
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return package in Path(trace.tb_frame.f_code.co_filename).resolve().parents


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
        handler.addFilter(_Repeats())
        root.addHandler(handler)
    _open_handlers.extend(handlers)
    root.setLevel(logging.WARNING)  # of other libraries
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

    Warnings of other libraries are omitted, because the planner gives one for every hot table. So
    are traces, because the exception is printed once, at the end of the command, and lines of
    progress if there is a bar.
    """
    if is_line_of_progress(record) and sys.stderr.isatty():
        return False
    return (_is_ours(record) or record.levelno >= logging.ERROR) and not record.exc_info


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name == "hotrec" or record.name.startswith("hotrec.")


class _Repeats:
    """Passes each message of another library once: TorchRec repeats some for every table."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a handler gets the record."""
        if _is_ours(record):
            return True
        message = (record.name, record.getMessage())
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def stop_logging() -> None:
    """Close the handlers of ``start_logging``; the next job of a sweep has another directory."""
    for handler in _open_handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _open_handlers.clear()
    logging.captureWarnings(False)


def log_trace(error: BaseException) -> None:
    """Write an error with its trace into the run's log file, if there is one."""
    trace = (type(error), error, error.__traceback__)
    message = "the command failed"
    record = logging.LogRecord("hotrec", logging.ERROR, __file__, 0, message, (), trace)
    for handler in _open_handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
