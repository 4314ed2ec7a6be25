"""Checks the installation: packages that fit together, shared memory, and the GPU.

``check_versions`` reads package metadata only (milliseconds, no torch) and runs at the start of
every command; ``diagnose`` also imports torch and inspects the machine.
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
# With less a run may still work; it is used by loader workers.
ENOUGH_SHM_BYTES = 1 << 30


@dataclass(frozen=True)
class Pair:
    """A torch with the last torchrec and fbgemm (fbgemm-gpu or fbgemm-gpu-cpu) released for it.

    ``is_tested``: whether hotrec's whole suite runs with it (``make test-pairs``).
    """

    torch: str
    torchrec: str
    fbgemm: str
    is_tested: bool = True

    def pip_line(self, fbgemm: str, *, force: bool = False) -> str:
        """The command that installs this pair with the fbgemm package of that name."""
        options = "--force-reinstall --no-deps " if force else ""
        torch = f"pip install {options}torch=={self.torch}"
        # torchrec's metadata requires the CUDA fbgemm-gpu, which conflicts with the CPU's.
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
# The pair in requirements/cpu.lock and cuda.lock, recommended without a usable torch.
PINNED_MINOR = 13
PINNED = PAIRS[PINNED_MINOR]
TESTED = ", ".join(f"2.{minor}" for minor, pair in PAIRS.items() if pair.is_tested)


@dataclass(frozen=True)
class Check:
    """One verdict: "fail" stops every command, "warn" does not; ``fix`` is a command."""

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
    """The installed packages that must fit together."""

    versions: Mapping[str, str]
    torch_cuda: str | None = None  # that torch was built for; None for a CPU build
    torchmetrics_pin: str | None = None  # that the installed torchrec requires

    @property
    def torch_minor(self) -> int:
        """The minor version of the installed torch 2; 0 if there is none."""
        return _minor(self.versions.get("torch", ""), major=2) or 0

    @property
    def pair(self) -> Pair:
        """The newest pair for a newer torch, the pinned one if no usable torch is installed."""
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
        """The command that installs a companion of the installed torch."""
        if self.torch_minor > NEWEST_MINOR:  # no companion is known, so torch changes as well
            return self.pair.pip_line(fbgemm)
        version = self.pair.torchrec if name == "torchrec" else self.pair.fbgemm
        return f"pip install --no-deps {name}=={version}"

    def replace_fbgemm(self, fbgemm: str) -> str:
        """The command that leaves only this fbgemm package in the folder that both share."""
        # Removing one of the two takes the other's files with it.
        return f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM} && {self.install(fbgemm, fbgemm)}"


@dataclass(frozen=True)
class LocalMachine:
    """The facts of the host."""

    shm_bytes: int | None  # size of /dev/shm
    has_gpu_device: bool  # attached and visible, whether torch can use it or not
    import_error: str = ""  # why torch, fbgemm or torchrec could not be imported
    gpus: tuple[tuple[str, int, int], ...] = ()  # name, total and free bytes of those torch can use


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
    # torch/version.py has `cuda: Optional[str] = '13.0'` or `= None` in every build. The version
    # string does not: the common index's CUDA build is plain 2.13.0.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    built_for = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built_for.group(1) if built_for else None


def has_gpu_device() -> bool:
    """Whether an NVIDIA GPU is attached and not hidden, without torch or the driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    # /dev/dxg is the GPU of a Linux that runs inside Windows.
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def read_machine() -> LocalMachine:
    """The facts of this host; imports torch, fbgemm and torchrec."""
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).total if shm.is_dir() else None
    try:
        import torch
        import torchrec  # noqa: F401  (loads fbgemm's libraries)
    except (ImportError, OSError, RuntimeError) as error:
        # torch only names the failed library of fbgemm; the exception's cause has the reason.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0]
        return LocalMachine(shm_bytes, has_gpu_device(), import_error=reason)
    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            gpus.append((torch.cuda.get_device_name(index), total_bytes, free_bytes))
    return LocalMachine(shm_bytes, has_gpu_device(), gpus=tuple(gpus))


def check_packages(packages: Packages, *, has_gpu: bool) -> list[Check]:
    """Check the installed packages."""
    fbgemm = packages.fbgemm(has_gpu=has_gpu)
    pin, metrics = packages.torchmetrics_pin, "torchmetrics"
    wanted = pin or packages.versions.get(metrics) or "1.0.3"
    fix = f"pip install --no-deps {metrics}=={wanted}"
    found = packages.versions.get(metrics)
    return [
        _check_torch(packages, fbgemm),
        _check_companion("torchrec", packages, fbgemm),
        _check_fbgemm(fbgemm, packages),
        _verdict(metrics, found == wanted, found, f"{wanted} for torchrec", fix),
    ]


