"""The doctor's verdicts on made-up package sets and machines, and its reading of real metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.doctor import check_versions, diagnose
from hotrec.doctor.check import Check
from hotrec.doctor.machine import GIB, Gpu, Machine, check_machine, has_gpu_device, read_memory
from hotrec.doctor.packages import Packages, check_packages, read_packages
from hotrec.doctor.pairs import MINOR_OFFSET, PAIRS

REPOSITORY = Path(__file__).parents[2]
CPU_SET = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchmetrics": "1.0.3",
}
CUDA_SET = {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "torchmetrics": "1.0.3"}
OLD_CUDA_SET = CUDA_SET | {
    "torch": "2.11.0a0+a6c236b9fd",
    "torchrec": "1.6.1",
    "fbgemm-gpu": "1.6.0",
}
NEW_CPU_SET = CPU_SET | {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}
MACHINE = Machine(
    shm_bytes=16 * GIB,
    open_files=65536,
    open_files_most=65536,
    memory_bytes=64 * GIB,
    memory_free_bytes=32 * GIB,
    host_name="trainer-0",
    host_has_address=True,
    has_gpu_device=False,
)


def packages(
    versions: dict[str, str],
    *,
    cuda: str | None = None,
    python: tuple[int, int] = (3, 12),
    pin: str | None = "1.0.3",
) -> Packages:
    return Packages(python=python, versions=versions, torch_cuda=cuda, torchmetrics_pin=pin)


def problems(checks: list[Check]) -> dict[str, tuple[str, str, str]]:
    return {c.name: (c.status, c.found, c.mend) for c in checks if c.status != "ok"}


def without(versions: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in versions.items() if key != name}


@pytest.mark.parametrize(
    ("installed", "has_gpu"),
    [
        (packages(CPU_SET), False),
        (packages(CPU_SET, python=(3, 11)), False),
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
SWAP = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && pip install --no-deps "


@pytest.mark.parametrize(
    ("installed", "has_gpu", "expected"),
    [
        pytest.param(
            packages(CPU_SET | {"torchrec": "1.7.0"}),
            False,
            {"torchrec": ("fail", "1.7.0", "pip install --no-deps torchrec==1.8.0")},
            id="torchrec of another torch",
        ),
        pytest.param(
            packages(CPU_SET | {"fbgemm-gpu-cpu": "1.7.0"}),
            False,
            {"fbgemm-gpu-cpu": ("fail", "1.7.0", "pip install --no-deps fbgemm-gpu-cpu==1.8.0")},
            id="fbgemm of another torch",
        ),
        pytest.param(
            packages(CUDA_SET | {"torch": "2.11.0"}, cuda="13.0"),
            True,
            {
                "torchrec": ("fail", "1.8.0", "pip install --no-deps torchrec==1.6.1"),
                "fbgemm-gpu": ("fail", "1.8.0", "pip install --no-deps fbgemm-gpu==1.6.0"),
            },
            id="torch 2.11 with the new pair",
        ),
        pytest.param(
            packages(CPU_SET | {"fbgemm-gpu": "1.8.0"}),
            False,
            {
                "fbgemm": (
                    "fail",
                    "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 in one folder",
                    SWAP + "fbgemm-gpu-cpu==1.8.0",
                )
            },
            id="both, CPU torch",
        ),
        pytest.param(
            packages(CUDA_SET | {"fbgemm-gpu-cpu": "1.8.0"}, cuda="13.0"),
            True,
            {
                "fbgemm": (
                    "fail",
                    "fbgemm-gpu 1.8.0 and fbgemm-gpu-cpu 1.8.0 in one folder",
                    SWAP + "fbgemm-gpu==1.8.0",
                )
            },
            id="both, CUDA torch",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "2.13.0"}, cuda="13.0"),
            True,
            {"fbgemm": ("fail", "fbgemm-gpu-cpu 1.8.0", SWAP + "fbgemm-gpu==1.8.0")},
            id="CPU fbgemm, CUDA torch, a GPU",
        ),
        pytest.param(
            packages(CUDA_SET | {"torch": "2.13.0+cpu"}),
            False,
            {"fbgemm": ("fail", "fbgemm-gpu 1.8.0", SWAP + "fbgemm-gpu-cpu==1.8.0")},
            id="CUDA fbgemm, CPU torch",
        ),
        pytest.param(
            packages(CPU_SET | {"torchmetrics": "1.8.2"}),
            False,
            {"torchmetrics": ("fail", "1.8.2", "pip install --no-deps torchmetrics==1.0.3")},
            id="torchmetrics not as pinned",
        ),
        pytest.param(
            packages(CPU_SET | {"torchmetrics": "1.0.3"}, pin="1.9.0"),
            False,
            {"torchmetrics": ("fail", "1.0.3", "pip install --no-deps torchmetrics==1.9.0")},
            id="torchrec pins another torchmetrics",
        ),
        pytest.param(
            packages(CPU_SET, python=(3, 10)),
            False,
            {"python": ("fail", "3.10", "python3.12 -m venv .venv")},
            id="old python",
        ),
        pytest.param(
            packages(CPU_SET, python=(3, 14)),
            False,
            {"python": ("fail", "3.14", "python3.12 -m venv .venv")},
            id="new python",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "2.10.0"}),
            False,
            {"torch": ("fail", "2.10.0 (CPU build)", PINNED)},
            id="torch too old: companions are judged by the pinned set",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "3.0.0"}),
            False,
            {"torch": ("fail", "3.0.0 (CPU build)", PINNED)},
            id="another torch altogether",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.7.0"}),
            False,
            {"torch": ("warn", "2.12.1 (CPU build)", PINNED)},
            id="a pair that is not tested",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "2.12.1"}),
            False,
            {
                "torch": ("warn", "2.12.1 (CPU build)", PINNED),
                "torchrec": ("fail", "1.8.0", "pip install --no-deps torchrec==1.7.0"),
                "fbgemm-gpu-cpu": ("fail", "1.8.0", "pip install --no-deps fbgemm-gpu-cpu==1.7.0"),
            },
            id="torch 2.12 with the pinned companions",
        ),
        pytest.param(
            packages(CPU_SET | {"torch": "2.14.1"}),
            False,
            {
                "torchrec": ("fail", "1.8.0", "pip install --no-deps torchrec==1.9.2"),
                "fbgemm-gpu-cpu": ("fail", "1.8.0", "pip install --no-deps fbgemm-gpu-cpu==1.9.0"),
            },
            id="torch 2.14 with the pinned companions",
        ),
        # torchrec 1.10 is on no index: nothing that does not exist may be recommended.
        pytest.param(
            packages(NEW_CPU_SET | {"torch": "2.15.0"}),
            False,
            {
                "torch": ("warn", "2.15.0 (CPU build)", NEWEST),
                "torchrec": ("fail", "1.9.2", NEWEST),
                "fbgemm-gpu-cpu": ("fail", "1.9.0", NEWEST),
            },
            id="newer than all pairs",
        ),
        pytest.param(
            packages(CUDA_SET | {"torch": "2.15.0+cpu"}),
            False,
            {
                "torch": ("warn", "2.15.0+cpu (CPU build)", NEWEST),
                "torchrec": ("fail", "1.8.0", NEWEST),
                "fbgemm": (
                    "fail",
                    "fbgemm-gpu 1.8.0",
                    f"pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {NEWEST}",
                ),
            },
            id="newer than all pairs, the other fbgemm",
        ),
        pytest.param(
            packages(
                CPU_SET | {"torch": "2.15.0", "torchrec": "1.10.0", "fbgemm-gpu-cpu": "1.10.0"}
            ),
            False,
            {"torch": ("warn", "2.15.0 (CPU build)", NEWEST)},
            id="newer than all pairs, but a pair by its numbers",
        ),
        pytest.param(
            packages(without(CPU_SET, "torchrec"), pin=None),
            False,
            {"torchrec": ("fail", "nothing", "pip install --no-deps torchrec==1.8.0")},
            id="no torchrec",
        ),
        pytest.param(
            packages({}, pin=None),
            True,
            {
                "torch": ("fail", "nothing", PINNED.replace("gpu-cpu", "gpu")),
                "torchrec": ("fail", "nothing", "pip install --no-deps torchrec==1.8.0"),
                "fbgemm-gpu": ("fail", "nothing", "pip install --no-deps fbgemm-gpu==1.8.0"),
                "torchmetrics": ("fail", "nothing", "pip install --no-deps torchmetrics==1.0.3"),
            },
            id="nothing, a GPU",
        ),
    ],
)
def test_sets_that_do_not_fit_are_told_with_their_pip_line(
    installed: Packages, has_gpu: bool, expected: dict[str, tuple[str, str, str]]
) -> None:
    assert problems(check_packages(installed, has_gpu=has_gpu)) == expected


def test_message_names_thing_expected_found_and_line() -> None:
    installed = packages(CPU_SET | {"fbgemm-gpu-cpu": "1.7.0"})
    [failed] = [c for c in check_packages(installed, has_gpu=False) if c.status == "fail"]
    assert failed.message() == (
        "fbgemm-gpu-cpu: expected 1.8.x, which goes with torch 2.13, got 1.7.0. "
        "Run: pip install --no-deps fbgemm-gpu-cpu==1.8.0"
    )


def test_a_torch_that_is_too_new_is_said_to_be_untested() -> None:
    new = CPU_SET | {"torch": "2.15.0", "torchrec": "1.9.2"}
    found = {check.name: check for check in check_packages(packages(new), has_gpu=False)}
    assert found["torch"].expected == "2.11 to 2.14 (hotrec has not been tested with 2.15)"
    assert found["torchrec"].expected == ("1.10.x, which goes with torch 2.15, if there is one")


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
    write_fake_packages(tmp_path, CPU_SET, cuda=None)
    result = run_check_versions(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


def test_check_versions_refuses_both_fbgemm_packages(tmp_path: Path) -> None:
    write_fake_packages(tmp_path, CUDA_SET | {"fbgemm-gpu-cpu": "1.8.0"}, cuda="13.0")
    result = run_check_versions(tmp_path)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "RuntimeError: fbgemm: expected fbgemm-gpu-cpu alone, got fbgemm-gpu-cpu 1.8.0 and "
        f"fbgemm-gpu 1.8.0 in one folder. Run: {SWAP}fbgemm-gpu-cpu==1.8.0"
    )


def test_this_environment_fits() -> None:
    check_versions()
    assert [check for check in diagnose() if check.status == "fail"] == []
    assert read_packages().torchmetrics_pin == "1.0.3"


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        pytest.param(MACHINE, {}, id="a good CPU host"),
        pytest.param(
            replace(MACHINE, shm_bytes=64 << 20),
            {
                "/dev/shm": (
                    "warn",
                    "64 MiB",
                    "mount -o remount,size=8G /dev/shm (in a container: docker run --shm-size=8g)",
                )
            },
            id="docker's default shm",
        ),
        pytest.param(
            replace(MACHINE, open_files=1024, open_files_most=524288),
            {"open files": ("warn", "1024", "ulimit -n 65536")},
            id="soft limit",
        ),
        pytest.param(
            replace(MACHINE, open_files=1024, open_files_most=8192),
            {"open files": ("warn", "1024", "ulimit -n 8192")},
            id="soft limit, low hard limit",
        ),
        pytest.param(
            replace(MACHINE, open_files=1024, open_files_most=1024),
            {
                "open files": (
                    "warn",
                    "1024",
                    "docker run --ulimit nofile=65536, or nofile in /etc/security/limits.conf",
                )
            },
            id="hard limit",
        ),
        pytest.param(
            replace(MACHINE, memory_free_bytes=2 * GIB),
            {
                "host memory": (
                    "warn",
                    "2.0 GiB free of 64.0 GiB",
                    "ps aux --sort -rss | head, and stop what is not needed",
                )
            },
            id="little memory",
        ),
        pytest.param(
            replace(MACHINE, host_has_address=False),
            {
                "host name": (
                    "warn",
                    "trainer-0 without one",
                    "echo '127.0.1.1 trainer-0' >> /etc/hosts, "
                    "or launch/torchrun.sh with --local-addr",
                )
            },
            id="the host's name has no address",
        ),
        pytest.param(
            replace(MACHINE, has_gloo=False),
            {
                "gloo": (
                    "fail",
                    "not in this build",
                    "pip install --force-reinstall torch==2.13.0",
                )
            },
            id="no gloo",
        ),
        pytest.param(
            replace(MACHINE, import_error="OSError: undefined symbol: _ZN3c10"),
            {
                "import torchrec": (
                    "fail",
                    "OSError: undefined symbol: _ZN3c10",
                    "pip install --force-reinstall --no-deps torch==2.13.0 torchrec==1.8.0 "
                    "fbgemm-gpu-cpu==1.8.0",
                )
            },
            id="libraries do not load",
        ),
    ],
)
def test_hosts_are_judged(machine: Machine, expected: dict[str, tuple[str, str, str]]) -> None:
    assert problems(check_machine(machine, packages(CPU_SET))) == expected


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


def test_the_cause_of_a_failed_import_is_told(tmp_path: Path) -> None:
    """torch raises one error for any library of fbgemm; the one behind it says why."""
    (tmp_path / "torchrec.py").write_text(
        "raise OSError('Could not load this library') from OSError('no libx.so')\n"
    )
    code = "from hotrec.doctor.machine import read_machine; print(read_machine().import_error)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "OSError: no libx.so\n", done.stderr


def test_an_installation_is_mended_with_its_own_pair() -> None:
    """A host whose torch is given, such as 2.11, is not told to renew it."""
    broken = replace(MACHINE, import_error="OSError: undefined symbol", has_gpu_device=True)
    told = problems(check_machine(broken, packages(OLD_CUDA_SET, cuda="13.0")))
    assert told["import torchrec"][2] == (
        "pip install --force-reinstall --no-deps torch==2.11.0 torchrec==1.6.1 fbgemm-gpu==1.6.0"
    )
    no_gloo = problems(check_machine(replace(MACHINE, has_gloo=False), packages(NEW_CPU_SET)))
    assert no_gloo["gloo"][2] == "pip install --force-reinstall torch==2.14.1"


def test_gpus_are_judged() -> None:
    gpu = Gpu("NVIDIA H200", total_bytes=139 * GIB, free_bytes=138 * GIB)
    cuda = packages(CUDA_SET, cuda="13.0")
    host = replace(MACHINE, has_gpu_device=True)
    good = check_machine(replace(host, gpus=(gpu,), has_nccl=True), cuda)
    assert problems(good) == {}
    assert [c.found for c in good if c.name == "gpu 0"] == [
        "NVIDIA H200, 138.0 GiB free of 139.0 GiB"
    ]

    no_nccl = problems(check_machine(replace(host, gpus=(gpu,)), cuda))
    assert no_nccl["nccl"][0] == "fail"
    old_driver = problems(check_machine(host, cuda))
    assert old_driver["gpu"][:2] == ("fail", "a GPU that torch, built for CUDA 13.0, cannot use")
    unused = problems(check_machine(host, packages(CPU_SET)))
    assert unused["gpu"][:2] == ("warn", "a GPU and the CPU build of torch")


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not has_gpu_device()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (100 * 1024, 60 * 1024)),
        ({"memory.max": "max", "memory.current": "5"}, (100 * 1024, 60 * 1024)),
        ({"memory.max": "40960", "memory.current": "1024"}, (40960, 39936)),
        (
            {"memory/memory.limit_in_bytes": "40960", "memory/memory.usage_in_bytes": "40000"},
            (40960, 960),
        ),
        # Version 1 says "no limit" by a number larger than any machine.
        (
            {"memory/memory.limit_in_bytes": str(1 << 62), "memory/memory.usage_in_bytes": "1"},
            (100 * 1024, 60 * 1024),
        ),
    ],
)
def test_memory_is_the_control_groups_where_it_is_smaller(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:   60 kB\nHugePages_Total: 0\n"
    )
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert read_memory(meminfo, tmp_path / "cgroup") == expected


def test_checks_are_plain_values() -> None:
    [first, *_] = check_packages(packages(CPU_SET), has_gpu=False)
    assert json.loads(json.dumps(vars(first)))["name"] == "python"
