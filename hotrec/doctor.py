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
TORCHMETRICS = "1.0.3"  # which every torchrec requires
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

    def pip_line(self, fbgemm: str) -> str:
        """The command that installs this pair alone, with the fbgemm package of that name."""
        # Both fbgemm packages share a folder. torchrec's metadata requires that of CUDA.
        return (
            f"pip uninstall -y {CUDA_FBGEMM} {CPU_FBGEMM} && pip install torch=={self.torch} && "
            f"pip install --no-deps torchrec=={self.torchrec} {fbgemm}=={self.fbgemm} "
            f"torchmetrics=={TORCHMETRICS}"
        )


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


Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One verdict: "fail" stops every command, "warn" does not; ``fix`` is a command."""

    name: str
    status: Status
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
        is_cuda_alone = CUDA_FBGEMM in self.versions and CPU_FBGEMM not in self.versions
        wants_cuda = has_gpu if "torch" not in self.versions else self.torch_cuda is not None
        return CUDA_FBGEMM if wants_cuda and (has_gpu or is_cuda_alone) else CPU_FBGEMM


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
    packages, has_gpu = read_packages(), has_gpu_device()
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).total if shm.is_dir() else 0
    error, num_gpus = import_torchrec()
    checks = check_packages(packages, has_gpu=has_gpu)
    machine = check_machine(
        packages, has_gpu=has_gpu, num_gpus=num_gpus, shm_bytes=shm_bytes, import_error=error
    )
    return [*checks, *machine]


def read_packages() -> Packages:
    """The versions in this environment, from metadata and without importing them."""
    versions = {}
    for name in READ:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Packages(versions, _read_torch_cuda())


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


def import_torchrec() -> tuple[str, int]:
    """Why torch, fbgemm or torchrec cannot be imported, and the GPUs that torch can use."""
    try:
        import torch
        import torchrec  # noqa: F401  (loads fbgemm's libraries)
    except (ImportError, OSError, RuntimeError) as error:
        # torch only names the failed library of fbgemm; the exception's cause has the reason.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{type(cause).__name__}: {cause}".splitlines()[0], 0
    return "", torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_packages(packages: Packages, *, has_gpu: bool) -> list[Check]:
    """Check the installed packages."""
    versions, torch_minor = packages.versions, packages.torch_minor
    fbgemm = packages.fbgemm(has_gpu=has_gpu)
    fix = packages.pair.pip_line(fbgemm)
    build = f"CUDA {packages.torch_cuda}" if packages.torch_cuda else "CPU"
    found = f"{versions['torch']} ({build} build)" if "torch" in versions else "nothing"
    is_usable = torch_minor >= OLDEST_MINOR
    is_tested = torch_minor in PAIRS and PAIRS[torch_minor].is_tested
    status: Status = "fail" if not is_usable else "ok" if is_tested else "warn"
    checks = [Check("torch", status, found, f"{TESTED}, which hotrec is tested with", fix)]
    # Without a usable torch its companions are compared with the pinned set.
    minor = (torch_minor if is_usable else PINNED_MINOR) - MINOR_OFFSET
    other = CPU_FBGEMM if fbgemm == CUDA_FBGEMM else CUDA_FBGEMM
    for name in ("torchrec", fbgemm):
        found = versions.get(name, "nothing")
        expected = f"1.{minor}.x, which matches torch 2.{minor + MINOR_OFFSET}"
        is_ok = _minor(found, major=1) == minor
        if name == fbgemm and other in versions:
            is_ok, found, expected = False, f"{found}, and {other}", f"{expected}, alone"
        checks.append(Check(name, "ok" if is_ok else "fail", found, expected, fix))
    found = versions.get("torchmetrics", "nothing")
    status = "ok" if found == TORCHMETRICS else "fail"
    return [*checks, Check("torchmetrics", status, found, f"{TORCHMETRICS} for torchrec", fix)]


def _minor(version: str, *, major: int) -> int | None:
    matched = re.match(rf"{major}\.(\d+)", version)
    return int(matched.group(1)) if matched else None


def check_machine(
    packages: Packages, *, has_gpu: bool, num_gpus: int, shm_bytes: int, import_error: str
) -> Iterator[Check]:
    """Check the host.

    Args:
        packages: The installed packages.
        has_gpu: Whether a GPU is attached and visible, whether torch can use it or not.
        num_gpus: The number of GPUs that torch can use.
        shm_bytes: The size of /dev/shm.
        import_error: Why torch, fbgemm or torchrec cannot be imported; empty if they can.
    """
    expected, fix = "it to load", packages.pair.pip_line(packages.fbgemm(has_gpu=has_gpu))
    if DRIVER_LIBRARY in import_error:
        expected = f"NVIDIA's driver, which fbgemm's CUDA build loads ({DRIVER_LIBRARY})"
        cpu_alone = packages.pair.pip_line(CPU_FBGEMM)
        fix = "nvidia-smi (and install or expose the driver)" if has_gpu else cpu_alone
    status: Status = "fail" if import_error else "ok"
    yield Check("import torchrec", status, import_error or "loads", expected, fix)
    yield Check(
        "/dev/shm",
        "ok" if shm_bytes >= ENOUGH_SHM_BYTES else "warn",
        f"{shm_bytes / (1 << 30):.2f} GiB",
        "at least 1 GiB for loader workers",
        "mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)",
    )
    cuda = packages.torch_cuda
    if import_error or num_gpus or not has_gpu:
        found = f"{num_gpus} usable" if num_gpus else "none; training runs on the CPU"
        yield Check("gpu", "ok", "not checked" if import_error else found)
    elif cuda is None:
        fix = f"pip install --force-reinstall torch=={packages.pair.torch}"
        found, expected = "a GPU and the CPU build of torch", "the CUDA build, or it stays unused"
        yield Check("gpu", "warn", found, expected, fix)
    else:
        found = f"a GPU that torch, built for CUDA {cuda}, cannot use"
        fix = "nvidia-smi (and update the driver)"
        yield Check("gpu", "fail", found, f"a driver for CUDA {cuda}", fix)
