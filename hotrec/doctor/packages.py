"""Do the installed torch, torchrec, fbgemm and torchmetrics fit together; metadata only.

A wrong pair of torch and fbgemm ends in an undefined symbol or in wrong kernels, so it is refused
before anything is imported. Reading and judging are apart: every verdict is tested on made-up sets.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotrec.doctor.check import Check

PYTHON_RANGE = ((3, 11), (3, 13))
# fbgemm 1.X and torchrec 1.X are built for torch 2.(X+5): torchrec and fbgemm by torch's minor
# version. The first is the oldest that hotrec runs on, the last is the pinned set.
RELEASES = {11: ("1.6.1", "1.6.0"), 12: ("1.7.0", "1.7.0"), 13: ("1.8.0", "1.8.0")}
MINOR_OFFSET = 5
PINNED_MINOR = max(RELEASES)

CPU_FBGEMM = "fbgemm-gpu-cpu"
CUDA_FBGEMM = "fbgemm-gpu"
READ = ("torch", "torchrec", CPU_FBGEMM, CUDA_FBGEMM, "torchmetrics")


@dataclass(frozen=True)
class Packages:
    """The installed packages that must fit together.

    Args:
        python: major and minor version of this interpreter.
        versions: version by package name, of those in ``READ`` that are installed.
        torch_cuda: CUDA version that torch was built for; None for a CPU build.
        torchmetrics_pin: the one version that the installed torchrec asks for, if it names one.
    """

    python: tuple[int, int]
    versions: Mapping[str, str]
    torch_cuda: str | None = None
    torchmetrics_pin: str | None = None


def read_packages() -> Packages:
    """The versions in this environment, from metadata and without importing them."""
    versions = {}
    for name in READ:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Packages(
        python=sys.version_info[:2],
        versions=versions,
        torch_cuda=_read_torch_cuda(),
        torchmetrics_pin=_read_torchmetrics_pin() if "torchrec" in versions else None,
    )


def _read_torch_cuda() -> str | None:
    # torch/version.py says `cuda: Optional[str] = '13.0'` or `= None` in every build. The version
    # string does not: the common index's CUDA build is plain 2.13.0.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    built_for = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built_for.group(1) if built_for else None


def _read_torchmetrics_pin() -> str | None:
    for need in importlib.metadata.requires("torchrec") or []:
        pin = re.fullmatch(r"torchmetrics\s*\(?==\s*([\w.]+)\)?", need.partition(";")[0].strip())
        if pin:
            return pin.group(1)
    return None


def check_packages(packages: Packages, *, has_gpu: bool) -> list[Check]:
    """Judge the installed packages."""
    fbgemm = needed_fbgemm(packages, has_gpu=has_gpu)
    checks = [_check_python(packages.python), _check_torch(packages)]
    minor = _minor(packages.versions.get("torch", ""), major=2)
    if minor is not None and minor > PINNED_MINOR:
        torchrec = build = f"1.{minor - MINOR_OFFSET}.0"
    else:
        # Without a usable torch its companions are judged against the pinned set.
        torchrec, build = RELEASES.get(minor or PINNED_MINOR, RELEASES[PINNED_MINOR])
    checks.append(_check_companion("torchrec", torchrec, packages))
    checks.append(_check_fbgemm(fbgemm, build, packages))
    checks.append(_check_torchmetrics(packages))
    return checks


def needed_fbgemm(packages: Packages, *, has_gpu: bool) -> str:
    """Which of the two fbgemm packages belongs to the installed torch on this machine."""
    if "torch" not in packages.versions:
        return CUDA_FBGEMM if has_gpu else CPU_FBGEMM
    if packages.torch_cuda is None:
        return CPU_FBGEMM
    if has_gpu or (CUDA_FBGEMM in packages.versions and CPU_FBGEMM not in packages.versions):
        return CUDA_FBGEMM
    return CPU_FBGEMM


def _minor(version: str, *, major: int) -> int | None:
    matched = re.match(rf"{major}\.(\d+)", version)
    return int(matched.group(1)) if matched else None


def _check_python(python: tuple[int, int]) -> Check:
    found = ".".join(map(str, python))
    lowest, highest = PYTHON_RANGE
    if lowest <= python <= highest:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "3.11 to 3.13", "python3.12 -m venv .venv")


def _check_torch(packages: Packages) -> Check:
    version = packages.versions.get("torch")
    pinned = f"pip install torch==2.{PINNED_MINOR}.0"
    supported = f"2.{min(RELEASES)} to 2.{PINNED_MINOR}"
    if version is None:
        return Check("torch", "fail", "nothing", supported, pinned)
    build = f"CUDA {packages.torch_cuda}" if packages.torch_cuda else "CPU"
    found = f"{version} ({build} build)"
    minor = _minor(version, major=2)
    if minor is None or minor < min(RELEASES):
        return Check("torch", "fail", found, supported, pinned)
    if minor > PINNED_MINOR:
        return Check("torch", "warn", found, f"{supported}, which hotrec is tested with", pinned)
    return Check("torch", "ok", found)


def _check_companion(name: str, release: str, packages: Packages) -> Check:
    minor = int(release.split(".")[1])
    expected = f"1.{minor}.x, which goes with torch 2.{minor + MINOR_OFFSET}"
    mend = f"pip install --no-deps {name}=={release}"
    version = packages.versions.get(name)
    if version is None:
        return Check(name, "fail", "nothing", expected, mend)
    if _minor(version, major=1) != minor:
        return Check(name, "fail", version, expected, mend)
    return Check(name, "ok", version)


def _check_fbgemm(needed: str, release: str, packages: Packages) -> Check:
    versions = packages.versions
    other = CUDA_FBGEMM if needed == CPU_FBGEMM else CPU_FBGEMM
    # Removing one of two packages that share a folder takes the other's files with it.
    mend = (
        f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM} && pip install --no-deps {needed}=={release}"
    )
    if needed in versions and other in versions:
        found = f"{needed} {versions[needed]} and {other} {versions[other]} in one folder"
        return Check("fbgemm", "fail", found, f"{needed} alone", mend)
    if other in versions:
        build = "a CUDA" if packages.torch_cuda else "the CPU"
        where = " on a machine with a GPU" if packages.torch_cuda else ""
        expected = f"{needed} for {build} build of torch{where}"
        return Check("fbgemm", "fail", f"{other} {versions[other]}", expected, mend)
    return _check_companion(needed, release, packages)


def _check_torchmetrics(packages: Packages) -> Check:
    pin, version = packages.torchmetrics_pin, packages.versions.get("torchmetrics")
    if version is not None and pin in (None, version):
        return Check("torchmetrics", "ok", version)
    wanted = pin or "1.0.3"
    mend = f"pip install --no-deps torchmetrics=={wanted}"
    return Check("torchmetrics", "fail", version or "nothing", f"{wanted} for torchrec", mend)
