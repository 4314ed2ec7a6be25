"""The changes of a model since an earlier export.

    delta.json                   the new model.json
    dense.safetensors            weights of all layers except the tables
    tables/<table>.safetensors   row (r,) and weight (r, D) of the changed rows; for int8 also
                                 scale (r,)
    vocab/<table>.parquet        value and row of the raw ids that are new or took another's row
    model.onnx                   complete, with export.onnx=true

The manifest has the content hash of the export that it applies to. From both, ``apply_delta`` makes
the full export: the same files, and the same content hash.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotrec.artifact import (
    Artifact,
    ArtifactError,
    Verify,
    check_made_from,
    commit_artifact,
    read_artifact,
    scratch_directory,
)
from hotrec.models.plain import (
    DENSE_FILE,
    DESCRIPTION,
    OWN,
    TABLES_DIR,
    WEIGHT,
    check_dense_file,
    check_rows,
    file_within,
    load_model,
    load_tables,
    load_tensors,
    read_description,
)
from hotrec.runs.exported import (
    CODE,
    IDS_AT_ONCE,
    KIND,
    VOCABULARIES,
    TensorWriter,
    check_ids,
    check_place,
    make_ids,
    map_tensors,
    read_ids,
    rows_at_once,
    table_file,
    vocabulary_file,
    write_code,
    write_hashes,
    write_ids,
)
from hotrec.runs.onnx_file import ONNX_FILE
from hotrec.types import Rows

DELTA_KIND = "model delta"
DELTA_DESCRIPTION = "delta.json"
ROW = "row"


def open_base(path: Path, description: Mapping[str, Any], datasets: Collection[str]) -> Artifact:
    """Open the export that a delta applies to.

    Args:
        path: Its directory.
        description: The new content of ``model.json``.
        datasets: Content hashes of the generations of the model's dataset.

    Raises:
        ArtifactError: If it is missing or damaged, or its rows are not those of the model.
    """
    base = read_artifact(path, kind=KIND, verify=Verify.full, stay_open=True)
    with base.parsing():
        before = _read_files(base, DESCRIPTION)
        dataset = before["checkpoint"]["dataset"]
        if dataset not in datasets:
            raise ArtifactError(
                f"since {path}: expected an export of a model of the dataset "
                f"{description['checkpoint']['dataset'][:12]} or of an earlier generation of it, "
                f"got one of {dataset[:12]}. Choose another, or run a full export."
            )
        forms = [
            (document["rows"], document["architecture"]["embedding_dim"])
            for document in (description, before)
        ]
        if forms[0] != forms[1]:
            (rows, dim), (rows_before, dim_before) = forms
            raise ArtifactError(
                f"since {path}: expected rows of {dim} values in {rows}, got rows of {dim_before} "
                f"in {rows_before}. Choose another, or run a full export."
            )
        _check_grown(before, description)
        check_content(path, before)
    return base


def _read_files(artifact: Artifact, name: str) -> dict[str, Any]:
    """Check that the files of an artifact are exactly the listed ones; returns its description.

    Raises:
        ValueError: If one is a link, or has not been compared with its checksum.
    """
    for file in artifact.files:
        file_within(artifact.path, file)
    description = read_description(artifact.path, name)
    tables = description["tables"]
    read = [name, DENSE_FILE, *(table_file(table["name"]) for table in tables)]
    read += [vocabulary_file(table["name"]) for table in tables if table["vocabulary"] is not None]
    for file in (*read, *([ONNX_FILE] if (artifact.path / ONNX_FILE).exists() else ())):
        artifact.file(file)
    return description


def check_content(directory: Path, description: Mapping[str, Any]) -> None:
    """Check the files of a full export against its description.

    Raises:
        ValueError: If they do not match.
    """
    if description["architecture"]["kind"] == OWN:  # whose code is not run for this
        check_dense_file(directory / DENSE_FILE, description)
        load_tables(directory, description)
    else:
        load_model(directory)
    for table in description["tables"]:
        if table["vocabulary"] is not None:
            file = vocabulary_file(table["name"])
            check_ids(file_within(directory, file), table["num_rows"], may_lack=False)


def _check_grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check that a model has the tables of an earlier one, with at least as many rows.

    Raises:
        ValueError: If it does not.
    """
    (old, _), (new, num_new) = (
        (
            {table["name"]: table["vocabulary"] is not None for table in of["tables"]},
            {table["name"]: table["num_rows"] for table in of["tables"]},
        )
        for of in (before, after)
    )
    shrunk = [t["name"] for t in before["tables"] if num_new.get(t["name"], 0) < t["num_rows"]]
    if old != new or shrunk:
        raise ValueError(
            f"tables: expected {sorted(old)} of the earlier export, none with fewer rows, got "
            f"{sorted(new)}, with fewer in {shrunk}. Run a full export."
        )


