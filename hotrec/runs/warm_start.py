"""Start a new run from the weights of another, by raw ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.artifact import ArtifactError, real_path
from hotrec.config.text import read_yaml
from hotrec.data.chunks import Dataset, one_array
from hotrec.data.generation import generations_of
from hotrec.data.kept import open_generation
from hotrec.data.vocabulary import RowEncoder, read_vocabulary, read_whole_vocabulary
from hotrec.runtime.ranks import rank
from hotrec.runtime.run_dir import CHECKPOINTS, CONFIG_FILE, run_at
from hotrec.train.checkpoint import find_latest, load_rows, read_facts

logger = logging.getLogger(__name__)

# Ids that are looked up at once.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint, the dataset that it was trained on, and the dataset to train on.

    Args:
        checkpoint: Its directory.
        trained_on: The dataset that it was trained on; None for an earlier generation of
            ``dataset``, which records its earlier rows.
        dataset: The dataset to train on.
        has_same_optimizer: Whether the checkpoint has state for the optimizer.
        generation: The number of the earlier generation.
        names: Renamed or skipped tensors, see ``load_rows``.
    """

    checkpoint: Path
    trained_on: Dataset | None
    dataset: Dataset
    has_same_optimizer: bool
    generation: int | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    _encoders: dict[str, RowEncoder] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def open(
        source: str,
        dataset: Dataset,
        optimizer: str,
        names: Mapping[str, str | None] | None = None,
    ) -> WarmStart:
        """Find a checkpoint and its dataset.

        Args:
            source: Directory of a run, whose latest checkpoint is used, or of a checkpoint.
            dataset: The dataset to train on.
            optimizer: The kind of optimizer to train with; the state of another kind is reset.
            names: Renamed or skipped tensors.

        Raises:
            ValueError: If there is no checkpoint, or the tables of the datasets do not match.
            ArtifactError: If the checkpoint is damaged, or its dataset is gone.
        """
        path = run_at(Path(source), CHECKPOINTS)
        checkpoint = Path(source) if path is None else find_latest(path / CHECKPOINTS)
        if checkpoint is None or not checkpoint.is_dir():
            raise ValueError(
                "trainer.warm_start: expected the directory of a run with checkpoints, or of a "
                f"checkpoint, got {source!r}."
            )
        facts = read_facts(checkpoint, None)["facts"]
        is_same = facts.get("optimizer") == optimizer
        names = names or {}
        if facts["dataset"] == dataset.artifact.content_hash:
            warm = WarmStart(checkpoint, dataset, dataset, is_same, names=names)
            warm._check_tables(dataset)
            return warm
        hashes = [generation["content_hash"] for generation in generations_of(dataset)]
        if facts["dataset"] in hashes:
            number = hashes.index(facts["dataset"])
            warm = WarmStart(checkpoint, None, dataset, is_same, number, names)
            for table in dataset.schema.tables:
                if (old := warm._old_name(table.name)) not in (table.name, None):
                    raise ValueError(
                        f"trainer.warm_start_names.{old}: expected the tables of generation "
                        f"{number} of {dataset.artifact.path} under their names, got {table.name}. "
                        "Remove the key."
                    )
            return warm
        trained_on = open_generation(_dataset_of(checkpoint), facts["dataset"], checkpoint)
        warm = WarmStart(checkpoint, trained_on, dataset, is_same, names=names)
        warm._check_tables(trained_on)
        return warm

    def num_seen(self) -> int:
        """Training samples of the dataset that the checkpoint may have been trained on.

        Raises:
            ValueError: If its dataset is not an earlier generation of this one.
        """
        if self.generation is None:
            raise ValueError(
                "order.new_only: expected a trainer.warm_start from an earlier generation of "
                f"{self.dataset.artifact.path}, got {self.checkpoint} of "
                f"{'this one' if self.trained_on is self.dataset else 'another dataset'}. Extend "
                "the dataset with `hotrec prepare append=...`, or set order.new_only=false."
            )
        return int(generations_of(self.dataset)[self.generation]["num_train"])

    def _check_tables(self, trained_on: Dataset) -> None:
        before = {table.name: table.num_rows for table in trained_on.schema.tables}
        for table in self.dataset.schema.tables:
            old = self._old_name(table.name)
            if old not in before:
                continue  # is initialized
            has = [_has_vocabulary(trained_on, old), _has_vocabulary(self.dataset, table.name)]
            if has[0] != has[1] or (not has[0] and before[old] != table.num_rows):
                raise ValueError(
                    f"trainer.warm_start table {table.name}: expected a vocabulary in both "
                    f"datasets, or the same {before[old]} hashed or numbered rows, got "
                    f"{table.num_rows} rows in {self.dataset.artifact.path}. Prepare it with the "
                    "encoding and num_rows of the other one."
                )

    def _old_name(self, table: str) -> str | None:
        """The name of a table in the checkpoint; None if that name is mapped to another table."""
        found = next((old for old, new in self.names.items() if new == table), table)
        return None if found == table and table in self.names else found

    def load(self, model: nn.Module, optimizer: KeyedOptimizer) -> None:
        """Load weights and optimizer state by raw id; collective.

        Raises:
            ArtifactError: If the checkpoint is damaged, or has other dimensions.
        """
        if not self.has_same_optimizer and rank() == 0:
            logger.warning(
                "%s was saved with another optimizer; its state is reset", self.checkpoint
            )
        found = load_rows(
            self.checkpoint,
            model=model,
            optimizer=optimizer if self.has_same_optimizer else None,
            find_rows=self._find_rows,
            names=self.names,
        )
        if rank() == 0:
            total = {table.name: table.num_rows for table in self.dataset.schema.tables}
            logger.info(
                "warm start from %s: matched rows: %s",
                self.checkpoint,
                ", ".join(f"{name} {num} of {total[name]} rows" for name, num in found.items()),
            )

    def _find_rows(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows of the same raw ids in the checkpoint; row 0 stands for unknown ids in both."""
        if self.trained_on is None:
            return self._find_earlier(table, rows)
        old = self._old_name(table)
        assert old is not None, f"{table} is not in the checkpoint"
        is_same = self.trained_on is self.dataset and old == table
        if is_same or not _has_vocabulary(self.dataset, table):
            return rows
        if table not in self._encoders:  # which hashes all its ids
            vocabulary = read_vocabulary(self.trained_on.artifact.path, old)
            self._encoders[table] = RowEncoder(vocabulary=vocabulary)
        encoder = self._encoders[table]
        values = one_array(read_vocabulary(self.dataset.artifact.path, table)["value"])
        found = torch.empty_like(rows)
        for begin in range(0, len(rows), _CHUNK):
            part = rows[begin : begin + _CHUNK]
            ids = values.take((part - 1).clamp(min=0).numpy())
            known = torch.from_numpy(encoder.rows(ids))
            found[begin : begin + _CHUNK] = torch.where(part == 0, 0, known.where(known > 0, -1))
        return found

    def _find_earlier(self, table: str, rows: torch.Tensor) -> torch.Tensor:
        """The same rows, -1 for those not assigned to their values yet."""
        assert self.generation is not None
        num_rows = generations_of(self.dataset)[self.generation]["num_rows"].get(table, 0)
        is_known = rows < num_rows
        if _has_vocabulary(self.dataset, table):
            vocabulary = read_whole_vocabulary(self.dataset.artifact.path, table)
            since = np.append(0, vocabulary.generations("since"))  # row 0 is for unknown ids
            is_known &= torch.from_numpy(since <= self.generation)[rows]
        return rows.where(is_known, -1)


def _has_vocabulary(dataset: Dataset, table: str) -> bool:
    return f"vocab/{table}.arrow" in dataset.artifact.files


def _dataset_of(checkpoint: Path) -> str:
    """The directory of the dataset that the run of a checkpoint recorded."""
    recorded = real_path(checkpoint).parents[1] / CONFIG_FILE
    try:
        return str(yaml.safe_load(read_yaml(recorded))["paths"]["dataset"])
    except (OSError, LookupError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ArtifactError(
            f"{recorded}: expected the configuration of the run that saved {checkpoint}, got "
            f"{error!r}. Set a run of `hotrec train`."
        ) from error
