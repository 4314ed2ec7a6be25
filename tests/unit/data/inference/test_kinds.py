"""What a column is taken for, by its name, its values and what the clicks know of it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrec.data.inference.spec import Inferred, infer
from tests.unit.data.inference.logs import CLICKS, ITEMS, NUM, PRICES, USERS, sample_of

RNG = np.random.default_rng(3)
DAYS = np.arange(NUM) // 200  # 30 days of May and June
AMOUNTS = (RNG.exponential(40, NUM)).astype(np.int64)
TOLD = RNG.random(NUM) < 0.1 + 0.6 * (AMOUNTS > 40)  # clicks that know an amount
EVEN = RNG.integers(0, 500, NUM)  # knows nothing, and lies everywhere alike
ID, LIST, NUMBER = ({"kind": kind} for kind in ("categorical", "categorical_list", "dense"))


def inferred(name: str, values: Any, clicks: Any = CLICKS, *, is_text: bool = False) -> Inferred:
    columns = {"clicked": clicks.astype(int), "user_id": USERS, "item_id": ITEMS, name: values}
    return infer(sample_of(columns, is_text=is_text), ["clicked"])


def spec_of(found: Inferred, name: str) -> dict[str, Any]:
    [entry] = [entry for entry in found.entries if entry.name == name and entry.is_used]
    return {key: value for key, value in entry.spec.items() if key not in SCALES}


SCALES = ("transform", "standardize", "fill")


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        (USERS.astype(np.float64), ID),
        (pa.array([float(user) if user % 9 else None for user in USERS]), ID),
        (pa.array([Decimal(int(user)) for user in USERS], pa.decimal128(20, 0)), ID),
        (pa.array(USERS).dictionary_encode(), ID),
        (pa.array(USERS.astype(str)).cast(pa.string_view()), ID),
        (pa.array(PRICES.astype(np.float16)), NUMBER),
        (pa.array([Decimal(f"{price:.2f}") for price in PRICES]), NUMBER),
        # As numbers some of these ids would be the same.
        (USERS + 6_700_000_000_000_000_000, ID),
        (pa.array([f"{user:04d}e{user % 7:03d}" for user in USERS]), ID),
        (USERS % 2 == 0, ID),
        (pa.array([list(range(user % 3)) for user in USERS]), LIST),
        (pa.array([[float(user % 3), 2.0] for user in USERS]), LIST),
        (pa.array([[user / 7, 0.5] for user in USERS]), {**NUMBER, "width": 2}),
    ],
)
def test_values_of_any_type(values: Any, spec: dict[str, Any]) -> None:
    assert spec_of(inferred("x", values), "x").items() >= spec.items()


@pytest.mark.parametrize(
    ("name", "texts", "spec"),
    [
        ("paid", [f"{price * 400:,.2f}" for price in PRICES], {**NUMBER, "thousands": ","}),
        ("paid", [f"{price:.2f}".replace(".", ",") for price in PRICES], {"decimal": ","}),
        ("paid", [f"${price * 400:,.0f}" for price in PRICES], {"thousands": ",", "ignore": "$"}),
        ("paid", [f"{price:.1f} %" for price in PRICES], {**NUMBER, "ignore": "%"}),
        ("x", [f"[{p:.3f}, {p / 3:.3f}]" for p in PRICES], {"width": 2, "separator": ","}),
        ("x", [f"{p:.3f}|{p / 3:.3f}" for p in PRICES], {"width": 2, "separator": "|"}),
        # Lists are no numbers with separators.
        ("x", [",".join(str(101 + u * k % 99) for k in range(u % 4 + 1)) for u in USERS], LIST),
        ("x", [str([int(item), int(item) % 7]) for item in ITEMS], {**LIST, "separator": ","}),
    ],
)
def test_texts_as_people_write_them(name: str, texts: list[str], spec: dict[str, Any]) -> None:
    assert spec_of(inferred(name, texts, is_text=True), name).items() >= spec.items()


@pytest.mark.parametrize(
    ("values", "remark"),
    [
        (np.where(USERS % 5 == 0, np.nan, PRICES), "NaN"),
        (pa.array([{"a": 1}] * NUM), "struct"),
        (pa.array([b"\xff"] * NUM), "binary"),
        (pa.array([[0.5] * (1 + user % 3) for user in USERS]), "lists of numbers"),
        (pa.array([f"{1 + d % 12:02d}/{1 + d % 11:02d}/2024" for d in DAYS]), "ambiguous dates"),
    ],
)
def test_what_is_not_read_is_said(values: Any, remark: str) -> None:
    found = inferred("x", values, is_text="dates" in remark)
    assert "x" not in [entry.name for entry in found.entries if entry.is_used]
    [said] = found.remarks
    assert said.startswith("x: skipped: ")
    assert remark in said


@pytest.mark.parametrize(
    ("name", "texts", "form"),
    [
        ("hour", [f"2405{1 + day:02d}{day % 24:02d}" for day in DAYS], "%y%m%d%H"),
        ("dt", [f"202405{1 + day:02d}" for day in DAYS], "%Y%m%d"),
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
    found = inferred(name, texts, is_text=True)
    assert found.times == {name: form}
    assert found.split["valid_from"] == "2024-05-24"


@pytest.mark.parametrize(
    ("name", "values", "clicks", "are_ids"),
    [
        *(
            (name, EVEN, CLICKS, True)
            for name in ["zip", "postal_code", "adgroup_id", "age_group", "f3"]
        ),
        *(
            (name, ITEMS, CLICKS, False)
            for name in ["price", "item_price", "watchtime", "num_items"]
        ),
        # Only names make numbers times.
        *((name, 1_714_521_600 + DAYS * 86_400, CLICKS, True) for name in ("candidate_id", "C14")),
        # Of names that say nothing, what the click knows.
        ("f3", USERS, CLICKS, True),
        ("f3", AMOUNTS, TOLD, False),
        ("f3", np.abs(AMOUNTS - 60), TOLD, False),  # neither rising nor falling
        # What it does not know: as many numbers as there are, or counts.
        ("f3", AMOUNTS**2, CLICKS, False),
        ("f3", AMOUNTS - 20, CLICKS, False),
        ("f3", np.where(EVEN % 3, -1, 100_000 + EVEN % 70), CLICKS, True),
        ("f3", AMOUNTS / 7, CLICKS, False),
    ],
)
def test_ids_or_a_quantity(name: str, values: Any, clicks: Any, are_ids: bool) -> None:
    found = inferred(name, values, clicks)
    assert spec_of(found, name) == (ID if are_ids else NUMBER)
    assert found.times == {}


def test_a_few_words_among_numbers_are_missing() -> None:
    prices = ["free" if place % 100 == 0 else f"{price}" for place, price in enumerate(PRICES)]
    found = inferred("cost", prices, is_text=True)
    assert (spec_of(found, "cost"), found.null_values) == (NUMBER, ["", "free"])
