"""One command from its arguments to its exit code.

Hydra composes the configuration and runs sweeps; the rest is here: one directory per run, the log
on stderr, one line of JSON on stdout, one message for an error, and the start of ranks.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import json
import os
import re
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hotrec.artifact import naming
from hotrec.cli.closing import print_closing
from hotrec.cli.commands import COMMANDS
from hotrec.cli.help import help_text
from hotrec.cli.launch import (
    PARENT,
    RUN_DIR,
    TOLD,
    decide_run_dir,
    end_with_parent,
    end_workers,
    environment_rank,
    environment_world_size,
    is_under_torchrun,
    private_temporary_directory,
    rank_prefix,
    remove_if_empty,
    this_host,
    this_process,
    use_default_start_method,
)
from hotrec.cli.made import (
    command_text,
)
from hotrec.cli.output import (
    FULL_TRACE,
    CommandFailed,
    EndedEarly,
    close_keys,
    is_reader_gone,
    log_trace,
    print_error,
    stop_logging,
)
from hotrec.cli.stage import plain, run_stage
from hotrec.cli.store import (
    FLAGS_OF_CONFIG_DIR,
    VERSION_BASE,
    build_config,
    conf_dir,
    quoted,
    register_schemas,
    user_conf_dir,
)
from hotrec.cli.sweep import leave_exit_code, take_exit_codes
from hotrec.config.roots import ROOTS
from hotrec.doctor import check_versions
from hotrec.runtime.run_dir import (
    latest_step,
    read_finished,
)

FLAGS_WITH_VALUE = (
    *FLAGS_OF_CONFIG_DIR,
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"),
    *("--info", "-i", "--experimental-rerun"),
)
EXIT_CODE_OF_SIGTERM = 128 + signal.SIGTERM
EXIT_CODE_OF_SIGINT = 128 + signal.SIGINT
EXIT_CODE_OF_SIGPIPE = 128 + signal.SIGPIPE
# The signals that end this process, in the order of arrival.
_came: list[int] = []

Figures = dict[str, Any]


@dataclass(frozen=True)
class Invocation:
    """A command line and its environment.

    Args:
        name: The command.
        flags: Hydra's flags, with their values.
        overrides: The overrides.
        environment: The environment before anything was set in it for Hydra.
    """

    name: str
    flags: Sequence[str]
    overrides: Sequence[str]
    environment: Mapping[str, str]

    @property
    def args(self) -> Namespace:
        """The flags as Hydra reads them."""
        return get_args_parser().parse_known_args(self.flags)[0]

    @property
    def wants_trace(self) -> bool:
        return self.environment.get(FULL_TRACE) == "1"

    @property
    def is_question(self) -> bool:
        """Whether Hydra only prints the configuration and runs no job."""
        args = self.args
        return bool(args.cfg or args.info or args.hydra_help or args.shell_completion)

    @property
    def is_multirun(self) -> bool:
        return bool(self.args.multirun)


def run_command(name: str, words: Sequence[str]) -> int:
    """Run one command; the exit code."""
    invocation = Invocation(name, [], words, dict(os.environ))
    try:
        flags, overrides = _complete(name, words)
        invocation = replace(invocation, flags=flags, overrides=overrides)
        if invocation.args.help:
            folder = invocation.args.config_dir
            print(help_text(name, [Path(folder)] if folder else []))
            return 0
        if name != "doctor":
            check_versions()
        if name != "doctor" and not invocation.is_question:
            _check_processes(invocation)
        with _prepared_process(invocation):
            return _run_and_say_what_ended_it(invocation)
    except KeyboardInterrupt:
        return EXIT_CODE_OF_SIGINT
    except Exception as error:
        if is_reader_gone(error):
            return EXIT_CODE_OF_SIGPIPE
        print_error(error, wants_trace=invocation.wants_trace)
        return 1


def _complete(name: str, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags with the user's own ``conf``, and overrides with the key that the first words set."""
    flags: list[str] = []
    overrides: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        is_flag = word.startswith("-") or previous in FLAGS_WITH_VALUE
        (flags if is_flag else overrides).append(word)
    args, unknown = get_args_parser().parse_known_args(flags)
    for flag in unknown:
        key = flag.lstrip("-").partition("=")[0].replace("-", "_")
        known = close_keys(key, ROOTS[COMMANDS[name].config_name])
        meant = " or ".join(f"{found}=..." for found in known) or "a flag of --help"
        raise ValueError(f"{flag}: expected {meant}, got an unknown flag. Keys have no dashes.")
    first = COMMANDS[name].first
    paths = list(itertools.takewhile(lambda word: _is_path(name, word), overrides)) if first else []
    if len(paths) > 1 and "[" not in first:
        raise ValueError(
            f"hotrec {name}: expected one path, got {len(paths)}: {', '.join(paths[:3])}. Use a "
            "directory, or quote the pattern."
        )
    if paths:
        overrides[: len(paths)] = [first.format(",".join(map(quoted, paths)))]
    if args.config_dir is None and (own := user_conf_dir()) is not None:
        flags += ["--config-dir", str(own)]
    # "from" cannot be the name of a field.
    overrides = [re.sub(r"^run\.from=", "run.from_=", word) for word in overrides]
    return flags, overrides


