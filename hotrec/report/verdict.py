"""Sentences about the measurements: hot rows, TorchRec's planner, and the prediction.

A plan is only called faster if the plans were interleaved (``hotrec compare``): the machine's state
changes between consecutive runs, which differ by up to a factor of two without another reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrec.planner.names import PLANNER, TORCHREC, plan_name
from hotrec.report.compared import Comparison, Ratio
from hotrec.report.plan import RecordedPrediction
from hotrec.report.read import Run
from hotrec.report.units import show_bytes, show_count, show_error, show_frac, show_seconds
from hotrec.runtime.run_dir import PREDICTION, is_comparison

NO_CLAIM = "Not interleaved, so speed is not comparable; use hotrec compare."
WHERE = "See docs/why_and_when.md for where hot rows pay."


def choose_baseline(runs: Sequence[Run]) -> Run | None:
    """The run with which the others are compared, one of TorchRec's plans."""

    # hotrec's own run may use a plan of TorchRec's, too; the baseline of a comparison comes first.
    def order(run: Run) -> tuple[bool, bool]:
        is_planner = str(run.summary.get("placement")) in (TORCHREC, f"{TORCHREC} {PLANNER}")
        return not is_comparison(run.path), not is_planner

    return min(filter(is_torchrec, runs), key=order, default=None)


def verdicts(
    runs: Sequence[Run], baseline: Run | None, comparison: Comparison | None = None
) -> list[str]:
    """The effect of the hot rows and TorchRec's planner, if the plans were interleaved.

    Otherwise a sentence for each run with measured steps: its step, the prediction, the baseline.
    Before them, warnings about a run's quality.
    """
    said = [f"{run.name}: {text}" for run in runs for text in suspicion(run.summary)]
    if comparison is not None:
        return said + _compared(list(filter(comparison.has, runs)), baseline, comparison)
    measured = [run for run in runs if run.number("step_p50_s") is not None]
    return said + [_verdict(run, None if run is baseline else baseline) for run in measured]


def _verdict(run: Run, baseline: Run | None) -> str:
    step_s, predicted_s = run.number("step_p50_s") or 0.0, run.number("predicted_step_s")
    text = f"{_described(run)}: {show_seconds(step_s)} per step"
    if predicted_s is not None:
        # Of the numbers shown here.
        text += f", predicted {show_seconds(predicted_s)} ({show_error(predicted_s / step_s - 1)})"
    if baseline is None or (their_s := baseline.number("step_p50_s")) is None:
        return f"{text}."
    return f"{text}; {_described(baseline)} took {show_seconds(their_s)}. {NO_CLAIM}"


def _compared(runs: Sequence[Run], baseline: Run | None, comparison: Comparison) -> list[str]:
    """On TorchRec's planner, on hot rows, and advice if the comparison is inconclusive."""
    own = [run for run in runs if not is_torchrec(run)]
    hot = next((run for run in own if run.number("hot_rows")), None)
    cold = next((run for run in own if not run.number("hot_rows")), None)
    said: list[str] = []
    pairs: list[tuple[Callable[[Run, Run, Comparison], str], Run, Run]] = []
    if baseline is not None and baseline in runs:
        if is_torchrec(runs[0]):  # two plans of TorchRec's are not compared
            said.append(f"Chosen: {runs[0].name}.")
        pairs += [(_against, own[0], baseline)] if own else []
    if hot is not None and cold is not None:
        pairs.append((_of_hot_rows, hot, cold))
    doubts = [comparison.why_not(run, other) for _, run, other in pairs]
    for doubt, (say, run, other) in zip(doubts, pairs, strict=True):
        chosen = "Chosen: " if say is _against and run is runs[0] else ""
        said += [] if doubt else [f"{chosen}{_capital(say(run, other, comparison))}"]
    if None in doubts:
        said += _of_trial(runs[0])
    if found := list(dict.fromkeys(filter(None, doubts))):
        why = " ".join(found)
        again = "Repeat the command on a quiet machine"
        if any(is_comparison(run.path) for run in runs):  # by `hotrec run`
            again += f", with run.from={'calibrate' if 'calibrate' in why else 'compare'}"
        said.append(f"Inconclusive: {why[0].lower()}{why[1:]} {again}.")
    return said


