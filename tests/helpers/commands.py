"""Runs commands of hotrec from inside a test, without the seconds of imports of new processes.

``hotrec`` runs a command in this process. The ranks that it would start are processes of
``tests.helpers.ranks``, with the variables that torchrun sets for its ranks. There is no agent,
nobody restarts anything, and all share one seed of string hashes: tests of that start real programs
with ``subprocess``.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import IO, Any
from unittest import mock

from hotrec.cli import main
from hotrec.cli.app import run_command
from hotrec.cli.commands import COMMANDS
from hotrec.cli.launch import PARENT, use_default_start_method
from tests.helpers.quiet import compose_once
from tests.helpers.ranks import RanksError, run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
_LIMIT_S = 240.0
# What the starter of ranks sets.
_OF_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")


def environment(**variables: str) -> dict[str, str]:
    """The environment of a program that a test starts."""
    kept = {name: value for name, value in os.environ.items() if name != "HOTREC_RUN_DIR"}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **variables}


@dataclass(frozen=True)
class Outcome:
    """What a command left: exit code, standard output, standard error."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def figures(self) -> dict[str, Any]:
        """The only line of standard output."""
        assert self.exit_code == 0, self.stderr
        (line,) = self.stdout.splitlines()
        return json.loads(line)


def hotrec(*words: str, cwd: Path, **variables: str) -> Outcome:
    """``hotrec WORDS``, with other values of some variables."""
    out, err = StringIO(), StringIO()
    with (
        mock.patch("hotrec.cli.launch.wait_for_child", _run_child),
        chdir(cwd),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        exit_code = run_command(words[0], words[1:])
    return Outcome(exit_code, out.getvalue(), err.getvalue())


def program(*words: str, cwd: Path, **variables: str) -> Outcome:
    """``hotrec`` as a user starts it: what it starts imports torch each time."""
    done = subprocess.run(
        [sys.executable, "-m", "hotrec", *words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def _run_child(
    words: Sequence[str], variables: Mapping[str, str], stdout: IO[str] | None = None
) -> int:
    """As ``hotrec.cli.launch.wait_for_child``: torchrun with a command, or a command alone."""
    command = list(words[words.index("hotrec") + 1 :])
    num_ranks = ranks_of(command)
    if "--nproc-per-node" in words:
        num_ranks = int(words[words.index("--nproc-per-node") + 1])
    done = run_on_ranks(command, num_ranks, variables)
    (stdout or sys.stdout).write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.exit_code


def ranks_of(words: Sequence[str]) -> int:
    """How many ranks a command starts."""
    asked = [word for word in words if word.startswith("launch.num_ranks=")]
    return int(asked[-1].partition("=")[2]) if asked and COMMANDS[words[0]].is_parallel else 1


def run_on_ranks(
    words: Sequence[str],
    num_ranks: int = 1,
    variables: Mapping[str, str] | None = None,
    *,
    before: Callable[[], None] | None = None,
) -> Outcome:
    """A command, or a script with its arguments, on ranks that start as torchrun starts them.

    With one rank it is a process of its own without torchrun.

    Args:
        words: what follows ``hotrec``, or the path of a script and its arguments.
        variables: the environment; None for ``environment()``.
        before: is called on each rank first.

    Raises:
        RanksError: if they do not end in time.
    """
    import torch.distributed as dist

    variables = environment() if variables is None else dict(variables)
    if num_ranks > 1:
        # As of torchrun's agent, of which all ranks are clients: its port is known before.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        variables |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
        variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with tempfile.TemporaryDirectory(prefix="hotrec-agent-") as name:
        folder, exit_code = Path(name), 0
        call = {"words": words, "variables": variables, "folder": folder, "before": before}
        try:
            codes = run_ranks(_run_rank, num_ranks, _LIMIT_S, **call)
        except RanksError as error:
            codes = error.exit_codes
            if not any(codes):
                raise
        exit_code = next((code for code in codes if code), 0)
        out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
        return Outcome(exit_code, out, err)


def _run_rank(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    before: Callable[[], None] | None,
) -> int:
    import torch.distributed as dist

    dist.destroy_process_group()  # the program makes its own
    of_rank = {name: os.environ[name] for name in _OF_RANK if name in os.environ}
    os.environ.clear()
    os.environ.update({**variables, PARENT: str(os.getppid())})
    if of_rank["WORLD_SIZE"] != "1":
        error_file = folder / "agent" / "attempt" / of_rank["RANK"] / "error.json"
        error_file.parent.mkdir(parents=True)
        os.environ.update({**of_rank, "TORCHELASTIC_ERROR_FILE": str(error_file)})
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    tempfile.tempdir = None
    use_default_start_method()  # the starter's is that of its own children, too
    logging.getLogger().handlers.clear()  # of the server, which has imported torch
    compose_once()

    def run() -> None:
        if before is not None:
            before()
        if not words[0].endswith(".py"):
            sys.exit(main(words))
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")

    exit_code = exit_code_of(run)
    atexit._run_exitfuncs()  # which multiprocessing leaves out
    sys.stdout.flush()
    return exit_code


def exit_code_of(program: Callable[[], object]) -> int:
    """The exit code of an interpreter that runs this; it prints what one would."""
    try:
        program()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
