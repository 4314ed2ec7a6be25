"""Checkpoints: everything that a run needs to go on, on any ranks and under any placement.

``step-00000100/`` holds the weights and the optimizer state of the plain model in safetensors files
(``hotrec.embedding.canonical``, ``hotrec.train.tensor_files``), the random generators of each rank,
and a manifest with the step, the position in the data, the facts that must match, and every file's
size and checksum. It is written under a hidden name and renamed when all ranks are done; the file
``latest`` names the newest, and ``best`` one that is kept. All ranks write under one directory, so
with several hosts it has to be on a shared file system.

A run with the same ranks and plan goes on bit for bit on CPU, and on CUDA where FBGEMM's updates
are reproducible (``hotrec.embedding.fused``); with others it goes on with the same weights, state
and remaining samples. No file can run code: random generators are read with ``weights_only``.
"""

from __future__ import annotations

import logging
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.artifact import ArtifactError, commit_artifact, read_artifact, remove_abandoned
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.canonical import Parts, canonical_parts
from hotrec.embedding.tables import sharded_collections
from hotrec.runtime.ranks import (
    all_gather_object,
    rank,
    same_verdict,
    shared_scratch,
    world_size,
)
from hotrec.train.best import BestQuality
from hotrec.train.run_log import replace_text
from hotrec.train.tensor_files import Piece, TensorFiles, make_index, write_tensors

logger = logging.getLogger(__name__)

KIND = "checkpoint"
LATEST, BEST = "latest", "best"
TENSORS = "tensors"
HOT_SET = "hot_set"
# The last commit that reads checkpoints of torch.distributed.checkpoint, with its ranks and plan.
_LAST_COMMIT_OF_DCP = "a16b2ca"


class StatefulLoader(Protocol):
    """A loader whose position can be taken and set; its state is JSON, the same on every rank."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates made, and samples seen over all ranks."""

    step: int
    num_samples: int


@dataclass(frozen=True)
class Checkpoints:
    """Where a run keeps its checkpoints, and what they have to agree with.

    Args:
        directory: Holds the checkpoints of one run and nothing else; shared by all ranks.
        facts: JSON values by name that must match at loading: dataset, partition, model.
        keep_last: The number of newest checkpoints to keep, 1 or more.
        resume_from: The checkpoint to resume from; None for a new run.
        lineage: Identifies one uninterrupted training, resumes of its newest checkpoint included.
            Checkpoints of another lineage in the same directory are never removed.

    Raises:
        ValueError: if none would be kept.
    """

    directory: Path
    facts: Mapping[str, Any]
    keep_last: int = 2
    resume_from: Path | None = None
    lineage: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"checkpoint keep_last: expected 1 or more, got {self.keep_last}.")


def save_checkpoint(
    checkpoints: Checkpoints,
    position: Position,
    model: nn.Module,
    optimizer: KeyedOptimizer,
    loader: StatefulLoader,
    hot_set: AdaptiveHotSet | None = None,
    best: BestQuality | None = None,
) -> Path:
    """Write a checkpoint from all ranks, and remove the oldest of its lineage.

    To be called on every rank, with the pipeline drained. If any rank fails (a full disk), all
    ranks raise, and the directory is as before.

    Args:
        checkpoints: Where to write, and what to record.
        position: The updates made, which Adam's bias correction goes on from, and samples seen.
        model: The sharded model.
        optimizer: Its optimizer.
        loader: The loader of the training samples.
        hot_set: The hot rows, where they follow the data.
        best: The best evaluation so far, whose checkpoint is not removed; None for none.

    Returns:
        The checkpoint's directory.

    Raises:
        RankError: on the ranks that did not fail themselves.
    """
    target = checkpoints.directory / f"step-{position.step:08d}"
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    loader_state = same_verdict(loader.state_dict)
    hot_state = {} if hot_set is None else hot_set.state_dict()
    with shared_scratch(target, kind=KIND) as scratch:
        pieces = same_verdict(lambda: _save_rank(scratch, parts, hot_state))
        of_ranks = all_gather_object(pieces)
        same_verdict(
            lambda: _commit(
                scratch,
                target,
                {
                    "step": position.step,
                    "num_samples": position.num_samples,
                    "lineage": checkpoints.lineage,
                    "facts": dict(checkpoints.facts),
                    "world_size": world_size(),
                    "loader": loader_state,
                    **({} if best is None else {"best": best.state_dict()}),
                    "tensors": make_index([piece for rank in of_ranks for piece in rank]),
                },
                checkpoints,
                is_best=best is not None and best.is_kept_at(position.step),
            )
        )
    return target