def _of_hot_rows(hot: Run, cold: Run, comparison: Comparison) -> str:
    """Whether the hot rows pay, by how much, and why."""
    plan, ratio = comparison.plan(hot), comparison.ratio(hot, cold)
    rows, frac = hot.number("hot_rows") or 0.0, hot.number("hot_rows_frac") or 0.0
    what = f"with the {show_count(rows)} rows ({show_frac(frac)}) that serve "
    what += f"{show_frac(plan.replicated_frac)} of the lookups copied to every rank, a step takes"
    sent = [run.by_name("sent_bytes") for run in (hot, cold)]
    saved = sent[1].get("all_to_all", 0.0) - sent[0].get("all_to_all", 0.0)
    added = sum(sent[0].values()) - sum(sent[1].values()) + saved
    why = f"they take {show_bytes(saved)} from the all-to-all and add {show_bytes(added)} to the "
    why += "other collectives of each rank and step"
    if ratio.is_less:
        return f"Hot rows pay here: {what} {ratio.size} less than without; {why}."
    if ratio.is_more:
        return f"Hot rows do not pay here: {what} {ratio.size} longer than without; {why}. {WHERE}"
    return f"Hot rows change little here: {what} as long as without ({ratio.text}); {why}. {WHERE}"


def _against(run: Run, baseline: Run, comparison: Comparison) -> str:
    """The step and the bytes of a plan compared with those of one of TorchRec's."""
    plan, theirs, ratio = *map(comparison.plan, (run, baseline)), comparison.ratio(run, baseline)
    text = f"{run.name}. A step takes {show_seconds(plan.step_s)}, with {baseline.name} "
    text += f"{show_seconds(theirs.step_s)}: "
    sent = [of.number("sent_bytes_total") for of in (run, baseline)]
    if ratio.is_less or ratio.is_more:
        change, sign = abs(ratio.middle - 1), "less" if ratio.is_less else "more"
        text += f"{change:.0%} {sign} ({ratio.size})"
    else:
        text += f"as fast within the noise ({ratio.text})"
    if None not in sent:
        text += f". It sends {show_bytes(sent[0] or 0.0)} instead of {show_bytes(sent[1] or 0.0)}"
    return f"{text}."


def _of_trial(run: Run) -> list[str]:
    """The best of TorchRec's plans in the run's trial, if that is not the planner's."""
    try:
        prediction = RecordedPrediction.read(run.path / PREDICTION)
    except (OSError, ValueError):
        return []
    of_trial = {name: plan["step_s"] for name, plan in prediction.trial.items()}
    theirs = [name for name in prediction.torchrec if name in of_trial]
    best = min(theirs, key=lambda name: of_trial[name], default=prediction.chosen)
    took_turns = (prediction.document.get("trial") or {}).get("took_turns")
    if not took_turns or best == prediction.chosen:
        return []
    plan, ours = prediction.plans[best], of_trial[prediction.chosen]
    if plan["torchrec_plan"] == PLANNER:
        return []
    ratio = Ratio(of_trial[best] / ours, *prediction.trial[best]["slower"])
    longer = f"{ratio.size} longer" if ratio.is_more else f"as long within the noise, {ratio.text}"
    return [
        f"{_capital(prediction.name(best))}, the best of TorchRec's in the trial before the run, "
        f"took {show_seconds(of_trial[best])} per step where the chosen plan took "
        f"{show_seconds(ours)} ({longer}), and is predicted to send "
        f"{show_bytes(plan['total_sent_bytes'])}."
    ]


def _capital(text: str) -> str:
    """With a capital letter, except for the name of this program."""
    return text if text.startswith("hotrec") else text[:1].upper() + text[1:]


def suspicion(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for each label that is predicted implausibly well, with the columns to check.

    Args:
        summary: Figures with the entry of ``hotrec.runs.suspicious``, or without.
    """
    sentences = []
    for label, found in (summary.get("suspicious") or {}).items():
        columns = ", ".join(f"{name} {auc:.4f}" for name, auc in found["alone"].items())
        sentences.append(
            f"an AUC of {found['auc']:.4f} for {label} is implausibly high: a column may be known "
            f"only after the label. The AUC of single columns, in training: {columns}. Remove such "
            "a column from data.source.columns."
        )
    return sentences


def is_torchrec(run: Run) -> bool:
    """Whether a run trained a plan of TorchRec's own, as it was configured or as hotrec chose."""
    return str(run.summary.get("placement")).startswith(TORCHREC)


def _described(run: Run) -> str:
    """The name of a run, and its plan, as far as recorded."""
    plan, pipeline = run.summary.get("placement"), run.summary.get("pipeline")
    name = None if plan is None else plan_name(str(plan), run.number("hot_rows"))
    told = ", ".join(t for t in (name, pipeline) if t and t not in run.name)
    return f"{run.name} ({told})" if told else run.name
