"""Which pipeline a prediction is of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

# Bytes of a float on the wire, by the type in which it travels.
WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class PipelineKind(Enum):
    """How steps overlap."""

    LOOK_AHEAD = "look_ahead"
    SPARSE_DIST = "sparse_dist"
    BASE = "base"
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class PipelineSpec:
    """A pipeline as the step models know it.

    Micro-batches are not in it: what they hide besides is not predicted.

    Args:
        kind: of the pipeline.
        wire: type in which rows and gradients travel, of WIRE_BYTES.
        depth: batches whose rows travel ahead in look-ahead. Of 1 and more the prediction is the
            same: as many rows and gradients travel, and those of the next step are as urgent. With
            0 all of them are.

    Raises:
        ValueError: if the wire type is unknown, or the depth negative.
    """

    kind: PipelineKind = PipelineKind.SPARSE_DIST
    wire: str = "fp32"
    depth: int = 1

    def __post_init__(self) -> None:
        if self.wire not in WIRE_BYTES:
            raise ValueError(
                f"pipeline wire: expected one of {sorted(WIRE_BYTES)}, got {self.wire!r}."
            )
        if self.depth < 0:
            raise ValueError(f"pipeline depth: expected at least 0, got {self.depth}.")

    @property
    def narrow_frac(self) -> float:
        """Bytes of a value on the wire, over those of a float32."""
        return WIRE_BYTES[self.wire] / WIRE_BYTES["fp32"]

    @property
    def is_look_ahead(self) -> bool:
        return self.kind is PipelineKind.LOOK_AHEAD

    @property
    def of_torchrec(self) -> PipelineSpec:
        """What unsplit tables are trained with where hot and cold rows are with this one."""
        return replace(self, kind=PipelineKind.SPARSE_DIST) if self.is_look_ahead else self


SPARSE_DIST = PipelineSpec()
LOOK_AHEAD = PipelineSpec(PipelineKind.LOOK_AHEAD)
