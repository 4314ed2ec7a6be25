"""Checkpoints: everything that a run needs to go on bit for bit.

So it does on CPU, and on CUDA where FBGEMM's updates are reproducible (``hotrec.embedding.fused``).

``step-00000100/`` holds model and optimizer (torch.distributed.checkpoint, written by all ranks in
parallel), one file per rank with the loader's position and the random generators, and a manifest
with the step, the facts that must match, and every file's size. It is written under a hidden name
and renamed when all ranks are done; the file ``latest`` names the newest. All ranks write under one
directory, so with several hosts it has to be on a shared file system.

Loading is in place and strict: same facts, same world size, same tensors, all files whole. No file
can run code: tensors and states are read with ``weights_only``, and of the pickled metadata of
torch.distributed.checkpoint only its own classes.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.artifact import ArtifactError, commit_artifact, read_artifact, remove_abandoned
from hotrec.runtime.ranks import all_gather_object, rank, same_verdict, shared_scratch, world_size
from hotrec.train.run_log import replace_text

logger = logging.getLogger(__name__)

KIND = "checkpoint"
LATEST = "latest"


class StatefulLoader(Protocol):
    """A loader whose position can be taken and set, such as torchdata's StatefulDataLoader."""

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
) -> Path:
    """Write a checkpoint from all ranks, and remove the oldest of its lineage.

    To be called on every rank, with the pipeline drained. If any rank fails (a full disk), all
    ranks raise, and the directory is as before.

    Returns:
        The checkpoint's directory.

    Raises:
        RankError: on the ranks that did not fail themselves.
        RuntimeError: if torch.distributed.checkpoint fails on any rank.
    """
    target = checkpoints.directory / f"step-{position.step:08d}"
    # Before the scratch directory exists: what this raises, it raises on all ranks.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with shared_scratch(target, kind=KIND) as scratch:
        same_verdict(lambda: _save_rank(scratch, loader))
        with _plain_errors(target):
            writer = dcp.FileSystemWriter(scratch / "tensors")
            dcp.save(_without_empty_state(state), storage_writer=writer)
        content = {
            "step": position.step,
            "num_samples": position.num_samples,
            "lineage": checkpoints.lineage,
            "facts": {**checkpoints.facts, "world_size": world_size()},
            "tensors": _shapes_of_all_ranks(state),
        }
        same_verdict(lambda: _commit(scratch, target, content, checkpoints))
    return target


def find_latest(directory: Path) -> Path | None:
    """The newest whole checkpoint of a run's directory, None if it has none yet.

    Raises:
        ArtifactError: if ``latest`` names a checkpoint that is not there.
    """
    pointer = directory / LATEST
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
) -> Position:
    """Load a checkpoint into a model that has not computed anything yet, on every rank.

    Args:
        path: one ``step-...`` directory.
        facts: as at saving.
        optimizer: left out to evaluate only.
        loader: left out to evaluate only. Iterate it only after this; then call
            ``restore_random_state``.

    Raises:
        ArtifactError: if it is cut short or altered, or any fact or tensor differs; RankError on
            the ranks that saw no fault themselves.
    """
    content = same_verdict(lambda: read_facts(path, facts, verify_files=True))
    if optimizer is not None:
        same_verdict(lambda: _fill_optimizer_state(optimizer))
    state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    expected = _shapes_of_all_ranks(state)
    same_verdict(lambda: _check_tensors(path, content["tensors"], expected, parts=set(state)))
    loaded = _without_empty_state(state)
    with _plain_errors(path):
        reader = dcp.FileSystemReader(path / "tensors")
        dcp.load(loaded, storage_reader=reader, planner=_LoadPlanner())
    model.load_state_dict(loaded["model"])
    if optimizer is not None:
        optimizer.load_state_dict(_filled(state["optimizer"], loaded.get("optimizer", {})))
    if loader is not None:
        saved = same_verdict(lambda: _load_rank(path))
        loader.load_state_dict(saved["loader"])
        if rank() == 0:
            remove_abandoned(path.parent)
    return Position(step=content["step"], num_samples=content["num_samples"])


def restore_random_state(path: Path) -> None:
    """Set this rank's random generators as they were when the checkpoint was taken.

    To be called last before the next step: starting a loader draws a number, which the run that
    was not interrupted did not draw at this point.
    """
    state = same_verdict(lambda: _load_rank(path))["random"]
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


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """DCP tells all ranks of a failure, but with a BaseException, which passes every handler."""
    try:
        yield
    except CheckpointException as error:
        causes = {f"rank {index}": repr(cause) for index, (cause, _) in error.failures.items()}
        raise RuntimeError(
            f"{path}: expected to write or read its tensors, got {causes}. "
            "Check space and permissions of the run directory."
        ) from error


def _rank_file(path: Path) -> Path:
    return path / f"rank-{rank():05d}.pt"


def _save_rank(scratch: Path, loader: StatefulLoader) -> None:
    file = _rank_file(scratch)
    try:
        torch.save({"loader": loader.state_dict(), "random": _random_state()}, file)
    except RuntimeError as error:  # of torch's writer, which hides the system's
        raise RuntimeError(
            f"{file}: expected to write it, got {str(error).splitlines()[0]} Free disk space or "
            "choose another run directory."
        ) from error


def _load_rank(path: Path) -> dict[str, Any]:
    file = _rank_file(path)
    try:
        loaded: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # a damaged pickle raises almost anything
        raise _not_plain(file, "the state of a rank in plain values and tensors", error) from error
    return loaded


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch.distributed.checkpoint's metadata, and no class or function of other modules."""

    def find_class(self, module: str, name: str) -> Any:
        is_allowed = (
            module == "torch.distributed.checkpoint.metadata"
            or (module, name)
            in (
                ("torch", "Size"),
                ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                ("torch.serialization", "_get_layout"),
            )
            or (module in ("pathlib", "pathlib._local") and name == "PosixPath")
            or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        )
        if "." in name or not is_allowed:
            raise pickle.UnpicklingError(f"{module}.{name}, which is no metadata")
        return super().find_class(module, name)


