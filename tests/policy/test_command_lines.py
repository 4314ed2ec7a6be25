"""Command lines in the documentation: a shell can read them, and the keys exist."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS
from tests.policy.source import REPOSITORY

PAGES = [
    *(REPOSITORY / "docs").glob("*.md"),
    *REPOSITORY.glob("*.md"),
    *(path for path in (REPOSITORY / "launch").rglob("*") if path.is_file()),
]
SECTIONS = [
    item.name
    for item in fields(ROOTS["config"])
    if is_dataclass(get_type_hints(ROOTS["config"])[item.name]) and item.name not in VARIANTS
]
KEYS = re.compile(rf"(?<![\w./])({'|'.join(SECTIONS)})\.(\w+)=")


def console_lines(page: Path) -> list[str]:
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.suffix == ".md"], ids=lambda page: page.name
)
def test_a_shell_reads_the_lines_of_a_page(page: Path) -> None:
    for line in console_lines(page):
        plain = re.sub(r"<[\w ]+>", "x", line)  # a placeholder
        done = subprocess.run(["bash", "-n", "-c", plain], capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)


def test_extras_are_quoted() -> None:
    for page in PAGES:
        if page.suffix in (".md", ".py"):
            found = re.findall(r"pip install hotrec\[\w+\]", page.read_text())
            assert found == [], f"{page.name}: zsh reads brackets as a pattern"


def test_keys_exist() -> None:
    hints = get_type_hints(ROOTS["config"])
    seen = 0
    for page in PAGES:
        for section, name in KEYS.findall(page.read_text(errors="replace")):
            seen += 1
            known = {item.name for item in fields(hints[section])}
            assert name in known, f"{page.name}: {section}.{name}"
    assert seen > 50
