"""Checks the installation: packages that fit together, shared memory, and the GPU.

``check_versions`` reads package metadata only (milliseconds, no torch) and runs at the start of
every command, since a wrong pair of torch and fbgemm ends in undefined symbols or wrong kernels.
``diagnose`` also imports torch and looks at the machine. Facts are read apart from judging them, so
every verdict is tested on made-up facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CPU_FBGEMM = "fbgemm-gpu-cpu"
CUDA_FBGEMM = "fbgemm-gpu"
READ = ("torch", "torchrec", CPU_FBGEMM, CUDA_FBGEMM, "torchmetrics")
# The one library of the driver that fbgemm's CUDA build needs at import; torch needs none.
DRIVER_LIBRARY = "libnvidia-ml.so.1"
# With less a run may still work; loader workers are what uses it up.
ENOUGH_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Pair:
    """A torch with its torchrec and its fbgemm, as they were released.

    Args:
        torch: The last release of this minor version.
        torchrec: The last release for it.
        fbgemm: The last release for it, of fbgemm-gpu and fbgemm-gpu-cpu alike.
        is_tested: Whether hotrec's whole suite runs with it (``make test-pairs``).
    """

    torch: str
    torchrec: str
    fbgemm: str
    is_tested: bool = True

    def pip_line(self, fbgemm: str, *, force: bool = False) -> str:
        """The command that installs this pair with the fbgemm package of that name."""
        options = "--force-reinstall --no-deps " if force else ""
        torch = f"pip install {options}torch=={self.torch}"
        # torchrec's metadata requires the CUDA fbgemm-gpu, which must not stand beside the CPU's.
        others = f"torchrec=={self.torchrec} {fbgemm}=={self.fbgemm}"
        return f"{torch} {others}" if force else f"{torch} && pip install --no-deps {others}"


# By torch's minor version; each release is on the package index. The locks in requirements/ and the
# table in the documentation must agree with it (tests/policy/test_locks.py).
PAIRS = {
    11: Pair("2.11.0", "1.6.1", "1.6.0"),
    12: Pair("2.12.1", "1.7.0", "1.7.0", is_tested=False),
    13: Pair("2.13.0", "1.8.0", "1.8.0"),
    14: Pair("2.14.1", "1.9.2", "1.9.0"),
}
OLDEST_MINOR, NEWEST_MINOR = min(PAIRS), max(PAIRS)
# fbgemm 1.X and torchrec 1.X are built for torch 2.(X+5).
MINOR_OFFSET = 5
# What requirements/cpu.lock and cuda.lock hold, recommended where there is no usable torch.
PINNED_MINOR = 13
PINNED = PAIRS[PINNED_MINOR]
TESTED = ", ".join(f"2.{minor}" for minor, pair in PAIRS.items() if pair.is_tested)


@dataclass(frozen=True)
class Check:
    """One verdict.

    Args:
        name: What was checked.
        status: "fail" stops every command, "warn" does not.
        found: What is there.
        expected: What should be there; empty if it is.
        fix: The command that fixes it; empty if there is nothing to do.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    expected: str = ""
    fix: str = ""

    def message(self) -> str:
        """The verdict as a sentence with the command that fixes it."""
        return f"{self.name}: expected {self.expected}, got {self.found}. Run: {self.fix}"


@dataclass(frozen=True)
class Packages:
    """The installed packages that must fit together.

    Args:
        versions: Version by package name, of those in ``READ`` that are installed.
        torch_cuda: The CUDA version that torch was built for; None for a CPU build.
        torchmetrics_pin: The version that the installed torchrec requires, if it names one.
    """

    versions: Mapping[str, str]
    torch_cuda: str | None = None
    torchmetrics_pin: str | None = None

    @property
    def torch_minor(self) -> int:
        """The minor version of the installed torch 2; 0 if there is none."""
        return _minor(self.versions.get("torch", ""), major=2) or 0

    @property
    def pair(self) -> Pair:
        """The newest pair for a newer torch, the pinned one where no usable torch is installed."""
        return PAIRS.get(min(self.torch_minor, NEWEST_MINOR), PINNED)

    def fbgemm(self, *, has_gpu: bool) -> str:
        """Which of the two fbgemm packages belongs to the installed torch on this machine."""
        if "torch" not in self.versions:
            return CUDA_FBGEMM if has_gpu else CPU_FBGEMM
        if self.torch_cuda is None:
            return CPU_FBGEMM
        is_cuda_alone = CUDA_FBGEMM in self.versions and CPU_FBGEMM not in self.versions
        return CUDA_FBGEMM if has_gpu or is_cuda_alone else CPU_FBGEMM

    def install(self, name: str, fbgemm: str) -> str:
        """The command that installs a companion of the installed torch.

        No companion is known for a torch that is newer than all pairs, so torch changes as well.
        """
        if self.torch_minor > NEWEST_MINOR:
            return self.pair.pip_line(fbgemm)
        version = self.pair.torchrec if name == "torchrec" else self.pair.fbgemm
        return f"pip install --no-deps {name}=={version}"

    def replace_fbgemm(self, fbgemm: str) -> str:
        """The command that leaves this fbgemm package alone in the folder that both share."""
        # Removing one of the two takes the other's files with it.
        return f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM} && {self.install(fbgemm, fbgemm)}"


