"""The training task around a model: logits -> loss, in the form TorchRec's pipelines expect."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from hotrec.data.batch import Batch
from hotrec.models.retrieval import SampledSoftmax
from hotrec.runtime.stages import mark, mark_backward

# A leaf for the tracer of TorchRec's pipelines.
torch.fx.wrap("mark_backward")


class ClickTask(nn.Module):
    """Binary cross entropy of a click model; with several labels, their weighted sum.

    Args:
        model: (dense (B, N), sparse) -> logits (B, L).
        world_size: W. The loss of a rank is W / num_global_samples times the sum over its samples,
            so that DDP's mean over the ranks is the gradient of the mean over the global batch,
            also in the last step of an epoch, in which ranks have unequal shares.
        label_weights: The weights of the L labels by name, in their order; None for one label.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        label_weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.world_size = world_size
        self.label_weights = dict(label_weights or {})

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Loss (), then (detached loss (), logits (B,), labels (B,)); (B, L) of several labels."""
        logits_B = self._outputs(batch)
        if not self.label_weights:
            logits_B = logits_B.squeeze(-1)
        loss_B = F.binary_cross_entropy_with_logits(logits_B, batch.labels, reduction="none")
        if self.label_weights:
            weights = self.label_weights.values()
            parts = [weight * loss_B[:, label] for label, weight in enumerate(weights)]
            loss_B = torch.stack(parts).sum(0)
        loss = self._mean((loss_B * batch.weights).sum(), batch)
        # Between forward and backward TorchRec's pipeline sends the ids of the next batch.
        loss = mark_backward(loss, "ids_exchange")
        mark("dense")
        return loss, (loss.detach(), logits_B.detach(), batch.labels)

    def _outputs(self, batch: Batch) -> torch.Tensor:
        # The loss is float32 for every precision of the model.
        outputs: torch.Tensor = self.model(batch.dense, batch.sparse).float()
        return outputs

    def _mean(self, loss: torch.Tensor, batch: Batch) -> torch.Tensor:
        return loss * (self.world_size / batch.num_global_samples)


class RetrievalTask(ClickTask):
    """The task of a model of user and item vectors, whose product is the logit.

    The loss is the binary cross entropy of the logit, or in training a sampled softmax of the
    samples of label 1, as the mean over all samples of the global batch like the cross entropy.

    Args:
        model: (dense (B, N), sparse) -> vectors of user and item, (B, 2, D).
        world_size: W, as in ``ClickTask``.
        temperature: That of the sampled softmax; None for the cross entropy.
    """

    def __init__(self, model: nn.Module, world_size: int, temperature: float | None = None) -> None:
        super().__init__(model, world_size)
        self.softmax = None if temperature is None else SampledSoftmax(temperature)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Loss (), then (detached loss (), logits (B,), labels (B,)), and in evaluation vectors."""
        vectors_B2D = self._outputs(batch)
        users_BD, items_BD = vectors_B2D[:, 0], vectors_B2D[:, 1]
        logits_B = (users_BD * items_BD).sum(1)
        if self.training and self.softmax is not None:
            rewards_B = batch.labels * batch.weights
            loss = self.softmax(users_BD, items_BD, batch.items, rewards_B)
        else:
            loss_B = F.binary_cross_entropy_with_logits(logits_B, batch.labels, reduction="none")
            loss = (loss_B * batch.weights).sum()
        loss = mark_backward(self._mean(loss, batch), "ids_exchange")
        mark("dense")
        output = (loss.detach(), logits_B.detach(), batch.labels)
        return loss, output if self.training else (*output, vectors_B2D.detach())
