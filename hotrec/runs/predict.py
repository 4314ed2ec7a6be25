"""Score raw files with a run's model: read and encoded as its dataset was, scores in Parquet.

Ranks divide the files, which stream through in blocks. Every rank holds the model's tables; for the
AUC of labelled files rank 0 reads logits and labels of all samples at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hotrec.artifact import Artifact, commit_artifact, read_artifact
from hotrec.config.data import ColumnKind, Encoding, SourceSpec, SplitSpec, tables_of
from hotrec.config.roots import Config, PredictConfig
from hotrec.data.chunks import Floats, Integers, Jagged
from hotrec.data.columns import Float64s, RawBlock
from hotrec.data.encode import (
    check_row_numbers,
    encode_inputs,
    feature_columns,
    read_encoding,
    read_times,
    sources_of,
)
from hotrec.data.log import Log, open_log
from hotrec.data.prepare import read_ahead
from hotrec.data.readers import find_files
from hotrec.data.vocabulary import RowEncoder
from hotrec.models.plain import Ids, PlainModel, TableRows
from hotrec.models.shape import architecture_of
from hotrec.planning.unsharded import label_weights_of
from hotrec.runs.export import Trained, dense_weights, open_trained, table_names
from hotrec.runtime.ranks import all_gather_object, rank, same_verdict, shared_scratch, world_size
from hotrec.train.checkpoint import open_tensors
from hotrec.train.evaluate import Quality, measure_all

logger = logging.getLogger(__name__)

KIND, SCORES = "prediction", "scores"


@dataclass(frozen=True)
class ScoredFiles:
    """Scores of raw files.

    Args:
        artifact: Directory of the scores.
        checkpoint: Name of the checkpoint.
        step: Number of updates before it.
        num_files: Number of files.
        num_samples: Number of samples that were scored.
        num_skipped: Number of samples that could not be read.
        quality: Quality of the scores; None for files without labels.
    """

    artifact: Artifact
    checkpoint: str
    step: int
    num_files: int
    num_samples: int
    num_skipped: int
    quality: Quality | None


def predict_run(config: PredictConfig, trained_config: Config, trained_dir: Path) -> ScoredFiles:
    """Score files with a run's checkpoint and write a Parquet file for each; collective.

    ``scores/00000.parquet`` has the columns line (in the file, or the row in one without lines,
    from 1), logit, score (the predicted rate of clicks) and, if the files have them, label and
    weight. With several labels there are a logit, a score and a label of each: logit_<name>,
    score_<name>, label_<name>. Values that the dataset's vocabularies do not hold get row 0, as in
    training.

    Args:
        config: The files, and where scores are written.
        trained_config: Configuration of the run.
        trained_dir: Directory of the run.

    Raises:
        ArtifactError: If the output directory holds something else, or the dataset or checkpoint
            is missing, altered, or made otherwise. Nothing is changed.
        ValueError: If the run has not finished, or a file lacks a column or cannot be read.
    """
    target = Path(config.output)
    with shared_scratch(target, kind=KIND) as scratch:
        trained = same_verdict(lambda: open_trained(trained_config, trained_dir, config.checkpoint))
        scorer = same_verdict(lambda: _make_scorer(config, trained))
        counts = same_verdict(lambda: _score_own_files(scorer, scratch))
        num_samples, num_skipped = map(sum, zip(*all_gather_object(counts), strict=True))

        def commit() -> None:
            quality = _measure(scratch, scorer) if scorer.labels else None
            content = {
                "num_samples": num_samples,
                "num_skipped": num_skipped,
                "files": [path.name for path in scorer.log.files],
                "checkpoint": trained.checkpoint.name,
                "quality": None if quality is None else quality.to_json(),
            }
            made_from = {"dataset": trained.dataset.artifact.content_hash}
            commit_artifact(scratch, target, kind=KIND, content=content, made_from=made_from)

        same_verdict(lambda: commit() if rank() == 0 else None)
    artifact = read_artifact(target, kind=KIND)
    quality = artifact.content["quality"]
    return ScoredFiles(
        artifact,
        trained.checkpoint.name,
        trained.step,
        len(scorer.log.files),
        num_samples,
        num_skipped,
        None if quality is None else _quality(quality),
    )


def _quality(document: dict[str, Any]) -> Quality:
    by_label = {name: Quality(**of) for name, of in document.get("by_label", {}).items()}
    return Quality(**{**document, "by_label": by_label})


def _measure(scratch: Path, scorer: _Scorer) -> Quality:
    found = pq.read_table(scratch / SCORES)
    weights = found["weight"].to_numpy() if scorer.weight is not None else None
    logits, labels = (
        np.stack([found[name + suffix].to_numpy() for suffix in scorer.suffixes], axis=1)
        for name in ("logit", "label")
    )
    if not scorer.label_weights:
        logits, labels = logits.reshape(-1), labels.reshape(-1)
    return measure_all(logits, labels, weights, scorer.label_weights)


@dataclass(frozen=True)
class _Scorer:
    """What all files share."""

    log: Log
    model: PlainModel
    encoders: dict[str, RowEncoder]  # by feature
    row_numbers: dict[str, int]  # rows of the table, by feature whose ids are row numbers
    scaling: Float64s
    label_weights: dict[str, float] | None  # of several labels
    labels: list[str]  # the log's columns, if the files have them
    weight: str | None
    batch_size: int

    @property
    def suffixes(self) -> list[str]:
        """What the names of each label's columns end with."""
        return [f"_{name}" for name in self.label_weights or ()] or [""]

    def inputs(self, block: RawBlock, file: Path) -> tuple[Floats, dict[str, Integers | Jagged]]:
        """Dense columns and rows of a block."""
        columns = self.log.columns
        for name, num_rows in self.row_numbers.items():
            advice = "or leave the sample out"
            check_row_numbers(block, name, columns[name], num_rows, file, advice)
        return encode_inputs(block, columns, self.encoders, self.scaling)


