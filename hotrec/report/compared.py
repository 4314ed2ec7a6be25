"""What runs may be compared in: interleaved plans in time, runs on the same data in the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotrec.artifact import read_record, real_path
from hotrec.planner.trial import MAX_WIDTH
from hotrec.report.read import Run, parse_object
from hotrec.report.units import NOT_RECORDED, show_count

COMPARED_JSON = "compare.json"
_SHOWN_HASH = 8


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


def differences(run: Run, other: Run) -> list[str]:
    """The differences in data and evaluation of two runs; empty if their quality is comparable.

    Each is "fact X vs. Y"; unknown facts are included.
    """
    pairs = zip(_evaluated(run).items(), _evaluated(other).values(), strict=True)
    return [
        f"{what} {ours or NOT_RECORDED} vs. {theirs or NOT_RECORDED}"
        for (what, ours), theirs in pairs
        if ours is None or ours != theirs
    ]


def is_as_large(run: Run, other: Run) -> bool:
    """Whether two runs trained on the same data with the same number of ranks and batch size."""
    same = all(run.number(name) == other.number(name) for name in ("world_size", "batch_size"))
    return same and _dataset(run) == _dataset(other) is not None


def unlike_sentences(runs: Sequence[Run], baseline: Run | None) -> list[str]:
    """A sentence for each run whose quality is not comparable with the baseline's, or the first's.

    Runs that were not evaluated have nothing to compare.
    """
    evaluated = [run for run in runs if run.number("auc") is not None]
    other = baseline if baseline in evaluated else next(iter(evaluated), None)
    return [
        f"{run.name} and {other.name} are not comparable in quality, bytes or time: "
        f"{'; '.join(found)}."
        for run in evaluated
        if other is not None and run is not other and (found := differences(run, other))
    ]


def _evaluated(run: Run) -> dict[str, str | None]:
    """What the quality of a run depends on besides the run itself, None where not recorded."""
    number, weights = run.number("num_eval_samples"), run.by_name("label_weights")
    labels = ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items())
    return {
        "dataset": _dataset(run),
        "labels": labels or "one",
        "split": run.summary.get("eval_split"),
        "number of samples evaluated": None if number is None else show_count(number),
    }


def _dataset(run: Run) -> str | None:
    content_hash, number = run.summary.get("dataset"), run.summary.get("generation")
    if not isinstance(content_hash, str):
        return None
    generation = f" (generation {number})" if number else ""
    name = run.summary.get("dataset_name") or ""
    return f"{name} {content_hash[:_SHOWN_HASH]}{generation}".strip()
