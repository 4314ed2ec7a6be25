"""A command of the configuration: here, or on ranks that are started for it."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import IO, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from hotrec.artifact import MANIFEST, naming
from hotrec.cli.commands import COMMANDS
from hotrec.cli.launch import (
    BRIEF,
    RUN_DIR,
    check_num_ranks,
    environment_rank,
    is_under_torchrun,
    run_under_torchrun,
    this_host,
)
from hotrec.cli.output import LOG_FILE, CommandFailed, quiet_torch, start_logging
from hotrec.cli.store import options_of, user_conf_dir
from hotrec.config.roots import Config, EvaluateConfig, ExportConfig, PredictConfig
from hotrec.config.text import as_document, as_yaml
from hotrec.lock import lock_file
from hotrec.runtime.run_dir import (
    CHECKPOINTS,
    CONFIG_FILE,
    LOCK_FILE,
    find_trained,
    latest_step,
    read_finished,
)

Figures = dict[str, Any]


def run_stage(
    name: str,
    config: Any,
    run_dir: Path,
    words: Sequence[str],
    environment: Mapping[str, str],
    output: IO[str] | None = None,
) -> Figures | None:
    """Run a command in its directory.

    Args:
        name: The command.
        config: Its configuration.
        run_dir: Its directory.
        words: Its overrides and flags, for its ranks.
        environment: The environment of its ranks.
        output: Where ranks write the line of figures; None for standard output.

    Returns:
        Its figures; None if ranks have written them.

    Raises:
        CommandFailed: If ranks failed, after their error message.
    """
    check_data(name, config)
    if isinstance(config, EvaluateConfig | ExportConfig | PredictConfig):
        find_trained(config.run_dir)  # before anything is written
    text = as_yaml(as_document(config))
    if name == "train" and config.trainer.resume == "latest":
        finished = read_finished(run_dir, text)
        if finished is not None and latest_step(run_dir) is not None:
            print(f"{run_dir}: already finished; nothing was changed", file=sys.stderr)
            return {"command": name, "run_dir": run_dir, **finished}
    host, is_parallel = this_host(), COMMANDS[name].is_parallel
    if host.num_hosts > 1 and not is_parallel:
        raise ValueError(
            f"hydra.launcher.nodes: expected 1 for hotrec {name}, got {host.num_hosts}. Use one "
            "node for each job."
        )
    if is_parallel or name == "run":
        chosen = config.launch.num_ranks
        asked = any(word.lstrip("+").startswith("launch.num_ranks=") for word in words)
        check_num_ranks(chosen if asked or chosen > 1 else None)
        cores = len(os.sched_getaffinity(0))
        if chosen > cores and not is_under_torchrun() and BRIEF not in os.environ:
            text_of_cores = f"{chosen} ranks share {cores} cores, so they take turns"
            print(f"launch.num_ranks: {text_of_cores}", file=sys.stderr)
    num_ranks = config.launch.num_ranks if is_parallel else 1
    if num_ranks * host.num_hosts > 1 and not is_under_torchrun():
        exit_code = run_under_torchrun(
            *(name, words),
            num_ranks=num_ranks,
            host=host,
            run_dir=str(run_dir),
            environment=environment,
            stdout=output,
        )
        if exit_code != 0:
            raise CommandFailed(exit_code)
        return None
    is_first = environment_rank() == 0
    with naming(run_dir), lock_file(run_dir / LOCK_FILE, run_dir) if is_first else nullcontext():
        if is_first:
            _check_run_dir(name, run_dir)
        # The table of a what-if sweep has the result of each job.
        start_logging(run_dir, is_brief=name == "plan" and is_in_sweep())
        if is_first and name != "train":  # train records it once it is accepted
            (run_dir / CONFIG_FILE).write_text(text)
        command = importlib.import_module(f"hotrec.cli.{name}")
        quiet_torch()
        more = (words, environment) if name == "run" else ()
        # Standard output is only for the line of figures, even if libraries print to it.
        with redirect_stdout(sys.stderr):
            figures: Figures = command.run(config, run_dir, *more)
    return figures


def check_data(name: str, config: Any) -> None:
    """Check that a dataset was chosen, to prevent using one by accident.

    Raises:
        ValueError: If none was; ``calibrate`` has a stand-in for one.
    """
    if name != "calibrate" and isinstance(config, Config) and not config.data.is_chosen:
        own = [] if (conf := user_conf_dir()) is None else [conf]
        raise ValueError(
            "data: expected a dataset, got none. Choose experiment=quickstart, which trains on "
            f"the sample data=kuairand, or data= with one of {', '.join(options_of('data', own))}; "
            "`hotrec init LOG` describes your own log."
        )


def is_in_sweep() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _check_run_dir(name: str, run_dir: Path) -> None:
    """Refuse a directory of another program or command, in which files would be replaced."""
    foreign = [MANIFEST]
    if not (run_dir / LOG_FILE).exists():
        foreign.append(CONFIG_FILE)
    if name != "train":
        foreign.append(CHECKPOINTS)
    for found in (of for of in foreign if (run_dir / of).exists()):
        raise ValueError(
            f"{RUN_DIR}: expected an empty directory or that of an earlier hotrec {name}, got "
            f"{run_dir} with {found} of another program. Use another directory."
        )


def plain(value: Any) -> Any:
    """A value in JSON form: NaN and infinity are null, paths are text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
