"""Which operators FBGEMM's CUDA wheels have, by release; imports no torch.

operators.json names the operators that hotrec calls, those that tensors of the stand-in meet in
TorchRec and FBGEMM, and those that the stand-in computes itself. An operator's schema is that of
the literal in the libraries which registers it. A fact is written at the release from which it
holds; null: there is none.
"""

from __future__ import annotations

import json
from pathlib import Path

TABLE = Path(__file__).with_name("operators.json")

# What fbgemm.py computes in FBGEMM's place.
REPLACED = (
    "dense_embedding_codegen_lookup_function",
    "lfu_cache_populate",
    "lru_cache_populate",
    "lxu_cache_flush",
    "lxu_cache_locations_update",
    "lxu_cache_locking_counter_decrement",
    "new_unified_tensor",
    "split_embedding_codegen_lookup_adagrad_function_pt2",
    "split_embedding_codegen_lookup_adam_function_pt2",
    "split_embedding_codegen_lookup_rowwise_adagrad_function_pt2",
    "split_embedding_codegen_lookup_sgd_function_pt2",
    "uvm_to_cpu",
)

Facts = dict[str, str | None]  # by the release from which they hold
Table = dict[str, dict[str, Facts]]  # "schemas" and "kernels" by operator; "functions" by name


def read() -> Table:
    table: Table = json.loads(TABLE.read_text())
    return table


def _number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def of_release(facts: Facts, release: str) -> str | None:
    """What holds in a release."""
    found = [since for since in facts if _number(since) <= _number(release)]
    return facts[max(found, key=_number)] if found else None


def schemas(release: str) -> dict[str, str]:
    """Schemas of the operators that a release has, by name."""
    every = ((name, of_release(facts, release)) for name, facts in read()["schemas"].items())
    return {name: schema for name, schema in every if schema is not None}


def argument_names(schema: str) -> list[str]:
    """The names of an operator's arguments, in their order."""
    inside = schema[schema.index("(") + 1 : schema.rindex(") ->")]
    return [text.partition("=")[0].split()[-1] for text in inside.split(",")]
