"""Which operators FBGEMM's CUDA wheels have, by release; imports no torch.

    pip download fbgemm-gpu==1.6.0 --no-deps
    python -m tests.stand_in.operators fbgemm_gpu-1.6.0-*.whl [--write]

compares operators.json with wheels, or renews it from them. It names the operators that hotrec
calls, those that tensors of the stand-in meet in TorchRec and FBGEMM, and those that the stand-in
computes itself. An operator's schema is that of the literal in the libraries which registers it,
its kernel the function of its name there; that the kernel works is not said. A fact is written at
the release from which it holds; null: there is none. Needs readelf and nm.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

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


# ----------------------------------------------------------------------------------- from wheels


def scan(wheel: Path, table: Table) -> dict[str, dict[str, str | None]]:
    """The table's facts in one wheel: its three parts, each by name."""
    by_name, symbols = dict[str, str](), set[str]()
    names = "|".join(table["schemas"]).encode()
    # A literal begins after another's end, or after a table of numbers.
    schema = re.compile(rb"(?<![a-zA-Z0-9_])(" + names + rb")\([^\0]*\) *-> *[^\0]*")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                for found in schema.finditer(_literals(library)):
                    by_name[found[1].decode()] = " ".join(found[0].decode().split())
                symbols.update(re.findall(r"\b\w+(?=[(<])", _said(["nm", "-DC", str(library)])))
                library.unlink()
    return {
        "schemas": {name: by_name.get(name) for name in table["schemas"]},
        "kernels": {
            name: next((k for k in (f"{name}_cuda", f"{name}_gpu", name) if k in symbols), None)
            for name in table["kernels"]
        },
        "functions": {name: name if name in symbols else None for name in table["functions"]},
    }


def _literals(library: Path) -> bytes:
    for line in _said(["readelf", "-SW", str(library)]).splitlines():
        name, _, rest = line.partition("]")[2].strip().partition(" ")
        if name == ".rodata":
            begin, size = (int(text, 16) for text in rest.split()[2:4])
            with library.open("rb") as file:
                file.seek(begin)
                return file.read(size)
    return b""


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="renew operators.json")
    options = parser.parse_args()
    table, differences = read(), list[str]()
    scanned: dict[str, Any] = {}
    for wheel in options.wheels:
        release = wheel.name.split("-")[1]
        scanned[release] = scan(wheel, table)
        for part, facts in scanned[release].items():
            for name, got in facts.items():
                expected = of_release(table[part][name], release)
                if got != expected:
                    differences.append(
                        f"{part} of {name} in {release}: expected {expected!r} of {TABLE.name}, "
                        f"got {got!r} of the wheel."
                    )
    if options.write:
        for part, of_part in table.items():
            for name in of_part:
                facts: Facts = {}
                for release in sorted(scanned, key=_number):
                    if of_release(facts, release) != scanned[release][part][name]:
                        facts[release] = scanned[release][part][name]
                of_part[name] = facts
        TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    elif differences:
        raise SystemExit("\n".join([*differences, "Renew it with --write and all wheels."]))


if __name__ == "__main__":
    main()
