"""Export a run's model: tables, vocabularies and layers in files that need no hotrec to read.

    model.json                   architecture, features, dense columns, tables; the checkpoint
    dense.safetensors            weights of all layers except the tables
    tables/<table>.safetensors   weight (R, D) in the dataset's row order; for int8 also scale (R,)
    vocab/<table>.parquet        value and row of each raw id, if the table has a vocabulary
    vocab/<table>.npy            the hash of the value of row 1, 2, ..., which the encoder reads

Tables are copied a chunk at a time.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from hotrec.artifact import (
    MANIFEST,
    ArtifactError,
    commit_artifact,
    read_record,
    real_path,
    scratch_directory,
)
from hotrec.assemble.job import make_job
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.planning import recorded_partition
from hotrec.config.data import (
    DERIVED_FROM_TIMES,
    FEATURE_KINDS,
    TEXT_FORMATS,
    ColumnKind,
    SourceSpec,
    TimeUnit,
    columns_of,
)
from hotrec.config.roots import Config, ExportConfig, RowType
from hotrec.data.chunks import Dataset
from hotrec.data.encoding import sources_of
from hotrec.data.hashing import Hashes, hash_text
from hotrec.data.loader import make_loader
from hotrec.data.vocabulary import read_vocabulary
from hotrec.embedding.canonical import TensorPart
from hotrec.models import encoder, hstu, interaction, plain, sasrec, sequence
from hotrec.models.encoder import hash_file
from hotrec.models.plain import (
    DENSE_FILE,
    DESCRIPTION,
    FORMAT_VERSION,
    OWN,
    SCALE,
    TABLES_DIR,
    WEIGHT,
    Architecture,
    load_model,
    table_file,
)
from hotrec.runs.evaluate import AUTO, find_checkpoint, is_best
from hotrec.runs.train import open_dataset
from hotrec.runtime.run_dir import read_finished
from hotrec.train.checkpoint import LATEST, open_tensors, read_facts
from hotrec.train.evaluate import Quality, measure_all
from hotrec.train.tensor_files import TensorFiles
from hotrec.types import Schema

logger = logging.getLogger(__name__)

KIND, VOCABULARIES = "model export", "vocab"
# The reader code for services without hotrec.
CODE = {
    path.name: path
    for of in (encoder, plain, interaction, hstu, sasrec, sequence)
    for path in [Path(inspect.getfile(of))]
}
# Raw ids, and bytes of a table, that are written at once.
IDS_AT_ONCE, _CHUNK_BYTES = 1 << 18, 64 << 20
_IDS = pa.schema([("value", pa.large_string()), ("row", pa.int64())])
_INT8_MOST = 127
_TABLE = re.compile(
    r"(?:.*\.)?embedding(?:_bag_collection\.embedding_bags|_collection\.embeddings)\.(.+)\.weight"
)
# The split of the run's dataset that the exported model is evaluated on, and samples at once.
EVALUATED_ON, BATCH_SIZE = "test", 4096
_TYPES = {RowType.fp32: np.float32, RowType.fp16: np.float16, RowType.int8: np.int8}
# Names of the types in safetensors files.
_NAMES: Mapping[Any, str] = {np.float32: "F32", np.float16: "F16", np.int8: "I8"}


@dataclass(frozen=True)
class Trained:
    """A run's checkpoint with its dataset.

    Args:
        spec: The model and its training rules.
        dataset: Its dataset.
        checkpoint: Directory of the checkpoint.
        step: Number of updates before it.
        source: The log that the dataset was prepared from; None if not recorded.
    """

    spec: ModelSpec
    dataset: Dataset
    checkpoint: Path
    step: int
    source: SourceSpec | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The figures of its checkpoint."""
        best = is_best(self.checkpoint)
        return {"checkpoint": self.checkpoint.name, "step": self.step, "is_best": best}


