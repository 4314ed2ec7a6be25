"""The commands of the command line as calls from Python."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr
from pathlib import Path, PurePath
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any

from hotrec.cli.commands import COMMANDS
from hotrec.cli.launch import (
    RUN_DIR,
    decide_run_dir,
    end_workers,
    private_temporary_directory,
    remove_if_empty,
)
from hotrec.cli.output import OF_HYDRA, CommandFailed, EndedEarly, describe, stop_logging
from hotrec.cli.stage import plain, run_stage
from hotrec.cli.store import build_config, compose_config, quoted, user_conf_dir

_PLAIN = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def command(
    name: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    workdir: str | Path = ".",
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a command of the command line in this process, and its ranks in processes of their own.

    ::

        hotrec.command("export", {"run_dir": run.directory, "output": "my_model"})

    Args:
        name: The command, such as ``"plan"``.
        settings: Values by key, as on the command line; a mapping holds keys below its own.
        workdir: The working directory, in which this process is meanwhile.
        quiet: Do not log on standard error.

    Returns:
        The figures that it prints as JSON.

    Raises:
        ValueError: If the command refuses an input; with its line.
        RuntimeError: If its ranks fail, after their error message.
        KeyboardInterrupt: If a signal ends it; a training run has been saved.
    """
    words, home = list(override_words(settings)), Path(workdir).absolute()
    with chdir(workdir), _silence(quiet), private_temporary_directory():
        if (own := user_conf_dir()) is not None:
            words.insert(0, f"hydra.searchpath=[{quoted(f'file://{own.absolute()}')}]")
        given, run_dir = os.environ.get(RUN_DIR), None
        try:
            config = build_config(compose_config(COMMANDS[name].config_name, words))
            run_dir = home / decide_run_dir(name, words, is_multirun=False)
            run_dir.mkdir(parents=True, exist_ok=True)
            with TemporaryFile("w+") as output:
                figures = run_stage(name, config, run_dir, words, os.environ, output)
                if figures is None:
                    output.seek(0)
                    figures = json.loads(output.read().splitlines()[-1])
            return dict(plain(figures))
        except OF_HYDRA as error:
            raise ValueError(describe(error)) from error
        except CommandFailed as failed:
            what = f"exit code 0, got {failed.exit_code}. Its error is above"
            raise RuntimeError(f"hotrec {name}: expected {what}.") from failed
        except (EndedEarly, SystemExit) as ended:
            raise KeyboardInterrupt from ended
        finally:
            stop_logging()
            end_workers()
            if run_dir is not None and given is None:
                del os.environ[RUN_DIR]
                remove_if_empty(run_dir)


@contextmanager
def _silence(quiet: bool) -> Iterator[None]:
    """Keep this process and those that it starts from writing on standard error."""
    if not quiet:
        yield
        return
    descriptor = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(descriptor, 2)
        os.close(descriptor)


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
