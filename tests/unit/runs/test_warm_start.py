"""Which rows of a checkpoint a run on another dataset starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrec.artifact import commit_artifact, scratch_directory
from hotrec.config.data import Encoding, TableSpec
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from hotrec.runs.warm_start import WarmStart
from hotrec.runtime.run_dir import CHECKPOINTS
from tests.unit.data.logs import HEADER, delimited_spec


def prepare_days(folder: Path, users: list[str], **table: Any) -> Dataset:
    folder.mkdir()
    (folder / "log.csv").write_text(
        HEADER + "".join(f"{n % 2},1,{user},i1,i2\n" for n, user in enumerate(users))
    )
    prepare(
        delimited_spec([folder / "log.csv"], table_defaults=TableSpec(min_count=1, **table)),
        folder / "dataset",
    )
    return Dataset.open(folder / "dataset")


def save_run(folder: Path, dataset: Dataset, content_hash: str = "") -> Path:
    """The record of a run with a checkpoint."""
    (folder / CHECKPOINTS).mkdir(parents=True)
    paths = {"dataset": str(dataset.artifact.path)}
    (folder / "config.yaml").write_text(json.dumps({"paths": paths}))
    checkpoint = folder / CHECKPOINTS / "step-00000001"
    facts = {"dataset": content_hash or dataset.artifact.content_hash}
    content = {"step": 1, "num_samples": 8, "world_size": 1, "facts": facts}
    with scratch_directory(checkpoint, kind="checkpoint") as scratch:
        content |= {"loader": {}, "tensors": {}}
        commit_artifact(scratch, checkpoint, kind="checkpoint", content=content)
    (folder / CHECKPOINTS / "latest").write_text("step-00000001\n")
    return folder


def test_rows_follow_their_raw_ids(tmp_path: Path) -> None:
    before = prepare_days(tmp_path / "one", ["u1", "u2", "u3", "u4"])
    after = prepare_days(tmp_path / "two", ["u9", "u4", "u2", "u7", "u1"])
    run = save_run(tmp_path / "run", before)
    for source in (run, run / CHECKPOINTS / "step-00000001"):
        warm = WarmStart.open(str(source), after, "adam")
        table = next(f.table for f in after.schema.features if f.name == "user")
        rows = torch.arange(after.schema.table(table).num_rows)
        found = warm._find_rows(table, rows).tolist()
        old, new = (
            [None, *read_vocabulary(data.artifact.path, table)["value"].to_pylist()]
            for data in (before, after)
        )
        assert [None if row < 0 else old[row] for row in found] == [
            id if id in old else None for id in new
        ]
        assert found[0] == 0
        assert found.count(-1) == 2


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"encoding": Encoding.hashing, "num_rows": 50}, "expected a vocabulary in both"),
        ({}, "the dataset .* that .* was trained on, got"),
    ],
)
def test_other_encodings_and_datasets_are_refused(
    table: dict[str, Any], message: str, tmp_path: Path
) -> None:
    before = prepare_days(tmp_path / "one", ["u1", "u2"])
    after = prepare_days(tmp_path / "two", ["u1", "u3"], **table)
    run = save_run(tmp_path / "run", before, "" if table else "77b0c4")
    with pytest.raises(ValueError, match=message):
        WarmStart.open(str(run), after, "adam")
