"""The measurements of a trial, its verdict, and the record of past trials.

Candidates are interleaved in rounds of one block of steps each, so that disturbances of the machine
affect all of them. The logarithm of a block's step is modelled as the sum of a candidate's effect,
a round's effect and normal noise (two-way analysis of variance without interaction), so the ratio
of two candidates' steps lies within Student's t interval of the difference of their means.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.special import stdtrit

from hotrec.artifact import read_record

logger = logging.getLogger(__name__)

CONFIDENCE = 0.9  # of intervals, two-sided
# A trial ends when no other candidate is likely to be faster than the leader by more than this.
TOLERANCE = 0.02
# Two blocks may agree by chance: the spread of ratios is assumed to be at least this.
MIN_SPREAD = 0.01
# Standard deviation of the logarithm of a ratio between starts of the same comparison, in addition
# to that of blocks of one start: placement of memory, threads and ranks (docs/results.md).
START_SPREAD = 0.02
# After one block the spread is unknown; a candidate that takes this much longer is dropped. Blocks
# of one candidate on a busy machine differed by factors of up to 1.4.
FIRST_RATIO = 1.5
# If the interval of a ratio is wider than this, the blocks disagree: on a quiet machine it is a
# fifth of it.
MAX_WIDTH = 1.5


def ratio_interval(
    ours: Sequence[float], theirs: Sequence[float], *others: Sequence[float]
) -> tuple[float, float]:
    """The interval of the ratio of their step to ours, from the rounds of both.

    ``others`` are further candidates, which improve the estimate of the noise; those with fewer
    rounds are ignored.
    """
    rounds = min(len(ours), len(theirs))
    logs_CR = np.log([of[:rounds] for of in (ours, theirs, *others) if len(of) >= rounds])
    mean = float((logs_CR[1] - logs_CR[0]).mean())
    half = math.log(FIRST_RATIO)
    if rounds > 1:
        noise = logs_CR - logs_CR.mean(axis=0) - logs_CR.mean(axis=1, keepdims=True)
        noise += logs_CR.mean()
        freedom = (logs_CR.shape[0] - 1) * (rounds - 1)
        # The ratio has the noise of two blocks.
        spread = max(math.sqrt(2 * float((noise**2).sum()) / freedom), MIN_SPREAD)
        half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * spread / math.sqrt(rounds)
    return math.exp(mean - half), math.exp(mean + half)


@dataclass(frozen=True)
class Trial:
    """The measured candidates.

    Args:
        block_s: Seconds per step of each block, by candidate. Slower candidates have fewer rounds.
        seconds: Duration of the trial, including the time to build the candidates.
        is_recorded: Whether it was measured by an earlier run of the same situation.
        took_turns: Whether the candidates were interleaved. Otherwise they trained one after the
            other, and the trial only gives an order, without a claim.
    """

    block_s: Mapping[str, Sequence[float]]
    seconds: float
    is_recorded: bool = False
    took_turns: bool = True

    @cached_property
    def open_candidates(self) -> list[str]:
        """The fastest candidate, and those that may be as fast."""
        rounds = max(map(len, self.block_s.values()))
        names = [name for name, blocks in self.block_s.items() if len(blocks) == rounds]
        first, *others = sorted(names, key=self.step_s)
        return [first, *(name for name in others if self._ratio(name, first)[0] <= 1)]

    @cached_property
    def chosen(self) -> str:
        """The fastest candidate; where noise hides it, the one that was predicted to be."""
        leader, *others = self.open_candidates
        alike = {leader, *(name for name in others if self._is_noisy(name, leader))}
        return next(name for name in self.block_s if name in alike)

    @property
    def is_decided(self) -> bool:
        """Whether no candidate is likely to be faster than the leader by more than TOLERANCE."""
        leader, *others = self.open_candidates
        return all(self._ratio(name, leader)[0] > 1 - TOLERANCE for name in others)

    def _is_left_out(self, name: str) -> bool:
        """Whether it has fewer than two blocks where others have more."""
        return len(self.block_s[name]) < min(2, len(self.block_s[self.chosen]))

    def _is_noisy(self, name: str, first: str) -> bool:
        """Whether blocks disagree so much that they do not tell which of two is faster."""
        low, high = self._ratio(name, first)
        return low <= 1 <= high and high / low > MAX_WIDTH

    def _ratio(self, name: str, first: str) -> tuple[float, float]:
        """The interval of the ratio of a candidate's step to that of ``first``."""
        others = [blocks for n, blocks in self.block_s.items() if n not in (first, name)]
        return ratio_interval(self.block_s[first], self.block_s[name], *others)

    def ratio(self, name: str, other: str) -> tuple[float, float, float]:
        """The ratio of the step of ``name`` to that of ``other``, and its interval in other starts.

        Returns:
            The ratio, and the ends of the interval that includes the ratio of another start of both
            with probability CONFIDENCE: wider than that of the mean, which only reflects this
            start.
        """
        low, high = self._ratio(name, other)
        middle = math.sqrt(low * high)
        normal = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        half = math.sqrt(2) * math.hypot(math.log(high / middle), normal * START_SPREAD)
        return middle, middle * math.exp(-half), middle * math.exp(half)

    def step_s(self, name: str) -> float:
        """The step of a candidate: the geometric mean of its blocks, whose ratios are compared."""
        return math.exp(float(np.log(self.block_s[name]).mean()))

    def why(self, titles: Mapping[str, str]) -> str:
        """The verdict for the user, with these titles of the candidates."""
        chosen = titles[self.chosen]
        others = sorted((n for n in self.block_s if n != self.chosen), key=self.step_s)
        when = "an earlier run's trial" if self.is_recorded else "a trial"
        when += f" of {self.seconds:.0f} s on this machine"
        if not self.took_turns:
            times = (f"{titles[n]} {1e3 * self.step_s(n):.3g} ms" for n in (self.chosen, *others))
            return (
                f"{chosen} took the least time a step in {when}, in which the plans did not take "
                f"turns: no claim of speed ({'; '.join(times)})."
            )
        text = f"{chosen} took {1e3 * self.step_s(self.chosen):.3g} ms a step"
        if self.chosen == self.open_candidates[0]:
            num_measured = sum(not self._is_left_out(name) for name in self.block_s)
            text += f", the least of {num_measured} plans in {when}"
        else:
            text += f" and was predicted to be the fastest; {when} was too noisy to tell"
        return f"{'; '.join([text, *(f'{titles[n]} {self._verdict(n)}' for n in others)])}."

    def _verdict(self, name: str) -> str:
        """The interval of the difference in the rounds of both, and its meaning."""
        if self._is_left_out(name):
            return "left out: its first steps were slower"
        low, high = self._ratio(name, self.chosen)
        if self._is_noisy(name, self.chosen):
            return "too noisy to tell"
        judged = "perhaps as fast, within the noise" if low <= 1 <= high else "slower"
        return f"{low - 1:+z.0%} to {high - 1:+z.0%}: {judged}"

    def document(self, labels: Mapping[str, str]) -> dict[str, Any]:
        """The trial for the prediction document, with these labels of the candidates."""
        return {
            "seconds": self.seconds,
            "is_recorded": self.is_recorded,
            "took_turns": self.took_turns,
            "plans": {
                labels[name]: {
                    "step_s": self.step_s(name),
                    "block_s": list(blocks),
                    "slower": list(self._ratio(name, self.chosen)),
                }
                for name, blocks in self.block_s.items()
            },
        }


