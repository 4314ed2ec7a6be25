"""What ``hotrec profile`` says of its figures."""

from __future__ import annotations

import pytest

from hotrec.cli.profile import DRIFT_AT, _warn_of_drift


@pytest.mark.parametrize(
    ("train", "heldout", "is_said"), [(0.7, 0.62, True), (0.7, 0.64, False), (0.7, None, False)]
)
def test_drift_is_said(
    train: float, heldout: float | None, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"rows_frac": 0.5, "train": 1.0, "heldout": 0.1}
    _warn_of_drift([other, {"rows_frac": DRIFT_AT, "train": train, "heldout": heldout}])
    assert ("adapt_every_steps" in caplog.text) == is_said
