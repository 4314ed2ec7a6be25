"""Fills configuration.md with tables of every key, made from the dataclasses and from ``conf/``.

The page holds one mark for each part; this extension replaces it when Sphinx reads the page, so the
reference cannot differ from the program.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import conf_dir
from hotrec.config.fields import MISSING, VARIANTS
from hotrec.config.roots import ROOTS

if TYPE_CHECKING:  # a test reads the tables where Sphinx is not installed
    from sphinx.application import Sphinx

PAGE = "configuration"
UNIONS = (Union, types.UnionType)
LIMIT_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One line of a table, as the page shows it."""

    name: str
    meaning: str
    default: str
    values: str


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
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return table((f"`{group}=`", "Meaning"), [(f"`{f.stem}`", leading_comment(f)) for f in files])


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
            parts.append(variants_table(prefix, VARIANTS[item.name]))
        else:
            parts.append(keys_table(list(keys_of(hints[item.name], prefix))))
    return "\n\n".join(parts)


def variants_table(prefix: str, variants: dict[str, type]) -> str:
    """The keys of all choices of a group; a key that several choices share stands once."""
    choices: dict[Key, list[str]] = {}
    for name, kind in variants.items():
        for key in keys_of(kind, prefix):
            choices.setdefault(key, []).append(name)
    rows = []
    for key, names in choices.items():
        absent = [name for name in variants if name not in names]
        if not absent:
            of = ""
        elif len(absent) < len(names):
            of = f" Not with {code_list(absent)}."
        else:
            of = f" Only with {code_list(names)}."
        rows.append((f"`{key.name}`", key.meaning + of, key.default, key.values))
    return table(("Key", "Meaning", "Default", "Values"), rows) if rows else "No keys."


def keys_table(keys: list[Key]) -> str:
    """A table of keys."""
    rows = [(f"`{key.name}`", key.meaning, key.default, key.values) for key in keys]
    return table(("Key", "Meaning", "Default", "Values"), rows)


def keys_of(kind: type, prefix: str) -> Iterator[Key]:
    """The keys of a dataclass and of the dataclasses in it."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.metadata["meaning"].startswith("choose it with"):
            continue  # the group's own name chooses it
        name = f"{prefix}{item.name}"
        inner, is_mapping = inner_dataclass(hints[item.name])
        if inner is not None:
            yield from keys_of(inner, f"{name}.<name>." if is_mapping else f"{name}.")
            continue
        yield Key(
            name,
            sentence(item.metadata["meaning"]),
            shown_default(item),
            shown_values(hints[item.name], item.metadata["limits"]),
        )


def inner_dataclass(hint: Any) -> tuple[type | None, bool]:
    """The dataclass in a type hint, and whether it is the value type of a mapping."""
    if is_dataclass(hint):
        return hint, False
    found = next((argument for argument in get_args(hint) if is_dataclass(argument)), None)
    return found, get_origin(hint) is dict


def shown_default(item: dataclasses.Field[Any]) -> str:
    """A default as one would write it on the command line."""
    if item.default_factory is not dataclasses.MISSING:
        value: Any = item.default_factory()
    else:
        value = item.default
    if value is dataclasses.MISSING or value == MISSING:
        # conf/ fills these in, from the name of a choice.
        return "see meaning" if "by default" in item.metadata["meaning"] else "required"
    if isinstance(value, list):
        return f"`[{', '.join(json.dumps(v) if v == '' else str(v) for v in value)}]`"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if isinstance(value, float):
        return f"`{value:g}`"
    is_blank = isinstance(value, str) and not value.strip()
    return f"`{json.dumps(value) if is_blank else value}`"


def shown_values(hint: Any, limits: dict[str, float]) -> str:
    """The type of a key, its members if it is an enumeration, and its limits."""
    bounds = [(LIMIT_SIGNS[name], at) for name, at in limits.items() if name in LIMIT_SIGNS]
    signs = ", ".join(f"{sign} {at}" for sign, at in bounds)
    is_optional = get_origin(hint) in UNIONS and type(None) in get_args(hint)
    return " ".join(filter(None, [shown_type(hint), signs, "or `null`" if is_optional else ""]))


def shown_type(hint: Any) -> str:
    """A type in words."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return code_list([member.name for member in hint])
    if get_origin(hint) in UNIONS:
        members = [member for member in get_args(hint) if member is not type(None)]
        return " or ".join(map(shown_type, members))
    if get_origin(hint) is list:
        return f"list of {shown_type(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping to {shown_type(get_args(hint)[1])}"
    return str(hint.__name__)


def leading_comment(path: Path) -> str:
    """The first paragraph of comments in a YAML file, without Hydra's directives."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        text = line.removeprefix("#").strip()
        if not text and lines:
            break
        if not text.startswith("@package"):
            lines.append(text)
    return sentence(" ".join(lines))


def sentence(text: str) -> str:
    """The text with a full stop; a Markdown table cell cannot hold a bar."""
    text = text.strip().replace("|", "\\|")
    starts_with_value = re.match(r"\w*[_=]|(?:fp|bf|tf)\d", text)
    text = text if starts_with_value else text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".:?" else f"{text}."


def code_list(names: list[str]) -> str:
    """Names in code spans."""
    return ", ".join(f"`{name}`" for name in names)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
