"""The locks: exact, closed, alike for CPU and CUDA, in step with pyproject.toml and the pairs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hotrec.doctor import PAIRS, PINNED, Pair
from tests.policy.source import REPOSITORY

REQUIREMENTS = REPOSITORY / "requirements"
# Asked for by metadata and left out on purpose; the locks say why.
LEFT_OUT = {("torchrec", "fbgemm-gpu"), ("torchx", "urllib3")}


def read_lock(path: Path) -> dict[str, str]:
    """Version by name, included files too."""
    pins: dict[str, str] = {}
    for line in path.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if text.startswith("-r "):
            added = read_lock(path.parent / text.removeprefix("-r "))
        else:
            matched = re.fullmatch(r"([\w.-]+)==([\w.]+)", text)
            assert matched, f"{path}: expected name==version, got {line!r}"
            added = {canonicalize_name(matched[1]): matched[2]}
        twice = pins.keys() & added.keys()
        assert not twice, f"{path}: pinned twice: {twice}"
        pins |= added
    return pins


CPU = read_lock(REQUIREMENTS / "cpu.lock")
CUDA = read_lock(REQUIREMENTS / "cuda.lock")
LIBRARIES = read_lock(REQUIREMENTS / "cuda-libs.lock")
DEV = read_lock(REQUIREMENTS / "dev.lock")
DOCS = read_lock(REQUIREMENTS / "docs.lock")
# By torch's minor version, what a pair has other versions of.
OTHERS = {
    int(path.stem.removeprefix("torch-2.")): read_lock(path)
    for path in REQUIREMENTS.glob("torch-2.*.lock")
}


def test_cpu_and_cuda_differ_by_fbgemm_and_cuda_libraries() -> None:
    shared = CPU.keys() & CUDA.keys()
    assert {name: CPU[name] for name in shared} == {name: CUDA[name] for name in shared}
    assert CPU.keys() - shared == {"fbgemm-gpu-cpu"}
    assert CUDA.keys() - shared == {"fbgemm-gpu"} | LIBRARIES.keys()
    assert CPU["fbgemm-gpu-cpu"] == CUDA["fbgemm-gpu"]


def test_dev_adds_and_does_not_change() -> None:
    assert DEV.keys() & CPU.keys() == set()
    assert DOCS.keys() & CPU.keys() == set()
    assert {name: DEV[name] for name in DEV.keys() & DOCS.keys()}.items() <= DOCS.items()


def pair_in(pins: dict[str, str]) -> Pair:
    assert pins["fbgemm-gpu-cpu"] == pins["fbgemm-gpu"]
    return Pair(pins["torch"], pins["torchrec"], pins["fbgemm-gpu"])


def test_locks_hold_the_doctors_pairs() -> None:
    assert pair_in(CPU | CUDA) == PINNED
    tested = {minor: pair for minor, pair in PAIRS.items() if pair.is_tested}
    assert {minor: pair_in(pins) for minor, pins in OTHERS.items()} == {
        minor: pair for minor, pair in tested.items() if pair != PINNED
    }


def needs_of(extra: str) -> list[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needs: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return needs


@pytest.mark.parametrize("extra", ["", "metrics", "remote", "torchx", "dev", "docs", "cpu", "cuda"])
def test_pyproject_accepts_the_pins(extra: str) -> None:
    needs, pins = needs_of(extra), CPU | CUDA | DEV | DOCS
    for need in map(Requirement, needs):
        name = canonicalize_name(need.name)
        assert name in pins, f"pyproject.toml needs {need}, the locks do not have it"
        assert need.specifier.contains(pins[name]), f"{need}, but the lock has {pins[name]}"


def test_locks_are_closed() -> None:
    """An environment that was made from them without dependencies lacks none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    known = (f"^{name} .*{need}" for name, need in LEFT_OUT)
    allowed = re.compile("|".join(["^No broken", *known]))
    assert [line for line in done.stdout.splitlines() if not allowed.search(line)] == []
