"""Checkpoints of a user's program: for any ranks and hot rows, like those of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.optimizers import ModelOptimizer
from hotrec.program.guard import Guard
from hotrec.runtime.ranks import same_verdict
from hotrec.train import checkpoint
from hotrec.train.checkpoint import Checkpoints, Position


@dataclass
class _Kept:
    """The program's state in a checkpoint, in place of a run's loader position."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


def _check_whole(name: str, model: nn.Module) -> None:
    guard = getattr(model, "hotrec_guard", None)  # not that of a model sharded otherwise
    if isinstance(guard, Guard):
        guard.check_whole(name)


def save_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    step: int,
    *,
    state: Mapping[str, Any] | None = None,
    keep_last: int = 2,
    hot_set: AdaptiveHotSet | None = None,
) -> Path:
    """Save a sharded model and its optimizer as ``step-...`` in a directory; collective.

    Tables are saved in their original row order, under the names of the unsharded model, in
    safetensors files. Random generators of each rank are saved with them.

    Args:
        directory: Directory of one training's checkpoints, on a file system shared by all ranks.
        model: The model that ``parallelize`` returned, or another sharded one.
        optimizer: Its optimizer.
        step: Updates made so far, for Adam's bias correction.
        state: JSON values to save, such as the position in the data; equal on every rank.
        keep_last: Number of newest checkpoints to keep.
        hot_set: Hot rows that follow the data, if they do.

    Returns:
        The checkpoint's directory.

    Raises:
        RuntimeError: If a step of the model has failed.
        RankError: On the ranks that did not fail themselves.
    """
    _check_whole("hotrec.save_checkpoint", model)
    checkpoints = Checkpoints(Path(directory), {}, keep_last=keep_last)
    newest = same_verdict(lambda: checkpoint.find_latest(checkpoints.directory))
    lineage = None if newest is None else checkpoint.lineage_of(newest)
    if lineage is not None:
        checkpoints = replace(checkpoints, lineage=lineage)
    position, kept = Position(step, num_samples=0), _Kept(state or {})
    return checkpoint.save_checkpoint(checkpoints, position, model, optimizer, kept, hot_set)


def load_checkpoint(
    directory: str | Path,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    *,
    hot_set: AdaptiveHotSet | None = None,
) -> tuple[int, dict[str, Any]]:
    """Load the newest checkpoint of a directory; collective.

    The ranks, the hot rows, the sharding plan and the pipeline may differ from those at saving.
    With the same ranks, random generators are restored. Batches that a pipeline holds stay; they
    are computed with the loaded weights.

    Args:
        directory: As at saving.
        model: A sharded model of the same tables and layers.
        optimizer: Its optimizer, of the same kind.
        hot_set: Hot rows that follow the data; gets those of the checkpoint, if it has any.

    Returns:
        Updates made, and the saved ``state``; 0 and {} if there is no checkpoint.

    Raises:
        RuntimeError: If a step of the model has failed: ranks and pipelines would remain apart.
        ArtifactError: If the checkpoint is damaged, or of another model or optimizer.
        RankError: On the ranks that did not fail themselves.
    """
    _check_whole("hotrec.load_checkpoint", model)
    newest = same_verdict(lambda: checkpoint.find_latest(Path(directory)))
    if newest is None:
        return 0, {}
    if isinstance(optimizer, ModelOptimizer) and optimizer.before_loading is not None:
        optimizer.before_loading()  # a hot set moves rows
    kept = _Kept()
    position = checkpoint.load_checkpoint(
        newest, model=model, optimizer=optimizer, loader=kept, facts={}, hot_set=hot_set
    )
    checkpoint.restore_random_state(newest)
    return position.step, dict(kept.values)
