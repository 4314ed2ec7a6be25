"""The text of ``hotrec <command> --help``; Hydra's ``--cfg job`` prints its keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of


def help_text(name: str, own: Sequence[Path] = ()) -> str:
    """The help of a command: its usage, and the choices of its groups.

    Args:
        name: The command.
        own: The user's directories of groups.
    """
    command = COMMANDS[name]
    groups = groups_of(command.config_name)
    words = f" [{command.word}]" if command.word else ""
    choices = (
        f"  {group}={default or ''}: {', '.join(options_of(group, own))}"
        for group, default in groups.items()
    )
    return "\n".join(
        [
            f"hotrec {name}: {command.summary}",
            f"Usage: hotrec {name}{words} [key=value ...] [flags]",
            "",
            *(["Groups, with their defaults and choices:", *choices, ""] if groups else []),
            "  --cfg job         print every key with its value under these overrides",
            "  --multirun, -m    run every combination of values separated by commas",
            "  --config-dir DIR  also search DIR for groups",
            "  --hydra-help      list all of Hydra's flags",
            "",
            "docs/configuration.md has every key with its type, default and meaning.",
        ]
    )
