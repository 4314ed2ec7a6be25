"""Logs in a store that fsspec reads: its own in memory, and S3 with moto in its place."""

from __future__ import annotations

import gzip
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.config.data import SourceFormat
from hotrec.data.readers import LogFormat, Wanted, count_samples, find_files, read_blocks
from hotrec.data.sample import read_sample

TABLE = pa.table({"label": [0, 1, 1], "item": ["a", "b", "a"]})
CSV = b"label,item\n0,a\n1,b\n1,a\n"
WANTED = Wanted(ids=("item",), numbers=("label",), labels=("label",))


def parquet() -> bytes:
    pq.write_table(TABLE, stream := io.BytesIO())
    return stream.getvalue()


def arrow() -> bytes:
    stream = io.BytesIO()
    with pa.ipc.new_file(stream, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return stream.getvalue()


FILES = {
    "csv": (SourceFormat.delimited, CSV),
    "csv.gz": (SourceFormat.delimited, gzip.compress(CSV)),
    "parquet": (SourceFormat.parquet, parquet()),
    "arrow": (SourceFormat.arrow, arrow()),
}


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    """A store with the place ``log``, in memory: what is of one protocol is fsspec's."""
    memory = fsspec.filesystem("memory")
    yield memory
    memory.rm("/log", recursive=True)


@pytest.mark.parametrize("suffix", FILES)
def test_a_remote_log_is_read_as_a_local_one(suffix: str, store: fsspec.AbstractFileSystem) -> None:
    kind, data = FILES[suffix]
    for name in ("b", "a", ".hidden"):
        store.pipe(f"/log/{name}.{suffix}", data)
    log_format = LogFormat(kind, ",")
    url = "memory://log"
    whole = find_files([url], kind)
    assert [file.name for file in whole] == [f"a.{suffix}", f"b.{suffix}"]
    assert find_files([f"{url}/[ab].{suffix}"], kind) == whole
    assert find_files([f"{url}/a.{suffix}"], kind) == whole[:1]
    assert count_samples(whole[0], log_format) == 3
    [block] = read_blocks(whole[0], log_format, WANTED)
    np.testing.assert_array_equal(block.numbers["label"], [0, 1, 1])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_init_looks_at_a_remote_directory(suffix: str, store: fsspec.AbstractFileSystem) -> None:
    kind, data = FILES[suffix]
    store.pipe(f"/log/a.{suffix}", data)
    sample = read_sample("memory://log")
    assert (sample.format, sample.num_rows) == (kind, 3)
    [pattern] = sample.files
    assert [file.name for file in find_files([pattern], kind)] == [f"a.{suffix}"]


def test_a_file_of_this_host_may_have_a_protocol(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(CSV)
    assert find_files([f"file://{tmp_path}"], SourceFormat.delimited) == [tmp_path / "a.csv"]


@pytest.mark.parametrize("protocol", ["nothing", "s3"])
def test_what_cannot_be_read_names_the_extra(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is installed: the package of that store is missing.
    monkeypatch.setitem(sys.modules, "upath" if protocol == "s3" else "s3fs", None)
    with pytest.raises(ValueError, match=rf"^files: .* reads {protocol}://.*hotrec\[remote\]"):
        find_files([f"{protocol}://log/*.csv"], SourceFormat.delimited)
