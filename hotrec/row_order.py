"""The order in which the rows of a row-wise sharded table are stored.

TorchRec's row-wise shards are blocks of consecutive rows. In a table whose ids follow popularity,
such as those numbered in the order of their first occurrence, the owner of the first block would
serve many times the rows of the mean. So row r may be stored as row (r * m + b) mod N of N rows,
with m near N over the golden ratio and prime to N: then any range of ids is spread evenly over the
blocks. b depends on the table's name, or the most popular rows of all tables were on one rank.

Row numbers are original ids everywhere else: only the place in a shard depends on the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import gcd, isqrt
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

_GOLDEN = (5**0.5 - 1) / 2
# Up to this number of rows the product of two row numbers fits into int64.
_MAX_EXACT_ROWS = isqrt((1 << 63) - 1)
# Beyond, a factor is split into its upper and these lower bits; up to 2^41 rows.
_LOW_BITS = 21

Numbers = TypeVar("Numbers")  # an int64 tensor or array


def mapped(rows: Any, factor: Any, offset: Any, num_rows: Any, *, is_wide: bool) -> Any:
    """``(rows * factor + offset) % num_rows`` in int64, by element.

    Args:
        rows: Numbers below ``num_rows``.
        factor: Numbers below ``num_rows``, or one.
        offset: The same.
        num_rows: Rows of each number's table, or of one.
        is_wide: Whether products may not fit into int64; see ``RowOrder.is_wide``.
    """
    if not is_wide:
        return (rows * factor + offset) % num_rows
    high, low = factor >> _LOW_BITS, factor & ((1 << _LOW_BITS) - 1)
    return ((rows * high % num_rows << _LOW_BITS) + rows * low + offset) % num_rows


@dataclass(frozen=True)
class RowOrder:
    """The order of a table's rows in its shards.

    Args:
        num_rows: Rows of the table.
        is_spread: Whether rows are spread; otherwise they are stored in the order of their ids.
        table: The table's name.
    """

    num_rows: int
    is_spread: bool = True
    table: str = ""

    @cached_property
    def factor(self) -> int:
        """The multiplier m; 1 for rows in the order of their ids."""
        if not self.is_spread or self.num_rows < 3:
            return 1
        near = round(_GOLDEN * self.num_rows)
        nearest = (near + sign * away for away in count() for sign in (1, -1))
        return next(m for m in nearest if gcd(m, self.num_rows) == 1)

    @cached_property
    def offset(self) -> int:
        """The stored row b of row 0."""
        return 0 if self.factor == 1 else crc32(self.table.encode()) * self.num_rows >> 32

    @property
    def is_wide(self) -> bool:
        """Whether the product of two row numbers may not fit into int64."""
        return self.num_rows > _MAX_EXACT_ROWS

    def stored(self, rows: Numbers) -> Numbers:
        """The stored rows of original ones."""
        if self.factor == 1:
            return rows
        found: Numbers = mapped(rows, self.factor, self.offset, self.num_rows, is_wide=self.is_wide)
        return found

    def original(self, rows: Numbers) -> Numbers:
        """The original rows of stored ones."""
        if self.factor == 1:
            return rows
        inverse = pow(self.factor, -1, self.num_rows)
        shifted: Any = rows - self.offset  # type: ignore[operator]
        found: Numbers = mapped(
            shifted % self.num_rows, inverse, 0, self.num_rows, is_wide=self.is_wide
        )
        return found

    def rows_at(self, begin: int, end: int) -> slice | npt.NDArray[np.int64]:
        """The original rows of consecutive stored ones, as an index of an array of the table."""
        return slice(begin, end) if self.factor == 1 else self.original(np.arange(begin, end))
