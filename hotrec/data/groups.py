"""The group of each sample, such as its user, for metrics that compare samples of one group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.config.data import Encoding
from hotrec.data.chunks import Dataset

NO_GROUP = -1


@dataclass(frozen=True)
class GroupBy:
    """Groups samples by the row of a categorical column.

    Args:
        feature: The column, with at most one id per sample.
        skips_first_row: Whether row 0 is for missing and unknown values, which are not one group.
    """

    feature: str
    skips_first_row: bool

    def groups_of(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """The groups of a batch's samples, int64 (B,); ``NO_GROUP`` for those without one."""
        ids = sparse[self.feature]
        groups_B = torch.full((sparse.stride(),), NO_GROUP, dtype=torch.int64)
        groups_B[ids.lengths() > 0] = ids.values()  # a padding sample has no id
        if self.skips_first_row:
            groups_B[groups_B == 0] = NO_GROUP
        return groups_B


def group_by_of(
    dataset: Dataset, feature: str | None, key: str = "trainer.eval_group_by"
) -> GroupBy | None:
    """The grouping by a column of a dataset; None for None.

    Args:
        dataset: The dataset.
        feature: The column.
        key: The configuration key that names it, for messages.

    Raises:
        ValueError: If the dataset has no such categorical column, or it can have several ids.
    """
    if feature is None:
        return None
    tables = {f.name: f.table for f in dataset.schema.features if not f.is_multi_hot}
    if feature not in tables:
        raise ValueError(
            f"{key}: expected a categorical column with one id per sample, one of "
            f"{sorted(tables)}, got {feature!r}. Correct the name, or remove it."
        )
    with dataset.artifact.parsing():
        encoded = dataset.artifact.content["source"].get("encoding", {}).get("tables", {})
    # The rows of a synthetic dataset and of encoding: rows are ids, the first one too.
    how = encoded.get(tables[feature], {"encoding": Encoding.rows})["encoding"]
    return GroupBy(feature, skips_first_row=how != Encoding.rows)
