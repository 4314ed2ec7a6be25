"""Exact look-ahead: rows of later batches travel while a step computes.

Let T(b) be the rows that any rank reads in batch b. While step t computes, the rows of batch t + 1
that are not in T(t) travel, and so do the gradients of step t - 1 that no rank needs in step t.
What is left for the time between two steps: the gradients of rows in both T(t) and T(t + 1)
("urgent"), and those rows back. Every row is updated once in a step, from the gradients of all
ranks, before it is next read; so loss and weights are those of a pipeline that does all of it in
line.

The idea of looking ahead is ScratchPipe's (Kwon, Rhu 2022) and BagPipe's (Agarwal et al. 2023: what
must be synchronised now, later, never); here the owners of the rows find the conflicts, who are
asked for the rows of both batches anyway.
"""

from hotrec.embedding.ahead.row_ahead import RowsAhead

__all__ = ["RowsAhead"]
