"""Which way the gradients of hot rows travel: what each way sends, and the choice in every step.

W ranks; of dimension D with H hot rows, rank r touched U_r rows, all ranks together ``union`` rows;
a value takes v bytes on the wire (4, or 2 with a 16-bit wire), a slot 4. The rank that sends most
sends, summed over the dimensions:

    touched rows    (W-1) max_r U_r (v D + 4)
                    every rank gathers all ranks' rows and adds them up
    owners          (W-1)/W max_r U_r (v D + 4)  to the owners of the rows, which add them up
                    + (W-1)/W union (v D + 4)    the sums, gathered by every rank
    dense           2 (W-1)/W H (v D + 1)        an all-reduce of all rows, a byte each says whether
                                                 some rank touched it

Owners are even: slot s belongs to rank s mod W. Of two ranks, owners never send less than touched
rows; of more they do, as soon as a row is touched by more than W/(W-1) ranks on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hotrec.types import HotExchange

SLOT_BYTES = 4
# Seconds of a collective by the bytes that the rank sends which sends most.
Seconds = Mapping[str, Callable[[float], float]]


def hot_messages(
    shapes: Sequence[tuple[int, int]],
    num_touched_RG: Sequence[Sequence[int]],
    num_union_G: Sequence[float],
    value_bytes: int,
) -> dict[HotExchange, dict[str, float]]:
    """What each way sends, by the formulas of the module.

    Args:
        shapes: (H, D) of each dimension.
        num_touched_RG: U of each rank, by dimension.
        num_union_G: rows that some rank touched, by dimension.
        value_bytes: of a value on the wire.

    Returns:
        By exchange (not AUTO), bytes by name of the collective, see ``hotrec.runtime.traffic``.
    """
    world_size = len(num_touched_RG)
    row_bytes_G = [value_bytes * dim + SLOT_BYTES for _, dim in shapes]
    most = max(
        sum(num * size for num, size in zip(nums, row_bytes_G, strict=True))
        for nums in num_touched_RG
    )
    union = sum(num * size for num, size in zip(num_union_G, row_bytes_G, strict=True))
    dense = sum(num_hot * (value_bytes * dim + 1) for num_hot, dim in shapes)
    others = (world_size - 1) / world_size
    return {
        HotExchange.touched_rows: {"all_gather": (world_size - 1) * most},
        HotExchange.owners: {"all_to_all": others * most, "all_gather": others * union},
        HotExchange.dense: {"all_reduce": 2 * others * dense},
    }


class HotChooser:
    """Chooses in each step, the same on every rank.

    The union of the touched rows is not known before they have travelled: it is taken for the share
    of the ranks' rows that it was in the last step, and at first for what it can be at most.

    Args:
        shapes: (H, D) of each dimension.
        exchange: AUTO to choose, another for always that one.
        value_bytes: of a value on the wire.
        seconds: of collectives by bytes, the same on every rank; None to choose by bytes.

    Raises:
        ValueError: if AUTO is to choose by seconds of which some collective's are missing.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        exchange: HotExchange,
        value_bytes: int = 4,
        seconds: Seconds | None = None,
    ) -> None:
        self._shapes = list(shapes)
        self._exchange = exchange
        self._value_bytes = value_bytes
        self._seconds = seconds
        self._union_frac_G = [1.0] * len(self._shapes)
        wanted = {"all_gather", "all_to_all", "all_reduce"}
        if seconds is not None and exchange is HotExchange.auto and not wanted <= set(seconds):
            raise ValueError(
                f"hot exchange seconds: expected the collectives {sorted(wanted)}, got "
                f"{sorted(seconds)}. Pass all of them, or none to choose by bytes."
            )

    def choose(self, num_touched_RG: Sequence[Sequence[int]]) -> HotExchange:
        """The exchange that costs least; of equals the first in the enum's order.

        Args:
            num_touched_RG: rows that each rank touched, by dimension.
        """
        if self._exchange is not HotExchange.auto:
            return self._exchange
        messages = hot_messages(
            self._shapes, num_touched_RG, self._estimate(num_touched_RG), self._value_bytes
        )
        costs = {exchange: self._cost(sent) for exchange, sent in messages.items()}
        return min(costs, key=lambda exchange: costs[exchange])

    def _estimate(self, num_touched_RG: Sequence[Sequence[int]]) -> list[float]:
        union_G = []
        for nums, frac, (num_hot, _) in zip(
            zip(*num_touched_RG, strict=True), self._union_frac_G, self._shapes, strict=True
        ):
            union_G.append(min(num_hot, max(frac * sum(nums), *nums)))
        return union_G

    def _cost(self, sent: Mapping[str, float]) -> float:
        if self._seconds is None:
            return sum(sent.values())
        return sum(self._seconds[name](num_bytes) for name, num_bytes in sent.items())

    def note(self, num_touched_RG: Sequence[Sequence[int]], num_union_G: Sequence[int]) -> None:
        """Learn how many rows the ranks of a step touched together, by dimension."""
        for index, num_union in enumerate(num_union_G):
            total = sum(nums[index] for nums in num_touched_RG)
            if total:
                self._union_frac_G[index] = num_union / total
