"""The train pipelines by name."""

from __future__ import annotations

import torch
from torch import nn

from hotrec.train.look_ahead import LookAhead, LookAheadPipeline
from hotrec.train.pipeline_base import Output, Pipeline
from hotrec.train.torchrec_pipeline import TorchRecPipeline

__all__ = ["PIPELINES", "LookAhead", "Output", "Pipeline", "make_pipeline"]

PIPELINES = ("look_ahead", "sparse_dist", "base", "prefetch")


def make_pipeline(
    kind: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    look_ahead: LookAhead | None = None,
    grad_clip_norm: float | None = None,
) -> Pipeline:
    """Put a sharded model and its optimizer into a pipeline.

    Args:
        kind: "look_ahead" (rows of the next batches travel while the current one computes),
            "sparse_dist" (only their ids do), "base" (only the copy to the device is ahead) or
            "prefetch" (TorchRec's, into the device caches of host tables).
        look_ahead: what the pipeline of this name needs.
        grad_clip_norm: scale the gradients of the dense layers down to this norm, that of all of
            them together, after their mean over the ranks; None not to. Rows are not clipped:
            their gradients go to their owners, who update them in backward.

    Raises:
        ValueError: if the kind is unknown, or the model does not fit it.
    """
    if kind not in PIPELINES:
        raise ValueError(f"pipeline: expected one of {PIPELINES}, got {kind!r}.")
    if kind != "look_ahead":
        return TorchRecPipeline(kind, model, optimizer, device, grad_clip_norm)
    if look_ahead is None:
        raise ValueError(
            "pipeline look_ahead: expected what feeds it rows, got none. Give make_pipeline "
            "look_ahead=LookAhead(...)."
        )
    return LookAheadPipeline(model, optimizer, device, look_ahead, grad_clip_norm)
