"""Shell scripts stop at the first command that fails."""

from __future__ import annotations

import pytest

from tests.policy.source import project_files


@pytest.mark.parametrize("suffix", [".sh", ".sbatch"])
def test_scripts(suffix: str) -> None:
    paths = [path for path in project_files() if path.suffix == suffix]
    assert paths
    for path in paths:
        lines = path.read_text().splitlines()
        assert "set -euo pipefail" in lines, f"{path}: a failing command must stop it"
