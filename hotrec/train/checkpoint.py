"""Checkpoints: everything needed to resume a run on any ranks and under any placement.

``step-00000100/`` holds the weights and the optimizer state of the plain model in safetensors files
(``hotrec.embedding.canonical``, ``hotrec.train.tensor_files``), the random generators of each rank,
and a manifest with the step, the position in the data, the facts that must match, and every file's
size and checksum. It is written under a hidden name and renamed when all ranks are done; the file
``latest`` names the newest, and ``best`` one that is kept. All ranks write under one directory, so
with several hosts it has to be on a shared file system.

A run with the same ranks and plan continues bit for bit on CPU, and on CUDA if FBGEMM's updates are
reproducible (``hotrec.embedding.fused``); with others it continues with the same weights, state and
remaining samples. No file can run code: random generators are read with ``weights_only``.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer

from hotrec.artifact import (
    ArtifactError,
    FileFacts,
    commit_artifact,
    read_artifact,
    read_record,
    remove_abandoned,
)
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.canonical import TensorParts, canonical_parts
from hotrec.runtime.random_state import random_state, set_random_state
from hotrec.runtime.ranks import (
    all_gather_object,
    rank,
    same_verdict,
    shared_scratch,
    world_size,
)
from hotrec.train.best import BestQuality, chosen_by
from hotrec.train.run_log import replace_text
from hotrec.train.tensor_files import (
    TensorFiles,
    make_index,
    own_shares,
    write_tensors,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)

KIND = "checkpoint"
LATEST, BEST = "latest", "best"
TENSORS = "tensors"
# Modules that have a table under its name.
_TABLES = "(embedding_bags|embeddings)"
HOT_SET = "hot_set"
_NAME, _POINTER_BYTES = re.compile(r"step-\d{8}(\.[0-9a-f]{8})?"), 1 << 10


class StatefulLoader(Protocol):
    """A loader with a restorable position; its state is JSON, the same on every rank."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """The position of a run: updates made, and samples seen over all ranks."""

    step: int
    num_samples: int


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoint directory of a run, and the facts that checkpoints must match.

    Args:
        directory: Contains only the checkpoints of one run; shared by all ranks.
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

    Call on every rank, with the pipeline drained. If any rank fails (a full disk), all ranks raise,
    and the directory is unchanged.

    Args:
        checkpoints: The directory, and the facts to record.
        position: The updates made (for Adam's bias correction) and the samples seen.
        model: The sharded model.
        optimizer: Its optimizer.
        loader: The loader of the training samples.
        hot_set: The hot rows, if they follow the data.
        best: The best evaluation so far, whose checkpoint is not removed; None for none.

    Returns:
        The checkpoint's directory.

    Raises:
        RankError: on the ranks that did not fail themselves.
    """
    target = checkpoints.directory / f"step-{position.step:08d}"
    is_best = best is not None and best.is_kept_at(position.step)
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    content = {
        "step": position.step,
        "num_samples": position.num_samples,
        "lineage": checkpoints.lineage,
        "facts": dict(checkpoints.facts),
        "world_size": world_size(),
        "loader": same_verdict(loader.state_dict),
        **({} if best is None else {"best": best.state_dict()}),
    }
    hot_state = {} if hot_set is None else hot_set.state_dict()
    with shared_scratch(target, kind=KIND) as scratch:
        same_verdict(lambda: _naming(scratch, lambda: _save_small(scratch, hot_state)))
        shares = same_verdict(lambda: own_shares(parts, rank(), world_size()))
        of_ranks = all_gather_object(
            same_verdict(
                lambda: _naming(scratch, lambda: write_tensors(shares, scratch, TENSORS, rank()))
            )
        )
        pieces = [piece for of_rank, _ in of_ranks for piece in of_rank]
        files = {name: facts for _, of_rank in of_ranks for name, facts in of_rank.items()}
        content["tensors"] = make_index(pieces)
        same_verdict(lambda: _commit(scratch, target, content, files, checkpoints, is_best=is_best))
    return target


def keep_best(checkpoints: Checkpoints, step: int) -> None:
    """Keep the checkpoint after ``step``, if there is one, instead of another; on rank 0."""
    name = f"step-{step:08d}"
    if rank() == 0 and (checkpoints.directory / name).is_dir():
        replace_text(checkpoints.directory / BEST, f"{name}\n")
        _remove_old(checkpoints)


