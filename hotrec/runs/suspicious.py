"""Columns to check if a model predicts implausibly well."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from hotrec.assemble.order import SPLIT
from hotrec.data.alone import alone_aucs
from hotrec.data.chunks import Dataset

# No honest model predicts clicks this well, unless a column was written after them.
SUSPICIOUS_AUC = 0.99
NUM_NAMED = 5


def suspicious_columns(
    dataset: Dataset, auc: float | None, of_labels: Mapping[str, float | None]
) -> dict[str, Any]:
    """For each label with an implausible AUC: that, and those of the best single columns.

    Args:
        dataset: The dataset that the model was trained on.
        auc: The AUC of the only label.
        of_labels: The AUC of each of several labels.

    Returns:
        {label: {"auc": ..., "alone": {column: AUC}}}, as JSON has it; empty if nothing is.
    """
    labels = dataset.schema.labels
    aucs = {label: of_labels.get(label) if of_labels else auc for label in labels}
    found = {}
    for number, (label, value) in enumerate(aucs.items()):
        if value is not None and value > SUSPICIOUS_AUC:
            alone = alone_aucs(dataset, SPLIT, number)
            best = dict(itertools.islice(alone.items(), NUM_NAMED))
            found[label] = {"auc": value, "alone": best}
    return found
