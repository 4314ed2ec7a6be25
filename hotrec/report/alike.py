"""Whether two runs can be compared: the differences in their data and their evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from hotrec.report.read import Run
from hotrec.report.units import NOT_RECORDED, show_count

_SHOWN_HASH = 8


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
