"""Score raw files with a run's model: read and encoded like its dataset, scores in Parquet.

Ranks divide the files, which are streamed in blocks. Every rank loads all of the model's tables;
for the AUC of labelled files rank 0 reads logits and labels of all samples at the end. Unknown ids
are counted: if most of a column are unknown, they have another format or are of another source.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hotrec.artifact import commit_artifact, read_artifact
from hotrec.config.data import (
    ColumnKind,
    Encoding,
    SourceSpec,
    SplitSpec,
    tables_of,
)
from hotrec.config.roots import Config, PredictConfig
from hotrec.data.chunks import Floats, Integers, Jagged
from hotrec.data.columns import Ids as RawIds
from hotrec.data.columns import RawBlock
from hotrec.data.encode import (
    NUM_TELLING,
    ShowColumn,
    check_row_numbers,
    count_missing,
    encode_inputs,
    labels_of,
    say_missing,
)
from hotrec.data.encoding import (
    feature_columns,
    read_encoding,
    read_times,
    sources_of,
    value_types_of,
)
from hotrec.data.files import find_files
from hotrec.data.loader import padded_size
from hotrec.data.log import Log, open_log
from hotrec.data.prepare import read_ahead
from hotrec.data.unknown import UnknownIds, count_unknown, unknown_ids_of
from hotrec.data.value_types import ValueTypes
from hotrec.data.vocabulary import RowEncoder
from hotrec.models.plain import Ids, PlainModel, TableRows
from hotrec.runs.export import Trained, check_place, dense_weights, open_trained, table_names
from hotrec.runtime.ranks import all_gather_object, rank, same_verdict, shared_scratch, world_size
from hotrec.train.checkpoint import open_tensors
from hotrec.train.evaluate import Quality, measure_all
from hotrec.types import Float64s

logger = logging.getLogger(__name__)

KIND, SCORES = "prediction", "scores"
# Columns of every file of scores.
_LINE, _LOGIT, _SCORE, _LABEL, _WEIGHT = "line", "logit", "score", "label", "weight"


def predict_run(config: PredictConfig, trained_config: Config, trained_dir: Path) -> dict[str, Any]:
    """Score files with a run's checkpoint and write a Parquet file for each; collective.

    ``scores/00000.parquet`` has the columns line (in the file, or the row in one without lines,
    from 1), logit, score (the predicted rate of clicks), the columns to keep and, if the files have
    them, the label by its name in the log, and weight. With several labels there are a logit, a
    score and a label of each: logit_<name>, score_<name>, label_<name>. Values that are not in the
    dataset's vocabularies get row 0, as in training.

    Args:
        config: The files, and the output directory.
        trained_config: Configuration of the run.
        trained_dir: Directory of the run.

    Returns:
        The figures of the command: the checkpoint, the number of files, of samples scored and
        skipped, the unknown ids by column and their share in the held-out samples, the samples
        without a value by column, and of files with labels the quality.

    Raises:
        ArtifactError: If the output directory contains something else, or the dataset or checkpoint
            is missing, altered, or does not match. Nothing is changed.
        ValueError: If the run has not finished, or a file lacks a column, cannot be read, or has
            more unknown ids than ``max_unknown_frac`` allows.
    """
    target = Path(config.output)
    same_verdict(lambda: check_place(target))
    with shared_scratch(target, kind=KIND) as scratch:
        trained = same_verdict(lambda: open_trained(trained_config, trained_dir, config.checkpoint))
        scorer = same_verdict(lambda: _make_scorer(config, trained))
        counts = same_verdict(lambda: _score_own_files(scorer, scratch))
        of_ranks = all_gather_object(counts)
        num_samples, num_skipped = sum(of[0] for of in of_ranks), sum(of[1] for of in of_ranks)
        unknown = sum((of[2] for of in of_ranks), start=UnknownIds())
        missing = sum((of[3] for of in of_ranks), start=Counter[str]())
        scorer.check_unknown(unknown, "input")
        content = {
            "unknown_ids": scorer.unknown_document(unknown),
            "missing": {name: num for name, num in sorted(missing.items()) if num},
            "num_samples": num_samples,
            "num_skipped": num_skipped,
            "files": [path.name for path in scorer.log.files],
            "checkpoint": trained.checkpoint.name,
        }

        def commit() -> None:
            quality = _measure(scratch, scorer).to_json() if scorer.labels else None
            made_from = {"dataset": trained.dataset.artifact.content_hash}
            given: dict[str, Any] = {
                "content": {**content, "quality": quality},
                "made_from": made_from,
            }
            commit_artifact(scratch, target, kind=KIND, **given)

        same_verdict(lambda: commit() if rank() == 0 else None)
    figures = dict(read_artifact(target, kind=KIND).content)
    quality = figures.pop("quality") or {}
    return {
        "output": target,
        **trained.facts,
        "num_files": len(figures.pop("files")),
        **figures,
        **quality,
        "num_samples": num_samples,
    }


def _measure(scratch: Path, scorer: _Scorer) -> Quality:
    found = pq.read_table(scratch / SCORES)
    weights = found[_WEIGHT].to_numpy() if scorer.weight is not None else None
    names = [f"{_LOGIT}{suffix}" for suffix in scorer.suffixes], scorer.label_columns
    logits, labels = (np.stack([found[name].to_numpy() for name in of], axis=1) for of in names)
    if not scorer.label_weights:
        logits, labels = logits.reshape(-1), labels.reshape(-1)
    return measure_all(logits, labels, weights, scorer.label_weights)


@dataclass(frozen=True)
class _Scorer:
    """Data shared by all files."""

    log: Log
    model: PlainModel
    encoders: dict[str, RowEncoder]  # by feature
    row_numbers: dict[str, int]  # rows of the table, by feature whose ids are row numbers
    scaling: Float64s
    value_types: ValueTypes  # of the columns of the training log
    label_weights: Mapping[str, float] | None  # of several labels
    held_out: dict[str, float]  # the share of unknown ids in held-out samples, by column
    max_unknown_frac: float
    labels: list[str]  # the log's columns, if the files have them
    weight: str | None
    batch_size: int

    @property
    def suffixes(self) -> list[str]:
        """Suffix of each label's columns."""
        return [f"_{name}" for name in self.label_weights or ()] or [""]

    @property
    def label_columns(self) -> list[str]:
        """The columns of labels in the scores: a single one has its name in the log."""
        if self.label_weights:
            return [f"{_LABEL}{suffix}" for suffix in self.suffixes]
        is_taken = self.labels and self.labels[0] in (_LINE, _LOGIT, _SCORE, _WEIGHT)
        return [_LABEL] if is_taken else self.labels

    @property
    def own_columns(self) -> list[str]:
        """The columns of the scores, without those to keep."""
        of_labels = [f"{of}{suffix}" for suffix in self.suffixes for of in (_LOGIT, _SCORE)]
        weights = [_WEIGHT] if self.weight is not None else []
        return [_LINE, *of_labels, *(self.label_columns if self.labels else ()), *weights]

    def check_unknown(
        self, unknown: UnknownIds, where: str, examples: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Check that most of a column's ids are known.

        Args:
            unknown: The unknown ids.
            where: Their source, for messages.
            examples: An unknown id, by column.

        Raises:
            ValueError: If they are not.
        """
        for column, frac in unknown.fracs.items():
            usual = self.held_out.get(column, 0.0)
            most = usual + self.max_unknown_frac * (1 - usual)
            num_ids = int(unknown.counts[column][0])
            if frac > most and num_ids >= NUM_TELLING:
                such = f", such as {examples[column]!r:.40}" if column in examples else ""
                raise ValueError(
                    f"{where} column {self.log.columns[column].source or column}: expected at most "
                    f"{most:.1%} of the ids to be unknown ({usual:.1%} in the held-out samples), "
                    f"got {frac:.1%} of {num_ids}{such}. Format ids as in the training log, or set "
                    "max_unknown_frac=1."
                )

    def unknown_document(self, unknown: UnknownIds) -> dict[str, dict[str, Any]]:
        """The unknown ids, by column, with the share in the held-out samples."""
        return {
            column: {**of, "held_out_frac": self.held_out.get(column)}
            for column, of in unknown.to_json().items()
        }

    def inputs(
        self, block: RawBlock, file: Path, show: ShowColumn | None = None
    ) -> tuple[Floats, dict[str, Integers | Jagged]]:
        """Dense columns and rows of a block."""
        columns = self.log.columns
        self.value_types.check(block.value_types)
        for name, num_rows in self.row_numbers.items():
            advice = "or remove the sample"
            check_row_numbers(block, name, columns[name], num_rows, file, advice)
        return encode_inputs(block, columns, self.encoders, self.scaling, show)


def _make_scorer(config: PredictConfig, trained: Trained) -> _Scorer:
    source = trained.source
    if source is None:
        raise ValueError(
            "input: expected a run whose configuration has data.source, the log that its dataset "
            "was prepared from, got none. Train on a log that `hotrec prepare` prepared, or give "
            "`Config(data=DataSpec(source=...))`."
        )
    encoders, scaling = read_encoding(trained.dataset, source)
    log = _open_input(config, source)
    held_out: dict[str, float] = {}
    for ids in unknown_ids_of(trained.dataset).values():
        held_out |= {name: max(frac, held_out.get(name, 0.0)) for name, frac in ids.fracs.items()}
    labels, weights = (
        list(sources_of(log.columns, kind).values())
        for kind in (ColumnKind.label, ColumnKind.weight)
    )
    tables = tables_of(source)
    of_features = {
        name: column.table or name for name, column in feature_columns(log.columns).items()
    }
    scorer = _Scorer(
        log,
        read_model(trained),
        {name: encoders[table] for name, table in of_features.items()},
        {
            name: encoders[table].num_rows
            for name, table in of_features.items()
            if tables[table].encoding is Encoding.rows
        },
        scaling,
        value_types_of(trained.dataset),
        trained.spec.label_weights,
        held_out,
        config.max_unknown_frac,
        labels,
        weights[0] if weights else None,
        config.batch_size,
    )
    taken = sorted(set(config.keep) & set(scorer.own_columns))
    if taken:
        raise ValueError(
            f"keep: expected names other than the score columns {scorer.own_columns}, got "
            f"{taken}. Remove or rename them."
        )
    return scorer


def _open_input(config: PredictConfig, source: SourceSpec) -> Log:
    """The run's log with the files to score, which are not split, and have lists of histories."""
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
        split = SplitSpec()
        # The earlier rows of a user need not be in these files.
        spec = replace(source, files=files, joins=joins, split=split, times=times, histories={})
        keep = tuple(dict.fromkeys(config.keep))
        return open_log(spec, needs_label=False, keep=keep)
    except ValueError as error:
        if str(error).startswith("data.source.columns."):  # has a column, but no file
            lists = [name for history in source.histories.values() for name in history.lists]
            if any(f"got {name!r}." in str(error) for name in lists):
                raise ValueError(
                    f"input {files[0]}: expected the lists of histories as columns, got not all of "
                    f"{lists}. Add them: the earlier rows of a user need not be in the files."
                ) from error
            raise ValueError(f"input {files[0]}: {error}") from error
        raise


def read_model(trained: Trained) -> PlainModel:
    """The model of a checkpoint, with its tables in memory."""
    schema = trained.dataset.schema
    shape = trained.spec.architecture
    with open_tensors(trained.checkpoint) as files:
        tables = {
            table: TableRows(files.whole(tensor), None, shape.pooling == "mean")
            for table, tensor in table_names(files, schema).items()
        }
        return PlainModel(shape, dense_weights(files), tables)


class _Counted:
    """A file's unknown ids with an example, and its samples without a value, by column."""

    def __init__(self) -> None:
        self.unknown = UnknownIds()
        self.examples: dict[str, str] = {}
        self.missing: Counter[str] = Counter()

    def show(self, column: str, ids: RawIds, rows: Integers | Jagged) -> None:
        """Count a column of a block, see ``encode_inputs``."""
        is_id = ids.codes.is_not_null().to_numpy()
        self.unknown += UnknownIds({column: count_unknown(is_id, rows)})
        values = rows.values if isinstance(rows, Jagged) else rows
        for at in np.flatnonzero(is_id & (values == 0))[:1]:
            self.examples.setdefault(column, ids.texts[ids.codes[int(at)]].as_py())


def _score_own_files(scorer: _Scorer, scratch: Path) -> tuple[int, int, UnknownIds, Counter[str]]:
    """Score this rank's files; the numbers of samples scored and skipped, unknown ids, missing."""
    (scratch / SCORES).mkdir(exist_ok=True)
    num_samples = num_skipped = 0
    unknown, missing = UnknownIds(), Counter[str]()
    for number in range(len(scorer.log.files))[rank() :: world_size()]:
        file, counted = scorer.log.files[number], _Counted()
        target = scratch / SCORES / f"{number:05d}.parquet"
        num_scored, num_bad = _score_file(scorer, number, target, counted)
        if not num_scored:
            raise ValueError(
                f"{file}: expected a readable sample, got {num_bad} unreadable ones. Correct the "
                "file, or remove it from the list."
            )
        scorer.check_unknown(counted.unknown, str(file), counted.examples)
        num_samples, num_skipped = num_samples + num_scored, num_skipped + num_bad
        unknown += counted.unknown
        missing.update(counted.missing)
        say_missing(file, counted.missing, num_scored)
        logger.info("%s: scored, %d samples so far", file, num_samples)
    return num_samples, num_skipped, unknown, missing


def _score_file(scorer: _Scorer, number: int, target: Path, counted: _Counted) -> tuple[int, int]:
    """Score a file block by block; the numbers of samples scored and skipped."""
    num_samples = num_skipped = 0
    writer: pq.ParquetWriter | None = None
    for block in read_ahead(scorer.log.blocks(number)):
        num_samples, num_skipped = num_samples + len(block), num_skipped + block.num_skipped
        if not len(block):
            continue
        inputs = scorer.inputs(block, scorer.log.files[number], counted.show)
        counted.missing += count_missing(block, scorer.log.columns)
        logits = score(scorer.model, *inputs, scorer.batch_size)
        scores = _scores_of(scorer, block, logits.reshape(len(block), -1))
        if writer is None:  # the columns to keep have the types of the file
            writer = pq.ParquetWriter(target, scores.schema)
        writer.write_table(scores.cast(writer.schema))
    if writer is not None:
        writer.close()
    return num_samples, num_skipped


def _scores_of(scorer: _Scorer, block: RawBlock, logits: Floats) -> pa.Table:
    """The scores of a block, from logits (n, L)."""
    columns: dict[str, pa.Array] = {_LINE: pa.array(block.lines)}
    for label, of_label in enumerate(logits.T):
        suffix = scorer.suffixes[label]
        columns[f"{_LOGIT}{suffix}"] = pa.array(of_label)
        columns[f"{_SCORE}{suffix}"] = pa.array(torch.from_numpy(of_label.copy()).sigmoid().numpy())
        if scorer.labels:
            values = labels_of(block, scorer.log.columns)[:, label]
            columns[scorer.label_columns[label]] = pa.array(values.astype(np.int8))
    if scorer.weight is not None:
        columns[_WEIGHT] = pa.array(block.numbers(scorer.weight).astype(np.float32))
    for name, values in block.kept.items():
        is_text = pa.types.is_dictionary(values.type) or pa.types.is_null(values.type)
        columns[name] = values.cast(pa.string()) if is_text else values
    return pa.table(columns)


def score(
    model: PlainModel, dense: Floats, features: dict[str, Integers | Jagged], batch_size: int
) -> Floats:
    """Logits of n encoded samples, computed ``batch_size`` at a time.

    As in evaluations, all batches are padded to the same size: see ``padded_size``.

    Returns:
        float32 (n,), or (n, L) with several labels.
    """
    num_labels = len(model.shape.labels)
    shape = (len(dense),) if num_labels == 1 else (len(dense), num_labels)
    logits = np.empty(shape, np.float32)
    with torch.no_grad():
        for begin in range(0, len(dense), batch_size):
            end = min(begin + batch_size, len(dense))
            num_empty = padded_size(batch_size) - (end - begin)
            ids = dict(_slices(features, begin, end, num_empty))
            part = torch.from_numpy(np.pad(dense[begin:end], ((0, num_empty), (0, 0))))
            logits[begin:end] = model(part, ids)[: end - begin].numpy()
    return logits


def _slices(
    features: dict[str, Integers | Jagged], begin: int, end: int, num_empty: int
) -> Iterator[tuple[str, Ids]]:
    for name, ids in features.items():
        if isinstance(ids, Jagged):
            offsets = ids.offsets[begin : end + 1]
            values = torch.from_numpy(ids.values[offsets[0] : offsets[-1]])
            offsets = np.pad(offsets - offsets[0], (0, num_empty), "edge")
            yield name, (values, torch.from_numpy(offsets))
        else:
            yield name, torch.from_numpy(np.pad(ids[begin:end], (0, num_empty), "edge"))
