"""A configuration as text, in the form that a run records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml

from hotrec.artifact import read_record

MAX_BYTES, MAX_DEPTH = 1 << 20, 64


def as_document(value: Any) -> Any:
    """A configuration, or a part of one, as JSON values; enumerations by name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: as_document(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_document(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_document(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    # Numbers of numpy.
    return value.item() if hasattr(value, "item") else value


def as_yaml(document: Any) -> str:
    """The text of config.yaml."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> str:
    """The text of a recorded configuration, which a reader of YAML can safely expand.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is no mapping in YAML, or is large, deep, or has aliases, whose targets a
            reader would copy.
    """
    text, depth, found = read_record(path, MAX_BYTES), 0, "no keys"
    try:
        for number, event in enumerate(yaml.parse(text)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if number == 2 and isinstance(event, yaml.MappingStartEvent):
                found = ""
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                found = "aliases" if depth <= MAX_DEPTH else f"more than {MAX_DEPTH} levels"
                break
    except yaml.YAMLError as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        raise ValueError(
            f"{path}: expected keys with values in YAML, got {found}. Restore the file."
        )
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts so that OmegaConf reads them: it knows more numbers, as 1e5, and references."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    text = text.replace("${", r"\${")
    try:
        float(text)
    except ValueError:
        return dumper.represent_str(text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'")


_Dumper.add_representer(str, _represent_text)