def find_latest(directory: Path, name: str = LATEST) -> Path | None:
    """The newest complete checkpoint of a run's directory, None if it has none yet.

    Args:
        directory: The directory of its checkpoints.
        name: LATEST, or BEST.

    Raises:
        ArtifactError: if the file names a missing checkpoint.
    """
    pointer = directory / name
    found = _pointed_at(pointer)
    if found is None:
        return None
    path = directory / found
    if not _NAME.fullmatch(found) or not path.is_dir():
        raise ArtifactError(
            f"{pointer}: expected the name of a checkpoint in its directory, got {found[:40]!r}. "
            "Set another checkpoint to resume from."
        )
    return path


def _pointed_at(pointer: Path) -> str | None:
    """The checkpoint name in a pointer file; None without one."""
    try:
        return read_record(pointer, max_bytes=_POINTER_BYTES).strip()
    except FileNotFoundError:
        return None


def lineage_of(path: Path) -> str | None:
    """The lineage of a checkpoint; None if it is unreadable, or from an older version."""
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
    """Load a checkpoint into a fresh model, on every rank.

    Args:
        path: one ``step-...`` directory.
        facts: as at saving.
        optimizer: None to evaluate only.
        loader: None to evaluate only. Iterate it only after this; then call
            ``restore_random_state``.
        hot_set: if hot rows follow the data; gets those of the checkpoint, if it has any.

    Raises:
        ArtifactError: if it is truncated or altered, or any fact or tensor differs; RankError on
            the ranks without an error of their own.
        ValueError: if the loader has another dataset or order of samples.
    """
    content = same_verdict(lambda: read_facts(path, facts, verify_files=True))
    if hot_set is not None:  # first, because it determines the place of the rows
        same_verdict(lambda: _load_hot_set(path, hot_set))
    if optimizer is not None:
        same_verdict(lambda: _fill_optimizer_state(optimizer))
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    _load_tensors(path, parts, with_state=optimizer is not None)
    _accept(model, parts, content["step"])
    if loader is not None:
        same_verdict(lambda: _load_random(path))
        same_verdict(lambda: _load_position(path, loader, content["loader"]))
        if rank() == 0:
            remove_abandoned(path.parent)
    return Position(step=content["step"], num_samples=content["num_samples"])


def _accept(model: nn.Module, parts: TensorParts, num_updates: int) -> None:
    """Refresh slots and replicas after loading."""
    parts.set_num_updates(num_updates)
    model.load_state_dict(parts.weights)


def open_tensors(path: Path) -> TensorFiles:
    """Open the weights and optimizer state of a checkpoint, under their canonical names.

    Raises:
        ArtifactError: If it is not a complete checkpoint.
    """
    # Open until the end: the files are mapped, and must not be replaced meanwhile.
    artifact = read_artifact(path, kind=KIND, stay_open=True)
    with artifact.parsing():
        return TensorFiles(artifact, artifact.content["tensors"])


def _load_tensors(path: Path, parts: TensorParts, *, with_state: bool) -> None:
    with same_verdict(lambda: open_tensors(path)) as files:
        expected: dict[str, tuple[int, ...]] = {}
        # A table's state is only on the ranks that have its rows.
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
    names: Mapping[str, str | None] | None = None,
) -> dict[str, int]:
    """Load the tensors that a changed model or dataset shares with a checkpoint; collective.

    Anything missing keeps its initial values: rows, tables, layers, and the state of another
    optimizer. Rank 0 logs a line for every tensor that is renamed, initialized, or unused.

    Args:
        path: One ``step-...`` directory.
        model: The sharded model.
        optimizer: Its optimizer, if it is of the checkpoint's kind; None to reset its state, as is
            done for an optimizer with other tensors.
        find_rows: Maps a table's name and rows int64 (R,) of the model to their rows in the
            checkpoint, int64 (R,), -1 for none.
        names: Names in the model by those in the checkpoint, None to skip one: of tables, of
            parameters, or of modules, for all parameters in them.

    Returns:
        The number of rows that were loaded, by table.

    Raises:
        ArtifactError: If the checkpoint is damaged, a tensor has another width or shape, or a name
            does not exist.
    """
    content = same_verdict(lambda: read_facts(path, None, verify_files=True))
    if optimizer is not None:
        same_verdict(lambda: _fill_optimizer_state(optimizer))
    parts = same_verdict(lambda: canonical_parts(model, optimizer))
    with same_verdict(lambda: open_tensors(path)) as files:
        own = {_base(part.name) for part in parts.parts}
        every = sorted(set().union(*all_gather_object(own)))
        sources = same_verdict(lambda: _find_sources(path, files.shapes, every, names or {}))
        saved = {
            f"{name}{full.removeprefix(source)}": shape
            for name, source in sources.items()
            for full, shape in files.shapes.items()
            if _base(full) == source
        }
        if not all(all_gather_object(_has_state(saved, parts))):
            parts = same_verdict(lambda: canonical_parts(model))
            if rank() == 0:
                logger.warning("%s was saved with another optimizer; its state is reset", path)
        same_verdict(lambda: _check_shapes(path, saved, parts))
        if rank() == 0:
            _say_sources(path, files.shapes, every, sources)

        def load() -> dict[str, int]:
            num_rows: dict[str, int] = {}
            for part in parts.parts:
                if part.name not in saved:
                    continue
                source = sources[_base(part.name)]
                of_source = replace(part, name=part.name.replace(_base(part.name), source, 1))
                if part.table is None:
                    files.read([of_source])
                    continue
                rows = find_rows(part.table, part.own_rows())
                files.read_rows(of_source, rows)
                # Once, for all column shards of a table.
                is_first = part.is_shard and not any(part.first[1:])
                is_counted = is_first or (rank() == 0 and not parts.has_shards(part.name))
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