def open_trained(config: Config, trained_dir: Path, checkpoint: str) -> Trained:
    """Find a checkpoint of a run, and its dataset.

    Args:
        config: Configuration of the run.
        trained_dir: Directory of the run.
        checkpoint: Name of the checkpoint; AUTO and LATEST only for a finished run.

    Raises:
        ArtifactError: If the dataset or checkpoint is missing or altered, or they do not match.
        ValueError: If there is no such checkpoint, or the run has not finished.
    """
    keeps_best = config.trainer.keeps_best
    path = find_checkpoint(trained_dir, checkpoint, keeps_best=keeps_best)
    if checkpoint in (AUTO, LATEST) and read_finished(trained_dir) is None:
        raise ValueError(
            f"run_dir: expected a finished run, got {trained_dir}, which stopped at {path.name}. "
            f"Resume it, or export this checkpoint with checkpoint={path.name}."
        )
    dataset = open_dataset(config.paths, path)
    job = make_job(config, dataset)
    _, partition = recorded_partition(job, trained_dir)
    content = read_facts(path, job.facts(partition), verify_files=True)
    return Trained(job.spec, dataset, path, content["step"], config.data.source)


def table_names(files: TensorFiles, schema: Schema) -> dict[str, str]:
    """The tensor of each table in a checkpoint.

    Raises:
        ArtifactError: If the checkpoint has other tables.
    """
    found = {
        match[1]: name
        for name in files.shapes
        if "/" not in name and (match := _TABLE.fullmatch(name))
    }
    expected = {table.name for table in schema.tables}
    if found.keys() != expected:
        raise ArtifactError(
            f"checkpoint: expected the tables {sorted(expected)}, got {sorted(found)}. Use a "
            "checkpoint of a model that hotrec trained."
        )
    return found


def dense_weights(files: TensorFiles) -> dict[str, torch.Tensor]:
    """The weights of the layers from a checkpoint, by their names in ``make_layers``."""
    names = (name for name in files.shapes if "/" not in name and not _TABLE.fullmatch(name))
    return {name.partition("layers.")[2]: files.whole(name) for name in names}