def _is_path(name: str, word: str) -> bool:
    """Whether a word is a path, not an override; parts of a path may look like ``key=value``."""
    key, is_pair, _ = word.partition("=")
    if not is_pair or os.path.exists(word) or any(glob.iglob(word)):
        return True
    key = key.lstrip("+~")
    root = key.partition(".")[0]
    known = [item.name for item in fields(ROOTS[COMMANDS[name].config_name])]
    is_key = root in known or root.partition("/")[0] == "hydra"
    return not is_key and not difflib.get_close_matches(root, known, n=1)


def _check_processes(invocation: Invocation) -> None:
    world_size = environment_world_size()
    if world_size > 1 and not COMMANDS[invocation.name].is_parallel:
        raise ValueError(
            f"hotrec {invocation.name}: expected one process, got {world_size} ranks. "
            "Start it without torchrun, or unset RANK and WORLD_SIZE."
        )
    if invocation.is_multirun and is_under_torchrun():
        raise ValueError(
            "--multirun: expected no torchrun, got RANK in the environment. Start the sweep "
            "without torchrun and set launch.num_ranks for the ranks of each job."
        )


@contextmanager
def _prepared_process(invocation: Invocation) -> Iterator[None]:
    """Set what Hydra reads from the process, and turn signals into an exit."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    saved_words, handlers = sys.argv, {number: signal.getsignal(number) for number in numbers}
    try:
        name, is_multirun = invocation.name, invocation.is_multirun
        is_made = not invocation.is_question
        decide_run_dir(name, invocation.overrides, is_multirun=is_multirun, is_made=is_made)
        # With this variable Hydra raises errors instead of printing them in its own way.
        os.environ[FULL_TRACE] = "1"
        sys.argv = [f"hotrec {name}", *invocation.flags]
        if is_multirun:  # the name for the callback of a sweep and a cluster's list of jobs
            sys.argv += [f"hydra.callbacks.sweep.command={name}", f"hydra.job.name=hotrec-{name}"]
        sys.argv += invocation.overrides
        if PARENT in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        # An exit unwinds, so that half-written artifacts are removed.
        _came.clear()
        signal.signal(signal.SIGTERM, _end_by)
        if handlers[signal.SIGHUP] != signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, _hang_up)
        if handlers[signal.SIGINT] is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end_by)
        with nullcontext() if is_under_torchrun() else private_temporary_directory():
            try:
                yield
            finally:
                end_workers()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.argv = saved_words
        _forget(Path(os.environ.get(RUN_DIR, "")), invocation)
        for key in (RUN_DIR, FULL_TRACE):
            os.environ.pop(key, None)
            if key in invocation.environment:
                os.environ[key] = invocation.environment[key]


def _end_by(number: int, _frame: FrameType | None) -> None:
    _came.append(number)
    raise _ending(number)


def _ending(number: int) -> BaseException:
    """The exception that unwinds the program after a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _hang_up(number: int, _frame: FrameType | None) -> None:
    """The terminal closed: end as for SIGTERM, with its current handler."""
    signal.raise_signal(signal.SIGTERM)


def _run_and_say_what_ended_it(invocation: Invocation) -> int:
    """Run Hydra; print one line if a signal ends it, in the outermost process."""
    run_dir = os.environ[RUN_DIR]
    try:
        return _run_hydra(invocation)
    except (KeyboardInterrupt, SystemExit) as ended:
        code = ended.code if isinstance(ended, SystemExit) else EXIT_CODE_OF_SIGINT
        is_by_signal = isinstance(code, int) and code - 128 in set(signal.Signals)
        if is_by_signal and environment_rank() == 0 and TOLD not in invocation.environment:
            # A second Ctrl-C must not print a trace.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            name = signal.Signals(int(code or 0) - 128).name
            said = f"{rank_prefix()}hotrec {invocation.name}: ended by {name}"
            with suppress(OSError):
                print(f"{said}{_how_to_go_on(invocation, run_dir)}.", file=sys.stderr, flush=True)
        raise


def _how_to_go_on(invocation: Invocation, run_dir: str) -> str:
    """Details of the line printed after a signal."""
    if invocation.name == "run" and not invocation.is_multirun:
        return "; run the same command again to continue"
    if invocation.name != "train" or invocation.is_multirun:
        return ""
    step = latest_step(Path(run_dir))
    if step is None:
        return "; no step was saved"
    again = f"{RUN_DIR}={shlex.quote(run_dir)}"
    if is_under_torchrun():
        return f"; saved step {step}; run the same command again with {again}"
    words = command_text("train", [*invocation.flags, *invocation.overrides])
    return f"; saved step {step}; continue with `{again} {words}`"