def _base(name: str) -> str:
    """The parameter that a tensor belongs to, if it is a state."""
    return name.partition("/")[0]


def _find_sources(
    path: Path, saved: Iterable[str], own: Sequence[str], names: Mapping[str, str | None]
) -> dict[str, str]:
    """The saved parameter for each parameter of the model that has one, by name."""
    left = set(map(_base, saved))
    sources: dict[str, str] = {}
    for old, new in names.items():
        found = _named(old, left)
        if not found:
            raise ArtifactError(
                f"trainer.warm_start_names.{old}: expected an unmapped table or parameter of "
                f"{path}, got none with this name. Use one of {_short_names(left)}."
            )
        left -= found.keys()
        targets = {} if new is None else {end: name for name, end in _named(new, own).items()}
        for source, end in found.items() if new is not None else ():
            if end not in targets or targets[end] in sources:
                raise ArtifactError(
                    f"trainer.warm_start_names.{old}: expected an unmapped table or parameter of "
                    f"this model, with the parts of {old}, got {new}. Use one of "
                    f"{_short_names(own)}."
                )
            sources[targets[end]] = source
    return sources | {name: name for name in own if name in left and name not in sources}


def _named(name: str, parameters: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The parameters of a table or module, or a parameter, with the affixes of its name."""
    weight = re.compile(rf"(.*\.)?{_TABLES}\.{re.escape(name)}\.weight")
    tables = {full: ("", "") for full in parameters if weight.fullmatch(full)}
    inside = re.compile(rf"(.*?\.|){re.escape(name)}(\..*|)")
    found = {full: inside.fullmatch(full) for full in parameters}
    return tables or {full: (match[1], match[2]) for full, match in found.items() if match}


def _short_names(parameters: Iterable[str]) -> list[str]:
    """Names of tables, and of other parameters."""
    return sorted(re.sub(rf"(.*\.)?{_TABLES}\.(.+)\.weight", r"\3", full) for full in parameters)


def _say_sources(
    path: Path, saved: Iterable[str], own: Sequence[str], sources: Mapping[str, str]
) -> None:
    for name in own:
        if name not in sources:
            logger.warning("warm start: %s not in the checkpoint, initialized", name)
        elif sources[name] != name:
            logger.info("warm start: %s loaded from %s", name, sources[name])
    for name in sorted(set(map(_base, saved)) - set(sources.values())):
        logger.warning("warm start: %s in %s unused", name, path)


def _has_state(saved: Mapping[str, tuple[int, ...]], parts: TensorParts) -> bool:
    """Whether the saved parameters have state of this rank's optimizer."""
    return all(
        len(saved.get(part.name, ())) == len(part.shape) and part.name in saved
        for part in parts.parts
        if "/" in part.name and part.name.partition("/")[0] in saved
    )


def _check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], parts: TensorParts) -> None:
    for part in parts.parts:
        shape = saved.get(part.name, part.shape)
        first = 0 if part.table is None else 1  # tables may have another number of rows
        if len(shape) != len(part.shape) or shape[first:] != part.shape[first:]:
            module = part.name.removeprefix("model.").partition(".")[0]
            raise ArtifactError(
                f"{path}: expected tensor {part.name} of shape {part.shape} (of this model), got "
                f"{shape} (of the checkpoint). "
                + (
                    f"Skip its module with +trainer.warm_start_names={{{module}: null}}."
                    if part.table is None
                    else "Start from a model with the same model.embedding_dim, or without "
                    "trainer.warm_start."
                )
            )


def restore_random_state(path: Path) -> None:
    """Restore this rank's random generators from a checkpoint.

    Call this last before the next step: starting a loader draws a random number that an
    uninterrupted run did not draw here. A rank that is not in the checkpoint keeps its own
    generators, advanced by its rank.
    """
    same_verdict(lambda: _set_random(path, _load_random(path)))


