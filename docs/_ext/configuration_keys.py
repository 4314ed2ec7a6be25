"""Every key with its meaning, default and values."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from hotrec.cli.store import conf_dir, options_of
from hotrec.config.fields import MISSING

UNIONS = (Union, types.UnionType)
LIMIT_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One line of a table, in Markdown."""

    name: str
    meaning: str
    default: str
    values: str


def settings_of(root: str, group: str) -> dict[str, dict[str, Any]]:
    """The settings of a group's choices, and of the root configuration after them."""
    own = yaml.safe_load((conf_dir() / f"{root}.yaml").read_text()).get(group) or {}
    return {
        name: (yaml.safe_load(file.read_text()) or {}) | own
        for name, file in options_of(group).items()
    }


def summary_of(file: Path) -> str:
    """The first paragraph of comments in a YAML file, without Hydra's directives."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or (lines and not text):
            break
        if not text.startswith("@package"):
            lines.append(text)
    return sentence(" ".join(lines))


def keys_of(kind: type, prefix: str) -> Iterator[Key]:
    """The keys of a dataclass and of the dataclasses in it."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        if item.metadata["meaning"].startswith("choose it with"):
            continue  # the group's own name chooses it
        # A field cannot have the name of a keyword: run.from.
        name = f"{prefix}{item.name.rstrip('_')}"
        inner, is_mapping = inner_dataclass(hints[item.name])
        if inner is not None:
            yield from keys_of(inner, f"{name}.<name>." if is_mapping else f"{name}.")
            continue
        yield Key(
            name,
            sentence(item.metadata["meaning"]),
            default_of(item),
            shown_values(hints[item.name], item.metadata["limits"]),
        )


def keys_of_choices(
    prefix: str, variants: Mapping[str, type], settings: Mapping[str, Mapping[str, Any]]
) -> list[Key]:
    """The keys of all choices of a group; one that only some choices have lists them.

    Args:
        prefix: The group's name and a dot.
        variants: The dataclass of each choice.
        settings: What the file of each choice sets.
    """
    choices: dict[Key, dict[str, str]] = {}
    for name, kind in variants.items():
        for key in keys_of(kind, prefix):
            given = settings.get(name, {}).get(key.name.removeprefix(prefix))
            default = key.default if given is None else shown_default(given)
            choices.setdefault(replace(key, default=""), {})[name] = default
    found = []
    for key, defaults in choices.items():
        names = list(defaults)
        absent = [name for name in variants if name not in names]
        if not absent:
            of = ""
        elif len(absent) < len(names):
            of = f" Not with {code_list(absent)}."
        else:
            of = f" Only with {code_list(names)}."
        [(usual, _)] = Counter(defaults.values()).most_common(1)
        others = ((name, default) for name, default in defaults.items() if default != usual)
        of += "".join(f" With `{name}` by default {default}." for name, default in others)
        found.append(replace(key, meaning=key.meaning + of, default=usual))
    return found


def inner_dataclass(hint: Any) -> tuple[type | None, bool]:
    """The dataclass in a type hint, and whether it is the value type of a mapping."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint, False
    found: Any = next((kind for kind in get_args(hint) if is_dataclass(kind)), None)
    return found, get_origin(hint) is dict


def default_of(item: dataclasses.Field[Any]) -> str:
    """The default of a field, for a table."""
    if item.default_factory is not dataclasses.MISSING:
        value: Any = item.default_factory()
    else:
        value = item.default
    if value is dataclasses.MISSING or value == MISSING:
        # conf/ fills these in, from the name of a choice.
        return "see meaning" if "by default" in item.metadata["meaning"] else "required"
    return shown_default(value)


def shown_default(value: Any) -> str:
    """A default as one would write it on the command line."""
    if isinstance(value, list):
        return f"`[{', '.join(json.dumps(v) if v == '' else str(v) for v in value)}]`"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if isinstance(value, float):
        return f"`{value:.10g}`"
    is_blank = isinstance(value, str) and not value.strip()
    return f"`{json.dumps(value) if is_blank else value}`"


def shown_values(hint: Any, limits: dict[str, float]) -> str:
    """The type of a key, its members if it is an enumeration, and its limits."""
    bounds = [(LIMIT_SIGNS[name], at) for name, at in limits.items() if name in LIMIT_SIGNS]
    signs = ", ".join(f"{sign} {at:.10g}" for sign, at in bounds)
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


def sentence(text: str) -> str:
    """The text with a full stop; a Markdown table cell cannot contain a bar."""
    text = text.strip().replace("|", "\\|")
    starts_with_value = re.match(r"\w*[_=]|(?:fp|bf|tf)\d", text)
    text = text if starts_with_value else text[:1].upper() + text[1:]
    return text if not text or text[-1] in ".:?" else f"{text}."


def code_list(names: list[str]) -> str:
    """Names in code spans."""
    return ", ".join(f"`{name}`" for name in names)
