"""Train on a table in memory, and score the rows of one.

A table becomes a Parquet file, its description a file of the user's configuration, as written by
``hotrec init``, and ``hotrec run`` does the rest. The results are files that
every command reads. Another table gets another name, so none is replaced.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf.errors import OmegaConfBaseException

from hotrec.cli.call import command
from hotrec.cli.init import check_name, check_text, first_settings, remarks_of, summary_of
from hotrec.cli.made import digest_of
from hotrec.cli.output import describe
from hotrec.cli.predict import say_unknown
from hotrec.cli.store import USER_CONF, read_config
from hotrec.config.data import TEXT_FORMATS, ColumnKind, SourceFormat, columns_of
from hotrec.config.roots import Config, PredictConfig
from hotrec.config.validate import validate
from hotrec.data.encoding import sources_of
from hotrec.data.infer import infer, to_yaml
from hotrec.data.memory import to_arrow, write_table
from hotrec.data.sample import read_sample
from hotrec.runs.predict import SCORES, predict_run
from hotrec.runtime.ranks import world_size
from hotrec.runtime.run_dir import CONFIG_FILE, TRAINED, find_trained, read_finished

Scores = npt.NDArray[np.float32]
_FILE = "table.parquet"


@dataclass(frozen=True)
class Run:
    """A run trained by ``fit``; its files are those of `hotrec run`.

    Args:
        directory: The run's directory, accepted by every command as ``run_dir``.
        workdir: The directory that paths in the run's files are relative to.
        figures: The content of the JSON line of `hotrec run`.
    """

    directory: Path
    workdir: Path
    figures: Mapping[str, Any] = field(repr=False)

    @property
    def auc(self) -> float | None:
        """The AUC on the test split, or on the validation split if there is no test split."""
        return self.figures["auc"]

    @property
    def page(self) -> Path:
        """The page of the run, in HTML."""
        return self.workdir / self.figures["page"]

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the training run: its quality, speed, bytes and hot rows."""
        return read_finished(self.directory / TRAINED) or {}


def fit(  # noqa: PLR0913
    table: Any,
    *,
    label: str | Sequence[str] | None = None,
    time: str | None = None,
    columns: Mapping[str, Mapping[str, Any] | None] = MappingProxyType({}),
    settings: Mapping[str, Any] = MappingProxyType({}),
    ranks: int | None = None,
    name: str | None = None,
    workdir: str | Path = ".",
    quiet: bool = False,
) -> Run:
    """Train a model on a table of clicks in memory, a row per impression.

    ::

        run = hotrec.fit(events, label="clicked", time="shown_at", ranks=2)

    The table is written to ``data/<name>/table.parquet`` in the working directory and described in
    ``conf/data/<name>.yaml``, with the roles that `hotrec init` guesses. Then `hotrec run
    data=<name>` trains on it. Current results are reused, and no other table, description or run is
    replaced.

    Args:
        table: A DataFrame of pandas, polars or another library with the Arrow or the DataFrame
            protocol, an Arrow table or batch, or a dict of columns. NaN is a missing value; the
            index of pandas is dropped.
        label: Label column of 0 and 1, or several; None to find it.
        time: Column of times to split by; None for the first one, or a random split without any.
        columns: Corrections of guessed roles: keys of ``data.source.columns`` by entry, such as
            ``{"zip": {"kind": "categorical"}}``; None skips a column.
        settings: Values by key of the configuration, as on the command line, such as
            ``{"model": "dcnv2", "trainer.batch_size": 512}``.
        ranks: Number of training processes; None for up to two.
        name: Name of the dataset, bound to this table and description; None to derive it from them.
        workdir: Working directory, created if needed.
        quiet: Print nothing on standard error.

    Raises:
        ValueError: If the table, an argument or a setting is refused, or another table or
            description has the name.
        RuntimeError: If ranks fail, after their error message.
    """
    home = Path(workdir)
    arrow = to_arrow(table, lambda name: columns.get(name, {}) is not None)
    if not arrow.num_rows:
        raise ValueError(
            f"table: expected rows, got none in {arrow.num_columns} columns. Add some."
        )
    home.mkdir(parents=True, exist_ok=True)
    if name is not None and not _description(home, name).exists():
        check_name(name)
    with TemporaryDirectory(prefix=".hotrec-fit-", dir=home) as scratch:
        file = Path(scratch, _FILE)
        with _saying_table(scratch):
            write_table(arrow, file)
            sample = read_sample(str(file))
            labels = [label] if isinstance(label, str) else label
            found = infer(sample, None if labels is None else list(labels), time, columns)
            check_text(to_yaml(sample, found, []))
        described = to_yaml(replace(sample, files=[]), found, [])
        name = name or f"table_{digest_of(_hash(file), described)[:8]}"
        kept = Path("data", name, file.name)
        _keep(file, home / kept)
    heading = [f"Created by hotrec.fit. `hotrec run data={name}` also trains on it."]
    text = to_yaml(replace(sample, files=[kept.as_posix()]), found, heading)
    _keep_text(text, _description(home, name), name)
    if not quiet:
        remarks = "".join(f"{remark}\n" for remark in remarks_of(sample, found))
        sys.stderr.write(f"{_description(Path(), name)}: {summary_of(found)}\n{remarks}")
    proposed = first_settings(sample, ranks)
    if ranks is not None:
        proposed["launch.num_ranks"] = ranks
    words = {"data": name, **proposed, **settings}
    figures = command("run", words, workdir=home, quiet=quiet)
    return Run(Path(figures["run_dir"]), home.absolute(), figures)