def _set_random(path: Path, state: Mapping[str, Any] | None) -> None:
    if state is None:
        torch.manual_seed(torch.initial_seed() + rank())
        return
    try:
        keys = state["numpy"]["state"]
        numpy_state = {**state["numpy"], "state": {**keys, "key": keys["key"].numpy()}}
        set_random_state({**state, "numpy": numpy_state})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{_random_file(path)}: expected the states of random generators, got {error!r}. Use "
            "another checkpoint."
        ) from error


def _random_file(path: Path) -> Path:
    return path / f"random-{rank():05d}.pt"


def _load_hot_set(path: Path, hot_set: AdaptiveHotSet) -> None:
    """Load the states of all ranks into it; no-op if hot rows did not follow the data."""
    try:
        of_ranks = [load_file(file) for file in sorted(path.glob(f"{HOT_SET}-*.safetensors"))]
        hot_set.load_state_dict(of_ranks)
    except (SafetensorError, LookupError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ArtifactError(
            f"{path}/{HOT_SET}-*.safetensors: expected the hot rows of this model, got {reason}. "
            "Use another checkpoint."
        ) from error


def _load_position(path: Path, loader: StatefulLoader, state: Any) -> None:
    try:
        loader.load_state_dict(state)
    except (LookupError, TypeError) as error:
        raise ArtifactError(
            f"{path}: expected the position of a loader, got {error!r}. Use another checkpoint."
        ) from error


def _save_small(scratch: Path, hot_state: Mapping[str, torch.Tensor]) -> None:
    # The key of numpy's generator is stored as a tensor, which needs no pickle.
    state = random_state()
    keys = state["numpy"]["state"]
    state["numpy"]["state"] = {**keys, "key": torch.from_numpy(keys["key"])}
    torch.save(state, _random_file(scratch))
    if hot_state:
        save_file(dict(hot_state), scratch / f"{HOT_SET}-{rank():05d}.safetensors")


def _naming(scratch: Path, write: Callable[[], T]) -> T:
    try:
        return write()
    except (RuntimeError, SafetensorError) as error:  # of writers, which wrap the system's
        raise RuntimeError(
            f"{scratch}: expected a writable directory, got {str(error).splitlines()[0]} Free disk "
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
            f"{type(error).__name__}: {str(error).splitlines()[0]} Use another checkpoint; this "
            "one may be malicious."
        ) from error
    return loaded


def _commit(
    scratch: Path,
    target: Path,
    content: Mapping[str, Any],
    written: Mapping[str, FileFacts],
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
        logger.warning(
            "%s: renamed to %s, because this run did not resume from it", target, kept.name
        )
    commit_artifact(scratch, target, kind=KIND, content=content, written=written)
    replace_text(target.parent / LATEST, f"{target.name}\n")
    if is_best:
        replace_text(target.parent / BEST, f"{target.name}\n")
    _remove_old(checkpoints)


def _best_name(directory: Path) -> str:
    """The name of the checkpoint to keep; empty without one, or if the file is damaged."""
    try:
        return _pointed_at(directory / BEST) or ""
    except ArtifactError as error:
        logger.warning("%s", error)
        return ""


def _remove_old(checkpoints: Checkpoints) -> None:
    directory = checkpoints.directory
    found, best = sorted(directory.glob("step-????????")), _best_name(directory)
    own = [path for path in found if lineage_of(path) == checkpoints.lineage]
    for old in own[: -checkpoints.keep_last]:
        if old.name == best:
            continue
        # Renamed first: an interrupted removal must not leave a partial checkpoint under its name.
        old.rename(old.with_name(f".{old.name}.old"))
    # Including the files of runs that were killed while saving: the directory has one writer.
    for stale in directory.glob(".step-*"):
        shutil.rmtree(stale, ignore_errors=True)


def read_facts(
    path: Path, facts: Mapping[str, Any] | None, *, verify_files: bool = False
) -> Mapping[str, Any]:
    """The manifest's content of a checkpoint, after checking that it matches a run.

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
        for name in ("step", "num_samples", "world_size"):
            if type(content[name]) is not int or content[name] < 0:
                raise TypeError(f"{name} {content[name]!r}")
        if not path.name.startswith(f"step-{content['step']:08d}"):
            raise ValueError(f"step {content['step']} in {path.name}")
        for name in ("tensors", "loader"):
            if not isinstance(content[name], dict):
                raise TypeError(f"{name} {content[name]!r}")
        if content.get("best") is not None:
            best = content["best"]
            BestQuality(by=chosen_by(best)).load_state_dict(best)
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
    """Materialize lazy optimizer state so that it can be loaded.

    TorchRec's fused optimizers have theirs from the start, and a dummy step would create gradients
    of their whole tables; so only the parts without state take one. Weights that it changes (by
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
