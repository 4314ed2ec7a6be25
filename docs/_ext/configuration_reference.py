"""Fills configuration.md with tables of every key, made from the dataclasses and from ``conf/``.

The page holds one mark for each part; this extension replaces it when Sphinx reads the page, so the
reference cannot differ from the program.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, get_type_hints

from configuration_keys import (
    Key,
    keys_of,
    keys_of_choices,
    sentence,
    settings_of,
    summary_of,
)

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import conf_dir, options_of
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS

if TYPE_CHECKING:  # a test reads the tables where Sphinx is not installed
    from sphinx.application import Sphinx

PAGE = "configuration"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marks of the page, such as ``<!-- keys: config -->``."""
    if page == PAGE:
        parts = {"commands": commands_table, "keys": sections, "options": options_table}
        source[0] = re.sub(
            r"<!-- (commands|keys|options)(?:: (\w+))? -->",
            lambda mark: parts[mark[1]](*filter(None, [mark[2]])),
            source[0],
        )


def commands_table() -> str:
    """Every command with the root configuration that it reads."""
    rows = [
        (f"`hotrec {name}`", command.summary, f"`{command.config_name}`")
        for name, command in COMMANDS.items()
    ]
    return table(("Command", "What it does", "Root"), rows)


def options_table(group: str) -> str:
    """The choices of a group, with the comment that each file begins with."""
    rows = [(f"`{name}`", summary_of(file)) for name, file in options_of(group).items()]
    return table((f"`{group}=`", "Meaning"), rows)


def sections(root: str) -> str:
    """A heading and a table for each section; sections of ``config`` are shown there alone."""
    parts: list[str] = []
    kind = ROOTS[root]
    hints = get_type_hints(kind)
    loose = [key for key in keys_of(kind, "") if "." not in key.name]
    if loose:
        parts.append(keys_table(loose))
    shown_before = set() if root == "config" else {item.name for item in fields(ROOTS["config"])}
    for item in fields(kind):
        if not is_dataclass(hints[item.name]) or item.name in shown_before:
            continue
        parts.append(f"### `{item.name}`")
        parts.append(sentence(item.metadata["meaning"]))
        if (conf_dir() / item.name).is_dir():
            parts.append(options_table(item.name))
        prefix = f"{item.name}."
        if item.name in VARIANTS:
            choices = keys_of_choices(prefix, VARIANTS[item.name], settings_of(root, item.name))
            parts.append(keys_table(choices) if choices else "No keys.")
        else:
            parts.append(keys_table(list(keys_of(hints[item.name], prefix))))
    return "\n\n".join(parts)


def keys_table(keys: list[Key]) -> str:
    """A table of keys."""
    rows = [(f"`{key.name}`", key.meaning, key.default, key.values) for key in keys]
    return table(("Key", "Meaning", "Default", "Values"), rows)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
