"""pytest in a process that has the stand-in for a CUDA device, so that no test of a GPU skips.

    python -m tests.stand_in.run_tests tests/gpu -q

A test that skips fails the run, and so does an operator of FBGEMM of which operators.json does not
say that the CUDA wheel has it. Ranks that a test spawns import this module before anything else,
and so have the stand-in as well: all of them the one device of a host with one GPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from tests.stand_in import device  # before torch

# isort: split
import pytest
import torch

from tests.stand_in.operators import TABLE, schemas


class NothingSkips:
    """Ends with an error if a test has skipped."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    plugin = NothingSkips()
    code = int(pytest.main([*arguments, "-p", "no:cacheprovider"], plugins=[plugin]))
    for name in plugin.skipped:
        print(f"{name}: expected it to run on the stand-in, got it skipped.")
    release = importlib.metadata.version("fbgemm-gpu-cpu").partition("+")[0]
    unknown = sorted(device.seen_operators() - set(schemas(release)))
    for name in unknown:
        print(
            f"fbgemm::{name} on the device: expected it in {TABLE.name} for fbgemm {release}, got "
            "none there. See whether the CUDA wheels have it (tests/stand_in/operators.py)."
        )
    device.close()
    return code or len(plugin.skipped) + len(unknown)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(min(code, 1))  # as ranks end: threads of gloo and of autograd have nothing to say
