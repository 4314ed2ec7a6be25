"""The doctor's verdicts on made-up package sets and machines, and its reading of real metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hotrec.doctor import (
    Check,
    Packages,
    check_machine,
    check_packages,
    check_versions,
    diagnose,
)

REPOSITORY = Path(__file__).parents[2]
OURS = {"torchrec": "1.8.0", "torchmetrics": "1.0.3"}
CPU_SET = {**OURS, "torch": "2.13.0+cpu", "fbgemm-gpu-cpu": "1.8.0"}
CUDA_SET = {**OURS, "torch": "2.13.0", "fbgemm-gpu": "1.8.0"}
OLD_SET = {**CUDA_SET, "torch": "2.11.0a0+a6c236b9fd", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"}
NEW_SET = {**CPU_SET, "torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}
MACHINE = {"has_gpu": False, "num_gpus": 0, "shm_bytes": 16 << 30, "import_error": ""}
PINNED = "torch==2.13.0 torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 torchmetrics==1.0.3"
CUDA = PINNED.replace("-cpu", "")
OLD = "torch==2.11.0 torchrec==1.6.1 fbgemm-gpu==1.6.0 torchmetrics==1.0.3"
NEWEST = "torch==2.14.1 torchrec==1.9.2 fbgemm-gpu-cpu==1.9.0 torchmetrics==1.0.3"


def packages(versions: dict[str, str], cuda: str | None = None) -> Packages:
    is_cuda = "fbgemm-gpu" in versions and "+cpu" not in versions.get("torch", "")
    return Packages(versions, torch_cuda=cuda or ("13.0" if is_cuda else None))


def problems(checks: Iterable[Check]) -> dict[str, tuple[str, set[str]]]:
    """The status of each check that is not ok, and the releases that its fix installs."""
    return {
        check.name: (check.status, {word for word in check.fix.split() if "==" in word})
        for check in checks
        if check.status != "ok"
    }


def fails(names: str, installs: str) -> dict[str, tuple[str, set[str]]]:
    return {name: ("fail", set(installs.split())) for name in names.split(", ")}


# Versions that differ from a set's, whether there is a GPU, and what is not ok.
SETS = {
    "as pinned": (CPU_SET, False, {}),
    "for a GPU, and a GPU": (CUDA_SET, True, {}),
    "an older pair": (OLD_SET, True, {}),
    "a newer pair": (NEW_SET, False, {}),
    "companions of another torch": (
        *({**CUDA_SET, "torch": "2.11.0"}, True),
        fails("torchrec, fbgemm-gpu", OLD),
    ),
    "both fbgemm": ({**CPU_SET, "fbgemm-gpu": "1.8.0"}, False, fails("fbgemm-gpu-cpu", PINNED)),
    "fbgemm of CUDA for torch of the CPU": (
        *({**CUDA_SET, "torch": "2.13.0+cpu"}, False),
        fails("fbgemm-gpu-cpu", PINNED),
    ),
    "torchmetrics": ({**CPU_SET, "torchmetrics": "1.8.2"}, False,
                     fails("torchmetrics", PINNED)),
    "torch too old": ({**CPU_SET, "torch": "2.10.0"}, False, fails("torch", PINNED)),
    # torchrec 1.10 is on no index: nothing that does not exist may be recommended.
    "newer than all pairs": (
        *({**NEW_SET, "torch": "2.15.0"}, False),
        {"torch": ("warn", set(NEWEST.split()))}
        | fails("torchrec, fbgemm-gpu-cpu", NEWEST),
    ),
    "nothing": (
        *({}, False),
        fails("torch, torchrec, fbgemm-gpu-cpu, torchmetrics", PINNED),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("versions", "has_gpu", "expected"), SETS.values(), ids=SETS)
def test_sets_are_judged(
    versions: dict[str, str], has_gpu: bool, expected: dict[str, tuple[str, set[str]]]
) -> None:
    assert problems(check_packages(packages(versions), has_gpu=has_gpu)) == expected


def test_the_cpu_build_of_fbgemm_does_not_use_a_gpu() -> None:
    mixed = packages({**CPU_SET, "torch": "2.13.0"}, cuda="13.0")
    assert problems(check_packages(mixed, has_gpu=False)) == {}
    found = problems(check_packages(mixed, has_gpu=True))
    assert found == fails("fbgemm-gpu", CUDA)


def write_packages(folder: Path, versions: dict[str, str], cuda: str | None) -> None:
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
    (folder / "torch").mkdir()
    # A wrong torch may fail at import; the check must not need it.
    (folder / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    (folder / "torch" / "version.py").write_text(f"cuda: str | None = {cuda!r}\n")


def run_code(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *options, "-c", f"from hotrec.doctor import *; {code}"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )


def test_check_versions_reads_metadata_without_importing_torch(tmp_path: Path) -> None:
    both = {**CUDA_SET, "fbgemm-gpu-cpu": "1.8.0"}
    for name, versions, cuda in (("good", CPU_SET, None), ("bad", both, "13.0")):
        write_packages(tmp_path / name, versions, cuda)
        # -S: this environment's own packages are out of sight.
        done = run_code(tmp_path / name, "check_versions()", "-S")
        assert done.returncode == (name == "bad")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: fbgemm-gpu-cpu: expected 1.8.x, which ")


@pytest.mark.slow
def test_this_environment_fits() -> None:
    check_versions()
    assert [check for check in diagnose() if check.status == "fail"] == []


GPU = {**MACHINE, "has_gpu": True}
BROKEN, DRIVER = (
    "OSError: undefined symbol",
    "OSError: libnvidia-ml.so.1: cannot open shared object",
)


@pytest.mark.parametrize(
    ("machine", "installed", "expected"),
    [
        (MACHINE, CPU_SET, {}),
        ({**GPU, "num_gpus": 1}, CUDA_SET, {}),
        ({**MACHINE, "shm_bytes": 64 << 20}, CPU_SET, {"/dev/shm": ("warn", set())}),
        (GPU, CPU_SET, {"gpu": ("warn", {"torch==2.13.0"})}),
        # A host that has to stay with its torch, such as 2.11, need not update it.
        (
            *({**MACHINE, "import_error": BROKEN}, OLD_SET),
            fails("import torchrec", OLD),
        ),
        # Not a broken installation: the same packages again would not load either.
        (
            *({**MACHINE, "import_error": DRIVER}, CUDA_SET),
            fails("import torchrec", PINNED),
        ),
    ],
)
def test_hosts_are_judged(
    machine: dict[str, Any], installed: dict[str, str], expected: dict[str, tuple[str, set[str]]]
) -> None:
    assert problems(check_machine(packages(installed), **machine)) == expected


@pytest.mark.slow
def test_the_cause_of_a_failed_import_is_reported(tmp_path: Path) -> None:
    """torch raises one error for any library of fbgemm; the one behind it says why."""
    text = "raise OSError('Could not load this library') from OSError('no libx.so')\n"
    (tmp_path / "torchrec.py").write_text(text)
    done = run_code(tmp_path, "print(import_torchrec()[0])")
    assert done.stdout == "OSError: no libx.so\n", done.stderr
