"""Sampled softmax over the items of all ranks, for models of user and item vectors."""

from __future__ import annotations

import torch
from torch import nn

from hotrec.data.batch import BatchItems
from hotrec.data.groups import NO_GROUP
from hotrec.runtime.gathered_rows import gather_rows, gather_sizes


class SampledSoftmax(nn.Module):
    """Cross entropy of each sample's item among the candidates of all ranks.

    With the score s(u, i) = u . i / temperature and the probability Q(i) with which item i is a
    candidate, the loss of a sample with user u and item i is

        -log(exp(s'(u, i)) / (exp(s'(u, i)) + sum_c exp(s'(u, c)))),  s'(u, i) = s(u, i) - log Q(i)

    where c are the candidates of all ranks that are not item i itself: equations 3 and 4 of
    "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations" (Yi et al.,
    RecSys 2019). Without the correction, frequent items would be negatives too often. Unlike there,
    all occurrences of item i are left out of the sum, not only the sample's own.

    Args:
        temperature: Divides the scores.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(
        self,
        users_BD: torch.Tensor,
        items_BD: torch.Tensor,
        items: BatchItems | None,
        rewards_B: torch.Tensor,
    ) -> torch.Tensor:
        """The sum of reward times loss over this rank's samples, (); collective.

        The sum over the ranks, and its gradients, are those of one process with all samples: the
        gradient of an item's vector has the parts of all ranks.

        Args:
            users_BD: Vectors of the users.
            items_BD: Vectors of the items.
            items: What the samples' items are.
            rewards_B: Weight of each sample, 0 for those that are not positive.

        Raises:
            ValueError: If the batch has no items.
        """
        if items is None:
            raise ValueError(
                "model.loss: expected batches with items for sampled_softmax, got batches without. "
                "Call add_items on the loader."
            )
        candidates_BD = items_BD[items.is_candidate]
        sizes = gather_sizes(candidates_BD.size(0), items_BD.device)
        candidates_CD = gather_rows(candidates_BD, sizes)
        # One message; float64 has all integers up to 2^53.
        facts_B2 = torch.stack((items.ids.double(), items.log_q.double()), dim=1)
        facts_C2 = gather_rows(facts_B2[items.is_candidate], sizes)
        ids_C, log_q_C = facts_C2[:, 0].long(), facts_C2[:, 1].to(users_BD.dtype)
        is_used = (rewards_B != 0) & (items.ids != NO_GROUP)
        users_PD, ids_P = users_BD[is_used], items.ids[is_used]
        own_P = (users_PD * items_BD[is_used]).sum(1) / self.temperature
        own_P = own_P - items.log_q[is_used].to(own_P.dtype)
        others_PC = users_PD @ candidates_CD.t() / self.temperature - log_q_C
        others_PC = others_PC.masked_fill(ids_P.unsqueeze(1) == ids_C, float("-inf"))
        all_P = torch.cat((own_P.unsqueeze(1), others_PC), dim=1).logsumexp(1)
        return ((all_P - own_P) * rewards_B[is_used]).sum()