def _run_hydra(invocation: Invocation) -> int:
    """Run the job, or all jobs of a sweep; the exit code of the last that failed, else 0."""
    register_schemas()
    exit_codes: list[int] = []
    # A launcher such as joblib's or submitit's runs jobs elsewhere, with copies of these.
    sweep_process = this_process()

    def job(composed: DictConfig) -> float | None:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        if this_process() == sweep_process:
            exit_codes.append(_run_job(invocation, composed, run_dir))
            return _objective(invocation, run_dir, exit_codes[-1])
        exit_code = _run_job_elsewhere(invocation, composed, run_dir)
        return _objective(invocation, run_dir, exit_code)

    try:
        hydra.main(
            version_base=VERSION_BASE,
            config_path=str(conf_dir()),
            config_name=COMMANDS[invocation.name].config_name,
        )(job)()
    except (ValueError, yaml.YAMLError) as error:
        if ": expected " in str(error):
            raise
        raise ValueError(
            f"command line: expected overrides and files that compose, got {type(error).__name__}: "
            f"{error}. Correct them."
        ) from error
    exit_codes += take_exit_codes()
    return next((code for code in reversed(exit_codes) if code != 0), 0)


def _run_job_elsewhere(invocation: Invocation, composed: DictConfig, run_dir: Path) -> int:
    """Run a job in a process of a launcher, perhaps on another host, and record its exit code."""
    use_default_start_method()
    # A cluster sets variables of a job here, not in the environment of the sweep.
    given = {k: v for k, v in os.environ.items() if k not in (RUN_DIR, FULL_TRACE)}
    trace = {k: v for k, v in invocation.environment.items() if k == FULL_TRACE}
    try:
        exit_code = _run_job(replace(invocation, environment=given | trace), composed, run_dir)
    except SystemExit as ended:  # by a signal, which only concerns this job
        exit_code = int(ended.code or 0)
    if this_host().number == 0:
        leave_exit_code(run_dir, exit_code)
    return exit_code


def _objective(invocation: Invocation, run_dir: Path, exit_code: int) -> float | None:
    """The objective of a sweeper such as Optuna's: a training run's AUC on the validation split."""
    if not invocation.is_multirun or invocation.name != "train" or exit_code != 0:
        return None
    from hotrec.report.sweep import choosing_quality

    finished = read_finished(run_dir)
    return None if finished is None else choosing_quality(finished)[1].get("auc")


def _run_job(invocation: Invocation, composed: DictConfig, run_dir: Path) -> int:
    """Run one job of a sweep, or the only one; a job that fails does not stop the others."""
    try:
        figures = _record_for_torchrun(
            lambda: run_stage(
                invocation.name,
                build_config(composed),
                run_dir,
                _own_words(invocation),
                invocation.environment,
            )
        )()
        if figures is not None:
            with naming(Path("standard output")):
                _print_figures(invocation, figures)
    except EndedEarly as ended:
        _print_figures(invocation, ended.figures)
        if ended.exit_code in (EXIT_CODE_OF_SIGTERM, EXIT_CODE_OF_SIGINT):
            raise SystemExit(ended.exit_code) from ended  # stops the other jobs too
        return ended.exit_code
    except CommandFailed as failure:
        return failure.exit_code
    except Exception as error:
        if _came:  # torch may turn the exit into its own error
            raise _ending(_came[0]) from error
        if is_reader_gone(error):
            return EXIT_CODE_OF_SIGPIPE
        log_trace(error)
        print_error(error, wants_trace=invocation.wants_trace)
        _forget(run_dir, invocation)
        return 1
    finally:
        stop_logging()
    return 0


def _forget(run_dir: Path, invocation: Invocation) -> None:
    """Remove a directory that was made for this command, if nothing was written into it."""
    if environment_rank() == 0 and not invocation.environment.get(RUN_DIR):
        remove_if_empty(run_dir)


def _record_for_torchrun(action: Callable[[], Figures | None]) -> Callable[[], Figures | None]:
    """Record an error of the action for torchrun's summary."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return action
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(action)


def _print_figures(invocation: Invocation, figures: Figures) -> None:
    """Print the end of a command: JSON unless stdout is a terminal, and a summary."""
    if environment_rank() != 0:
        return
    if not sys.stdout.isatty():  # before the lines, which are the last that a reader sees
        print(json.dumps(plain(figures), allow_nan=False), flush=True)
    if invocation.name != "run":  # run's lines have figures of all its stages
        print_closing(invocation.name, figures, _own_words(invocation))


def _own_words(invocation: Invocation) -> list[str]:
    """The words of a command as typed, without Hydra's own except for its directory."""
    folder = invocation.args.config_dir
    return [*(["--config-dir", folder] if folder else []), *HydraConfig.get().overrides.task]
