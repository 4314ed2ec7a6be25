"""The files of an exported model, written by ``hotrec export``.

Tables and vocabularies of any size are written in pieces.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from hotrec.artifact import MANIFEST, read_record, real_path
from hotrec.models import encoder, hstu, plain, sasrec, sequence
from hotrec.models.plain import TABLES_DIR

KIND = "model export"
VOCABULARIES = "vocab"
# The reader code for services without hotrec.
CODE = {
    path.name: path
    for path in map(Path, map(inspect.getfile, (encoder, plain, hstu, sasrec, sequence)))
}
# Raw ids that are written at once.
IDS_AT_ONCE = 1 << 18
_CHUNK_BYTES = 64 << 20
# Type and shape of each tensor of a file.
Forms = Mapping[str, tuple[str, tuple[int, ...]]]
_IDS = pa.schema([("value", pa.large_string()), ("row", pa.int64())])
# Names of the types in safetensors files.
_TYPES = {"int64": "I64", "float32": "F32", "float16": "F16", "int8": "I8"}


def rows_at_once(dim: int) -> int:
    """Number of rows of a table that are read and written at once."""
    return max(1, _CHUNK_BYTES // (4 * dim))


def table_file(table: str) -> str:
    """Path of a table in the exported directory."""
    return f"{TABLES_DIR}/{table}.safetensors"


def vocabulary_file(table: str) -> str:
    """Path of a table's vocabulary in the exported directory."""
    return f"{VOCABULARIES}/{table}.parquet"


@dataclass(frozen=True)
class FileLayout:
    """The start of a safetensors file: the length of a JSON header in 8 bytes, and the header.

    Args:
        head: These bytes, followed by the concatenated tensors.
        places: The first byte of each tensor in the file, and the one after its end.
    """

    head: bytes
    places: Mapping[str, tuple[int, int]]


def layout(tensors: Forms) -> FileLayout:
    """The layout of a file; wider types must come first, so that all are aligned."""
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    places = {
        name: (len(head) + entry["data_offsets"][0], len(head) + entry["data_offsets"][1])
        for name, entry in header.items()
    }
    return FileLayout(head, places)


class TensorWriter:
    """Writes a safetensors file whose tensors are larger than memory, in pieces.

    Args:
        path: The file.
        tensors: Type and shape of each tensor, as for ``layout``.
    """

    def __init__(self, path: Path, tensors: Forms) -> None:
        made = layout(tensors)
        self._at = {name: begin for name, (begin, _) in made.places.items()}
        self._file: BinaryIO = path.open("wb")
        self._file.write(made.head)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append values to a tensor."""
        self._file.seek(self._at[name])
        self._at[name] += self._file.write(np.ascontiguousarray(values).data)


def check_place(target: Path) -> None:
    """Check that an output directory is not inside an artifact, which it would modify.

    Raises:
        ValueError: If it is.
    """
    for parent in real_path(target).parents:
        if _is_artifact(parent):
            raise ValueError(
                f"output {target}: expected a directory outside of hotrec's artifacts, got one "
                f"inside {parent}. Choose another directory."
            )


@contextmanager
def write_ids(path: Path) -> Iterator[pq.ParquetWriter]:
    """A vocabulary to which tables of ``make_ids`` are written, in the order of their rows."""
    with pq.ParquetWriter(path, _IDS) as writer:
        yield writer


def make_ids(values: pa.Array, rows: npt.NDArray[np.int64]) -> pa.Table:
    """Raw ids and their rows."""
    return pa.table([values, rows], schema=_IDS)


def _is_artifact(directory: Path) -> bool:
    try:  # the file may be from another program
        return {"kind", "content_hash"} <= json.loads(read_record(directory / MANIFEST)).keys()
    except (OSError, ValueError, AttributeError):
        return False


def write_code(directory: Path) -> None:
    """Write hotrec's own reader code, never code from another export.

    The files import one another from their own directory.
    """
    for name, source in CODE.items():
        code = source.read_text().replace("from hotrec.models.", "from ")
        (directory / name).write_text(code)
