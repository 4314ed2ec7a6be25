"""Checks whether comparisons repeat: is the ratio of one start in the interval of another?

    for i in 1 2 3 4 5; do HOTREC_RUN_DIR=runs/repeat/$i hotrec run experiment=quickstart \\
        launch.num_ranks=2 run.compare=true; done
    python benchmarks/repeats.py runs/repeat/*/compare

Each argument is a directory in which ``hotrec compare`` or ``hotrec run`` left compare.json. Plans
are matched by the last part of their run directory (train, torchrec, counterpart). Five starts are
ten pairs. It also prints the standard deviation of the logarithm of a ratio between the starts, and
the one expected from the blocks of one start: START_SPREAD of hotrec/planner/trial.py is the rest.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from hotrec.planner.trial import CONFIDENCE, START_SPREAD, Trial
from hotrec.report.render import markdown_table


def read_trial(path: Path) -> tuple[Trial, list[str]]:
    """The measurements of one start by the last part of the run directories, and its doubts."""
    document = json.loads((path / "compare.json").read_text())
    blocks = {Path(name).name: of["block_s"] for name, of in document["plans"].items()}
    return Trial(blocks, document["seconds"]), document["doubts"]


def main(paths: Sequence[str]) -> None:
    """Print the steps of each start, and for each two plans the pairs of starts that agree."""
    read = {path: read_trial(Path(path)) for path in paths}
    trials = [trial for trial, _ in read.values()]
    names = [name for name in trials[0].block_s if all(name in trial.block_s for trial in trials)]
    steps = [
        [path, *(f"{1e3 * trial.step_s(name):.1f} ms" for name in names), "; ".join(doubts) or "-"]
        for path, (trial, doubts) in read.items()
    ]
    print(markdown_table(["start", *names, "doubts"], steps), end="\n\n")
    rows = []
    for name, other in itertools.combinations(names, 2):
        found = [trial.ratio(name, other) for trial in trials]
        logs = [math.log(middle) for middle, _, _ in found]
        pairs = list(itertools.combinations(found, 2))
        inside = sum(low <= theirs[0] <= high for (_, low, high), theirs in pairs)
        normal = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
        # Of an interval what is not START_SPREAD is the noise of the blocks of one start.
        own = fmean(
            math.sqrt(max(0.0, (math.log(high / low) / 2 / normal) ** 2 / 2 - START_SPREAD**2))
            for _, low, high in found
        )
        between = stdev(logs) if len(logs) > 1 else math.nan
        rows.append(
            [
                f"{name} over {other}",
                f"{math.exp(fmean(logs)):.3f}",
                f"{min(m for m, _, _ in found):.3f} to {max(m for m, _, _ in found):.3f}",
                f"{fmean(high / low for _, low, high in found):.2f}",
                f"{inside} of {len(pairs)}",
                f"{between:.3f}",
                f"{own:.3f}",
            ]
        )
    header = ["ratio", "mean", "of starts", "interval, high over low", "pairs inside"]
    print(markdown_table([*header, "spread between starts", "of the blocks of one"], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