@dataclass(frozen=True)
class Machine:
    """What the host offers.

    Args:
        shm_bytes: Size of /dev/shm, None if there is none.
        has_gpu_device: Whether a GPU is attached and visible, whether torch can use it or not.
        import_error: Why torch, fbgemm or torchrec could not be imported; empty if they were.
        gpus: Name, total and free bytes of the devices that torch can use.
    """

    shm_bytes: int | None
    has_gpu_device: bool
    import_error: str = ""
    gpus: tuple[tuple[str, int, int], ...] = ()


def check_versions() -> None:
    """Refuse packages that do not fit together; metadata only, milliseconds.

    Raises:
        RuntimeError: naming every wrong package and the command that fixes it.
    """
    checks = check_packages(read_packages(), has_gpu=has_gpu_device())
    failed = [check.message() for check in checks if check.status == "fail"]
    if failed:
        raise RuntimeError("\n".join(failed))


def diagnose() -> list[Check]:
    """Check packages and machine; imports torch and torchrec (seconds)."""
    packages, machine = read_packages(), read_machine()
    checks = check_packages(packages, has_gpu=machine.has_gpu_device)
    return [*checks, *check_machine(machine, packages)]


def read_packages() -> Packages:
    """The versions in this environment, from metadata and without importing them."""
    versions = {}
    for name in READ:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    pin = None
    for need in importlib.metadata.requires("torchrec") or [] if "torchrec" in versions else []:
        matched = re.match(r"torchmetrics\s*\(?==\s*([\w.]+)", need)
        pin = matched.group(1) if matched else pin
    return Packages(versions, _read_torch_cuda(), pin)


def _read_torch_cuda() -> str | None:
    # torch/version.py says `cuda: Optional[str] = '13.0'` or `= None` in every build. The version
    # string does not: the common index's CUDA build is plain 2.13.0.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    built_for = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built_for.group(1) if built_for else None