def export_run(config: ExportConfig, trained_config: Config, trained_dir: Path) -> dict[str, Any]:
    """Write the model of a run's checkpoint into a directory.

    Args:
        config: The output directory and format.
        trained_config: Configuration of the run.
        trained_dir: Directory of the run.

    Returns:
        The figures of the command: the checkpoint, the number of rows of all tables and of bytes,
        and the quality of the exported model, if it was evaluated.

    Raises:
        ArtifactError: If the output directory contains something else, the dataset or checkpoint
            is missing or altered, these do not match, or values exceed the type. Nothing is
            changed.
        ValueError: As ``open_trained``.
    """
    target, rows = Path(config.output), config.rows
    check_place(target)
    with scratch_directory(target, kind=KIND) as scratch:
        trained = open_trained(trained_config, trained_dir, config.checkpoint)
        dataset = trained.dataset.artifact
        shape = trained.spec.architecture
        description = _description(trained, shape, rows)
        with open_tensors(trained.checkpoint) as files:
            (scratch / TABLES_DIR).mkdir()
            for table, tensor in table_names(files, trained.dataset.schema).items():
                write_table(scratch / table_file(table), files, tensor, rows)
            dense = dense_weights(files)
        save_file(dense, scratch / DENSE_FILE)
        description["dense_sha256"] = sha256((scratch / DENSE_FILE).read_bytes()).hexdigest()
        _write_vocabularies(scratch, trained)
        for name, source in CODE.items():  # never code from another export
            code = source.read_text().replace("from hotrec.models.", "from ")
            (scratch / name).write_text(code)
        (scratch / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        quality = _evaluate(scratch, trained)
        artifact = commit_artifact(
            scratch,
            target,
            kind=KIND,
            content={"quality": None if quality is None else quality.to_json()},
            made_from={"dataset": dataset.content_hash},
            apart=CODE,
        )
    return {
        "output": target,
        **trained.facts,
        "rows": rows.name,
        "num_rows": sum(table.num_rows for table in trained.dataset.schema.tables),
        "num_bytes": sum(file["num_bytes"] for file in artifact.files.values()),
        "split": None if quality is None else EVALUATED_ON,
        **({} if quality is None else quality.to_json()),
    }


def check_place(target: Path) -> None:
    """Check that an output directory is not inside an artifact, which it would modify.

    Raises:
        ValueError: If it is.
    """

    def is_artifact(directory: Path) -> bool:
        try:  # the file may be from another program
            manifest = json.loads(read_record(directory / MANIFEST))
            return {"kind", "content_hash"} <= manifest.keys()
        except (OSError, ValueError, AttributeError):
            return False

    for parent in filter(is_artifact, real_path(target).parents):
        raise ValueError(
            f"output {target}: expected a directory outside of hotrec's artifacts, got one "
            f"inside {parent}. Choose another directory."
        )


def write_table(path: Path, files: TensorFiles, name: str, row_type: RowType) -> None:
    """Write the rows of a table of a checkpoint, which may exceed memory, as a safetensors file.

    Raises:
        ArtifactError: If a value exceeds the type.
    """
    num_rows, dim = files.shapes[name]
    forms: dict[str, tuple[Any, tuple[int, ...]]] = {WEIGHT: (_TYPES[row_type], (num_rows, dim))}
    if row_type is RowType.int8:  # before the rows, because wider types must come first
        forms = {SCALE: (np.float32, (num_rows,)), **forms}
    header: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    end = 0
    for tensor, (dtype, shape) in forms.items():
        places[tensor], end = end, end + prod(shape) * np.dtype(dtype).itemsize
        header[tensor] = {"dtype": _NAMES[dtype], "shape": shape}
        header[tensor]["data_offsets"] = [places[tensor], end]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    step = max(1, _CHUNK_BYTES // (4 * dim))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, num_rows, step):
            part = torch.empty(min(step, num_rows - begin), dim)
            files.read([TensorPart(name, (num_rows, dim), part, (begin, 0))])
            rows = part.numpy()
            _check_range(rows, name, row_type)
            stored: list[Any] = [rows.astype(_TYPES[row_type], copy=False)]
            if row_type is RowType.int8:
                stored = list(quantize(rows))
            for tensor, values in zip(forms, stored, strict=True):
                file.seek(8 + len(text) + places[tensor])
                places[tensor] += file.write(values.data)


def quantize(
    rows: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int8]]:
    """Rows (r, D) as scales float32 (r,) and int8 (r, D); a scale is the largest |x| / 127."""
    scales = np.abs(rows).max(axis=1) / np.float32(_INT8_MOST)
    divisors = np.where(scales > 0, scales, np.float32(1))[:, None]
    return scales, np.rint(rows / divisors).clip(-_INT8_MOST, _INT8_MOST).astype(np.int8)


def _check_range(rows: npt.NDArray[np.float32], name: str, row_type: RowType) -> None:
    most = float(np.finfo(np.float16 if row_type is RowType.fp16 else np.float32).max)
    largest = float(np.abs(rows).max(initial=0))
    if not largest <= most:
        raise ArtifactError(
            f"{name}: expected values of at most {most:g} for rows={row_type.name}, got "
            f"{largest:g}. Set rows=fp32, or train with a lower learning rate."
        )


def _write_vocabularies(scratch: Path, trained: Trained) -> None:
    """Write value and row of each raw id, and the hashes of the values for the encoder."""
    dataset = trained.dataset.artifact
    for table in _with_vocabulary(trained):
        dataset.verify_file(f"vocab/{table}.arrow")
        (scratch / VOCABULARIES).mkdir(exist_ok=True)
        shape = (trained.dataset.schema.table(table).num_rows - 1,)
        hashes: Hashes = np.lib.format.open_memmap(
            scratch / hash_file(table), mode="w+", dtype="<u8", shape=shape
        )
        values = read_vocabulary(dataset.path, table)["value"]
        with pq.ParquetWriter(scratch / _vocabulary_file(table), _IDS) as writer:
            for begin in range(0, len(values), IDS_AT_ONCE):
                chunk = values.slice(begin, IDS_AT_ONCE).combine_chunks()
                end = begin + len(chunk)
                # Row 0 is for all other values.
                writer.write_table(pa.table([chunk, np.arange(begin, end) + 1], schema=_IDS))
                hashes[begin:end] = hash_text(chunk)


def _vocabulary_file(table: str) -> str:
    return f"{VOCABULARIES}/{table}.parquet"


def _with_vocabulary(trained: Trained) -> list[str]:
    files, tables = trained.dataset.artifact.files, trained.dataset.schema.tables
    return [table.name for table in tables if f"vocab/{table.name}.arrow" in files]


def _labels(trained: Trained, shape: Architecture) -> list[str]:
    """The names of the labels; a single one has the name of its column in the log.

    A user's model class is constructed with the names that it was trained with.
    """
    source = trained.source
    if source is None or len(shape.labels) > 1 or shape.kind == OWN:
        return list(shape.labels)
    return list(sources_of(columns_of(source), ColumnKind.label).values())


def _encoding(trained: Trained) -> dict[str, Any] | None:
    """How raw values are encoded, for ``hotrec.models.encoder``; None without a log."""
    recorded = trained.dataset.artifact.content["source"].get("encoding")
    source = trained.source
    if recorded is None or source is None:
        return None
    columns = {
        name: {
            **column,
            "source": column["source"] or name,
            **({"table": column["table"] or name} if column["kind"] in FEATURE_KINDS else {}),
        }
        for name, column in recorded["columns"].items()
    }
    of_times = {
        column["source"] for column in columns.values() if column["derive"] in DERIVED_FROM_TIMES
    }
    dense = trained.dataset.schema.dense
    return {
        # Parquet and Arrow files have their own nulls.
        "null_values": source.null_values if source.format in TEXT_FORMATS else [],
        "columns": columns,
        "tables": recorded["tables"],
        "names": recorded["names"],
        "expr": _exprs(recorded["expr"], {column["source"] for column in columns.values()}),
        "are_texts": source.format in TEXT_FORMATS,
        "value_types": recorded["value_types"],
        "times": {name: recorded["times"].get(name, TimeUnit.ms.name) for name in sorted(of_times)},
        "means": dict(zip(dense, recorded["means"], strict=True)),
        "deviations": dict(zip(dense, recorded["deviations"], strict=True)),
    }


def _exprs(recorded: Mapping[str, str], used: set[str]) -> dict[str, Any]:
    """The computed columns that are read, and what they are computed from."""
    exprs = {name: sql for name, sql in recorded.items() if name in used}
    if not exprs:
        return {}
    from hotrec.data.expr import columns_read_by  # polars is only needed for these

    return {n: {"sql": sql, "columns": columns_read_by(n, sql)} for n, sql in exprs.items()}


def _description(trained: Trained, shape: Architecture, rows: RowType) -> dict[str, Any]:
    """The content of ``model.json``."""
    schema = trained.dataset.schema
    with_vocabulary = _with_vocabulary(trained)
    tables = [
        {
            "name": table.name,
            "num_rows": table.num_rows,
            "vocabulary": _vocabulary_file(table.name) if table.name in with_vocabulary else None,
        }
        for table in schema.tables
    ]
    return {
        "format_version": FORMAT_VERSION,
        "architecture": {**asdict(shape), "labels": _labels(trained, shape)},
        "rows": rows.name,
        "tables": tables,
        "encoding": _encoding(trained),
        "checkpoint": {
            "name": trained.checkpoint.name,
            "step": trained.step,
            "dataset": trained.dataset.artifact.content_hash,
        },
    }


def _evaluate(directory: Path, trained: Trained) -> Quality | None:
    """The quality of the exported model, read from its files."""
    split = EVALUATED_ON
    if split in trained.dataset.splits and trained.dataset.num_samples(split) == 0:
        logger.info("no evaluation: the split %s of the dataset is empty", split)
        return None
    loader = make_loader(
        trained.dataset.artifact.path,
        split,
        batch_size=BATCH_SIZE,
        rank=0,
        world_size=1,
        epochs=1,
        shuffle=False,
    )
    model = load_model(directory, allow_code=True)
    logits, labels, weights = [], [], []
    for batch in loader:
        ids = {name: (f.values(), f.offsets()) for name, f in batch.sparse.to_dict().items()}
        with torch.no_grad():
            logits.append(model(batch.dense, ids).numpy())
        labels.append(batch.labels.numpy())
        weights.append(batch.weights.numpy())
    return measure_all(
        np.concatenate(logits),
        np.concatenate(labels),
        np.concatenate(weights),
        trained.spec.label_weights,
    )
