"""Where a model finds its features in the batch, and which forwards hide it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hotrec.train.traced import features_read, follow


class Bags(nn.Module):
    """Stands in for an embedding module."""

    def forward(self, features: Any) -> Any:
        return features


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags()

    def forward(self, features: Any) -> Any:
        return self.bags(features)


class Model(nn.Module):
    def __init__(self, forward: Callable[[Model, Any], Any]) -> None:
        super().__init__()
        self.bags, self.inner, self.top = Bags(), Inner(), nn.Linear(1, 1)
        self.num_calls, self._forward = 0, forward

    def forward(self, batch: Any) -> Any:
        self.num_calls += 1
        return self._forward(self, batch)


def read(forward: Callable[[Model, Any], Any]) -> dict[str, Any]:
    """What each module reads of a batch, and that to find it leaves the model as it was."""
    model = Model(forward)
    paths = features_read(model, lambda module: isinstance(module, Bags))
    assert model.num_calls == 0
    batch = SimpleNamespace(ids="ids", of={"user": ("a", "b")})
    return {name: follow(path, batch) for name, path in paths.items()}


def test_features_are_attributes_and_items_of_the_batch() -> None:
    def forward(model: Model, batch: Any) -> Any:
        first = model.bags(batch.ids)
        second = model.inner(batch.of["user"][1])
        return first + second + model.top(batch.dense)

    assert read(forward) == {"bags": "ids", "inner.bags": "b"}


def test_the_batch_itself_may_be_the_features() -> None:
    assert set(read(lambda model, batch: model.bags(batch))) == {"bags"}


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda m, b: m.bags(b.ids) if b.dense.sum() > 0 else m.bags(b.ids), "TraceError"),
        (lambda m, b: [m.bags(b.ids) for _ in range(b.dense.shape[0])], "TypeError"),
        (lambda m, b: m.bags(torch.relu(b.ids)), "bags is called with features that forward"),
        (lambda m, b: m.bags(b.ids.permute([1, 0])), "bags is called with features that forward"),
        (lambda m, b: m.bags(b.ids) + m.bags(b.ids), "bags is called more than once"),
        (lambda m, b: m.bags(m.bags(b.ids)), "bags is called more than once"),
    ],
)
def test_other_forwards_are_told_with_the_reason(
    forward: Callable[[Model, Any], Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read(forward)
