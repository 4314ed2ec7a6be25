"""What ``hotrec run`` takes as current: above all a dataset that files were appended to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.artifact import ArtifactError
from hotrec.cli.made import dataset_inputs, find_dataset, record_dataset
from hotrec.cli.output import LOG_FILE
from hotrec.cli.prepare import figures_of
from hotrec.cli.stage import run_stage
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import ColumnKind, ColumnSpec, SourceSpec
from hotrec.config.roots import Config
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from hotrec.runtime.run_dir import CHECKPOINTS, CONFIG_FILE
from tests.unit.data.logs import spec_by_day, write_day


def config_of(folder: Path, source: SourceSpec, *, overwrite: bool = False) -> Config:
    words = [f"paths.dataset={folder}/dataset", f"overwrite={overwrite}"]
    config = build_config(compose_config("config", words))
    return replace(config, data=replace(config.data, source=source, synthetic=None))


def test_a_dataset_that_has_grown_is_current(tmp_path: Path) -> None:
    """Whatever the bounds and the first files are now; until it is to be overwritten."""
    files = [write_day(tmp_path, day, ["a", "b", "c"]) for day in range(3)]
    spec = spec_by_day(files[0], valid_day=1)
    config = config_of(tmp_path, spec)
    prepare(spec, tmp_path / "dataset")
    figures = figures_of(Dataset.open(tmp_path / "dataset"))
    assert find_dataset(config) is None, "nobody recorded it"
    record_dataset(config, "other", figures)
    assert find_dataset(config) is None
    prepare(spec_by_day(files[0], valid_day=2), tmp_path / "dataset", append=files[1:])
    found = find_dataset(config)
    assert found is not None
    assert found.num_samples("train") == 6
    Path(files[0]).unlink()
    assert find_dataset(config) is not None
    assert find_dataset(config_of(tmp_path, spec, overwrite=True)) is None
    columns = {**spec.columns, "more": ColumnSpec(ColumnKind.dense, source="price")}
    with pytest.raises(ArtifactError, match=r"columns\.more .* set overwrite=true"):
        find_dataset(config_of(tmp_path, replace(spec, columns=columns)))


def test_a_log_that_has_changed_is_prepared_again(tmp_path: Path) -> None:
    file = Path(write_day(tmp_path, 0, ["a", "b", "c"]))
    spec = spec_by_day(str(file))
    config = config_of(tmp_path, spec)
    prepare(spec, tmp_path / "dataset")
    figures = figures_of(Dataset.open(tmp_path / "dataset"))
    record_dataset(config, dataset_inputs(config), figures)
    assert find_dataset(config) is not None
    file.write_text(file.read_text() + file.read_text().splitlines(keepends=True)[-1])
    assert find_dataset(config) is None


def test_no_other_command_writes_into_a_training_run(tmp_path: Path) -> None:
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / LOG_FILE).touch()
    (tmp_path / CONFIG_FILE).write_text("trained")
    config = config_of(tmp_path, spec_by_day("log"))
    with pytest.raises(ValueError, match="expected .* an earlier hotrec prepare, got"):
        run_stage("prepare", config, tmp_path, [], {})
    assert (tmp_path / CONFIG_FILE).read_text() == "trained"
