"""Models of sequences on a machine without a GPU: every pipeline and memory tier of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_sequence_models import prepare_log
from tests.stand_in.build import why_not
from tests.stand_in.ranks import run_on_device

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(400),
]

CHECKS = [
    "models_equal_one_process",
    "checkpoints_go_on",
    "cases_equal_the_unsplit_reference",
    "programs_equal_the_unsplit_model",
    "evaluation_changes_nothing",
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    folder: Path = tmp_path_factory.mktemp("sequences")
    found: dict[str, str | None] = run_on_device(
        "tests.stand_in.sequences:run_all", 2, timeout_s=300, names=CHECKS,
        dataset=str(prepare_log(folder)), folder=str(folder),
    )[0]  # fmt: skip
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_on_the_device(verdicts: dict[str, str | None], check: str) -> None:
    assert verdicts[check] is None, verdicts[check]
