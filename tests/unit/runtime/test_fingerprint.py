"""What a machine is known by."""

from __future__ import annotations

from pathlib import Path

import torch

from hotrec.calibrate.measure import measure_memory
from hotrec.runtime.memory import read_fingerprint, read_memory


def test_the_fingerprint_of_this_machine(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Processor @ 2 GHz\nflags\t: x\n")
    found = read_fingerprint("cpu", cpuinfo)
    assert found["processor"] == "A Processor @ 2 GHz"
    assert found["device"] == "cpu"
    assert found["num_gpus"] == 0  # on CPU they do not matter
    assert found["gpu"] is None
    assert found["num_cores"] >= 1
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found == read_fingerprint("cpu", cpuinfo)


def test_without_a_description_of_the_processor(tmp_path: Path) -> None:
    assert read_fingerprint("cpu", tmp_path / "none")["processor"] != ""


def test_the_device_is_what_there_is() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert read_fingerprint()["device"] == expected


def test_memory() -> None:
    assert measure_memory(torch.device("cpu")) == (0, read_memory()[0])
