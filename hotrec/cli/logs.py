"""Logging: to stderr, and by rank 0 into the run directory. Standard output stays free."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from hotrec.cli.environment import environment_rank, rank_prefix

LOG_FILE = "log.txt"
_open_handlers: list[logging.Handler] = []


def start_logging(run_dir: Path) -> None:
    """Send log records to stderr and rank 0's also to ``run_dir``; replaces earlier handlers.

    Other ranks show warnings only: they would repeat rank 0.
    """
    is_first = environment_rank() == 0
    form = f"%(asctime)s {rank_prefix()}%(levelname).1s %(name)s: %(message)s"
    formatter = logging.Formatter(form, datefmt="%H:%M:%S")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.INFO if is_first else logging.WARNING)
    console.addFilter(_is_for_people)
    handlers: list[logging.Handler] = [console]
    if is_first:
        handlers.append(logging.FileHandler(run_dir / LOG_FILE))
    stop_logging()
    root = logging.getLogger()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    _open_handlers.extend(handlers)
    root.setLevel(logging.WARNING)  # other libraries: warnings; ours: all that informs
    logging.getLogger("hotrec").setLevel(logging.INFO)
    logging.captureWarnings(True)


def quiet_torch() -> None:
    """Keep torch's own log handlers to errors; to be called once torch is imported."""
    logging.getLogger("torch").setLevel(logging.ERROR)


def _is_for_people(record: logging.LogRecord) -> bool:
    """What the console shows; the file has all.

    Not the warnings of other libraries: the planner alone gives one for every hot table. Not an
    exception's trace: the exception comes out of the command and is printed once, at the end.
    """
    is_ours = record.name == "hotrec" or record.name.startswith("hotrec.")
    return (is_ours or record.levelno >= logging.ERROR) and not record.exc_info


def stop_logging() -> None:
    """Close what ``start_logging`` opened; the next job of a sweep has a directory of its own."""
    for handler in _open_handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _open_handlers.clear()
    logging.captureWarnings(False)


def log_trace(error: BaseException) -> None:
    """Write an error with its trace into the run's log file, where there is one."""
    trace = (type(error), error, error.__traceback__)
    message = "the command failed"
    record = logging.LogRecord("hotrec", logging.ERROR, __file__, 0, message, (), trace)
    for handler in _open_handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(record)
