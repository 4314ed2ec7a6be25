"""AUC and GAUC of models of histories, and of models of bags, on KuaiRand's log over seeds.

    PYTHONPATH=. python benchmarks/sequence_quality.py [--seeds 0 1 2 3 4] [--models dlrm din ...]
        [--work runs/sequence_quality] [--page benchmarks/results/sequence_quality.md]

Prepares the data if needed and trains every model with every seed, seed by seed, two
ranks each, one epoch, all from ``experiment=kuairand_hstu`` except for the model's own settings.
Finished runs are not repeated. All models see the same samples with the same columns; DIN has the
last ids of the history as columns of their own, and its other lists pooled.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality import hotrec
from hotrec.report.render import markdown_table

FURTHER = ("is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")
SHARED = (
    "data=kuairand_histories",
    "optimizer=rowwise_adagrad",
    "optimizer.learning_rate=0.01",
    "optimizer.dense_learning_rate=0.005",
    "trainer.batch_size=256",
    "trainer.eval_group_by=user_id",
    *(f"++trainer.label_weights.{label}=0.1" for label in FURTHER),
)
RUN = ("placement=fraction", "placement.hot_frac=0.5", "launch.num_ranks=2", "trainer.resume=none")
DIM, PLACES = 32, 20
OVER = (f"model.embedding_dim={DIM}", "model.over_layer_sizes=[128,64,1]")
BAGS = (*OVER, f"model.dense_layer_sizes=[64,{DIM}]")
HISTORY = (
    *OVER,
    "+model.history.history_video=video_id",
    "model.side=[history_action,history_play,history_age]",
    "model.context=[user_id,active_degree,follow_range,fans_range,friend_range,register_range]",
)
# The settings that prepare a dataset, by its name: histories as lists, or as columns.
DATA: Mapping[str, Sequence[str]] = {
    "lists": (),
    "places": (
        "data.source.columns.history_video.kind=sequence",
        f"data.source.columns.history_video.max_length={PLACES}",
    ),
}
# The dataset of a model, and its settings.
MODELS: Mapping[str, tuple[str, Sequence[str]]] = {
    "dlrm": ("lists", ("model=dlrm", *BAGS)),
    "din": ("places", ("model=din", *BAGS, "+model.attention.history_video=video_id")),
    "sasrec": ("lists", ("model=sasrec", *HISTORY)),
    "hstu": ("lists", ("model=hstu", *HISTORY)),
}
FIGURES = ("auc", "gauc", "log_loss")

PAGE = """# Quality: models of histories on KuaiRand

Will the user click the video (is_click), and six more tasks of weight 0.1, from the user, the
video, the context and what the user did before: up to 50 earlier videos with actions, play times
and ages (`conf/data/kuairand_histories.yaml`). One epoch of 199,011 samples, batch 2 x 256, rows of
{dim}, two ranks; AUC, GAUC (by user) and log loss of is_click on the last day. No setting was tuned
for any of them. DLRM pools each list; DIN attends over the last {places} videos and pools the other
lists. Made by

```
{command}
```

{verdict}

{means}

GAUC is the mean of the AUC inside each user, weighted by samples, of users with both outcomes.

{seeds}
"""


def train(work: Path, model: str, seed: int) -> dict[str, Any]:
    """The figures of a run on the test split, of an earlier one if it has ended."""
    name, settings = MODELS[model]
    run_dir, of_data = work / f"{model}-{seed}", [*SHARED, *DATA[name]]
    dataset = work / name / "dataset"
    place = f"paths.dataset={dataset}"
    kept = run_dir / "result.json"
    if kept.exists():
        earlier: dict[str, Any] = json.loads(kept.read_text())
        return earlier
    if not dataset.exists():
        hotrec(work / name / "prepare_run", ["prepare", *of_data, place])
    begin = time.monotonic()
    words = ["train", *of_data, *settings, place, *RUN, f"trainer.seed={seed}"]
    found = hotrec(run_dir, words)
    result = {key: found[f"{key}_by_label"]["label"] for key in FIGURES}
    print(
        f"{model} seed {seed}: {result}, {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    kept.write_text(json.dumps(result))
    return result


def _mean(values: np.ndarray) -> str:
    return f"{values.mean():.4f} +- {values.std(ddof=1):.4f}"


def render(runs: Mapping[str, Sequence[Mapping[str, float]]], seeds: Sequence[int]) -> str:
    """The page."""
    of_model = {
        model: {key: np.array([run[key] for run in of_seed]) for key in FIGURES}
        for model, of_seed in runs.items()
    }
    means = [[model, *(_mean(of[key]) for key in FIGURES)] for model, of in of_model.items()]
    best = max(of_model, key=lambda model: float(of_model[model]["auc"].mean()))
    apart = [
        f"{model} by {_mean(of_model[best]['auc'] - of['auc'])}"
        for model, of in of_model.items()
        if model != best
    ]
    seeds_of = [
        [model, key, *(f"{value:.4f}" for value in of[key])]
        for model, of in of_model.items()
        for key in FIGURES[:2]
    ]
    return PAGE.format(
        dim=DIM,
        places=PLACES,
        command=f"PYTHONPATH=. python benchmarks/sequence_quality.py {shlex.join(sys.argv[1:])}",
        verdict=f"{best} has the highest mean AUC; seed by seed it is above {', '.join(apart)}.",
        means=markdown_table(["model", "AUC", "GAUC", "log loss"], means),
        seeds=markdown_table(["model", "", *(f"seed {seed}" for seed in seeds)], seeds_of),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--work", type=Path, default=Path("runs/sequence_quality"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {model: [] for model in options.models}
    for seed in options.seeds:
        for model, of_seed in runs.items():
            of_seed.append(train(options.work, model, seed))
    if options.page:
        options.page.write_text(render(runs, options.seeds))
        options.page.with_suffix(".json").write_text(json.dumps(runs, indent=1) + "\n")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