def _make_scorer(config: PredictConfig, trained: Trained) -> _Scorer:
    source = trained.config.data.source
    if source is None:
        raise ValueError(
            "input: expected a run whose configuration has data.source, the log that its dataset "
            "was prepared from, got none. Train on a log that `hotrec prepare` prepared, or give "
            "`Config(data=DataSpec(source=...))`."
        )
    encoders, scaling = read_encoding(trained.dataset, source)
    log = _open_input(config, source)
    labels, weights = (
        list(sources_of(log.columns, kind).values())
        for kind in (ColumnKind.label, ColumnKind.weight)
    )
    tables = tables_of(source)
    of_features = {
        name: column.table or name for name, column in feature_columns(log.columns).items()
    }
    return _Scorer(
        log,
        read_model(trained),
        {name: encoders[table] for name, table in of_features.items()},
        {
            name: encoders[table].num_rows
            for name, table in of_features.items()
            if tables[table].encoding is Encoding.rows
        },
        scaling,
        label_weights_of(trained.config.trainer, trained.dataset.schema),
        labels,
        weights[0] if weights else None,
        config.batch_size,
    )


def _open_input(config: PredictConfig, source: SourceSpec) -> Log:
    """The run's log with the files to score, which are not split."""
    for name in config.joins:
        if name not in source.joins:
            raise ValueError(
                f"joins.{name}: expected one of the side tables {sorted(source.joins)}, got "
                f"{name!r}. Correct the name."
            )
    joins = {
        name: replace(join, files=config.joins.get(name, join.files))
        for name, join in source.joins.items()
    }
    files = [str(path) for path in find_files(config.input, source.format, key="input")]
    try:
        times = {name: source.times[name] for name in read_times(source)}
        spec = replace(source, files=files, joins=joins, split=SplitSpec(), times=times)
        return open_log(spec, needs_label=False)
    except ValueError as error:
        if str(error).startswith("data.source.columns."):  # names a column, but no file
            raise ValueError(f"input {files[0]}: {error}") from error
        raise


def read_model(trained: Trained) -> PlainModel:
    """The model of a checkpoint, with its tables in memory."""
    schema = trained.dataset.schema
    shape = architecture_of(trained.config.model, schema)
    with open_tensors(trained.checkpoint) as files:
        tables = {
            table: TableRows(files.whole(tensor), None, shape.pooling == "mean")
            for table, tensor in table_names(files, schema).items()
        }
        return PlainModel(shape, dense_weights(files, shape), tables)


def _score_own_files(scorer: _Scorer, scratch: Path) -> tuple[int, int]:
    """Score this rank's files; the numbers of samples scored and skipped."""
    (scratch / SCORES).mkdir(exist_ok=True)
    num_samples = num_skipped = 0
    for number in range(len(scorer.log.files))[rank() :: world_size()]:
        for block in _scored_blocks(scorer, number, scratch / SCORES / f"{number:05d}.parquet"):
            num_samples += len(block)
            num_skipped += block.num_skipped
        logger.info("%s: scored, %d samples so far", scorer.log.files[number], num_samples)
    return num_samples, num_skipped


def _scored_blocks(scorer: _Scorer, number: int, target: Path) -> Iterator[RawBlock]:
    """Score a file block by block and write each; yields what was written."""
    columns = {"line": pa.int64()}
    for suffix in scorer.suffixes:
        columns |= {f"logit{suffix}": pa.float32(), f"score{suffix}": pa.float32()}
        if scorer.labels:
            columns[f"label{suffix}"] = pa.int8()
    if scorer.weight is not None:
        columns["weight"] = pa.float32()
    schema = pa.schema(columns)
    with pq.ParquetWriter(target, schema) as writer:
        for block in read_ahead(scorer.log.blocks(number)):
            inputs = scorer.inputs(block, scorer.log.files[number])
            logits = score(scorer.model, *inputs, scorer.batch_size)
            values: list[Any] = [block.lines]
            for label, of_label in enumerate(logits.reshape(len(block), -1).T):
                values += [of_label, torch.from_numpy(of_label.copy()).sigmoid().numpy()]
                if scorer.labels:
                    values.append(block.numbers[scorer.labels[label]].astype(np.int8))
            if scorer.weight is not None:
                values.append(block.numbers[scorer.weight].astype(np.float32))
            writer.write_table(pa.table(values, schema=schema))
            yield block


def score(
    model: PlainModel, dense: Floats, features: dict[str, Integers | Jagged], batch_size: int
) -> Floats:
    """Logits of n encoded samples, computed ``batch_size`` at a time.

    Returns:
        float32 (n,), or (n, L) with several labels.
    """
    num_labels = len(model.shape.labels)
    shape = (len(dense),) if num_labels == 1 else (len(dense), num_labels)
    logits = np.empty(shape, np.float32)
    with torch.no_grad():
        for begin in range(0, len(dense), batch_size):
            end = min(begin + batch_size, len(dense))
            ids = dict(_slices(features, begin, end))
            logits[begin:end] = model(torch.from_numpy(dense[begin:end]), ids).numpy()
    return logits


def _slices(
    features: dict[str, Integers | Jagged], begin: int, end: int
) -> Iterator[tuple[str, Ids]]:
    for name, ids in features.items():
        if isinstance(ids, Jagged):
            offsets = ids.offsets[begin : end + 1]
            values = torch.from_numpy(ids.values[offsets[0] : offsets[-1]])
            yield name, (values, torch.from_numpy(offsets - offsets[0]))
        else:
            yield name, torch.from_numpy(ids[begin:end])
