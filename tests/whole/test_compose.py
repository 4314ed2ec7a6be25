"""Every experiment with every choice of placement, optimizer, order and pipeline."""

from __future__ import annotations

import pytest

from hotrec.cli.store import options_of
from tests.config.test_compose import takes_other_choices


@pytest.mark.parametrize("experiment", options_of("experiment"))
def test_experiment_takes_other_choices(experiment: str) -> None:
    takes_other_choices(experiment, 0, 1)
