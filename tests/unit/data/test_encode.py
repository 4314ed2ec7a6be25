"""What a dataset records of its encoding makes the same samples of the log again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotrec.artifact import ArtifactError
from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, SourceSpec, TableSpec
from hotrec.data.chunks import Dataset, Jagged
from hotrec.data.encode import encode_inputs, feature_columns, read_encoding
from hotrec.data.log import open_log
from hotrec.data.prepare import prepare
from tests.unit.data.logs import delimited_spec, write_dataset

LOG = "click,price,user,item,history\n1,2.5,u1,a,a b\n0,,u2,b,\n1,-4,u1,c,c c a\n0,7,,a,b\n"


@pytest.fixture
def spec(tmp_path: Path) -> SourceSpec:
    (tmp_path / "log.csv").write_text(LOG)
    spec = delimited_spec([tmp_path / "log.csv"])
    columns = {**spec.columns, "price": ColumnSpec(ColumnKind.dense, standardize=True, fill=1.0)}
    return replace(spec, columns=columns, tables={"user": TableSpec(Encoding.hashing, num_rows=9)})


def test_the_log_is_encoded_as_it_was_prepared(spec: SourceSpec, tmp_path: Path) -> None:
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    encoders, scaling = read_encoding(dataset, spec)
    log = open_log(spec, needs_label=False)
    (block,) = log.blocks(0)
    of_features = {
        name: encoders[column.table or name]
        for name, column in feature_columns(log.columns).items()
    }
    dense, features = encode_inputs(block, log.columns, of_features, scaling)
    prepared = dataset.block("train", 0)
    np.testing.assert_array_equal(dense, prepared.dense)
    for name, expected in prepared.features.items():
        found = features[name]
        if isinstance(expected, Jagged):
            assert isinstance(found, Jagged)
            np.testing.assert_array_equal(found.values, expected.values)
            np.testing.assert_array_equal(found.offsets, expected.offsets)
        else:
            np.testing.assert_array_equal(found, expected)


def test_a_dataset_without_a_record_is_refused(spec: SourceSpec, tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset", {"train": 5})
    with pytest.raises(ArtifactError, match=r"expected the column encoding .*, got none"):
        read_encoding(Dataset.open(tmp_path / "dataset"), spec)


def test_another_configuration_is_refused(spec: SourceSpec, tmp_path: Path) -> None:
    prepare(spec, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    other = replace(spec, tables={"user": TableSpec(Encoding.hashing, num_rows=8)})
    with pytest.raises(ArtifactError, match=r"data.source.tables.user as the run recorded"):
        read_encoding(dataset, other)
