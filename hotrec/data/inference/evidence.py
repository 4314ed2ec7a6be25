"""Predictive power of single columns for the label, on a sample."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotrec.data.alone import Bools, alone_auc, codes_of_numbers
from hotrec.data.auc import measure_auc
from hotrec.data.columns import Float64s
from hotrec.data.inference.look import Column
from hotrec.types import Rows

# Rows on either side of a value that show what the order alone predicts; and the number of rows
# with the overall share that smooth a share of few rows.
_NEAR_FRAC, _PRIOR_ROWS = 1 / 32, 10.0
# A group of rows of one class (199 of 200) with one in 100 of that class, too many for chance.
_PURE_ROWS, _PURE_SHARE, _PURE_FRAC, _FEW_VALUES = 50, 0.995, 0.01, 50
# AUC of a single column above which it may be known only after the click. No honest column of the
# public click logs exceeds 0.7.
_SUSPICIOUS_AUC = 0.85


@dataclass(frozen=True)
class Order:
    """How well the values of a column predict a label as ids, and as numbers.

    Args:
        as_ids: AUC by the share of positives of each value, in the other half of the rows.
        as_numbers: AUC by the order of the values, increasing, decreasing, or by the values nearby.
        error: Standard error of an AUC of this many rows.
    """

    as_ids: float
    as_numbers: float
    error: float


def order_of(column: Column, is_click: Bools) -> Order | None:
    """How well integers predict the label by themselves and by their order; None if unknown."""
    is_there = column.codes >= 0
    codes, is_click = column.codes[is_there], is_click[is_there]
    as_ids, num_clicks = alone_auc(codes, is_click), int(is_click.sum())
    if as_ids is None:
        return None
    error = np.sqrt((1 / num_clicks + 1 / (codes.size - num_clicks)) / 12)
    return Order(as_ids, _auc_of_numbers(codes, column.numbers, is_click), float(error))


def _auc_of_numbers(codes: Rows, numbers: Float64s, is_click: Bools) -> float:
    """AUC, from 0.5 up, of numbers in their order, or by the click rate of those near each.

    The rows of a value are excluded from its own rate, so that only its neighbours predict it.
    """
    order = np.argsort(numbers, kind="stable")
    rank_of = np.empty_like(order)
    rank_of[order] = np.arange(order.size)
    ranks = rank_of[codes]
    rising = measure_auc(ranks, is_click)
    num, num_clicks = (np.bincount(ranks, weights, order.size) for weights in (None, is_click))
    end = np.cumsum(num)
    start, edges = end - num, np.append(0, end)
    clicks = np.append(0.0, np.cumsum(num_clicks))
    near = max(1.0, _NEAR_FRAC * codes.size)
    before = clicks[:-1] - np.interp(start - near, edges, clicks)
    after = np.interp(end + near, edges, clicks) - clicks[1:]
    rows = np.minimum(start, near) + np.minimum(codes.size - end, near)
    rates = (before + after + _PRIOR_ROWS * is_click.mean()) / (rows + _PRIOR_ROWS)
    return max(rising, 1 - rising, measure_auc(rates[ranks], is_click))


def suspicion_of(column: Column, are_ids: bool, clicks: list[Bools]) -> str:
    """Why a column may leak the label; empty if it does not.

    Args:
        column: The column.
        are_ids: Whether its values are ids; otherwise numbers.
        clicks: For each label, whether each row is positive, bool (n,).
    """
    if column.is_unread or column.kind == "vector":
        return ""
    for is_click in clicks:
        auc = alone_auc(_codes(column, are_ids), is_click, column.offsets)
        if auc is not None and auc >= _SUSPICIOUS_AUC:
            return f"alone: AUC {auc:.2f}"
        if column.offsets is None and (found := _pure_rows(column, is_click)):
            return f"alone: all of {found} are {int(is_click.mean() <= 0.5)}"
    return ""


def _codes(column: Column, are_ids: bool) -> Rows:
    """The values of the rows as numbers from 0, one of them for missing values."""
    if column.kind == "time":
        return (column.codes >= 0).astype(np.int64)
    if are_ids or not column.is_numeric:
        return column.codes + 1 if column.offsets is None else column.codes
    return codes_of_numbers(np.append(column.numbers, np.nan)[column.codes])


def _pure_rows(column: Column, is_click: Bools) -> str:
    """Rows that are certainly of the rarer class.

    For a column of few values: the rows of each value, and those without one; for numbers: the rows
    at the minimum and those above it.
    """
    codes, is_rare = column.codes, is_click if is_click.mean() <= 0.5 else ~is_click
    groups = [("without a value", codes < 0), ("with a value", codes >= 0)]
    shown = [repr(value) for value in column.values[:_FEW_VALUES].to_pylist()]
    if column.num_values <= _FEW_VALUES:
        groups += [(f"with {value}", codes == code) for code, value in enumerate(shown)]
    elif column.is_numeric:
        code = int(np.argmin(column.numbers))
        least = f"{column.numbers[code]:g}"
        groups.append((f"above {least}", (codes >= 0) & (codes != code)))
        groups.append((f"at {least}", codes == code))
    min_rows = max(_PURE_ROWS, _PURE_FRAC * is_rare.sum())
    for where, is_in in groups:
        num = int(is_in.sum())
        if min_rows <= num < codes.size and is_rare[is_in].mean() >= _PURE_SHARE:
            return f"{num:,} rows {where}"
    return ""