def changed_rows(
    chunks: Iterable[Mapping[str, npt.NDArray[Any]]], base: Mapping[str, npt.NDArray[Any]]
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """The rows of a table that differ in any bit from an earlier export, and new ones.

    Args:
        chunks: The tensors of the table in exported form, some rows at a time.
        base: The tensors of the earlier export.

    Yields:
        For each chunk, row numbers int64 (r,) under ``ROW`` and its tensors at these rows.
    """
    begin = 0
    for chunk in chunks:
        num_rows = len(chunk[WEIGHT])
        is_changed = np.ones(num_rows, bool)
        num_kept = min(max(len(base[WEIGHT]) - begin, 0), num_rows)
        is_changed[:num_kept] = False
        for name, values in chunk.items():
            before = base[name][begin : begin + num_kept]
            is_changed[:num_kept] |= _differs(values[:num_kept], before)
        (changed,) = is_changed.nonzero()
        yield {ROW: begin + changed, **{name: values[changed] for name, values in chunk.items()}}
        begin += num_rows


def _differs(values: npt.NDArray[Any], before: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether each row differs in any bit, (r,)."""
    bits = np.dtype(f"u{values.itemsize}")
    differs = values.view(bits) != before.view(bits)
    return differs.reshape(len(values), -1).any(axis=1)


def changed_ids(tables: Iterable[pa.Table], base: Path) -> Iterator[pa.Table]:
    """The raw ids that are new or have another row than in an earlier vocabulary.

    Args:
        tables: Raw ids and all rows from 1 on, some at a time.
        base: The earlier vocabulary.
    """
    for table in tables:
        rows = table["row"].to_numpy()
        begin, end = int(rows[0]), int(rows[-1]) + 1
        before = read_ids(base, begin, end)["value"]
        is_changed = np.ones(len(rows), bool)
        kept = table["value"].slice(0, len(before))
        is_changed[: len(before)] = pc.not_equal(kept, before).to_numpy()
        yield table.filter(pa.array(is_changed))


def apply_delta(base: str | Path, delta: str | Path, output: str | Path) -> Path:
    """Apply a delta to an exported model; the result is bit-identical to the full export.

    Args:
        base: Directory of the export that is named in the delta's manifest.
        delta: Directory written by ``hotrec export since=...``.
        output: Directory of the new export; may be ``base``.

    Returns:
        ``output``.

    Raises:
        ArtifactError: If one of them is missing or damaged, if the delta belongs to another export,
            or if the output directory contains something else. Nothing is changed.
    """
    base, delta, output = Path(base), Path(delta), Path(output)
    check_place(output)
    with scratch_directory(output, kind=KIND) as scratch:
        content, made_from = _merge_verified(base, delta, scratch)
        commit_artifact(
            scratch, output, kind=KIND, content=content, made_from=made_from, apart=CODE
        )
    return output


def _merge_verified(
    base: Path, delta: Path, scratch: Path
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Merge two artifacts, which are closed at the end; content and inputs of the result."""
    opened = read_artifact(delta, kind=DELTA_KIND, verify=Verify.full, stay_open=True)
    opened_base = read_artifact(base, kind=KIND, verify=Verify.full)
    check_made_from(opened, opened_base)
    with opened_base.parsing():
        check_content(base, _read_files(opened_base, DESCRIPTION))
    with opened.parsing():
        _read_files(opened, DELTA_DESCRIPTION)
        merge(base, delta, scratch)
    made_from = {kind: claimed for kind, claimed in opened.made_from.items() if kind != KIND}
    return opened.content, made_from


def merge(base: Path, delta: Path, target: Path) -> None:
    """Write the export that results from a delta and its base.

    Raises:
        ValueError: If the delta is incomplete or does not match its description.
    """
    description = read_description(delta, DELTA_DESCRIPTION)
    _check_grown(read_description(base), description)
    write_code(target)
    shutil.copyfile(delta / DELTA_DESCRIPTION, target / DESCRIPTION)
    for file in (DENSE_FILE, ONNX_FILE):
        if file == DENSE_FILE or (delta / file).exists():
            shutil.copyfile(file_within(delta, file), target / file)
    check_dense_file(target / DENSE_FILE, description)
    (target / TABLES_DIR).mkdir()
    dim = description["architecture"]["embedding_dim"]
    for table in description["tables"]:
        name, shape = table["name"], (table["num_rows"], dim)
        file = table_file(name)
        before = map_tensors(file_within(base, file))
        changes = _map_changes(file_within(delta, file), description["rows"], shape, before)
        _merge_table(before, changes, table["num_rows"], target / file)
        if table["vocabulary"] is not None:
            (target / VOCABULARIES).mkdir(exist_ok=True)
            file = vocabulary_file(name)
            check_ids(file_within(delta, file), table["num_rows"], may_lack=True)
            _merge_ids(base / file, delta / file, target / file)
            check_ids(target / file, table["num_rows"], may_lack=False)
            write_hashes(target, name, table["num_rows"])


def _map_changes(
    path: Path, form: str, shape: tuple[int, int], base: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """The tensors of the changed rows of a table, checked.

    Raises:
        ValueError: If they have other types or shapes than the table's, rows outside of it, a row
            twice, or not all new ones.
    """
    held = load_tensors(path)
    rows = held.pop(ROW, torch.empty(0))
    check_rows(path, held, form, (len(rows), shape[1]))
    if rows.dtype is not torch.int64 or rows.dim() != 1:
        raise ValueError(
            f"{path}: expected the rows' numbers of type int64, got {rows.dtype} of shape "
            f"{tuple(rows.shape)}. Export the changes again."
        )
    num_before, num_rows = len(base[WEIGHT]), shape[0]
    is_rising = bool((rows[1:] > rows[:-1]).all())
    is_inside = not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < num_rows)
    num_new = int((rows >= num_before).sum())
    if not is_rising or not is_inside or num_new != num_rows - num_before:
        raise ValueError(
            f"{path}: expected increasing rows below {num_rows} including all from {num_before} "
            "on, got others. Export the changes again."
        )
    tensors = {ROW: rows, **held}
    if base.keys() != held.keys():
        raise ValueError(
            f"{path}: expected tensors {sorted(base)} as in the earlier export, got "
            f"{sorted(held)}. Run a full export."
        )
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _merge_table(
    base: Mapping[str, npt.NDArray[Any]],
    delta: Mapping[str, npt.NDArray[Any]],
    num_rows: int,
    path: Path,
) -> None:
    rows: Rows = delta[ROW]
    step = rows_at_once(delta[WEIGHT].shape[1])
    # In the order of the full export, whose header lists the scale first.
    names = [name for name in sorted(delta) if name != ROW]
    tensors = {name: (str(delta[name].dtype), (num_rows, *delta[name].shape[1:])) for name in names}
    with TensorWriter(path, tensors) as writer:
        for begin in range(0, num_rows, step):
            end = min(begin + step, num_rows)
            low, high = np.searchsorted(rows, (begin, end))
            for name in names:
                values = np.zeros((end - begin, *delta[name].shape[1:]), delta[name].dtype)
                before = base[name][begin:end]
                values[: len(before)] = before
                values[rows[low:high] - begin] = delta[name][low:high]
                writer.write(name, values)


def _merge_ids(base: Path, delta: Path, path: Path) -> None:
    with write_ids(path) as writer:
        for begin in count(1, IDS_AT_ONCE):
            before, now = (read_ids(file, begin, begin + IDS_AT_ONCE) for file in (base, delta))
            is_replaced = pc.is_in(before["row"], value_set=now["row"])
            merged = pa.concat_tables([before.filter(pc.invert(is_replaced)), now]).sort_by("row")
            if not len(merged):
                return
            writer.write_table(make_ids(merged["value"].combine_chunks(), merged["row"].to_numpy()))
