"""``hotrec <command> --help``: what it does, what can be chosen, each key with meaning and default.

Values are those that the given overrides compose to, so ``placement=budget --help`` shows that
policy's keys, and ``experiment=quickstart --help`` what the experiment sets.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from hotrec.cli.commands import COMMANDS, Command
from hotrec.cli.errors import FULL_TRACE, print_error
from hotrec.cli.store import compose_config, options_of
from hotrec.config import data as spec

WIDTH = 100
LONGEST_VALUE = 40
LIMIT_SIGNS = {"at_least": ">=", "above": ">", "at_most": "<=", "below": "<"}
GROUPS = (
    "experiment",
    "data",
    "model",
    "placement",
    "optimizer",
    "order",
    "pipeline",
    "trainer",
    "profiler",
)
HYDRA_FLAGS = (
    ("--cfg job", "print the composed configuration and stop"),
    ("--multirun", "run every combination of values given with commas, each in its directory"),
    ("--config-dir DIR", "look for groups in DIR too, for configurations of your own"),
)


@dataclass(frozen=True)
class Key:
    """A line of the help: a full key, its value, its meaning."""

    name: str
    value: str
    meaning: str


def print_help(name: str, overrides: Sequence[str]) -> int:
    """Print a command's help; the exit code."""
    command = COMMANDS[name]
    try:
        composed = compose_config(command.config_name, _composable(overrides))
    except Exception as error:
        print_error(error, wants_trace=os.environ.get(FULL_TRACE) == "1")
        return 1
    print(_render(name, command, composed))
    return 0


def _composable(words: Sequence[str]) -> list[str]:
    """The overrides among the words, with a further directory of groups as Hydra's own override."""
    kept: list[str] = []
    previous = ""
    for word in words:
        if previous in ("--config-dir", "-cd"):
            kept.append(f"hydra.searchpath=[file://{Path(word).resolve()}]")
        elif not word.startswith("-"):
            kept.append(word)
        previous = word
    return kept


def _render(name: str, command: Command, composed: DictConfig) -> str:
    parts = [
        f"hotrec {name}: {command.summary}",
        f"usage: hotrec {name} [key=value ...] [group=choice ...] [--multirun] [--cfg job]",
        textwrap.fill(command.description, WIDTH),
    ]
    if command.config_name == "config":
        lines = [("experiment=" if g == "experiment" else f"{g}=", g) for g in _groups(command)]
        rows = [(label, " ".join(options_of(group))) for label, group in lines]
        parts.append("Groups (group=choice):\n" + _columns(rows))
    keys = [key for section in command.sections for key in _section_keys(section, composed)]
    if keys:
        parts.append("Keys (key=value; what they are now; what they mean):\n" + _key_lines(keys))
    parts.append("Flags:\n" + _columns(HYDRA_FLAGS))
    examples = [f"  # {what}\n  {line}" for what, line in command.examples]
    parts.append("Examples:\n" + "\n".join(examples))
    return "\n\n".join(parts)


def _groups(command: Command) -> list[str]:
    always = ("experiment", "data")
    return [group for group in GROUPS if group in always or group in command.sections]


def _section_keys(section: str, composed: DictConfig) -> list[Key]:
    if not section:
        return [key for key in _node_keys(composed, "") if "." not in key.name]
    return list(_node_keys(composed[section], f"{section}."))


def _is_section(value: Any) -> bool:
    return isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value))


def _node_keys(node: DictConfig, prefix: str) -> Iterator[Key]:
    kind: Any = OmegaConf.get_type(node)
    documented = _documented_arguments(kind)
    for item in fields(kind):
        if item.name == "kind" and "choose it" in item.metadata.get("meaning", ""):
            continue  # said by the groups
        is_missing = OmegaConf.is_missing(node, item.name)
        value: Any = None if is_missing else node[item.name]
        if _is_section(value):
            yield from _node_keys(value, f"{prefix}{item.name}.")
            continue
        if value is None and is_dataclass(_section_type(item)):
            continue  # a source where the log is synthetic, or the other way round
        meaning = item.metadata.get("meaning") or documented.get(item.name, "")
        limits = item.metadata.get("limits", {})
        if limits:
            words = [f"{LIMIT_SIGNS[name]} {limit:g}" for name, limit in limits.items()]
            meaning = f"{meaning} [{', '.join(words)}]"
        yield Key(f"{prefix}{item.name}", "(required)" if is_missing else _show(value), meaning)


def _section_type(item: Field[Any]) -> Any:
    """The dataclass in an annotation such as ``"SourceSpec | None"``, which is text here."""
    name = str(item.type).partition(" ")[0]
    return getattr(spec, name, None)


def _show(value: Any) -> str:
    if isinstance(value, DictConfig | ListConfig):
        text = str(OmegaConf.to_container(value, enum_to_str=True)).replace("'", "")
        return text if len(text) <= LONGEST_VALUE else f"({len(value)} entries)"
    if isinstance(value, Enum):
        return value.name
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip() != value:
        return repr(value)  # a blank or a tab would not be seen
    return str(value) or "''"


def _documented_arguments(kind: Any) -> dict[str, str]:
    """Meanings from the ``Args`` of a docstring, for dataclasses that are not the cli's own."""
    _, _, arguments = (kind.__doc__ or "").partition("Args:\n")
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", arguments, flags=re.MULTILINE)
    return {name: " ".join(text.split()).replace("``", "").rstrip(".") for name, text in found}


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(label) for label, _ in rows)
    return "\n".join(_hang(f"  {label:<{width}}  ", text) for label, text in rows)


def _key_lines(keys: Sequence[Key]) -> str:
    width = min(max(len(f"{key.name}={key.value}") for key in keys), 44)
    lines = []
    for key in keys:
        start = f"{key.name}={key.value}"
        if len(start) > width:
            lines.append(f"  {start}")
            start = ""
        lines.append(_hang(f"  {start:<{width}}  ", key.meaning))
    return "\n".join(lines)


def _hang(start: str, text: str) -> str:
    """Text behind ``start``, its further lines indented to stand under the first."""
    indent = " " * len(start)
    filled = textwrap.fill(
        text, WIDTH, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
    )
    return filled or start.rstrip()
