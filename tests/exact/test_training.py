"""The main test: any partition, placement, optimizer, pipeline and batch train the unsplit model.

The same losses and weights as one process in plain torch (to 1e-5), and the same bits at every
depth of look-ahead, with slots or without, and again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hotrec.types import ModelKind
from tests.exact.case import CLIP, Case, draw_cases
from tests.exact.training import run_cases
from tests.helpers.dense import POOLED_KINDS
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.samples import is_whole, num_cases

# The host of each rank, and the share of the cases.
GROUPS = {"0": 0.18, "00": 0.24, "000": 0.4, "0011": 0.12, "001": 0.06}
# Of which the sample has hot rows that follow the data in every large group.
SEED = 32
# Where there are many cases.
MORE_GROUPS = {"0000": 0.04, "0101": 0.02, "0001": 0.01, "001122": 0.02, "000111": 0.02}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test of each group, or one of the case that was given."""
    if "cases" not in metafunc.fixturenames:
        return
    given, num = metafunc.config.getoption("--case"), num_cases() or 130
    if given:  # or a route of another test
        cases = [[eval(given, {"Case": Case})]] if given.startswith("Case") else []
        metafunc.parametrize("cases", cases, ids=["given"] * len(cases))
        return
    groups = GROUPS | (MORE_GROUPS if is_whole() else {})
    each = num / sum(groups.values())
    drawn = {hosts: draw_cases(hosts, round(share * each), SEED) for hosts, share in groups.items()}
    metafunc.parametrize("cases", drawn.values(), ids=drawn)


@pytest.mark.timeout(1100)
def test_it_trains_the_unsplit_model(
    cases: list[Case], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    hosts, timeout_s = cases[0].hosts, 60 + 4.0 * len(cases)
    try:
        found = run_ranks(run_cases, len(hosts), timeout_s=timeout_s, cases=cases, folder=tmp_path)
    except RanksError as error:  # of a hang only the case in it is known
        last = {path.read_text() for path in tmp_path.iterdir()}
        text = "\n".join(["in training", *sorted(last), str(error)])
        raise RanksError(text, error.exit_codes) from None
    for of_rank in found:
        assert not of_rank.failures, "\n".join(of_rank.failures)
        if len(cases) > 30:  # hot rows follow the data, and 16 bits round
            assert of_rank.num_moved > 0
            assert of_rank.num_rounded > 0
    seconds = sum(of_rank.seconds for of_rank in found)
    record_property("exact", {**asdict(found[0]), "num_ranks": len(hosts), "seconds": seconds})


# Name and whether it trains in micro-batches.
PIPELINES = (("look_ahead", False), ("look_ahead", True), ("sparse_dist", False), ("base", False))


def cases_of_models(hosts: str) -> list[Case]:
    """Of every model and pipeline one, on three features at least, each of one table."""
    found = []
    for at, kind in enumerate(ModelKind):
        given = {"model": kind.name, "labels": 2 if kind is ModelKind.mmoe else 1, "twin": ""}
        given["output"] = "bags" if kind in POOLED_KINDS else "sequences"
        drawn = draw_cases(hosts, 200, at, is_uniform_dim=True, skip=False, **given)
        names = {case: [n for table in case.tables() for n in table.features] for case in drawn}
        fitting = [case for case in drawn if 3 <= len(names[case]) == len({*names[case]})]
        found += [
            next(case for case in fitting if (case.pipeline, case.micro_batches) == pipeline)
            for pipeline in PIPELINES
        ]
    return found


@pytest.mark.slow
def test_every_model_trains_as_the_unsplit_one() -> None:
    for found in run_ranks(run_cases, 2, timeout_s=200, cases=cases_of_models("00")):
        assert not found.failures, "\n".join(found.failures)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPU")
def test_compiled_layers_train_the_unsplit_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or it starts processes to compile in, which import torch first.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    case = Case("0", 8, "half", "adagrad", pipeline="look_ahead", clip=CLIP)
    cases = [replace(case, model="dlrm", is_compiled=True)]
    [found] = run_ranks(run_cases, 1, timeout_s=280, cases=cases)
    assert not found.failures, found.failures
