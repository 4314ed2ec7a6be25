"""The program ``hotrec <command> [overrides]``.

Nothing heavy is imported here, so ``hotrec``, ``hotrec --help`` and ``hotrec --version`` answer at
once, and a misspelt command or key is refused before torch is loaded.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from hotrec.cli.commands import COMMANDS

FLAGS_OF_HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line after the program's name; by default ``sys.argv[1:]``.

    Returns:
        The exit code: 0, 1 if the command failed, 2 if there is no such command.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:  # of the list of commands; the others report the error themselves
        return 128 + signal.SIGPIPE
    finally:
        _end_output()


def _end_output() -> None:
    """Flush standard output; silent if its reader has exited, like ``head``."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in FLAGS_OF_HELP or words == ["help"]:
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"hotrec {_version()}")
        return 0
    if words[0] == "help":
        words = [words[1], "--help", *words[2:]]
    name, *overrides = words
    if name not in COMMANDS:
        print(f"error: {_unknown_command(name)}", file=sys.stderr)
        return 2
    from hotrec.cli.app import run_command

    return run_command(name, overrides)


def _version() -> str:
    try:
        return version("hotrec")
    except PackageNotFoundError:
        return "(not installed; run from a checkout)"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "hotrec: train recommendation models with hot rows replicated and cold rows sharded.",
            "",
            "usage: hotrec <command> [key=value ...]",
            "",
            *lines,
            "",
            "`hotrec <command> --help` lists a command's groups, keys and flags,",
            "`hotrec <command> --help <section>` one section of the keys, such as trainer.",
            "Start here: hotrec init <a CSV or Parquet file>, or hotrec run experiment=quickstart",
        ]
    )


def _unknown_command(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    advice = f"Did you mean `hotrec {close[0]}`?" if close else "Run `hotrec` for the list."
    return f"command: expected one of {', '.join(COMMANDS)}, got {name!r}. {advice}"
