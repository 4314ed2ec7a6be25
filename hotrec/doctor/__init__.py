"""Does this machine have what hotrec needs, and if not, which line mends it.

``check_versions`` reads package metadata only (milliseconds, no torch) and is called at the start
of every command. ``diagnose`` also imports torch and looks at the machine.
"""

from __future__ import annotations

from hotrec.doctor.check import Check
from hotrec.doctor.machine import check_machine, has_gpu_device, read_machine
from hotrec.doctor.packages import check_packages, read_packages

__all__ = ["Check", "check_versions", "diagnose"]


def diagnose() -> list[Check]:
    """Look at packages and machine; imports torch and torchrec (seconds)."""
    packages = read_packages()
    has_gpu = has_gpu_device()
    checks = check_packages(packages, has_gpu=has_gpu)
    return checks + check_machine(read_machine(), packages)


def check_versions() -> None:
    """Refuse packages that do not fit together; metadata only, milliseconds.

    Raises:
        RuntimeError: naming every wrong package and the pip line that mends it.
    """
    checks = check_packages(read_packages(), has_gpu=has_gpu_device())
    failed = [check.message() for check in checks if check.status == "fail"]
    if failed:
        raise RuntimeError("\n".join(failed))
