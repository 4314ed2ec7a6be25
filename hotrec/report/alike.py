"""Whether two runs can be compared: the differences in their data and their evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from hotrec.report.read import Run
from hotrec.report.units import show_count

_SHOWN_HASH = 8


def differences(run: Run, other: Run) -> list[str]:
    """The differences in data and evaluation of two runs; empty if their quality is comparable.

    Each is "fact X vs. Y"; unknown facts are included.
    """
    pairs = [
        ("dataset", *map(_dataset, (run, other))),
        ("labels", *map(_labels, (run, other))),
        ("split", *(of.summary.get("eval_split") for of in (run, other))),
        ("number of samples evaluated", *map(_num_samples, (run, other))),
    ]
    found = []
    for what, ours, theirs in pairs:
        if ours is None or theirs is None:
            found.append(f"the {what} is not recorded for one of them")
        elif ours != theirs:
            found.append(f"{what} {ours} vs. {theirs}")
    return found


def is_alike(runs: Sequence[Run]) -> bool:
    """Whether the quality of all these runs is comparable."""
    return not any(differences(run, runs[0]) for run in runs[1:])


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
    sentences = []
    for run in evaluated:
        if other is not None and run is not other and (found := differences(run, other)):
            sentences.append(
                f"{run.name} and {other.name} are not comparable in quality, bytes or time: "
                f"{'; '.join(found)}."
            )
    return sentences


def _dataset(run: Run) -> str | None:
    content_hash, number = run.summary.get("dataset"), run.summary.get("generation")
    if not isinstance(content_hash, str):
        return None
    generation = f" (generation {number})" if number else ""
    name = run.summary.get("dataset_name") or ""
    return f"{name} {content_hash[:_SHOWN_HASH]}{generation}".strip()


def _labels(run: Run) -> str:
    """The labels with their weights in the mean AUC."""
    weights = run.by_name("label_weights")
    return ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items()) or "one"


def _num_samples(run: Run) -> str | None:
    number = run.number("num_eval_samples")
    return None if number is None else show_count(number)