def predict(
    run: Run | str | Path,
    table: Any,
    *,
    checkpoint: str = "auto",
    max_unknown_frac: float = 0.5,
) -> Scores | dict[str, Scores]:
    """Score the rows of a table in memory, like `hotrec predict` for a file.

    Every call reads the model from the run's files. To score a few rows many times, export it
    (``load_encoder``, ``load_model``).

    Args:
        run: A run of ``fit``, or the directory of one whose log was Parquet or Arrow, with paths
            relative to the current directory.
        table: The rows, in a form accepted by ``fit``, with the columns of the training log except
            for labels, weight and the column of the split, which are not read.
        checkpoint: Which one to score with, see `hotrec predict`.
        max_unknown_frac: Maximum share of a column's ids that may be new, relative to the share of
            known ids in the held-out samples; 1 for any.

    Returns:
        The predicted rates of clicks, float32 (n,) in the order of the rows; by name with several
        labels. NaN for unreadable rows if the run's log has ``on_bad_line: skip``.

    Raises:
        ValueError: If the table lacks a column, a row cannot be read, too many ids are new, or the
            run has not finished, or its dataset is gone.
    """
    if world_size() > 1:
        raise ValueError(
            f"hotrec.predict: expected one process, got {world_size()} ranks. Use `hotrec predict`."
        )
    home = run.workdir if isinstance(run, Run) else Path()
    trained_dir = find_trained(str(run.directory if isinstance(run, Run) else run)).absolute()
    trained: Config = read_config(trained_dir / CONFIG_FILE, Config)
    source = trained.data.source
    if source is None or source.format in TEXT_FORMATS:
        what = "no log" if source is None else f"a log of format {source.format.name}"
        raise ValueError(
            f"run {trained_dir}: expected a run trained on a table, Parquet or Arrow, got {what}. "
            "Write the rows in the log's format and use `hotrec predict`."
        )
    # Columns of Parquet and Arrow are read alike.
    data = replace(trained.data, source=replace(source, format=SourceFormat.parquet))
    paths = replace(trained.paths, dataset=str(home / trained.paths.dataset))
    trained = replace(trained, data=data, paths=paths)
    labels = sources_of(columns_of(source), ColumnKind.label)
    unread = {*labels.values(), *sources_of(columns_of(source), ColumnKind.weight).values()}
    read = {column.source or name for name, column in columns_of(source).items()} - unread
    read |= {join.on for join in source.joins.values()}
    arrow = to_arrow(table, read.__contains__)
    arrow = arrow.select([name for name in arrow.column_names if name in read])
    columns = {name: f"score_{name}" for name in labels} if len(labels) > 1 else {"": "score"}
    scores = {name: np.full(arrow.num_rows, np.nan, np.float32) for name in columns}
    if arrow.num_rows:
        with TemporaryDirectory(prefix="hotrec-predict-") as scratch, _saying_table(scratch):
            file, output = Path(scratch, _FILE), Path(scratch, "scores")
            write_table(arrow, file)
            config = PredictConfig(
                [str(file)],
                str(output),
                checkpoint=checkpoint,
                max_unknown_frac=max_unknown_frac,
            )
            validate(config)
            scored = predict_run(config, trained, trained_dir)
            say_unknown(scored["unknown_ids"])
            found = pq.read_table(output / SCORES)
        for name, column in columns.items():
            scores[name][found["line"].to_numpy() - 1] = found[column].to_numpy()
    return scores if len(labels) > 1 else scores[""]


@contextmanager
def _saying_table(scratch: str) -> Iterator[None]:
    """Context for reading the file of a table: errors refer to the table, in one line."""
    try:
        yield
    except (ValueError, pa.ArrowException, OmegaConfBaseException) as error:
        text = describe(error).replace(f"{scratch}/{_FILE}", "table")
        raise ValueError(re.sub("^path: ", "table: ", text)) from error


def _keep(file: Path, target: Path) -> None:
    """Write a table to its path, unless it is already there.

    Raises:
        ValueError: If a different one is there.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        file.rename(target)
    elif _hash(file) != _hash(target):
        raise ValueError(
            f"{target}: expected the same table or none, got a different one. Use another name, or "
            "omit it."
        )


def _keep_text(text: str, file: Path, name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        if file.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"{file}: expected the description of these arguments, got a different one. Use "
                f"another name, or omit it; `hotrec run data={name}` trains with the existing one."
            ) from None


def _description(home: Path, name: str) -> Path:
    return home / USER_CONF / "data" / f"{name}.yaml"


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
