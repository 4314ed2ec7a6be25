"""The commands of the command line as calls from Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any

from hotrec.cli.launch import PARENT
from hotrec.cli.store import quoted

# The last line of a failed command, from any rank.
_ERROR = re.compile(r"^(?:\[rank \d+\] )?error: (.*)$", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def command(
    name: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    workdir: str | Path = ".",
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a command of the command line, in a separate process that starts its ranks.

    ::

        hotrec.command("export", {"run_dir": run.directory, "output": "my_model"})

    Args:
        name: The command, such as ``"plan"``.
        settings: Values by key, as on the command line; a mapping holds keys below its own.
        workdir: The working directory of the command.
        quiet: Do not repeat its log on standard error.

    Returns:
        The figures that it prints as JSON.

    Raises:
        ValueError: If the command refuses an input; with its line.
        RuntimeError: If it ends in another way, such as by a signal.
    """
    words = [sys.executable, "-m", "hotrec", name, *override_words(settings)]
    variables = {**os.environ, PARENT: str(os.getpid())}
    said: list[str] = []

    def hear(lines: Iterable[str]) -> None:
        for line in lines:
            said.append(line)
            if not quiet:
                sys.stderr.write(line)

    with (
        TemporaryFile("w+") as figures,
        # In its own session: Ctrl-C reaches it once, from here.
        subprocess.Popen(
            words,
            cwd=workdir,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=figures,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
    ):
        assert child.stderr is not None
        try:
            hear(child.stderr)
        except BaseException:
            child.send_signal(signal.SIGINT)  # upon which training saves
            hear(child.stderr)
            child.wait()
            raise
        exit_code = child.wait()
        figures.seek(0)
        lines = figures.read().splitlines()
    if exit_code != 0:
        errors = _ERROR.findall("".join(said))
        if errors and ": expected " in errors[-1]:
            raise ValueError(errors[-1])
        last = errors[-1:] or [line.rstrip() for line in said[-1:]]
        raise RuntimeError(
            f"hotrec {name}: expected exit code 0, got {exit_code}: {''.join(last) or 'no reason'}"
        )
    return dict(json.loads(lines[-1]))


def override_words(settings: Mapping[str, Any], parent: str = "") -> Iterator[str]:
    """The settings as words of a command line."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from override_words(value, f"{parent}{key}.")
        else:
            yield f"{parent}{key}={_value(value)}"


def _value(value: Any) -> str:
    """A value as an override has it."""
    if isinstance(value, str | PurePath):
        text = str(value)
        return text if _PLAIN.fullmatch(text) else quoted(text)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
