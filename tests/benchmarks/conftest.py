"""The dataset of tests/e2e."""

from tests.e2e.conftest import workspace  # noqa: F401