def trial_file(folder: Path, situation: Mapping[str, Any]) -> Path:
    """The file of the trial of a situation: its data, model, machine and candidates."""
    text = json.dumps(situation, sort_keys=True, default=str)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_trial(file: Path, candidates: Mapping[str, str]) -> Trial | None:
    """The recorded trial of these candidates; None without one, or with a warning if damaged.

    Args:
        file: The record.
        candidates: Labels of the candidates by digest.
    """
    try:
        document = json.loads(read_record(file))
        blocks = {str(n): [float(s) for s in of] for n, of in document["block_s"].items()}
        took_turns = bool(document.get("took_turns", True))
        trial = Trial(blocks, float(document["seconds"]), True, took_turns)
        if not blocks or not all(map(_are_seconds, blocks.values())):
            raise ValueError(f"block_s {blocks}")
        if not blocks.keys() <= set(candidates):
            raise ValueError(f"candidates {sorted(blocks)}, not of {sorted(candidates)}")
        trial.document(candidates)  # raises if the record is invalid
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning(
            "%s: expected the record of a trial, got %r. Repeating the trial.", file, error
        )
        return None
    return trial


def _are_seconds(block_s: Sequence[float]) -> bool:
    return len(block_s) > 0 and min(block_s) > 0 and math.isfinite(sum(block_s))


def write_trial(trial: Trial, file: Path) -> None:
    """Record a trial, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".tmp")
    part.write_text(json.dumps(dataclasses.asdict(trial)) + "\n")
    part.replace(file)
