"""Fixtures of more than one package; torch is imported where a test needs it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.helpers.quiet import compose_once
from tests.helpers.samples import draw, num_cases

if TYPE_CHECKING:
    from hotrec.runtime.ranks import Ranks

# Examples have no time limit: a machine that does other work would fail them. ``make test`` draws
# the same ones in every run, and so does ``make test-all`` unless it is asked for more.
settings.register_profile("test", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("random", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many cases tables draw, or which one ``tests/exact`` repeats."""
    text = "trainings of tests/exact; from 250 on tables run whole, from 500 on examples are random"
    parser.addoption("--cases", type=int, help=text)
    parser.addoption("--case", default="", help="only this one, as a failure prints it")


def pytest_configure(config: pytest.Config) -> None:
    """Tables are cut to their samples as test modules are imported."""
    draw(config.getoption("--cases") or 0)
    settings.load_profile("random" if num_cases() >= 500 else "test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was proved, by what tests note of it, and what was not run here."""
    passed = terminalreporter.stats.get("passed", [])
    noted = [note for report in passed for note in report.user_properties]
    found = [value for name, value in noted if name == "exact"]
    if found:
        num, again = (sum(one[key] for one in found) for key in ("num_cases", "num_twins"))
        ranks = sorted({one["num_ranks"] for one in found})
        terminalreporter.write_line(
            f"exact: {num} generated trainings on {ranks} ranks: losses and weights within "
            f"{max(one['worst'] for one in found):.1e} of one process, {again} the same bit for "
            f"bit, in {sum(one['seconds'] for one in found):.0f} processor seconds"
        )
    for routes in [value for name, value in noted if name == "routes"]:
        terminalreporter.write_line(
            f"checkpoints: {routes['num']} routes go on as one process does, "
            f"in {routes['seconds']:.0f} processor seconds"
        )
    for line in [value for name, value in noted if name == "proved"]:
        terminalreporter.write_line(line)
    if shutil.which("nvidia-smi") is None:
        terminalreporter.write_line("not run here: CUDA, which needs a device (tests/gpu)")


def pytest_collection_finish() -> None:
    """Have no collection of garbage walk over what the imports of all tests have made."""
    compose_once()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _run_dir_of_no_other_test() -> Iterator[None]:
    """Commands keep their directory in the environment, where a test must not leave it."""
    before = os.environ.get("HOTREC_RUN_DIR")
    yield
    os.environ.pop("HOTREC_RUN_DIR", None)
    if before is not None:
        os.environ["HOTREC_RUN_DIR"] = before


@pytest.fixture(autouse=True)
def _loader_workers_of_no_other_test() -> Iterator[None]:
    """Every later command in this process would wait for them, some seconds for each."""
    yield
    if multiprocessing.active_children():
        gc.collect()
    assert not [child for child in multiprocessing.active_children() if child.daemon]


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    """A process group of this process alone, so that TorchRec shards without a spawn."""
    import torch

    from hotrec.runtime.ranks import process_group
    from tests.helpers.quiet import log_little

    torch.set_num_threads(1)
    log_little()
    with process_group(device="cpu") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    """One rank over NCCL."""
    import torch

    from hotrec.runtime.ranks import process_group

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with process_group(device="cuda") as ranks:
        yield ranks


@pytest.fixture
def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


class Time:
    """Stands in for the module ``time``; it moves by what the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The time of stage clocks and of a run's meter."""
    from hotrec.runtime import stages
    from hotrec.train import meters, segment

    time = Time()
    for module in (stages, meters, segment):
        monkeypatch.setattr(module, "time", time)
    return time
