"""Export a run's model: tables, vocabularies and layers in files that need no hotrec to read.

    model.json                   architecture, features, dense columns, tables; the checkpoint
    dense.safetensors            weights of all layers but the tables
    tables/<table>.safetensors   weight (R, D) in the dataset's own rows; for int8 also scale (R,)
    vocab/<table>.parquet        value and row of each raw id, where the table has a vocabulary

Tables are copied a chunk at a time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hotrec.artifact import Artifact, ArtifactError, commit_artifact, scratch_directory
from hotrec.config.roots import Config, ExportConfig, ExportFormConfig, RowType
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.vocabulary import read_vocabulary
from hotrec.embedding.canonical import Part
from hotrec.models.plain import (
    DENSE_FILE,
    DESCRIPTION,
    FORMAT_VERSION,
    SCALE,
    TABLES_DIR,
    WEIGHT,
    Architecture,
    PlainModel,
    load_model,
)
from hotrec.models.shape import architecture_of
from hotrec.planning.training_plan import read_training_plan
from hotrec.planning.unsharded import label_weights_of
from hotrec.runs.evaluate import find_checkpoint
from hotrec.runs.train import checkpoint_facts
from hotrec.runtime.run_dir import read_finished
from hotrec.train.checkpoint import open_tensors, read_facts
from hotrec.train.evaluate import Quality, measure_all
from hotrec.train.tensor_files import TensorFiles
from hotrec.types import Schema

logger = logging.getLogger(__name__)

KIND = "model export"
VOCABULARIES = "vocab"
_CHUNK_BYTES = 64 << 20
_VOCABULARY_BATCH = 1 << 18
_INT8_MOST = 127
_TABLE = re.compile(r"(?:.*\.)?sparse_arch\.embedding_bag_collection\.embedding_bags\.(.+)\.weight")
# The layers of TorchRec's models by the names of ours; {n} is the last of the top ones.
_LAYERS = (
    (r"dense_arch\.model\._mlp\.(\d+)\._linear\.(\w+)", r"bottom.{}.\2"),
    (r"over_arch\.model\.0\._mlp\.(\d+)\._linear\.(\w+)", r"top.{}.\2"),
    (r"inter_arch\.crossnet\.V_kernels\.(\d+)", r"interaction.v.\1"),
    (r"inter_arch\.crossnet\.W_kernels\.(\d+)", r"interaction.w.\1"),
    (r"inter_arch\.crossnet\.bias\.(\d+)", r"interaction.bias.\1"),
)
# Names of the types in safetensors files.
_TYPES = {"float32": "F32", "float16": "F16", "int8": "I8"}


@dataclass(frozen=True)
class Trained:
    """A run's checkpoint that fits its dataset.

    Args:
        config: Configuration of the run.
        dataset: Its dataset.
        checkpoint: Directory of the checkpoint.
        step: Number of updates before it.
    """

    config: Config
    dataset: Dataset
    checkpoint: Path
    step: int


@dataclass(frozen=True)
class ExportedModel:
    """An exported model.

    Args:
        artifact: Its directory.
        checkpoint: Name of the checkpoint.
        step: Number of updates before it.
        quality: Quality of the exported model; None without an evaluation.
    """

    artifact: Artifact
    checkpoint: str
    step: int
    quality: Quality | None


def open_trained(config: Config, trained_dir: Path, checkpoint: str) -> Trained:
    """Find a checkpoint of a run, and its dataset.

    Args:
        config: Configuration of the run.
        trained_dir: Directory of the run.
        checkpoint: Name of the checkpoint; "latest" only for a finished run.

    Raises:
        ArtifactError: If the dataset or checkpoint is missing or altered, or they do not fit.
        ValueError: If there is no such checkpoint, or the run has not finished.
    """
    path = find_checkpoint(trained_dir, checkpoint)
    if checkpoint == "latest" and read_finished(trained_dir) is None:
        raise ValueError(
            f"run_dir: expected a finished run, got {trained_dir}, which stands at {path.name}. "
            f"Resume it, or choose this state with checkpoint={path.name}."
        )
    dataset = Dataset.open(config.paths.dataset, config.paths.verify)
    plan = read_training_plan(config, trained_dir)
    facts = checkpoint_facts(plan.config, dataset, plan.artifact)
    content = read_facts(path, facts, verify_files=True)
    return Trained(plan.config, dataset, path, content["step"])


def table_names(files: TensorFiles, schema: Schema) -> dict[str, str]:
    """The tensor of each table in a checkpoint.

    Raises:
        ArtifactError: If the checkpoint holds other tables.
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


