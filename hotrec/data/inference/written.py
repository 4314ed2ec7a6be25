"""The specification of a log as YAML, with the evidence as comments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from hotrec.config.data import SourceFormat
from hotrec.data.inference.spec import Inferred
from hotrec.data.sample import Sample

# Texts that YAML reads as another type.
_PLAIN = re.compile(r"[A-Za-z_][\w-]*")
_NOT_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(sample: Sample, found: Inferred, heading: list[str]) -> str:
    """The specification as a file of the group ``data``, with the evidence as comments."""
    lines = [f"# {line}" for line in heading]
    seen = f"{sample.table.num_rows:,} rows"
    whole = "all" if sample.is_whole else f"about {sample.num_rows:,}, evenly spread"
    lines += [f"# Guessed from {seen} ({whole}); docs/configuration.md has every key.", "source:"]
    lines += [f"  format: {sample.format.name}", f"  files: {_flow(sample.files)}"]
    if sample.format is SourceFormat.delimited:
        lines.append(f"  separator: {json.dumps(sample.separator)}")
    if found.null_values:
        lines.append(f"  null_values: {_flow(found.null_values)}")
    if sample.num_bad:
        lines.append(f"  # on_bad_line: skip  # ignores lines such as {sample.fault}")
    if found.times:
        lines.append(f"  times: {_flow(found.times)}")
    if found.split["kind"] == "time":
        lines.append("  # About 80% of the rows train, the next 10% validate, the last 10% test.")
    lines += [f"  split: {_flow(found.split)}"]
    lines += ["  table_defaults: {min_count: 2}  # a value seen once in training shares row 0"]
    if found.tables:
        lines.append("  tables:")
        lines += [f"    {_key(n)}: {_flow(s)}  # {note}" for n, (s, note) in found.tables.items()]
    lines.append("  # Remove columns that are known only after the click.")
    lines.append("  columns:")
    for entry in found.entries:
        mark = "" if entry.is_used else "# "
        lines.append(f"    {mark}{_key(entry.name)}: {_flow(entry.spec)}  # {_comment(entry.note)}")
    return "\n".join(lines) + "\n"


def _comment(note: str) -> str:
    """A comment of one line, escaped because OmegaConf would interpolate texts of the log."""
    return " ".join(note.split())


def _key(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NOT_TEXT and text.isascii()
    if is_plain:
        return text
    # As in JSON, but YAML knows no surrogates.
    letters = (json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08x}" for c in text)
    return f'"{"".join(letters)}"'


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        # An ISO time is text to Hydra; OmegaConf would interpolate ${.
        return _key(value).replace("${", "\\\\${")
    return json.dumps(value)
