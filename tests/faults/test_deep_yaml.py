"""A recorded configuration that is nested too deeply is refused at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrec.cli.store import MAX_YAML_DEPTH, check_yaml_files


def test_the_depth_of_a_file_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    # The mapping at the top is a level too.
    deepest = MAX_YAML_DEPTH - 1
    path.write_text("a: " + "[" * deepest + "]" * deepest)
    check_yaml_files(path)
    for num_brackets in (MAX_YAML_DEPTH, 200_000):
        path.write_text("a: " + "[" * num_brackets)
        with pytest.raises(ValueError, match=rf"config.yaml: expected .*{MAX_YAML_DEPTH}.*, got"):
            check_yaml_files(path)