def dense_weights(files: TensorFiles, shape: Architecture) -> dict[str, torch.Tensor]:
    """The weights of the layers from a checkpoint."""
    names = (name for name in files.shapes if "/" not in name and not _TABLE.fullmatch(name))
    return by_layer({name: files.whole(name) for name in names}, shape)


def by_layer(weights: Mapping[str, torch.Tensor], shape: Architecture) -> dict[str, torch.Tensor]:
    """Weights of a trained model by the names of the plain one's layers."""
    if shape.kind in ("dlrm", "dcnv2"):
        last = len(shape.over_layer_sizes) - 1
        return {layer_name(name, last): weight for name, weight in weights.items()}
    # Trained with the very layers that the plain model has.
    return {name.partition("layers.")[2]: weight for name, weight in weights.items()}


def layer_name(name: str, last: int) -> str:
    """The name in ``DenseLayers`` of a weight of TorchRec's models; ``last`` is of the top layers.

    Raises:
        ArtifactError: If it is a weight of another model.
    """
    if match := re.search(r"over_arch\.model\.1\.(\w+)$", name):
        return f"top.{2 * last}.{match[1]}"
    for pattern, ours in _LAYERS:
        if match := re.search(f"{pattern}$", name):
            # Every second module of ours is an activation.
            return match.expand(ours).format(2 * int(match[1]))
    raise ArtifactError(
        f"checkpoint: expected weights of a DLRM or DCNv2, got {name}. Use a checkpoint of a model "
        "that hotrec trained."
    )


