"""Canonical tensors in safetensors files: written by all ranks at once, read by any number.

Every rank writes the rows that it owns, so no rank needs memory for other tables, and at most
``MAX_FILE_BYTES`` for copies. An index lists the files of a tensor and the
part of it in each. A reader maps the files into memory and copies only the rows that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hotrec.artifact import Artifact, ArtifactError, FileFacts, write_through
from hotrec.embedding.canonical import TensorPart, TensorParts

MAX_FILE_BYTES = 256 << 20
_CHUNK_BYTES = 64 << 20
# Replicated tensors from this size on are written by all ranks, smaller ones by rank 0.
_SHARED_BYTES = 1 << 20
# Optimizer state that is never negative: sums of squares, and counts of updates.
_NEVER_NEGATIVE = frozenset({"sum", "step", "exp_avg_sq", "max_exp_avg_sq", "momentum2"})


@dataclass(frozen=True)
class FilePiece:
    """A box of a tensor in a file.

    Args:
        tensor: Name of the canonical tensor.
        file: Path of the file in the checkpoint.
        key: Name of the box in the file.
        first: Position of the box in the tensor, by dimension.
        step: Distance of its rows in the tensor.
        shape: Shape of the box.
        of: Shape of the tensor.
        dtype: Type of its values, such as "float32".
    """

    tensor: str
    file: str
    key: str
    first: tuple[int, ...]
    step: int
    shape: tuple[int, ...]
    of: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Share:
    """Consecutive rows of a part that one rank writes.

    Args:
        part: The part.
        begin: The first row, within the part.
        end: The row after the last one.
        take: Reads rows of the part, by their range.
    """

    part: TensorPart
    begin: int
    end: int
    take: Callable[[int, int], torch.Tensor]


def own_shares(parts: TensorParts, rank: int, world_size: int) -> list[Share]:
    """This rank's share of the tensors of a model, to write; not a collective.

    Args:
        parts: The parts on this rank.
        rank: This rank.
        world_size: Number of ranks, which all write.
    """
    hot = {part.name: part for part in parts.parts if part.rows is not None}
    shares = []
    for part in parts.parts:
        num_rows = part.value.shape[0] if part.value.dim() else 1
        if part.is_shard:
            begin, end = 0, num_rows
        elif parts.has_shards(part.name):
            continue  # the owners of the table write its hot rows
        elif part.value.nbytes < _SHARED_BYTES:
            begin, end = 0, num_rows if rank == 0 else 0
        else:
            begin, end = (num_rows * r // world_size for r in (rank, rank + 1))
        if begin < end:
            shares.append(Share(part, begin, end, _taker(part, hot.get(part.name))))
    return shares


def write_tensors(
    shares: Sequence[Share], directory: Path, folder: str, rank: int
) -> tuple[list[FilePiece], dict[str, FileFacts]]:
    """Write this rank's share of the tensors of a model to the disk; not a collective.

    Args:
        shares: What to write.
        directory: Directory of the checkpoint.
        folder: Folder in it, made if it is missing.
        rank: This rank, for the names of its files.

    Returns:
        The written boxes, for ``make_index``, and the files, for ``commit_artifact``.
    """
    (directory / folder).mkdir(exist_ok=True)
    pieces: list[FilePiece] = []
    held: dict[str, torch.Tensor] = {}
    files: list[str] = []

    def flush() -> None:
        if held:
            files.append(file_name())
            save_file(held, directory / files[-1])
            held.clear()

    def file_name() -> str:
        return f"{folder}/{rank:05d}-{len(files):05d}.safetensors"

    for part, first, value in _boxes(shares):
        if sum(tensor.nbytes for tensor in held.values()) + value.nbytes > MAX_FILE_BYTES:
            flush()
        key, shape = _key(part, first, value), tuple(value.shape)
        held[key] = value
        dtype = str(value.dtype).removeprefix("torch.")
        pieces.append(
            FilePiece(part.name, file_name(), key, first, part.step, shape, part.shape, dtype)
        )
    flush()
    return pieces, {file: write_through(directory / file) for file in files}


def _key(part: TensorPart, first: Sequence[int], value: torch.Tensor) -> str:
    if tuple(value.shape) == part.shape:
        return part.name
    steps = [part.step, *(1 for _ in first[1:])]
    ranges = (
        f"{at}:{at + size * step}" + (f":{step}" if step > 1 else "")
        for at, size, step in zip(first, value.shape, steps, strict=True)
    )
    return f"{part.name}[{', '.join(ranges)}]"


def _boxes(shares: Sequence[Share]) -> Iterator[tuple[TensorPart, tuple[int, ...], torch.Tensor]]:
    """The boxes of the shares, with their positions."""
    for share in shares:
        part = share.part
        if part.value.dim() == 0:
            yield part, (), share.take(0, 1)
            continue
        row_bytes = prod(part.value.shape[1:]) * part.value.element_size()
        size = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for row in range(share.begin, share.end, size):
            first = part.first[0] + row * part.step
            yield part, (first, *part.first[1:]), share.take(row, min(row + size, share.end))


def _taker(part: TensorPart, replica: TensorPart | None) -> Callable[[int, int], torch.Tensor]:
    """Reads rows of a part, by their range in it; hot rows come from the replica.

    A number is as if it was one row.
    """
    if replica is None:
        is_number = part.value.dim() == 0
        return lambda low, high: _canonical(part.value if is_number else part.value[low:high])
    assert replica.rows is not None
    rows_H, slots_H = replica.rows.sort()
    if not part.is_shard:  # all rows are hot
        return lambda low, high: _canonical(replica.value[slots_H[low:high]])
    places_H, is_here = part.places(rows_H)
    places_H, slots_H = places_H[is_here], slots_H[is_here].to(replica.value.device)

    def take(low: int, high: int) -> torch.Tensor:
        at, until = torch.searchsorted(places_H, torch.tensor([low, high])).tolist()
        value = _canonical(part.value[low:high])
        if at == until:
            return value
        value = value.clone()
        value[places_H[at:until] - low] = replica.value[slots_H[at:until]].cpu()
        return value

    return take


def _canonical(value: torch.Tensor) -> torch.Tensor:
    """A copy on the host, in fp32 if the rows are stored in bf16."""
    return (value.float() if value.dtype is torch.bfloat16 else value).contiguous().cpu()


def make_index(pieces: Sequence[FilePiece]) -> dict[str, Any]:
    """The pieces of all ranks as a JSON document."""
    index: dict[str, Any] = {}
    for piece in pieces:
        document = asdict(piece)
        name, shape, dtype = (document.pop(key) for key in ("tensor", "of", "dtype"))
        entry = index.setdefault(name, {"shape": list(shape), "dtype": dtype, "pieces": []})
        entry["pieces"].append(document)
    return index


class TensorFiles:
    """The tensors of a checkpoint.

    Args:
        artifact: The checkpoint.
        index: The document of ``make_index``.

    Raises:
        ArtifactError: If the index is damaged, or a tensor is incomplete.
    """

    def __init__(self, artifact: Artifact, index: Mapping[str, Any]) -> None:
        self._artifact = artifact
        self._pieces: dict[str, list[FilePiece]] = {}
        with artifact.parsing():
            for name, entry in index.items():
                if not isinstance(entry, dict):
                    raise ArtifactError(
                        f"{artifact.path}: expected shape, dtype and pieces of tensor {name}, got "
                        f"{entry!r}. Use another checkpoint."
                    )
                of, dtype = tuple(map(int, entry["shape"])), str(entry["dtype"])
                self._pieces[name] = [
                    FilePiece(
                        name,
                        str(piece["file"]),
                        str(piece["key"]),
                        tuple(map(int, piece["first"])),
                        int(piece["step"]),
                        tuple(map(int, piece["shape"])),
                        of,
                        dtype,
                    )
                    for piece in entry["pieces"]
                ]
        for name, pieces in self._pieces.items():
            _check_cover(artifact.path, name, pieces)
        self._files = ExitStack()
        self._opened: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._files.close()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by its name."""
        return {name: pieces[0].of for name, pieces in self._pieces.items()}

    def whole(self, name: str) -> torch.Tensor:
        """All values of a tensor."""
        first = self._pieces[name][0]
        value = torch.empty(first.of, dtype=getattr(torch, first.dtype))
        self._read(TensorPart(name, first.of, value, (0,) * value.dim()))
        return value

    def read(self, parts: Iterable[TensorPart]) -> None:
        """Copy the values of parts from the files into them."""
        for part in parts:
            self._read(part)

    def read_rows(self, part: TensorPart, rows: torch.Tensor) -> None:
        """Copy rows int64 (R,) of the saved tensor into a part; rows with -1 keep their values."""
        self._check_type(part)
        rows_R, places_R = rows.sort()
        for piece in self._pieces[part.name]:
            self._copy_rows(piece, part, rows_R, places_R)

    def _check_type(self, part: TensorPart) -> None:
        """Refuse another type than that of weights; counts of optimizers may have either."""
        saved, expected = self._pieces[part.name][0].dtype, _canonical_type(part.value.dtype)
        is_state = "/" in part.name
        is_float = getattr(torch, saved).is_floating_point
        if saved != expected and not (is_state and is_float == part.value.is_floating_point()):
            raise ArtifactError(
                f"{self._artifact.path}: expected tensor {part.name} in {expected}, got it in "
                f"{saved}. Use another checkpoint."
            )

    def _check_values(self, piece: FilePiece, values: torch.Tensor) -> None:
        """Refuse invalid values, such as NaN, among those that are read."""
        if values.numel() == 0 or values.dtype == torch.bool:
            return
        low, high = (float(bound) for bound in torch.aminmax(values))  # NaN if a value is
        parameter, _, state = piece.tensor.partition("/")
        is_sum = state == "momentum1" and f"{parameter}/momentum2" not in self._pieces
        is_never_negative = state in _NEVER_NEGATIVE or is_sum
        if not math.isfinite(low + high) or (is_never_negative and low < 0):
            expected = "0 or more" if is_never_negative else "finite values"
            found = low if math.isfinite(high) else high
            raise ArtifactError(
                f"{self._artifact.path / piece.file}: expected {expected} in {piece.tensor}, got "
                f"{found:g}. Use another checkpoint."
            )

    def _read(self, part: TensorPart) -> None:
        pieces = self._pieces[part.name]
        if part.rows is not None or max(part.step, *(piece.step for piece in pieces)) > 1:
            self.read_rows(part, part.own_rows())
            return
        self._check_type(part)
        for piece in pieces:
            self._copy_box(piece, part)

    def _copy_box(self, piece: FilePiece, part: TensorPart) -> None:
        boxes = _overlap(piece.first, piece.shape, part.first, part.value.shape)
        if boxes is not None:
            source, target = boxes
            values = self._open(piece)[source]
            self._check_values(piece, values)
            part.value[target] = values.to(part.value.device)

    def _copy_rows(
        self, piece: FilePiece, part: TensorPart, rows_R: torch.Tensor, places_R: torch.Tensor
    ) -> None:
        """Copy the rows of a piece among ascending ones to their places in a part."""
        first, step = piece.first[0], piece.step
        bounds = torch.tensor([first, first + piece.shape[0] * step])
        low, high = torch.searchsorted(rows_R, bounds).tolist()
        rows_R, places_R = rows_R[low:high], places_R[low:high]
        if step > 1:
            is_here = (rows_R - first) % step == 0
            rows_R, places_R = rows_R[is_here], places_R[is_here]
        columns = _overlap(piece.first[1:], piece.shape[1:], part.first[1:], part.value.shape[1:])
        if rows_R.numel() == 0 or columns is None:
            return
        source, target = columns
        saved = self._open(piece)[(slice(None), *source)]
        device = part.value.device
        size = max(1, _CHUNK_BYTES // (4 * prod(piece.shape[1:])))
        for rows, places in zip(rows_R.split(size), places_R.split(size), strict=True):
            values = saved[(rows - first) // step]
            self._check_values(piece, values)
            values = values.to(device, part.value.dtype)
            part.value[(slice(None), *target)].index_copy_(0, places.to(device), values)

    def _open(self, piece: FilePiece) -> torch.Tensor:
        """The values of a piece, mapped from its file."""
        try:
            if piece.file not in self._opened:
                path = self._artifact.file(piece.file)
                self._opened[piece.file] = self._files.enter_context(safe_open(path, "pt"))
            value: torch.Tensor = self._opened[piece.file].get_tensor(piece.key)
        except SafetensorError as error:
            raise ArtifactError(
                f"{self._artifact.path / piece.file}: expected {piece.key}, got "
                f"{str(error).splitlines()[0]}. Use another checkpoint."
            ) from error
        if tuple(value.shape) != piece.shape or str(value.dtype) != f"torch.{piece.dtype}":
            raise ArtifactError(
                f"{self._artifact.path / piece.file} {piece.key}: expected {piece.dtype} "
                f"{piece.shape}, got {value.dtype} {tuple(value.shape)}. Use another checkpoint."
            )
        return value


def _check_cover(path: Path, name: str, pieces: Sequence[FilePiece]) -> None:
    """Raise an ArtifactError unless the pieces contain each value of a tensor exactly once."""
    found = sum(prod(piece.shape) for piece in pieces)
    expected = f"{path}: expected a complete tensor {name}"
    if not pieces or found != prod(pieces[0].of):
        raise ArtifactError(f"{expected}, got {found} of its values. Use another checkpoint.")
    open_pieces: list[FilePiece] = []
    for piece in sorted(_by_residue(path, pieces), key=lambda piece: piece.first):
        is_box = len(piece.first) == len(piece.shape) == len(piece.of) and all(
            0 <= at <= at + size <= of
            for at, size, of in zip(piece.first, piece.shape, piece.of, strict=True)
        )
        if not is_box:
            raise ArtifactError(
                f"{expected}, got a piece at {list(piece.first)} of shape {list(piece.shape)} in "
                f"{list(piece.of)}. Use another checkpoint."
            )
        # The others end before this one starts.
        row = piece.first[0] if piece.first else 0
        open_pieces = [p for p in open_pieces if p.shape and p.first[0] + p.shape[0] > row]
        if any(_overlap(p.first, p.shape, piece.first, piece.shape) for p in open_pieces):
            raise ArtifactError(
                f"{expected}, got the values at {list(piece.first)} twice. Use another checkpoint."
            )
        open_pieces.append(piece)


def _by_residue(path: Path, pieces: Sequence[FilePiece]) -> list[FilePiece]:
    """Pieces with every n-th row as boxes of a tensor with these rows side by side."""
    steps = {piece.step for piece in pieces}
    step = max(steps, default=1)
    if step == 1:
        return [*pieces]
    is_inside = all(
        piece.first and piece.shape and piece.first[0] + (piece.shape[0] - 1) * step < piece.of[0]
        for piece in pieces
    )
    if steps != {step} or not is_inside:
        raise ArtifactError(
            f"{path}: expected the rows of {pieces[0].tensor} in pieces of one step inside of it, "
            f"got steps {sorted(steps)}. Use another checkpoint."
        )
    found = []
    for piece in pieces:
        row, residue = divmod(piece.first[0], step)
        of = (step, -(-piece.of[0] // step), *piece.of[1:])
        first, shape = (residue, row, *piece.first[1:]), (1, *piece.shape)
        found.append(replace(piece, first=first, shape=shape, of=of))
    return found


def _canonical_type(dtype: torch.dtype) -> str:
    """The type in which values of a type are saved, see ``_canonical``."""
    return str(torch.float32 if dtype is torch.bfloat16 else dtype).removeprefix("torch.")


def _overlap(
    first: Sequence[int], shape: Sequence[int], own_first: Sequence[int], own_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection of two boxes of a tensor, as slices of each; None if empty."""
    source, target = [], []
    for at, size, own_at, own_size in zip(first, shape, own_first, own_shape, strict=True):
        low, high = max(at, own_at), min(at + size, own_at + own_size)
        if low >= high:
            return None
        source.append(slice(low - at, high - at))
        target.append(slice(low - own_at, high - own_at))
    return tuple(source), tuple(target)
