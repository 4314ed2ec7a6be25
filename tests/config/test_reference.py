"""The configuration page of the documentation has every key, each with its meaning."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import compose_config, options_of
from tests.policy.source import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def extension() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS / "_ext")
        yield importlib.import_module("configuration_reference")


@pytest.fixture(scope="module")
def page(extension: ModuleType) -> str:
    source = [(DOCS / "configuration.md").read_text()]
    extension.fill(SimpleNamespace(), "configuration", source)
    return source[0]


def test_every_mark_is_filled(page: str) -> None:
    assert "<!--" not in page
    assert all(f"| `hotrec {name}` |" in page for name in COMMANDS)


def test_every_key_has_a_meaning(page: str) -> None:
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    bare = [cells[0] for cells in rows if len(cells) < 2 or not cells[1].strip(" .")]
    assert len(rows) > 150
    assert bare == []


@pytest.mark.parametrize(
    ("root", "overrides"),
    [
        *(("config", [f"placement={choice}"]) for choice in ("cost", "fae", "torchrec")),
        ("config", ["data=synthetic", "model=dcnv2", "optimizer=adam", "order=all_hot"]),
        ("config", ["data=kuairand", "profiler=trace"]),
        ("bench", ["bench=smoke"]),
        ("evaluate", []),
        ("init", []),
        ("export", []),
        ("predict", []),
        ("report", []),
    ],
)
def test_composed_keys_are_on_the_page(root: str, overrides: list[str], page: str) -> None:
    def leaves(node: object, name: str) -> list[str]:
        if isinstance(node, dict) and node and not name.endswith("rounds_of"):
            return [leaf for key in node for leaf in leaves(node[key], f"{name}.{key}")]
        return [name]

    composed = OmegaConf.to_container(compose_config(root, overrides))
    names = {leaf.lstrip(".").rstrip("_") for leaf in leaves(composed, "")}  # of run.from_
    # Entries of mappings have names of their own, and an empty source or mapping has no keys.
    entries = r"(source\.(?:columns|tables|joins)|outline\.tables|bench\.variants)\.\w+\."
    names = {re.sub(entries, r"\1.<name>.", name) for name in names}
    empty = r".*\.kind|data\.(source|synthetic|outline)|data\.source\.\w+|bench\.variants"
    missing = [n for n in sorted(names) if f"| `{n}` |" not in page and not re.fullmatch(empty, n)]
    assert missing == []


@pytest.mark.parametrize(
    "group", ["experiment", "data", "placement", "pipeline", "trainer", "bench"]
)
def test_every_choice_is_on_the_page(group: str, page: str) -> None:
    assert [name for name in options_of(group) if f"| `{name}` |" not in page] == []
