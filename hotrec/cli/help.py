"""The text of ``hotrec <command> --help``: every key of the command, with meaning and default."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import conf_dir, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.reference import Key, keys_of, keys_of_choices
from hotrec.config.roots import ROOTS

_MOST_COLUMNS, _INDENT = 120, 8
_FLAGS = """Flags:
  --cfg job         print every key with the value that these overrides give it
  --multirun, -m    run every combination of values separated by commas
  --config-dir DIR  look for groups in DIR too
  --hydra-help      list all of Hydra's flags

docs/configuration.md has the same keys with their types and limits."""


def help_text(name: str) -> str:
    """The help of a command.

    Args:
        name: The command.
    """
    command = COMMANDS[name]
    root = ROOTS[command.config_name]
    hints = get_type_hints(root)
    words = [f"[{command.word}]"] if command.word else []
    groups = [path.name for path in sorted(conf_dir().iterdir()) if path.is_dir()]
    groups = [group for group in groups if group in hints or group == "experiment"]
    if command.config_name not in ("config", "bench"):
        groups = []
    words += ["[group=choice ...]"] if groups else []
    parts = [
        f"hotrec {name}: {command.summary}",
        f"Usage: hotrec {name} {' '.join(words)} [key=value ...] [flags]".replace("  ", " "),
    ]
    if groups:
        choices = (f"  {group}: {', '.join(options_of(group))}" for group in groups)
        parts.append("\n".join(["Groups:", *choices]))
    of_others = []
    loose = [key for key in keys_of(root, "") if "." not in key.name]
    if loose:
        parts.append("\n".join(["Keys:", *map(_shown, loose)]))
    for item in fields(root):
        if not is_dataclass(hints[item.name]):
            continue
        if command.sections and item.name not in command.sections:
            of_others.append(item.name)
            continue
        prefix, variants = f"{item.name}.", VARIANTS.get(item.name)
        keys = keys_of_choices(prefix, variants) if variants else keys_of(hints[item.name], prefix)
        lines = [f"{item.name}: {item.metadata['meaning']}", *map(_shown, keys)]
        if len(lines) > 1:
            parts.append("\n".join(lines))
    if of_others:
        text = f"Accepted too, for the commands beside this one: keys of {', '.join(of_others)}."
        parts.append(textwrap.fill(text, _width()))
    return "\n\n".join([*parts, _FLAGS])


def _shown(key: Key) -> str:
    """A key with its default, and its meaning in lines of its own."""
    default = key.default.replace("`", "")
    head = (
        f"  {key.name} ({default})"
        if default in ("required", "see meaning")
        else (f"  {key.name}={default}")
    )
    meaning = key.meaning.replace("`", "").replace("\\|", "|")
    margin = " " * _INDENT
    text = textwrap.fill(
        meaning,
        _width(),
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{head}\n{text}"


def _width() -> int:
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns)