def has_gpu_device() -> bool:
    """Whether an NVIDIA GPU is attached and not hidden; asks neither torch nor the driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    # /dev/dxg is the GPU of a Linux that runs inside Windows.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def read_machine() -> Machine:
    """The facts of this host; imports torch, fbgemm and torchrec."""
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).total if shm.is_dir() else None
    try:
        import torch
        import torchrec  # noqa: F401  (loads fbgemm's libraries)
    except (ImportError, OSError, RuntimeError) as error:
        # torch says only which of fbgemm's libraries failed; the cause behind it says why.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        return Machine(shm_bytes, has_gpu_device(), import_error=reason)
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            gpus.append((torch.cuda.get_device_name(index), total_bytes, free_bytes))
    return Machine(shm_bytes, has_gpu_device(), gpus=tuple(gpus))


def check_packages(packages: Packages, *, has_gpu: bool) -> list[Check]:
    """Judge the installed packages."""
    fbgemm = packages.fbgemm(has_gpu=has_gpu)
    return [
        _check_torch(packages, fbgemm),
        _check_companion("torchrec", packages, fbgemm),
        _check_fbgemm(fbgemm, packages),
        _check_torchmetrics(packages),
    ]


def _minor(version: str, *, major: int) -> int | None:
    matched = re.match(rf"{major}\.(\d+)", version)
    return int(matched.group(1)) if matched else None


def _check_torch(packages: Packages, fbgemm: str) -> Check:
    version, minor = packages.versions.get("torch"), packages.torch_minor
    fix, supported = PINNED.pip_line(fbgemm), f"2.{OLDEST_MINOR} to 2.{NEWEST_MINOR}"
    if version is None:
        return Check("torch", "fail", "nothing", supported, fix)
    build = f"CUDA {packages.torch_cuda}" if packages.torch_cuda else "CPU"
    found = f"{version} ({build} build)"
    if minor < OLDEST_MINOR:
        return Check("torch", "fail", found, supported, fix)
    if minor > NEWEST_MINOR:
        untested = f"{supported} (hotrec has not been tested with 2.{minor})"
        return Check("torch", "warn", found, untested, packages.pair.pip_line(fbgemm))
    if not PAIRS[minor].is_tested:
        return Check("torch", "warn", found, f"{TESTED}, which hotrec is tested with", fix)
    return Check("torch", "ok", found)


def _check_companion(name: str, packages: Packages, fbgemm: str) -> Check:
    torch_minor = packages.torch_minor
    if torch_minor < OLDEST_MINOR:
        # Without a usable torch its companions are judged against the pinned set.
        torch_minor = PINNED_MINOR
    minor = torch_minor - MINOR_OFFSET
    expected = f"1.{minor}.x, which goes with torch 2.{torch_minor}"
    if torch_minor > NEWEST_MINOR:
        expected += ", if there is one"
    version = packages.versions.get(name)
    if version is None or _minor(version, major=1) != minor:
        return Check(name, "fail", version or "nothing", expected, packages.install(name, fbgemm))
    return Check(name, "ok", version)


def _check_fbgemm(needed: str, packages: Packages) -> Check:
    versions = packages.versions
    other = CUDA_FBGEMM if needed == CPU_FBGEMM else CPU_FBGEMM
    if other not in versions:
        return _check_companion(needed, packages, needed)
    if needed in versions:
        found = f"{needed} {versions[needed]} and {other} {versions[other]} in one folder"
        expected = f"{needed} alone"
    else:
        found = f"{other} {versions[other]}"
        build = "a CUDA" if packages.torch_cuda else "the CPU"
        where = " on a machine with a GPU" if packages.torch_cuda else ""
        expected = f"{needed} for {build} build of torch{where}"
    return Check("fbgemm", "fail", found, expected, packages.replace_fbgemm(needed))


def _check_torchmetrics(packages: Packages) -> Check:
    pin, version = packages.torchmetrics_pin, packages.versions.get("torchmetrics")
    if version is not None and pin in (None, version):
        return Check("torchmetrics", "ok", version)
    wanted = pin or "1.0.3"
    fix = f"pip install --no-deps torchmetrics=={wanted}"
    return Check("torchmetrics", "fail", version or "nothing", f"{wanted} for torchrec", fix)


def check_machine(machine: Machine, packages: Packages) -> Iterator[Check]:
    """Judge the host."""
    yield _check_import(machine, packages)
    yield _check_shm(machine.shm_bytes)
    if not machine.import_error:
        yield from _check_gpus(machine, packages)


def _check_import(machine: Machine, packages: Packages) -> Check:
    name, error = "import torchrec", machine.import_error
    if not error:
        return Check(name, "ok", "loads")
    if DRIVER_LIBRARY in error:
        expected = f"NVIDIA's driver, which fbgemm's CUDA build loads ({DRIVER_LIBRARY})"
        fix = "nvidia-smi (and install the driver, or let the container see it)"
        if not machine.has_gpu_device:
            fix = packages.replace_fbgemm(CPU_FBGEMM)
        return Check(name, "fail", error, expected, fix)
    fbgemm = packages.fbgemm(has_gpu=machine.has_gpu_device)
    return Check(name, "fail", error, "it to load", packages.pair.pip_line(fbgemm, force=True))


def _check_shm(shm_bytes: int | None) -> Check:
    found = "nothing" if shm_bytes is None else f"{shm_bytes / (1 << 30):.2f} GiB"
    if shm_bytes is not None and shm_bytes >= ENOUGH_SHM_BYTES:
        return Check("/dev/shm", "ok", found)
    fix = "mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)"
    return Check("/dev/shm", "warn", found, "at least 1 GiB for loader workers", fix)


def _check_gpus(machine: Machine, packages: Packages) -> Iterator[Check]:
    for index, (name, total_bytes, free_bytes) in enumerate(machine.gpus):
        memory = f"{free_bytes / (1 << 30):.1f} GiB free of {total_bytes / (1 << 30):.1f} GiB"
        yield Check(f"gpu {index}", "ok", f"{name}, {memory}")
    if machine.gpus:
        return
    if not machine.has_gpu_device:
        yield Check("gpu", "ok", "none; training runs on the CPU")
    elif packages.torch_cuda is None:
        fix = f"pip install --force-reinstall torch=={packages.pair.torch}"
        found, expected = "a GPU and the CPU build of torch", "the CUDA build, or it stays unused"
        yield Check("gpu", "warn", found, expected, fix)
    else:
        found = f"a GPU that torch, built for CUDA {packages.torch_cuda}, cannot use"
        expected = f"a driver for CUDA {packages.torch_cuda}"
        yield Check("gpu", "fail", found, expected, "nvidia-smi (and update the driver)")
