"""What the values of a column are, whatever type they are stored in."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrec.data.inference.look import look_at
from tests.unit.data.inference.logs import ITEMS, NUM, PRICES, USERS, look, sample_of

DAYS = np.arange(NUM) // 200  # 30 days of May and June


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (USERS, "integer"),
        (USERS.astype(np.float64), "integer"),
        (pa.array([float(user) if user % 9 else None for user in USERS]), "integer"),
        (pa.array([Decimal(int(user)) for user in USERS], pa.decimal128(20, 0)), "integer"),
        (pa.array(USERS).dictionary_encode(), "integer"),
        (pa.array(USERS.astype(str)).cast(pa.string_view()), "integer"),
        (pa.array(PRICES.astype(np.float16)), "number"),
        (pa.array([Decimal(f"{price:.2f}") for price in PRICES]), "number"),
        # As numbers some of these ids would be the same.
        (USERS + 6_700_000_000_000_000_000, "text"),
        (pa.array([Decimal(int(user) + 10**18) for user in USERS], pa.decimal128(20, 0)), "text"),
        (pa.array([f"{user:08d}" for user in USERS]), "text"),
        (pa.array([f"{user:04d}e{user % 7:03d}" for user in USERS]), "text"),
        (USERS % 2 == 0, "text"),
        (pa.array([list(range(user % 3)) for user in USERS]), "list"),
        (pa.array([[float(user % 3), 2.0] for user in USERS]), "list"),
        (pa.array([[user / 7, 0.5] for user in USERS]), "vector"),
        (pa.array([[1.5] * 8] * NUM, pa.list_(pa.float32(), 8)), "vector"),
    ],
)
def test_kinds_of_arrow(values: Any, kind: str) -> None:
    assert look("x", values).kind == kind


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.where(USERS % 5 == 0, np.nan, PRICES), "not supported: numbers with NaN or infinity"),
        (pa.array([{"a": 1}] * NUM), "not supported: type struct"),
        (pa.array([b"\xff"] * NUM), "not supported: type binary"),
        (
            pa.array([[0.5] * (1 + user % 3) for user in USERS]),
            "not supported: lists of numbers of different",
        ),
    ],
)
def test_what_is_not_read(values: Any, why: str) -> None:
    column = look("x", values)
    assert column.is_unread
    assert column.kind.startswith(why)


@pytest.mark.parametrize(
    ("texts", "keys"),
    [
        ([f"{price * 400:,.2f}" for price in PRICES], {"thousands": ","}),
        ([f"{int(price * 400):,}" for price in PRICES], {"thousands": ","}),
        ([f"{price:.2f}".replace(".", ",") for price in PRICES], {"decimal": ","}),
        (
            [f"{price * 400:,.2f}".translate(str.maketrans(",.", ".,")) for price in PRICES],
            {"thousands": ".", "decimal": ","},
        ),
        ([f"${price * 400:,.2f}" for price in PRICES], {"thousands": ",", "ignore": "$"}),
        ([f"{price:.1f} %" for price in PRICES], {"ignore": "%"}),
        ([f"{price * 400:_.2f}".replace("_", " ") for price in PRICES], {"thousands": " "}),
    ],
)
def test_numbers_as_people_write_them(texts: list[str], keys: dict[str, str]) -> None:
    column = look("paid", texts, is_text=True)
    assert (column.kind, column.number_form) == ("number", keys)
    assert np.isfinite(column.numbers).all()


def test_lists_are_no_numbers() -> None:
    texts = [",".join(str(101 + (user + k) % 99) for k in range(user % 4 + 1)) for user in USERS]
    assert look("recent", texts, is_text=True).kind == "list"
    assert look("item_ids", texts, is_text=True).kind == "list"


@pytest.mark.parametrize(
    ("name", "texts", "form"),
    [
        ("hour", [f"2405{1 + day:02d}{day % 24:02d}" for day in DAYS], "%y%m%d%H"),
        ("dt", [f"202405{1 + day:02d}" for day in DAYS], "%Y%m%d"),
        ("at", [f"202405{1 + day:02d}123015" for day in DAYS], "%Y%m%d%H%M%S"),
        ("x", [f"2024-05-{1 + day:02d} 10:30:00 UTC" for day in DAYS], "iso"),
        ("x", [f"2024-05-{1 + day:02d}T10:30:00+0200" for day in DAYS], "iso"),
        ("x", [f"{1 + day:02d}.05.2024 10:30" for day in DAYS], "%d.%m.%Y %H:%M"),
        ("x", [f"05/{1 + day:02d}/2024 01:30 PM" for day in DAYS], "%m/%d/%Y %I:%M %p"),
        ("x", [f"{1 + day:02d}/May/2024:10:30:00 +0000" for day in DAYS], "%d/%b/%Y:%H:%M:%S %z"),
        ("ts", [f"{1_714_521_600 + 86_400 * day}" for day in DAYS], "s"),
        ("ts", [f"{1_714_521_600_000 + 86_400_000 * day}.0" for day in DAYS], "ms"),
    ],
)
def test_times(name: str, texts: list[str], form: str) -> None:
    column = look(name, texts, is_text=True)
    assert (column.kind, column.form) == ("time", form)
    assert np.ptp(column.numbers) >= 29 * 86_400_000
    assert column.numbers.min() // 86_400_000 == 19_844  # 2024-05-01


def test_numbers_are_times_only_by_name() -> None:
    for name in ("item", "candidate_id", "C14"):
        assert look(name, 1_714_521_600 + DAYS * 86_400).kind == "integer"
    either = [f"{1 + day % 12:02d}/{1 + day % 11:02d}/2024" for day in DAYS]
    assert look("x", either, is_text=True).kind.startswith("ambiguous dates")


@pytest.mark.parametrize(
    ("form", "separator"),
    [("{:.3f} {:.3f}", " "), ("[{:.3f}, {:.3f}]", ","), ("{:.3f}|{:.3f}", "|")],
)
def test_vectors_in_text(form: str, separator: str) -> None:
    column = look("x", [form.format(p, p / 3) for p in PRICES], is_text=True)
    assert (column.kind, column.width, column.separator) == ("vector", 2, separator)


def test_lists_in_brackets() -> None:
    texts = [str([int(item), int(item) % 7]) for item in ITEMS]
    column = look("x", texts, is_text=True)
    assert (column.kind, column.separator, column.longest) == ("list", ",", 2)
    assert set(column.values.to_pylist()) == {str(i) for i in {*ITEMS, *(ITEMS % 7)}}


def test_a_few_words_among_numbers_are_missing() -> None:
    prices = ["free" if place % 100 == 0 else f"{price}" for place, price in enumerate(PRICES)]
    columns, nulls = look_at(sample_of({"cost": prices, "item_id": prices}, is_text=True))
    assert [column.kind for column in columns] == ["number", "text"]
    assert (nulls, columns[0].num_missing) == (["", "free"], NUM // 100)