def export_run(config: ExportConfig, trained_config: Config, trained_dir: Path) -> ExportedModel:
    """Write the model of a run's checkpoint into a directory.

    Args:
        config: Where to write it, and in which form.
        trained_config: Configuration of the run.
        trained_dir: Directory of the run.

    Returns:
        What was written, evaluated as ``config`` says.

    Raises:
        ArtifactError: If the output directory holds something else, the dataset or checkpoint is
            missing or altered, or rows do not fit the type. Nothing is changed.
        ValueError: As ``open_trained``.
    """
    target, form = Path(config.output), config.export
    with scratch_directory(target, kind=KIND) as scratch:
        trained = open_trained(trained_config, trained_dir, config.checkpoint)
        shape = architecture_of(trained.config.model, trained.dataset.schema)
        with open_tensors(trained.checkpoint) as files:
            tables = table_names(files, trained.dataset.schema)
            (scratch / TABLES_DIR).mkdir()
            for table, tensor in tables.items():
                _write_table(scratch / table_file(table), files, tensor, form.rows)
            _write_dense(scratch / DENSE_FILE, dense_weights(files, shape))
        vocabularies = _write_vocabularies(scratch, trained)
        description = _description(trained, shape, form, vocabularies)
        (scratch / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
        quality = _evaluate(load_model(scratch), trained, form)
        artifact = commit_artifact(
            scratch,
            target,
            kind=KIND,
            content={"quality": None if quality is None else quality.to_json()},
            made_from={"dataset": trained.dataset.artifact.content_hash},
        )
    return ExportedModel(artifact, trained.checkpoint.name, trained.step, quality)


def table_file(table: str) -> str:
    """Path of a table in the exported directory."""
    return f"{TABLES_DIR}/{table}.safetensors"


class TensorWriter:
    """Writes a safetensors file whose tensors are larger than memory, in pieces.

    The format is 8 bytes with the length of a JSON header, the header, and the tensors end to end.

    Args:
        path: The file.
        tensors: Type and shape of each tensor; wider types first, so that all are aligned.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        header: dict[str, dict[str, Any]] = {}
        begins: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            begins[name], end = end, end + prod(shape) * np.dtype(dtype).itemsize
            offsets = [begins[name], end]
            header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._at = {name: 8 + len(text) + begin for name, begin in begins.items()}
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

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


def row_chunks(files: TensorFiles, name: str) -> Iterator[npt.NDArray[np.float32]]:
    """The rows of a table of a checkpoint, float32 (r, D), a bounded number at a time."""
    num_rows, dim = files.shapes[name]
    step = max(1, _CHUNK_BYTES // (4 * dim))
    for begin in range(0, num_rows, step):
        rows = torch.empty(min(step, num_rows - begin), dim)
        files.read([Part(name, (num_rows, dim), rows, (begin, 0))])
        yield rows.numpy()


def _write_table(path: Path, files: TensorFiles, name: str, row_type: RowType) -> None:
    num_rows, dim = files.shapes[name]
    types = {RowType.fp32: "float32", RowType.fp16: "float16", RowType.int8: "int8"}
    tensors: dict[str, tuple[str, Sequence[int]]] = {}
    if row_type is RowType.int8:
        tensors[SCALE] = ("float32", (num_rows,))
    tensors[WEIGHT] = (types[row_type], (num_rows, dim))
    with TensorWriter(path, tensors) as writer:
        for rows in row_chunks(files, name):
            _check_range(rows, name, row_type)
            if row_type is RowType.int8:
                scales, rows_of_int8 = quantize(rows)
                writer.write(SCALE, scales)
                writer.write(WEIGHT, rows_of_int8)
            else:
                writer.write(WEIGHT, rows.astype(types[row_type]))


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
            f"{name}: expected values of at most {most:g} for export.rows={row_type.name}, got "
            f"{largest:g}. Set export.rows=fp32, or train with a lower learning rate."
        )


def _write_dense(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    arrays = {name: value.numpy() for name, value in weights.items()}
    tensors = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    with TensorWriter(path, tensors) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def _write_vocabularies(scratch: Path, trained: Trained) -> dict[str, str]:
    """Value and row of each raw id; the file of each table that has a vocabulary."""
    artifact, written = trained.dataset.artifact, {}
    for table in trained.dataset.schema.tables:
        source = f"vocab/{table.name}.arrow"
        if source not in artifact.files:
            continue
        artifact.verify_file(source)
        (scratch / VOCABULARIES).mkdir(exist_ok=True)
        written[table.name] = f"{VOCABULARIES}/{table.name}.parquet"
        columns = pa.schema([("value", pa.large_string()), ("row", pa.int64())])
        with pq.ParquetWriter(scratch / written[table.name], columns) as writer:
            row = 1  # row 0 is for all other values
            values = read_vocabulary(artifact.path, table.name).select(["value"])
            for batch in values.to_batches(max_chunksize=_VOCABULARY_BATCH):
                rows = pa.array(np.arange(row, row + batch.num_rows))
                writer.write_batch(pa.record_batch([batch.column(0), rows], schema=columns))
                row += batch.num_rows
    return written


def _description(
    trained: Trained, shape: Architecture, form: ExportFormConfig, vocabularies: Mapping[str, str]
) -> dict[str, Any]:
    """The content of ``model.json``."""
    schema, source = trained.dataset.schema, trained.dataset.artifact.content["source"]
    tables = [
        {
            "name": table.name,
            "num_rows": table.num_rows,
            "file": table_file(table.name),
            "vocabulary": vocabularies.get(table.name),
        }
        for table in schema.tables
    ]
    return {
        "format_version": FORMAT_VERSION,
        "architecture": asdict(shape),
        "rows": form.rows.name,
        "tables": tables,
        # What each column and table of the log was encoded by; null where it was not a log.
        "encoding": source.get("encoding"),
        "checkpoint": {
            "name": trained.checkpoint.name,
            "step": trained.step,
            "dataset": trained.dataset.artifact.content_hash,
        },
    }


def _evaluate(model: PlainModel, trained: Trained, form: ExportFormConfig) -> Quality | None:
    """The quality of the exported model, read from its files."""
    split = form.eval_split
    if split is None:
        return None
    if split in trained.dataset.splits and trained.dataset.num_samples(split) == 0:
        logger.info("no evaluation: the split %s of the dataset is empty", split)
        return None
    loader = make_loader(
        trained.dataset.artifact.path,
        split,
        batch_size=form.batch_size,
        rank=0,
        world_size=1,
        epochs=1,
        shuffle=False,
    )
    logits, labels, weights = [], [], []
    for batch in loader:
        ids = {name: (f.values(), f.offsets()) for name, f in batch.sparse.to_dict().items()}
        with torch.no_grad():
            logits.append(model(batch.dense, ids).numpy())
        labels.append(batch.labels.numpy())
        weights.append(batch.weights.numpy())
    label_weights = label_weights_of(trained.config.trainer, trained.dataset.schema)
    return measure_all(
        np.concatenate(logits), np.concatenate(labels), np.concatenate(weights), label_weights
    )