def keep_best(checkpoints: Checkpoints, step: int) -> None:
    """Keep the checkpoint after ``step``, if there is one, in the place of another; on rank 0."""
    name = f"step-{step:08d}"
    if rank() == 0 and (checkpoints.directory / name).is_dir():
        replace_text(checkpoints.directory / BEST, f"{name}\n")
        _remove_old(checkpoints)


def find_latest(directory: Path, name: str = LATEST) -> Path | None:
    """The newest whole checkpoint of a run's directory, None if it has none yet.

    Args:
        directory: The directory of its checkpoints.
        name: LATEST, or BEST for the one that is kept.

    Raises:
        ArtifactError: if the file names a checkpoint that is not there.
    """
    pointer = directory / name
    if not pointer.exists():
        return None
    name = pointer.read_bytes()[:200].decode(errors="replace").strip()
    path = directory / name
    if not re.fullmatch(r"step-\d{8}(\.[0-9a-f]{8})?", name) or not path.is_dir():
        raise ArtifactError(
            f"{pointer}: expected the name of a checkpoint beside it, got {name[:40]!r}. "
            "Name another checkpoint to resume from."
        )
    return path


def lineage_of(path: Path) -> str | None:
    """The lineage of a checkpoint; None if it cannot be read, or is of an older version."""
    try:
        return read_artifact(path, kind=KIND).content.get("lineage")
    except ArtifactError:
        return None


def load_checkpoint(
    path: Path,
    *,
    model: nn.Module,
    facts: Mapping[str, Any],
    optimizer: KeyedOptimizer | None = None,
    loader: StatefulLoader | None = None,
    hot_set: AdaptiveHotSet | None = None,
) -> Position:
    """Load a checkpoint into a model that has not computed anything yet, on every rank.

    Args:
        path: one ``step-...`` directory.
        facts: as at saving.
        optimizer: left out to evaluate only.
        loader: left out to evaluate only. Iterate it only after this; then call
            ``restore_random_state``.
        hot_set: where hot rows follow the data; takes those of the checkpoint, if it has any.

    Raises:
        ArtifactError: if it is cut short or altered, or any fact or tensor differs; RankError on
            the ranks that saw no fault themselves.
        ValueError: if the loader has another dataset or order of samples.
    """
    content = same_verdict(lambda: read_facts(path, facts, verify_files=True))
    if hot_set is not None:  # first, since it says where the rows belong
        same_verdict(lambda: hot_set.load_state_dict(_load_hot_sets(path)))
    if optimizer is not None:
        same_verdict(lambda: _fill_optimizer_state(optimizer))
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    _load_tensors(path, parts, with_state=optimizer is not None)
    _accept(model, parts, content["step"])
    if loader is not None:
        same_verdict(lambda: _load_random(path))
        same_verdict(lambda: loader.load_state_dict(content["loader"]))
        if rank() == 0:
            remove_abandoned(path.parent)
    return Position(step=content["step"], num_samples=content["num_samples"])


def _accept(model: nn.Module, parts: Parts, num_updates: int) -> None:
    """Tell the model and its caches that the tensors were written."""
    parts.set_num_updates(num_updates)
    model.load_state_dict(parts.weights)
    for _, collection in sharded_collections(model):
        collection.drop_cached_rows()


def open_tensors(path: Path) -> TensorFiles:
    """Open the weights and optimizer state of a checkpoint, under their canonical names.

    Raises:
        ArtifactError: If it is no whole checkpoint.
    """
    # Open until the end: the files are mapped, and must not be replaced meanwhile.
    artifact = read_artifact(path, kind=KIND, stay_open=True)
    with artifact.parsing():
        return TensorFiles(artifact, artifact.content["tensors"])


def _load_tensors(path: Path, parts: Parts, *, with_state: bool) -> None:
    with same_verdict(lambda: open_tensors(path)) as files:
        expected: dict[str, tuple[int, ...]] = {}
        # A table's state is only on the ranks that hold its rows.
        for shapes in all_gather_object({part.name: part.shape for part in parts.parts}):
            expected.update(shapes)
        saved = files.shapes
        if not with_state:
            saved = {name: shape for name, shape in saved.items() if "/" not in name}
        same_verdict(lambda: _check_tensors(path, saved, expected))
        same_verdict(lambda: files.read(parts.parts))


