import pytest

from hotrec.report import units


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (units.show_bytes, 0, "0 B"),
        (units.show_bytes, 999, "999 B"),
        (units.show_bytes, 4_900_000, "4.90 MB"),
        (units.show_bytes, 14_800_000, "14.8 MB"),
        (units.show_bytes, 2.5e9, "2.50 GB"),
        (units.show_bytes, 3.2e12, "3.20 TB"),
        (units.show_seconds, 0.124, "124 ms"),
        (units.show_seconds, 0.0012, "1.20 ms"),
        (units.show_seconds, 12.34, "12.3 s"),
        (units.show_frac, 0.0, "0.0%"),
        (units.show_frac, 0.9123, "91.2%"),
        (units.show_frac, 0.00012, "0.012%"),
        (units.show_frac, 1.0, "100.0%"),
        (units.show_count, 4950000, "4,950,000"),
        (units.show_rate, 33032.4, "33,032 /s"),
        (units.show_quality, 0.78125, "0.7812"),
        (units.show_quality, float("nan"), "nan"),
    ],
)
def test_numbers_carry_their_unit(show, value, text):
    assert show(value) == text


def test_ratio():
    assert units.show_ratio(1, 3) == "0.33x"
    assert units.show_ratio(1, 0) == ""
    assert units.show_ratio(float("nan"), 1) == ""
