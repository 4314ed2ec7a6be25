"""The text of ``hotrec <command> --help``: every key with type, meaning and default, or a part."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import groups_of, options_of, settings_of, summary_of
from hotrec.config.fields import VARIANTS
from hotrec.config.reference import Key, keys_of, keys_of_choices
from hotrec.config.roots import ROOTS

_MAX_COLUMNS, _INDENT = 100, 8
_FLAGS = """Flags:
  --cfg job         print every key with its value under these overrides
  --multirun, -m    run every combination of values separated by commas
  --config-dir DIR  also search DIR for groups
  --hydra-help      list all of Hydra's flags"""


@dataclass(frozen=True)
class _Section:
    """A section of a root configuration; its name is empty for the keys outside of all."""

    name: str
    meaning: str
    keys: Sequence[Key]


def help_text(name: str, topics: Sequence[str] = (), own: Sequence[Path] = ()) -> str:
    """The help of a command.

    Args:
        name: The command.
        topics: Sections, groups and keys to show; without any, all that the command reads.
        own: The user's directories of groups.

    Raises:
        ValueError: If the command has no such section, group or key.
    """
    command = COMMANDS[name]
    sections, groups = _sections(command.config_name), groups_of(command.config_name)
    if topics:
        return "\n\n".join(
            _topic(name, topic.rstrip("."), sections, groups, own) for topic in topics
        )
    is_read = {
        section.name: not (command.sections and section.name) or section.name in command.sections
        for section in sections
    }
    words = [f"[{command.word}]"] if command.word else []
    words += ["[group=choice ...]"] if groups else []
    words += ["[key=value ...]"] if sections else []
    parts = [
        _filled(f"hotrec {name}: {command.summary}", 0, 2),
        _filled(" ".join([f"Usage: hotrec {name}", *words, "[flags]"]), 0, 2),
    ]
    if groups:
        choices = (
            _filled(f"{_with_default(group, groups)}: {', '.join(options_of(group, own))}", 2, 4)
            for group in groups
        )
        parts.append("\n".join(["Groups, with their default choices:", *choices]))
    parts += [_shown_section(section) for section in sections if is_read[section.name]]
    of_others = [section.name for section in sections if not is_read[section.name]]
    if of_others:
        text = f"Also accepted, for use by other commands: keys of {', '.join(of_others)}."
        parts.append(_filled(text, 0, 0))
    parts.append(_FLAGS)
    shown = [*groups, *(section.name for section in sections if section.name)]
    if shown:
        example = next((topic for topic in ("trainer", "placement") if topic in shown), shown[-1])
        parts.append(f"`hotrec {name} --help {example}` shows only one section, group or key.")
    return "\n\n".join(parts)


def _sections(root: str) -> list[_Section]:
    """The sections of a root configuration that have keys."""
    kind = ROOTS[root]
    hints = get_type_hints(kind)
    found = [_Section("", "Keys:", [key for key in keys_of(kind, "") if "." not in key.name])]
    for item in fields(kind):
        if not is_dataclass(hints[item.name]):
            continue
        prefix, variants = f"{item.name}.", VARIANTS.get(item.name)
        keys = (
            keys_of_choices(prefix, variants, settings_of(root, item.name))
            if variants
            else list(keys_of(hints[item.name], prefix))
        )
        found.append(_Section(item.name, f"{item.name}: {item.metadata['meaning']}", keys))
    return [section for section in found if section.keys]


def _topic(
    command: str,
    topic: str,
    sections: Sequence[_Section],
    groups: dict[str, str | None],
    own: Sequence[Path],
) -> str:
    """A section, a group, or the keys that start with a text."""
    parts = []
    if topic in groups:
        options = options_of(topic, own).items()
        choices = (_filled(f"{choice}: {summary_of(file)}", 2, 8) for choice, file in options)
        parts.append("\n".join([f"Choices of {_with_default(topic, groups)}:", *choices]))
    for section in sections:
        if section.name == topic:
            parts.append(_shown_section(section))
        elif keys := [key for key in section.keys if f"{key.name}.".startswith(f"{topic}.")]:
            parts.append("\n".join(map(_shown, keys)))
    if parts:
        return "\n\n".join(parts)
    names = [key.name for section in sections for key in section.keys]
    inner = [name[:end] for name in names for end, sign in enumerate(name) if sign == "."]
    known = sorted({*groups, *names, *inner})
    close = difflib.get_close_matches(topic, known, n=3)
    top = ", ".join(name for name in known if "." not in name)
    advice = f"Did you mean {' or '.join(close)}?" if close else f"Name one of {top}."
    raise ValueError(
        f"hotrec {command} --help: expected a section, a group or a key, got {topic!r}. "
        + (advice if known else "It has none.")
    )


def _with_default(group: str, groups: dict[str, str | None]) -> str:
    """A group as the override that chooses its default."""
    return f"{group}={groups[group]}" if groups[group] else f"{group}= (no default)"


def _shown_section(section: _Section) -> str:
    return "\n".join([_filled(section.meaning, 0, 2), *map(_shown, section.keys)])


def _shown(key: Key) -> str:
    """A key with its default and type, and its meaning on separate lines."""
    default, values = key.default.replace("`", ""), key.values.replace("`", "")
    without = {"required": " (required)", "see meaning": ""}
    head = f"{key.name}{without.get(default, f'={default}')}  [{values}]"
    meaning = key.meaning.replace("`", "").replace("\\|", "|")
    return f"{_filled(head, 2, _INDENT)}\n{_filled(meaning, _INDENT, _INDENT)}"


def _filled(text: str, first: int, rest: int) -> str:
    return textwrap.fill(
        text,
        min(_MAX_COLUMNS, shutil.get_terminal_size().columns),
        initial_indent=" " * first,
        subsequent_indent=" " * rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
