"""The doctor's verdicts on made-up package sets and machines, and its reading of real metadata."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.doctor import (
    MINOR_OFFSET,
    PAIRS,
    Check,
    LocalMachine,
    Packages,
    check_machine,
    check_packages,
    check_versions,
    diagnose,
    has_gpu_device,
    read_packages,
)

REPOSITORY = Path(__file__).parents[2]
CPU_SET = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchmetrics": "1.0.3",
}
BOTH_FBGEMM = "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 in one folder"
CUDA_SET = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "torchmetrics": "1.0.3"}
OLD_CUDA_SET = CUDA_SET | {
    "torch": "2.11.0a0+a6c236b9fd",
    "torchrec": "1.6.1",
    "fbgemm-gpu": "1.6.0",
}
NEW_CPU_SET = CPU_SET | {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}
MACHINE = LocalMachine(shm_bytes=16 << 30, has_gpu_device=False)


def packages(
    versions: dict[str, str], *, cuda: str | None = None, pin: str | None = "1.0.3"
) -> Packages:
    return Packages(versions, torch_cuda=cuda, torchmetrics_pin=pin)


def problems(checks: Iterable[Check]) -> dict[str, tuple[str, str, str]]:
    return {c.name: (c.status, c.found, c.fix) for c in checks if c.status != "ok"}


def without(versions: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in versions.items() if key != name}


@pytest.mark.parametrize(
    ("installed", "has_gpu"),
    [
        (packages(CPU_SET), False),
        (packages(CUDA_SET, cuda="13.0"), True),
        # A login node or an image build: the CUDA set without a GPU.
        (packages(CUDA_SET, cuda="13.0"), False),
        # torch's CUDA build used on the CPU.
        (packages(CPU_SET | {"torch": "2.13.0"}, cuda="13.0"), False),
        (packages(OLD_CUDA_SET, cuda="13.0"), True),
        (packages(NEW_CPU_SET), False),
        (packages(CPU_SET | {"torchrec": "1.8.3", "fbgemm-gpu-cpu": "1.8.1+cpu"}), False),
        (packages(CPU_SET, pin=None), False),
    ],
)
def test_sets_that_fit_are_accepted(installed: Packages, has_gpu: bool) -> None:
    assert problems(check_packages(installed, has_gpu=has_gpu)) == {}


PINNED = "pip install torch==2.13.0 && pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0"
NEWEST = "pip install torch==2.14.1 && pip install --no-deps torchrec==1.9.2 fbgemm-gpu-cpu==1.9.0"
REMOVE = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
SWAP = f"{REMOVE}pip install --no-deps "


def wrong(name: str, found: str, release: str) -> dict[str, tuple[str, str, str]]:
    """A failed check that another release of the same package fixes."""
    return {name: ("fail", found, f"pip install --no-deps {name}=={release}")}


def warned(version: str, fix: str) -> dict[str, tuple[str, str, str]]:
    return {"torch": ("warn", f"{version} (CPU build)", fix)}


# Installed versions, torch's CUDA, whether there is a GPU, and the checks that are not ok.
MISFITS = {
    "torchrec of another torch": (
        *(CPU_SET | {"torchrec": "1.7.0"}, None, False),
        wrong("torchrec", "1.7.0", "1.8.0"),
    ),
    "torch 2.11 with the new pair": (
        *(CUDA_SET | {"torch": "2.11.0"}, "13.0", True),
        wrong("torchrec", "1.8.0", "1.6.1") | wrong("fbgemm-gpu", "1.8.0", "1.6.0"),
    ),
    "both fbgemm, CPU torch": (
        *(CPU_SET | {"fbgemm-gpu": "1.8.0"}, None, False),
        {"fbgemm": ("fail", BOTH_FBGEMM, SWAP + "fbgemm-gpu-cpu==1.8.0")},
    ),
    "CPU fbgemm, CUDA torch, a GPU": (
        *(CPU_SET | {"torch": "2.13.0"}, "13.0", True),
        {"fbgemm": ("fail", "fbgemm-gpu-cpu 1.8.0", SWAP + "fbgemm-gpu==1.8.0")},
    ),
    "CUDA fbgemm, CPU torch": (
        *(CUDA_SET | {"torch": "2.13.0+cpu"}, None, False),
        {"fbgemm": ("fail", "fbgemm-gpu 1.8.0", SWAP + "fbgemm-gpu-cpu==1.8.0")},
    ),
    "torchmetrics not as pinned": (
        *(CPU_SET | {"torchmetrics": "1.8.2"}, None, False),
        wrong("torchmetrics", "1.8.2", "1.0.3"),
    ),
    "torch too old: companions are judged by the pinned set": (
        *(CPU_SET | {"torch": "2.10.0"}, None, False),
        {"torch": ("fail", "2.10.0 (CPU build)", PINNED)},
    ),
    "a pair that is not tested, with the pinned companions": (
        *(CPU_SET | {"torch": "2.12.1"}, None, False),
        warned("2.12.1", PINNED)
        | wrong("torchrec", "1.8.0", "1.7.0")
        | wrong("fbgemm-gpu-cpu", "1.8.0", "1.7.0"),
    ),
    # torchrec 1.10 is on no index: nothing that does not exist may be recommended.
    "newer than all pairs": (
        *(NEW_CPU_SET | {"torch": "2.15.0"}, None, False),
        warned("2.15.0", NEWEST)
        | {"torchrec": ("fail", "1.9.2", NEWEST), "fbgemm-gpu-cpu": ("fail", "1.9.0", NEWEST)},
    ),
    "newer than all pairs, the other fbgemm": (
        *(CUDA_SET | {"torch": "2.15.0"}, None, False),
        warned("2.15.0", NEWEST)
        | {
            "torchrec": ("fail", "1.8.0", NEWEST),
            "fbgemm": ("fail", "fbgemm-gpu 1.8.0", REMOVE + NEWEST),
        },
    ),
    "newer than all pairs, but a pair by its numbers": (
        *(CPU_SET | {"torch": "2.15.0", "torchrec": "1.10.0", "fbgemm-gpu-cpu": "1.10.0"},),
        *(None, False),
        warned("2.15.0", NEWEST),
    ),
    "nothing, a GPU": (
        *({}, None, True),
        {"torch": ("fail", "nothing", PINNED.replace("gpu-cpu", "gpu"))}
        | wrong("torchrec", "nothing", "1.8.0")
        | wrong("fbgemm-gpu", "nothing", "1.8.0")
        | wrong("torchmetrics", "nothing", "1.0.3"),
    ),
}


@pytest.mark.parametrize(("versions", "cuda", "has_gpu", "expected"), MISFITS.values(), ids=MISFITS)
def test_sets_that_do_not_fit_are_reported_with_a_fix(
    versions: dict[str, str],
    cuda: str | None,
    has_gpu: bool,
    expected: dict[str, tuple[str, str, str]],
) -> None:
    assert problems(check_packages(packages(versions, cuda=cuda), has_gpu=has_gpu)) == expected


def test_torchmetrics_is_the_one_that_torchrec_requires() -> None:
    found = problems(check_packages(packages(CPU_SET, pin="1.9.0"), has_gpu=False))
    assert found == wrong("torchmetrics", "1.0.3", "1.9.0")


def test_pairs_are_numbered_as_released() -> None:
    for minor, pair in PAIRS.items():
        assert pair.torch.startswith(f"2.{minor}.")
        for release in (pair.torchrec, pair.fbgemm):
            assert release.startswith(f"1.{minor - MINOR_OFFSET}.")


def write_fake_packages(folder: Path, versions: dict[str, str], cuda: str | None) -> None:
    for name, version in versions.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        needs = "Requires-Dist: torchmetrics==1.0.3\n" if name == "torchrec" else ""
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        (info / "METADATA").write_text(text)
    (folder / "torch").mkdir()
    # A wrong torch may fail at import; the check must not need it.
    (folder / "torch" / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    line = f"cuda: Optional[str] = {cuda!r}\n"
    (folder / "torch" / "version.py").write_text("from typing import Optional\n" + line)


def run_check_versions(folder: Path) -> subprocess.CompletedProcess[str]:
    # -S: this environment's own packages are out of sight.
    code = "from hotrec.doctor import check_versions; check_versions()"
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_check_versions_reads_metadata_without_importing_torch(tmp_path: Path) -> None:
    write_fake_packages(tmp_path / "good", CPU_SET, cuda=None)
    result = run_check_versions(tmp_path / "good")
    assert (result.returncode, result.stderr) == (0, "")
    write_fake_packages(tmp_path / "bad", CUDA_SET | {"fbgemm-gpu-cpu": "1.8.0"}, cuda="13.0")
    result = run_check_versions(tmp_path / "bad")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"RuntimeError: fbgemm: expected fbgemm-gpu-cpu alone, got {BOTH_FBGEMM}. "
        f"Run: {SWAP}fbgemm-gpu-cpu==1.8.0"
    )


def test_this_environment_fits() -> None:
    check_versions()
    assert [check for check in diagnose() if check.status == "fail"] == []
    assert read_packages().torchmetrics_pin == "1.0.3"


REINSTALL = "pip install --force-reinstall --no-deps "


@pytest.mark.parametrize(
    ("machine", "installed", "expected"),
    [
        (MACHINE, CPU_SET, None),
        (
            replace(MACHINE, shm_bytes=64 << 20),
            CPU_SET,
            ("/dev/shm", "warn", "0.06 GiB", "mount -o remount,size=8G /dev/shm (in a container: "),
        ),
        (
            replace(MACHINE, import_error="OSError: undefined symbol: _ZN3c10"),
            *(CPU_SET, ("import torchrec", "fail", "OSError: undefined symbol: _ZN3c10")),
        ),
        # A host that has to stay with its torch, such as 2.11, need not update it.
        (
            replace(MACHINE, import_error="OSError: undefined symbol", has_gpu_device=True),
            OLD_CUDA_SET,
            (
                *("import torchrec", "fail", "OSError: undefined symbol"),
                f"{REINSTALL}torch==2.11.0 torchrec==1.6.1 fbgemm-gpu==1.6.0",
            ),
        ),
    ],
)
def test_hosts_are_judged(
    machine: LocalMachine, installed: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    cuda = "13.0" if "fbgemm-gpu" in installed else None
    found = problems(check_machine(machine, packages(installed, cuda=cuda)))
    if expected is None:
        assert found == {}
    else:
        name, status, what, *fix = expected
        assert list(found) == [name]
        assert found[name][:2] == (status, what)
        assert found[name][2].startswith(fix[0] if fix else REINSTALL)


def test_a_cuda_fbgemm_without_a_driver() -> None:
    """Not a broken installation: the same packages again would not load either."""
    missing = (
        "OSError: libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
    )
    cuda = packages(CUDA_SET, cuda="13.0")
    login_node = problems(check_machine(replace(MACHINE, import_error=missing), cuda))
    assert login_node["import torchrec"] == ("fail", missing, SWAP + "fbgemm-gpu-cpu==1.8.0")
    container = replace(MACHINE, import_error=missing, has_gpu_device=True)
    assert problems(check_machine(container, cuda))["import torchrec"][2].startswith("nvidia-smi")


@pytest.mark.slow
def test_the_cause_of_a_failed_import_is_reported(tmp_path: Path) -> None:
    """torch raises one error for any library of fbgemm; the one behind it says why."""
    (tmp_path / "torchrec.py").write_text(
        "raise OSError('Could not load this library') from OSError('no libx.so')\n"
    )
    code = "from hotrec.doctor import read_machine; print(read_machine().import_error)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "OSError: no libx.so\n", done.stderr


def test_gpus_are_judged() -> None:
    gpu = ("NVIDIA H200", 139 << 30, 138 << 30)
    cuda = packages(CUDA_SET, cuda="13.0")
    host = replace(MACHINE, has_gpu_device=True)
    good = list(check_machine(replace(host, gpus=(gpu,)), cuda))
    assert problems(good) == {}
    assert [c.found for c in good if c.name == "gpu 0"] == [
        "NVIDIA H200, 138.0 GiB free of 139.0 GiB"
    ]
    old_driver = problems(check_machine(host, cuda))
    assert old_driver["gpu"][:2] == ("fail", "a GPU that torch, built for CUDA 13.0, cannot use")
    unused = problems(check_machine(host, packages(CPU_SET)))
    assert unused["gpu"][:2] == ("warn", "a GPU and the CPU build of torch")


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_gpu_device()
