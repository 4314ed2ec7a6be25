"""Logs in a store that fsspec reads: its own in memory, and S3 with moto in its place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import ColumnKind, ColumnSpec, SourceFormat
from hotrec.data.chunks import Dataset
from hotrec.data.files import find_files
from hotrec.data.prepare import prepare
from hotrec.data.sample import read_sample
from tests.unit.data.logs import delimited_spec

FORMATS = {
    "csv": SourceFormat.delimited,
    "csv.gz": SourceFormat.delimited,
    "parquet": SourceFormat.parquet,
    "arrow": SourceFormat.arrow,
}
COLUMNS = {"label": ColumnSpec(ColumnKind.label), "item": ColumnSpec(ColumnKind.categorical)}


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store with the place ``log``, in memory: what is of one protocol is fsspec's."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/log", recursive=True)


def write(path: Path, table: pa.Table) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path)
        case ".arrow":
            feather.write_feather(table, path, compression="uncompressed")
        case _:
            with pa.output_stream(str(path), compression="detect") as stream:
                pacsv.write_csv(table, stream)


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_remote_log_is_prepared_as_a_local_one(
    suffix: str, store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "log").mkdir()
    for name in ("b", "a", ".hidden"):
        path = tmp_path / "log" / f"{name}.{suffix}"
        write(path, pa.table({"label": [0, 1, 1], "item": ["a", name, "a"]}))
        store.pipe(f"/log/{path.name}", path.read_bytes())
    found = []
    for place in ("log", "file://log", "memory://log", f"memory://log/*.{suffix}"):
        files = [place.replace("file://log", f"file://{tmp_path}/log")]
        files = [f"{tmp_path}/log"] if place == "log" else files
        spec = replace(delimited_spec([], columns=COLUMNS), format=FORMATS[suffix], files=files)
        prepare(spec, tmp_path / f"{len(found)}")
        dataset = Dataset.open(tmp_path / f"{len(found)}")
        blocks = [dataset.block("train", file) for file in range(2)]
        found.append([(block.label.tolist(), block.features["item"].tolist()) for block in blocks])
    assert found == found[:1] * 4
    assert [labels for labels, _ in found[0]] == [[0, 1, 1]] * 2
    sample = read_sample("memory://log")
    assert (sample.format, sample.num_rows) == (FORMATS[suffix], 6)
    prepare(replace(spec, files=sample.files), tmp_path / "d")


@pytest.mark.parametrize("protocol", ["nothing", "s3"])
def test_what_cannot_be_read_names_the_extra(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is installed: the package of that store is missing.
    monkeypatch.setitem(sys.modules, "upath" if protocol == "s3" else "s3fs", None)
    with pytest.raises(ValueError, match=rf"^files: .* reads {protocol}://.*hotrec\[remote\]"):
        find_files([f"{protocol}://log/*.csv"], SourceFormat.delimited)
