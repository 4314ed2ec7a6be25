"""The locks: exact, closed, alike for CPU and CUDA, in step with pyproject.toml and the pairs."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

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


def test_pairs_change_pins_and_add_none() -> None:
    """What make_venv.sh puts in the place of a pin must be a pin; the same version is no change."""
    pinned = CPU | CUDA | DEV
    for minor, pins in OTHERS.items():
        same = {name for name, version in pins.items() if pinned.get(name, version) == version}
        assert same == set(), f"torch-2.{minor}.lock"


def test_readme_has_the_tested_pairs() -> None:
    """With the day and the commit of the last run of the whole suite that passed, if any did."""
    text = (REPOSITORY / "README.md").read_text()
    run = r"(?:\d{4}-\d\d-\d\d, [0-9a-f]{7}|none yet)"
    rows = re.findall(rf"^\| (2\.\S+) \| (\S+) \| (\S+) \| {run} \|$", text, re.MULTILINE)
    assert [Pair(*row) for row in rows] == [pair for pair in PAIRS.values() if pair.is_tested]


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


@pytest.mark.parametrize("extra", ["metrics", "remote"])
def test_images_have_what_clusters_ask_for(extra: str) -> None:
    """Images are made from these locks alone."""
    names = {canonicalize_name(Requirement(need).name) for need in needs_of(extra)}
    assert names <= CPU.keys() & CUDA.keys()


def test_extras_pin_the_doctors_pair() -> None:
    """Of torchrec's needs, cpu has all but the CUDA fbgemm-gpu, which would break it."""
    pinned = {
        extra: {n.name: str(n.specifier) for n in map(Requirement, needs_of(extra))}
        for extra in ("cpu", "cuda")
    }
    assert pinned["cuda"] == {
        "torch": f"=={PINNED.torch}",
        "torchrec": f"=={PINNED.torchrec}",
        "fbgemm-gpu": f"=={PINNED.fbgemm}",
    }
    assert pinned["cpu"]["torch"] == f"=={PINNED.torch}"
    assert pinned["cpu"]["fbgemm-gpu-cpu"] == f"=={PINNED.fbgemm}"
    wanted = {Requirement(need).name for need in importlib.metadata.requires("torchrec") or []}
    there = {canonicalize_name(Requirement(need).name) for need in needs_of("")}
    optional = {"iopath"}  # of torchrec[datasets]
    assert wanted - there - pinned["cpu"].keys() - optional == {"fbgemm-gpu"}


def installed_version(name: str) -> str | None:
    try:
        return Version(importlib.metadata.version(name)).public
    except importlib.metadata.PackageNotFoundError:
        return None


def test_locks_are_closed() -> None:
    """Every need of every locked package is locked, in a version that it accepts.

    In an environment of another torch, with the versions of its pair.
    """
    pair = OTHERS.get(Version(installed_version("torch") or "0").minor, {})
    of_torch = [Requirement(need) for need in importlib.metadata.requires("torch") or []]
    # torch's CUDA build asks for its libraries as extras of one package.
    libraries = {extra for need in of_torch if need.name == "cuda-toolkit" for extra in need.extras}
    pins = CPU | DEV | (LIBRARIES if libraries else {})
    pins |= DOCS if installed_version("sphinx") else {}
    pins |= {name: version for name, version in pair.items() if name in pins}
    installed = {name: installed_version(name) for name in pins}
    others = {name: found for name, found in installed.items() if found != pins[name]}
    if others:
        pytest.skip(f"this environment was not made from the locks: {others}")
    missing = []
    for name in pins:
        extras = {"", *libraries} if name == "cuda-toolkit" else {""}
        for need in map(Requirement, importlib.metadata.requires(name) or []):
            wanted = canonicalize_name(need.name)
            if (name, wanted) in LEFT_OUT or (
                need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras)
            ):
                continue
            if wanted not in pins or not need.specifier.contains(pins[wanted]):
                missing.append(f"{name} needs {need}, locked: {pins.get(wanted)}")
    assert missing == []
