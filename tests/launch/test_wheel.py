"""An installed hotrec finds its configuration inside itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NO_INDEX = ("No matching distribution", "Could not find a version", "connection", "Connection")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the project, unpacked as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("hotrec", "conf"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, source / name)
    words = ["wheel", "--no-deps", "--quiet", "-w", str(folder), str(source)]
    built = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=200
    )
    if built.returncode != 0 and any(sign in built.stderr for sign in NO_INDEX):
        pytest.skip("no package index to take the build backend from")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("hotrec-*.whl")
    site = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_every_file_is_in_the_wheel(installed: Path) -> None:
    assert (installed / "hotrec" / "py.typed").exists()

    def names(root: Path) -> set[str]:
        return {path.relative_to(root).as_posix() for path in root.rglob("*.yaml")}

    assert names(installed / "hotrec" / "conf") == names(REPOSITORY / "conf")


def test_commands_find_it(installed: Path, tmp_path: Path) -> None:
    program = "from hotrec.cli.store import conf_dir; print(conf_dir())"
    for words, expected in (
        (["-c", program], str(installed / "hotrec" / "conf")),
        (["-m", "hotrec", "train", "experiment=quickstart", "--help"], "quickstart"),
    ):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
