"""What the group order chooses from: the order in which training samples come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hotrec.cli.schema.fields import key


class OrderKind(Enum):
    """The order in which training samples come."""

    shuffled = "shuffled"
    all_hot = "all_hot"


class OrderAssign(Enum):
    """Which rank computes which sample of a global batch."""

    as_read = "as_read"
    by_owner = "by_owner"


@dataclass
class OrderConfig:
    """What all orders share."""

    kind: OrderKind = key("the order; choose it with order=")
    assign: OrderAssign = key(
        "samples of a global batch go to ranks as_read, or by_owner: where their cold rows are",
        OrderAssign.as_read,
    )


@dataclass
class ShuffledOrder(OrderConfig):
    """All samples shuffled together."""

    kind: OrderKind = key("the order; choose it with order=", OrderKind.shuffled)


@dataclass
class AllHotOrder(OrderConfig):
    """Blocks of all-hot batches and of mixed batches in turn, longer or shorter by the loss."""

    kind: OrderKind = key("the order; choose it with order=", OrderKind.all_hot)
    start_rate: float = key(
        "share of an epoch's batches of a kind that a block holds at first", 0.5, above=0, at_most=1
    )
    least_rate: float = key(
        "the least share that a block is cut to, when the loss gets worse",
        0.01,
        above=0,
        at_most=1,
    )
    patience: int = key(
        "evaluations in a row with a better loss before blocks grow twice as long", 4, at_least=1
    )