def _check_metadata(path: Path) -> None:
    """Check that unpickling the metadata, as torch.distributed.checkpoint does, runs no code."""
    file = path / "tensors" / ".metadata"
    try:
        with file.open("rb") as content:
            _MetadataUnpickler(content).load()
    except Exception as error:  # a damaged pickle raises almost anything
        raise _not_plain(file, "metadata of torch.distributed.checkpoint", error) from error


def _not_plain(file: Path, expected: str, error: Exception) -> ArtifactError:
    text = str(error).split("\n")[0]
    return ArtifactError(
        f"{file}: expected {expected}, got {type(error).__name__}: {text} Use another checkpoint, "
        "and find out who wrote this one."
    )


class _LoadPlanner(DefaultLoadPlanner):
    """Refuses values that ``weights_only`` does not read, before the base class unpickles them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _commit(
    scratch: Path, target: Path, content: Mapping[str, Any], checkpoints: Checkpoints
) -> None:
    if rank() != 0:
        return
    if target.exists() and (other := lineage_of(target)) != checkpoints.lineage:
        kept = target.with_name(f"{target.name}.{(other or uuid.uuid4().hex)[:8]}")
        target.rename(kept)
        logger.warning("%s: kept as %s, since this run did not go on from it", target, kept.name)
    commit_artifact(scratch, target, kind=KIND, content=content)
    replace_text(target.parent / LATEST, f"{target.name}\n")
    found = sorted(target.parent.glob("step-????????"))
    own = [path for path in found if lineage_of(path) == checkpoints.lineage]
    for old in own[: -checkpoints.keep_last]:
        # Renamed first: a removal that is cut short must not leave half a checkpoint in sight.
        old.rename(old.with_name(f".{old.name}.old"))
    # With what runs that were killed while saving have left: the directory has one writer.
    for stale in target.parent.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)


def read_facts(
    path: Path, facts: Mapping[str, Any], *, verify_files: bool = False
) -> Mapping[str, Any]:
    """The manifest's content of a checkpoint that agrees with a run.

    Args:
        path: One ``step-...`` directory.
        facts: As at saving.
        verify_files: Whether to compare the checksums of this rank's share of the files.

    Raises:
        ArtifactError: If the checkpoint is damaged, or a fact differs.
    """
    artifact = read_artifact(path, kind=KIND)
    content = artifact.content
    with artifact.parsing():
        saved = dict(content["facts"])
        for name in ("step", "num_samples"):
            if not isinstance(content[name], int) or content[name] < 0:
                raise TypeError(f"{name} {content[name]!r}")
        if not path.name.startswith(f"step-{content['step']:08d}"):
            raise ValueError(f"step {content['step']} in {path.name}")
        dict(content["tensors"])
    expected = {**facts, "world_size": world_size()}
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            raise ArtifactError(
                f"{path}: expected {name} {expected.get(name)!r} (of this run), got "
                f"{saved.get(name)!r} (of the checkpoint). Resume with the settings of the "
                "checkpoint, or start a new run."
            )
    if verify_files:
        for name in sorted(artifact.files)[rank() :: world_size()]:
            artifact.verify_file(name)
        artifact.file("tensors/.metadata")
        artifact.file(_rank_file(Path()).as_posix())
        _check_metadata(path)
    return content


def _without_empty_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Drop empty mappings from the optimizer's state, such as that of rows under SGD.

    DCP leaves empty mappings out when it saves, but looks for them when it loads on a rank that
    holds no shard of some table (default_planner.py falls back to the names of torch 2.3 there).
    """
    taken = {"model": state["model"]}
    optimizer = _without_empty(state.get("optimizer", {}))
    return taken | {"optimizer": optimizer} if optimizer else taken


def _without_empty(state: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in state.items():
        inner = _without_empty(value) if isinstance(value, Mapping) else value
        if not isinstance(inner, dict) or inner:
            kept[key] = inner
    return kept


def _filled(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The loaded values in the shape of the state, empty mappings included."""
    return {
        key: _filled(value, loaded.get(key, {})) if isinstance(value, Mapping) else loaded[key]
        for key, value in state.items()
    }


def _shapes(state: Mapping[str, Any], prefix: str = "") -> dict[str, list[int]]:
    """Global shape of every tensor by its full name."""
    shapes: dict[str, list[int]] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            shapes.update(_shapes(value, f"{name}/"))
        elif isinstance(value, ShardedTensor):
            shapes[name] = list(value.metadata().size)
        elif isinstance(value, torch.Tensor):
            shapes[name] = list(value.shape)
    return shapes


def _shapes_of_all_ranks(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes that any rank knows: a table's optimizer state is only where its shards are."""
    together: dict[str, list[int]] = {}
    for shapes in all_gather_object(_shapes(state)):
        together.update(shapes)
    return together


def _check_tensors(
    path: Path,
    saved: Mapping[str, list[int]],
    expected: Mapping[str, list[int]],
    *,
    parts: set[str],
) -> None:
    of_parts = {name: shape for name, shape in saved.items() if name.split("/")[0] in parts}
    differing = sorted(
        name
        for name in of_parts.keys() | expected.keys()
        if of_parts.get(name) != expected.get(name)
    )
    if differing:
        name = differing[0]
        raise ArtifactError(
            f"{path}: expected tensor {name} of shape {expected.get(name)} (of this model), got "
            f"{of_parts.get(name)} (of the checkpoint), and {len(differing) - 1} more that differ. "
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
