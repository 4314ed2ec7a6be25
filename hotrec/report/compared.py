"""Measurements of ``hotrec compare`` on interleaved plans, and their conclusions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record, real_path
from hotrec.planner.trial import MAX_WIDTH
from hotrec.report.read import Run, parse_object

COMPARED_JSON = "compare.json"


@dataclass(frozen=True)
class Ratio:
    """The ratio of the step times of two plans.

    Args:
        middle: As measured. low, high: The interval that would contain it in another comparison of
        both.
    """

    middle: float
    low: float
    high: float

    @property
    def is_less(self) -> bool:
        return self.high < 1

    @property
    def is_more(self) -> bool:
        return self.low > 1

    @property
    def text(self) -> str:
        """Such as ``-23% to -15%``."""
        ends = [f"{end - 1:+z.0%}" for end in (self.low, self.high)]
        return " to ".join(end.replace("+0%", "0%") if end == "+0%" else end for end in ends)

    @property
    def size(self) -> str:
        """Such as ``15% to 23%``, without the sign; one number if both ends round to it."""
        ends = sorted(f"{abs(end - 1):.0%}" for end in (self.low, self.high))
        ends.sort(key=lambda end: int(end.rstrip("%")))
        return ends[0] if ends[0] == ends[1] else " to ".join(ends)


@dataclass(frozen=True)
class ComparedPlan:
    """One of the interleaved plans.

    Args:
        step_s: Seconds of a step.
        ratios: Its step time relative to each of the others, by resolved directory.
        replicated_frac: Share of the lookups that a replica on the rank of the sample serves.
        owned_fracs: Share that the shards of each rank serve.
    """

    step_s: float
    ratios: Mapping[Path, Ratio]
    replicated_frac: float
    owned_fracs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The content of ``compare.json``, by resolved run directory."""

    seconds: float
    doubts: tuple[str, ...]
    plans: Mapping[Path, ComparedPlan]

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Read it from a file, or from its directory.

        Raises:
            ValueError: If there is none, or it is not output of ``hotrec compare``.
        """
        file = path / COMPARED_JSON if path.is_dir() else path
        try:
            document = parse_object(read_record(file), str(file))
            plans = {real_path(Path(name)): _plan(of) for name, of in document["plans"].items()}
            doubts = tuple(str(doubt) for doubt in document["doubts"])
            return cls(float(document["seconds"]), doubts, plans)
        except FileNotFoundError as error:
            raise ValueError(
                f"compared {file}: expected the output of `hotrec compare`, got no such file. Pass "
                "its directory."
            ) from error
        except (OSError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}: expected the output of `hotrec compare`, got {error!r}. Compare again."
            ) from error

    def has(self, run: Run) -> bool:
        """Whether the plan of a run took part."""
        return real_path(run.path) in self.plans

    def complete(self, run: Run) -> Run:
        """A run with the figures of its plan, if that took part."""
        if not self.has(run):
            return run
        plan, owned = self.plan(run), sum(self.plan(run).owned_fracs)
        mean = owned / len(plan.owned_fracs)
        figures = {
            "interleaved_step_s": plan.step_s,
            "home_lookups_frac": plan.replicated_frac + mean,
            "owner_balance": max(plan.owned_fracs) / mean if owned else None,
        }
        return replace(run, summary={**run.summary, **figures})

    def plan(self, run: Run) -> ComparedPlan:
        """The measurements of the plan of a run that took part."""
        return self.plans[real_path(run.path)]

    def ratio(self, run: Run, other: Run) -> Ratio:
        """The ratio of the step times of two runs."""
        return self.plan(run).ratios[real_path(other.path)]

    def why_not(self, run: Run, other: Run) -> str | None:
        """Why the comparison of two runs is inconclusive, in a sentence; None if it is not."""
        if self.doubts:
            return " ".join(self.doubts)
        ratio = self.ratio(run, other)
        if ratio.high / ratio.low > MAX_WIDTH:
            return f"Their blocks of steps disagree ({ratio.text})."
        return None


def _plan(of: Mapping[str, Any]) -> ComparedPlan:
    return ComparedPlan(
        float(of["step_s"]),
        {real_path(Path(other)): Ratio(*map(float, ends)) for other, ends in of["ratios"].items()},
        float(of["replicated_frac"]),
        tuple(float(share) for share in of["owned_fracs"]),
    )