def load_rows(
    path: Path,
    *,
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    find_rows: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, int]:
    """Load what a changed model or dataset shares with a checkpoint; collective.

    What the checkpoint lacks keeps its values: rows, tables, layers, and the state of another
    optimizer.

    Args:
        path: One ``step-...`` directory.
        model: The sharded model.
        optimizer: Its optimizer, if it is of the checkpoint's kind; None to start its state anew,
            which an optimizer with other tensors does, too.
        find_rows: Maps a table's name and rows int64 (R,) of the model to their rows in the
            checkpoint, int64 (R,), -1 for none.

    Returns:
        The number of rows that were loaded, by table.

    Raises:
        ArtifactError: If the checkpoint is damaged, or a tensor has another width or shape.
    """
    content = same_verdict(lambda: read_facts(path, None, verify_files=True))
    if optimizer is not None:
        same_verdict(lambda: _fill_optimizer_state(optimizer))
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    with same_verdict(lambda: open_tensors(path)) as files:
        saved = files.shapes
        if not all(all_gather_object(_has_state(saved, parts))):
            parts = same_verdict(lambda: canonical_parts(model))
            if rank() == 0:
                logger.warning("%s is of another optimizer, whose state starts anew", path)
        same_verdict(lambda: _check_shapes(path, saved, parts))
        missing = sorted({part.name for part in parts.parts} - saved.keys())
        if missing and rank() == 0:
            logger.warning(
                "%s lacks %d tensors of this model, which start anew: %s",
                *(path, len(missing), ", ".join(missing[:5])),
            )

        def load() -> dict[str, int]:
            num_rows: dict[str, int] = {}
            for part in parts.parts:
                if part.name not in saved:
                    continue
                if part.table is None:
                    files.read([part])
                    continue
                rows = find_rows(part.table, part.own_rows())
                files.read_rows(part, rows)
                is_counted = part.is_shard or (rank() == 0 and not parts.has_shards(part.name))
                if is_counted and "/" not in part.name:
                    found = int((rows >= 0).sum())
                    num_rows[part.table] = num_rows.get(part.table, 0) + found
            return num_rows

        of_ranks = all_gather_object(same_verdict(load))
    _accept(model, parts, content["step"])
    return {
        table: sum(of_rank.get(table, 0) for of_rank in of_ranks)
        for table in sorted({table for of_rank in of_ranks for table in of_rank})
    }


def _has_state(saved: Mapping[str, tuple[int, ...]], parts: Parts) -> bool:
    """Whether the parameters that were saved have state of this rank's optimizer."""
    return all(
        len(saved.get(part.name, ())) == len(part.shape) and part.name in saved
        for part in parts.parts
        if "/" in part.name and part.name.partition("/")[0] in saved
    )


def _check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], parts: Parts) -> None:
    for part in parts.parts:
        shape = saved.get(part.name, part.shape)
        first = 0 if part.table is None else 1  # tables may have another number of rows
        if len(shape) != len(part.shape) or shape[first:] != part.shape[first:]:
            raise ArtifactError(
                f"{path}: expected tensor {part.name} of shape {part.shape} (of this model), got "
                f"{shape} (of the checkpoint). Start from a model of the same dimensions, or "
                "without trainer.warm_start."
            )