def _verdict(name: str, is_ok: bool, found: str | None, expected: str, fix: str) -> Check:
    """A check that fails unless something is as expected."""
    if is_ok:
        return Check(name, "ok", found or "nothing")
    return Check(name, "fail", found or "nothing", expected, fix)


def _minor(version: str, *, major: int) -> int | None:
    matched = re.match(rf"{major}\.(\d+)", version)
    return int(matched.group(1)) if matched else None


def _check_torch(packages: Packages, fbgemm: str) -> Check:
    version, minor = packages.versions.get("torch"), packages.torch_minor
    fix, supported = PINNED.pip_line(fbgemm), f"2.{OLDEST_MINOR} to 2.{NEWEST_MINOR}"
    build = f"CUDA {packages.torch_cuda}" if packages.torch_cuda else "CPU"
    found = "nothing" if version is None else f"{version} ({build} build)"
    if minor > NEWEST_MINOR:
        untested = f"{supported} (hotrec has not been tested with 2.{minor})"
        return Check("torch", "warn", found, untested, packages.pair.pip_line(fbgemm))
    if minor in PAIRS and not PAIRS[minor].is_tested:
        return Check("torch", "warn", found, f"{TESTED}, which hotrec is tested with", fix)
    return _verdict("torch", minor in PAIRS, found, supported, fix)


def _check_companion(name: str, packages: Packages, fbgemm: str) -> Check:
    # Without a usable torch its companions are compared with the pinned set.
    torch_minor = packages.torch_minor if packages.torch_minor >= OLDEST_MINOR else PINNED_MINOR
    minor = torch_minor - MINOR_OFFSET
    expected = f"1.{minor}.x, which matches torch 2.{torch_minor}"
    if torch_minor > NEWEST_MINOR:
        expected += ", if there is one"
    version = packages.versions.get(name)
    is_ok = _minor(version or "", major=1) == minor
    return _verdict(name, is_ok, version, expected, packages.install(name, fbgemm))


def _check_fbgemm(needed: str, packages: Packages) -> Check:
    versions = packages.versions
    other = CUDA_FBGEMM if needed == CPU_FBGEMM else CPU_FBGEMM
    if other not in versions:
        return _check_companion(needed, packages, needed)
    build = "a CUDA build of torch on a machine with a GPU"
    expected = f"{needed} for {build if packages.torch_cuda else 'the CPU build of torch'}"
    found = f"{other} {versions[other]}"
    if needed in versions:
        found, expected = (
            f"{needed} {versions[needed]} and {found} in one folder",
            f"{needed} alone",
        )
    return Check("fbgemm", "fail", found, expected, packages.replace_fbgemm(needed))


def check_machine(machine: LocalMachine, packages: Packages) -> Iterator[Check]:
    """Check the host."""
    yield _check_import(machine, packages)
    size = None if machine.shm_bytes is None else f"{machine.shm_bytes / (1 << 30):.2f} GiB"
    if (machine.shm_bytes or 0) >= ENOUGH_SHM_BYTES:
        yield Check("/dev/shm", "ok", size or "nothing")
    else:
        fix = "mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)"
        expected = "at least 1 GiB for loader workers"
        yield Check("/dev/shm", "warn", size or "nothing", expected, fix)
    if not machine.import_error:
        yield from _check_gpus(machine, packages)


def _check_import(machine: LocalMachine, packages: Packages) -> Check:
    error, has_gpu = machine.import_error, machine.has_gpu_device
    if DRIVER_LIBRARY in error:
        expected = f"NVIDIA's driver, which fbgemm's CUDA build loads ({DRIVER_LIBRARY})"
        fix = "nvidia-smi (and install the driver, or expose it to the container)"
        fix = fix if has_gpu else packages.replace_fbgemm(CPU_FBGEMM)
    else:
        expected = "it to load"
        fix = packages.pair.pip_line(packages.fbgemm(has_gpu=has_gpu), force=True)
    return _verdict("import torchrec", not error, error or "loads", expected, fix)


def _check_gpus(machine: LocalMachine, packages: Packages) -> Iterator[Check]:
    for index, (name, total_bytes, free_bytes) in enumerate(machine.gpus):
        memory = f"{free_bytes / (1 << 30):.1f} GiB free of {total_bytes / (1 << 30):.1f} GiB"
        yield Check(f"gpu {index}", "ok", f"{name}, {memory}")
    if machine.gpus:
        return
    cuda = packages.torch_cuda
    if not machine.has_gpu_device:
        yield Check("gpu", "ok", "none; training runs on the CPU")
    elif cuda is None:
        fix = f"pip install --force-reinstall torch=={packages.pair.torch}"
        found, expected = "a GPU and the CPU build of torch", "the CUDA build, or it stays unused"
        yield Check("gpu", "warn", found, expected, fix)
    else:
        found = f"a GPU that torch, built for CUDA {cuda}, cannot use"
        fix = "nvidia-smi (and update the driver)"
        yield Check("gpu", "fail", found, f"a driver for CUDA {cuda}", fix)
