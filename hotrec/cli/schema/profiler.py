"""What the group profiler chooses from: a dataclass for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.cli.schema.fields import key


class ProfilerKind(Enum):
    """What is recorded of single steps."""

    none = "none"
    trace = "trace"


@dataclass
class ProfilerConfig:
    """What all profilers share."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=")


@dataclass
class NoProfiler(ProfilerConfig):
    """Nothing is recorded."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=", ProfilerKind.none)


@dataclass
class TraceProfiler(ProfilerConfig):
    """A trace of a few steps, a file per rank."""

    kind: ProfilerKind = key("what is recorded; choose it with profiler=", ProfilerKind.trace)
    first_step: int = key(
        "first step to record, counted from this start; those before warm up", 20, at_least=1
    )
    num_steps: int = key("steps to record; they are in no rate", 5, at_least=1, at_most=100)
    warn_of_syncs: bool = key(
        "in these steps CUDA warns of each line that makes the host wait for the device", False
    )