def restore_random_state(path: Path) -> None:
    """Set this rank's random generators as they were when the checkpoint was taken.

    To be called last before the next step: starting a loader draws a number, which the run that
    was not interrupted did not draw at this point. A rank that the checkpoint does not know keeps
    its own generators, moved on by its number.
    """
    state = same_verdict(lambda: _load_random(path))
    if state is None:
        torch.manual_seed(torch.initial_seed() + rank())
        return
    torch.set_rng_state(state["torch"])
    keys = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**keys, "key": keys["key"].numpy()}})
    random.setstate(state["python"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> dict[str, Any]:
    # The generator that libraries draw from. Its key is kept as a tensor, which needs no pickle.
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    keys = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy_state, "state": {**keys, "key": torch.from_numpy(keys["key"])}},
        "python": random.getstate(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def _random_file(path: Path) -> Path:
    return path / f"random-{rank():05d}.pt"


def _load_hot_sets(path: Path) -> list[dict[str, torch.Tensor]]:
    """What every rank saved of ``AdaptiveHotSet``; empty if hot rows did not follow the data."""
    return [load_file(file) for file in sorted(path.glob(f"{HOT_SET}-*.safetensors"))]


def _save_rank(scratch: Path, parts: Parts, hot_state: Mapping[str, torch.Tensor]) -> list[Piece]:
    file = _random_file(scratch)
    try:
        torch.save(_random_state(), file)
        if hot_state:
            save_file(dict(hot_state), scratch / f"{HOT_SET}-{rank():05d}.safetensors")
        return write_tensors(parts, scratch, TENSORS, rank=rank(), world_size=world_size())
    except (RuntimeError, SafetensorError) as error:  # of writers, which hide the system's
        raise RuntimeError(
            f"{file.parent}: expected to write it, got {str(error).splitlines()[0]} Free disk "
            "space or choose another run directory."
        ) from error


def _load_random(path: Path) -> dict[str, Any] | None:
    file = _random_file(path)
    if not file.exists():
        return None
    try:
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # a damaged pickle raises almost anything
        raise ArtifactError(
            f"{file}: expected random generators in plain values and tensors, got "
            f"{type(error).__name__}: {str(error).splitlines()[0]} Use another checkpoint, and "
            "find out who wrote this one."
        ) from error
    return loaded


def _commit(
    scratch: Path,
    target: Path,
    content: Mapping[str, Any],
    checkpoints: Checkpoints,
    *,
    is_best: bool,
) -> None:
    if rank() != 0:
        return
    if target.exists() and (other := lineage_of(target)) != checkpoints.lineage:
        kept = target.with_name(f"{target.name}.{(other or uuid.uuid4().hex)[:8]}")
        was_best = _best_name(target.parent) == target.name
        target.rename(kept)
        if was_best:
            replace_text(target.parent / BEST, f"{kept.name}\n")
        logger.warning("%s: kept as %s, since this run did not go on from it", target, kept.name)
    commit_artifact(scratch, target, kind=KIND, content=content)
    replace_text(target.parent / LATEST, f"{target.name}\n")
    if is_best:
        replace_text(target.parent / BEST, f"{target.name}\n")
    _remove_old(checkpoints)


def _best_name(directory: Path) -> str:
    pointer = directory / BEST
    return pointer.read_text().strip() if pointer.exists() else ""


def _remove_old(checkpoints: Checkpoints) -> None:
    directory = checkpoints.directory
    found, best = sorted(directory.glob("step-????????")), _best_name(directory)
    own = [path for path in found if lineage_of(path) == checkpoints.lineage]
    for old in own[: -checkpoints.keep_last]:
        if old.name == best:
            continue
        # Renamed first: a removal that is cut short must not leave half a checkpoint in sight.
        old.rename(old.with_name(f".{old.name}.old"))
    # With what runs that were killed while saving have left: the directory has one writer.
    for stale in directory.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)


def read_facts(
    path: Path, facts: Mapping[str, Any] | None, *, verify_files: bool = False
) -> Mapping[str, Any]:
    """The manifest's content of a checkpoint that agrees with a run.

    Args:
        path: One ``step-...`` directory.
        facts: As at saving; None to compare none.
        verify_files: Whether to compare the checksums of this rank's share of the files.

    Raises:
        ArtifactError: If the checkpoint is damaged, or a fact differs.
    """
    artifact = read_artifact(path, kind=KIND)
    content = artifact.content
    with artifact.parsing():
        saved = dict(content["facts"])
        if "loader" not in content:
            raise ArtifactError(
                f"{path}: expected a checkpoint in safetensors files, got one of "
                f"torch.distributed.checkpoint. Resume it with commit {_LAST_COMMIT_OF_DCP} of "
                "hotrec, or start a new run."
            )
        for name in ("step", "num_samples", "world_size"):
            if not isinstance(content[name], int) or content[name] < 0:
                raise TypeError(f"{name} {content[name]!r}")
        if not path.name.startswith(f"step-{content['step']:08d}"):
            raise ValueError(f"step {content['step']} in {path.name}")
        dict(content["tensors"])
    facts = saved if facts is None else facts
    for name in sorted(saved.keys() | facts.keys()):
        if saved.get(name) != facts.get(name):
            raise ArtifactError(
                f"{path}: expected {name} {facts.get(name)!r} (of this run), got "
                f"{saved.get(name)!r} (of the checkpoint). Resume with the settings of the "
                "checkpoint, or start a new run."
            )
    if verify_files:
        for name in sorted(artifact.files)[rank() :: world_size()]:
            artifact.verify_file(name)
    return content


def _check_tensors(
    path: Path, saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    differing = sorted(
        name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name)
    )
    if differing:
        name = differing[0]
        raise ArtifactError(
            f"{path}: expected tensor {name} of shape {expected.get(name)} (of this model), got "
            f"{saved.get(name)} (of the checkpoint), and {len(differing) - 1} more that differ. "
            "Resume with the model and optimizer of the checkpoint."
        )


def _fill_optimizer_state(optimizer: KeyedOptimizer) -> None:
    """Let lazy optimizers make their state, which is then overwritten by the loaded one.

    TorchRec's fused optimizers have theirs from the start, and a dummy step would give their whole
    tables gradients; so only the parts that lack state take one. Weights that it moves (by
    weight decay) are loaded afterwards.
    """
    parts = (
        [part for _, part in optimizer.optimizers]
        if isinstance(optimizer, CombinedOptimizer)
        else [optimizer]
    )
    for part in parts:
        if isinstance(part, CombinedOptimizer):
            _fill_optimizer_state(part)
        elif len(part.state) < len(part.params):
            part.init_state()
            part.zero_grad(set_to_none=True)
