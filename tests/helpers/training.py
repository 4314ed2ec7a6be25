"""A run of a small model, from the model, its optimizer and keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from hotrec.data.batch import Batch
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import BatchFacts
from hotrec.train.ahead import DaysAhead
from hotrec.train.alternate import Alternation
from hotrec.train.best import BestQuality
from hotrec.train.checkpoint import Checkpoints, StatefulLoader
from hotrec.train.dense_sync import count_dense_values
from hotrec.train.evaluation import Evaluation
from hotrec.train.hot_set import HotSet
from hotrec.train.loop import TrainResult, train
from hotrec.train.meters import Tables
from hotrec.train.metrics import FIRST_COMPARED_STEP, Counts, Metrics, Record
from hotrec.train.parts import Parts
from hotrec.train.pipelines import make_pipeline
from hotrec.train.saver import Saver
from hotrec.train.watch import Watch
from hotrec.types import PipelineKind, PipelineSpec


@dataclass(frozen=True)
class Cadence:
    """How often things happen, in steps; 0 for never."""

    eval_every: int = 0
    save_every: int = 0
    save_every_s: float = 0.0
    log_every: int = 100
    check_every: int = 10
    check_replicas_every: int = 1000
    adapt_every: int = 0
    warmup_steps: int = 10


def train_model(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    loader: StatefulLoader,
    ranks: Ranks,
    *,
    num_steps: int,
    cadence: Cadence,
    lr_factor: Callable[[int], float],
    pipeline_kind: str = "sparse_dist",
    grad_clip_norm: float | None = None,
    eval_batches: Mapping[str, Iterable[Batch]] | None = None,
    checkpoints: Checkpoints | None = None,
    check_replicas: Callable[[], None] | None = None,
    count_tables: Callable[[], Tables] | None = None,
    count_caches: Callable[[], Mapping[str, float]] | None = None,
    run_dir: Path | None = None,
    inspect_batch: Callable[[Batch], BatchFacts] | None = None,
    description: Mapping[str, Any] | None = None,
    first_compared_step: int = FIRST_COMPARED_STEP,
    alternation: Alternation | None = None,
    ahead: DaysAhead | None = None,
    best: BestQuality | None = None,
    hot_set: AdaptiveHotSet | None = None,
    callbacks: Sequence[str] = (),
    on_accepted: Callable[[], None] | None = None,
    **record: Any,
) -> TrainResult:
    """Train with parts made from keywords; ``record`` are those of ``Record``."""
    pipeline = partial(
        make_pipeline,
        PipelineSpec(PipelineKind[pipeline_kind]),
        model,
        optimizer,
        ranks.device,
        grad_clip_norm,
    )
    counts = Counts(count_dense_values(model), inspect_batch, count_tables, count_caches)
    metrics = Metrics(
        ranks,
        counts,
        log_every_steps=cadence.log_every,
        warmup_steps=cadence.warmup_steps,
        first_compared_step=first_compared_step,
        record=Record(
            run_dir, description or {}, callbacks=callbacks, accept=on_accepted, **record
        ),
    )
    evaluation = Evaluation(
        metrics,
        eval_batches,
        every_steps=cadence.eval_every,
        ahead=ahead,
        best=best,
        alternation=alternation,
        checkpoints=checkpoints,
    )
    of_model = HotSet(metrics, hot_set, cadence.adapt_every)
    saver = Saver(
        metrics,
        evaluation,
        of_model,
        checkpoints,
        every_steps=cadence.save_every,
        every_s=cadence.save_every_s,
    )
    watch = Watch(
        ranks,
        metrics,
        saver,
        every_steps=cadence.check_every,
        check_replicas=check_replicas,
        check_replicas_every=cadence.check_replicas_every,
    )
    parts = Parts(ranks, metrics, watch, evaluation, saver, between=[of_model])
    trained: Any = SimpleNamespace(model=model, optimizer=optimizer, pipeline=pipeline)
    return train(trained, loader, parts, num_steps=num_steps, lr_factor=lr_factor)
