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
from hotrec.doctor.pairs import (
    MINOR_OFFSET,
    NEWEST_MINOR,
    OLDEST_MINOR,
    PAIRS,
    PINNED,
    PINNED_MINOR,
    TESTED,
    Pair,
)

PYTHON_RANGE = ((3, 11), (3, 13))

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
    return [
        _check_python(packages.python),
        _check_torch(packages, fbgemm),
        _check_companion("torchrec", packages, _mend("torchrec", packages, fbgemm)),
        _check_fbgemm(fbgemm, packages),
        _check_torchmetrics(packages),
    ]


def pair_of(packages: Packages) -> Pair:
    """What exists for the installed torch: its pair, the newest for a torch that is newer still.

    Where torch is missing or too old, the pinned pair.
    """
    return PAIRS.get(min(_torch_minor(packages), NEWEST_MINOR), PINNED)


def needed_fbgemm(packages: Packages, *, has_gpu: bool) -> str:
    """Which of the two fbgemm packages belongs to the installed torch on this machine."""
    if "torch" not in packages.versions:
        return CUDA_FBGEMM if has_gpu else CPU_FBGEMM
    if packages.torch_cuda is None:
        return CPU_FBGEMM
    if has_gpu or (CUDA_FBGEMM in packages.versions and CPU_FBGEMM not in packages.versions):
        return CUDA_FBGEMM
    return CPU_FBGEMM


def swap_fbgemm(needed: str, packages: Packages) -> str:
    """The line that leaves this fbgemm package alone in its folder."""
    # Removing one of two packages that share a folder takes the other's files with it.
    return f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM} && {_mend(needed, packages, needed)}"


def _minor(version: str, *, major: int) -> int | None:
    matched = re.match(rf"{major}\.(\d+)", version)
    return int(matched.group(1)) if matched else None


def _torch_minor(packages: Packages) -> int:
    """The minor version of the installed torch 2; 0 if there is none."""
    return _minor(packages.versions.get("torch", ""), major=2) or 0


def _mend(name: str, packages: Packages, fbgemm: str) -> str:
    """The line that installs this package for the installed torch.

    No release is known for a torch that is newer than all pairs, so there torch changes too.
    """
    pair = pair_of(packages)
    if _torch_minor(packages) > NEWEST_MINOR:
        return pair.pip_line(fbgemm)
    return f"pip install --no-deps {name}=={pair.torchrec if name == 'torchrec' else pair.fbgemm}"


def _check_python(python: tuple[int, int]) -> Check:
    found = ".".join(map(str, python))
    lowest, highest = PYTHON_RANGE
    if lowest <= python <= highest:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "3.11 to 3.13", "python3.12 -m venv .venv")


def _check_torch(packages: Packages, fbgemm: str) -> Check:
    version, minor = packages.versions.get("torch"), _torch_minor(packages)
    mend, supported = PINNED.pip_line(fbgemm), f"2.{OLDEST_MINOR} to 2.{NEWEST_MINOR}"
    if version is None:
        return Check("torch", "fail", "nothing", supported, mend)
    build = f"CUDA {packages.torch_cuda}" if packages.torch_cuda else "CPU"
    found = f"{version} ({build} build)"
    if minor < OLDEST_MINOR:
        return Check("torch", "fail", found, supported, mend)
    if minor > NEWEST_MINOR:
        untested = f"{supported} (hotrec has not been tested with 2.{minor})"
        return Check("torch", "warn", found, untested, pair_of(packages).pip_line(fbgemm))
    if not PAIRS[minor].is_tested:
        return Check("torch", "warn", found, f"{TESTED}, which hotrec is tested with", mend)
    return Check("torch", "ok", found)


def _check_companion(name: str, packages: Packages, mend: str) -> Check:
    torch_minor = _torch_minor(packages)
    if torch_minor < OLDEST_MINOR:
        # Without a usable torch its companions are judged against the pinned set.
        torch_minor = PINNED_MINOR
    minor = torch_minor - MINOR_OFFSET
    expected = f"1.{minor}.x, which goes with torch 2.{torch_minor}"
    if torch_minor > NEWEST_MINOR:
        expected += ", if there is one"
    version = packages.versions.get(name)
    if version is None:
        return Check(name, "fail", "nothing", expected, mend)
    if _minor(version, major=1) != minor:
        return Check(name, "fail", version, expected, mend)
    return Check(name, "ok", version)


def _check_fbgemm(needed: str, packages: Packages) -> Check:
    versions = packages.versions
    other = CUDA_FBGEMM if needed == CPU_FBGEMM else CPU_FBGEMM
    mend = swap_fbgemm(needed, packages)
    if needed in versions and other in versions:
        found = f"{needed} {versions[needed]} and {other} {versions[other]} in one folder"
        return Check("fbgemm", "fail", found, f"{needed} alone", mend)
    if other in versions:
        build = "a CUDA" if packages.torch_cuda else "the CPU"
        where = " on a machine with a GPU" if packages.torch_cuda else ""
        expected = f"{needed} for {build} build of torch{where}"
        return Check("fbgemm", "fail", f"{other} {versions[other]}", expected, mend)
    return _check_companion(needed, packages, _mend(needed, packages, needed))


def _check_torchmetrics(packages: Packages) -> Check:
    pin, version = packages.torchmetrics_pin, packages.versions.get("torchmetrics")
    if version is not None and pin in (None, version):
        return Check("torchmetrics", "ok", version)
    wanted = pin or "1.0.3"
    mend = f"pip install --no-deps torchmetrics=={wanted}"
    return Check("torchmetrics", "fail", version or "nothing", f"{wanted} for torchrec", mend)
