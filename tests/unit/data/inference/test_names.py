"""What names of columns say."""

from __future__ import annotations

import pytest

from hotrec.data.inference.names import names_ids, names_ids_of, names_times

IDS = "id user_id itemId movieID visitorid adgroup_id zip postal_code C.hash device_ip session "
IDS += "age_group asin QueryID count_code brand age_level hashed_user"
QUANTITIES = "price age item_price user_age viewCount num_items n_clicks duration_ms play_time "
QUANTITIES += "watchtime ratio avg_session follow_user_num id_count ctr bid"
UNKNOWN = "C14 f3 year besuche onehot_feat3 paid tab"


@pytest.mark.parametrize(("names", "expected"), [(IDS, True), (QUANTITIES, False), (UNKNOWN, None)])
def test_ids_and_quantities(names: str, expected: bool | None) -> None:
    assert {name: names_ids(name) for name in names.split()} == dict.fromkeys(
        names.split(), expected
    )


def test_times() -> None:
    names = "hour event_time unixReviewTime createdAt ts dt date timestamp eventdate when"
    assert all(map(names_times, names.split()))
    assert not any(map(names_times, ["candidate_id", "candidate", "time_id", "price", "format"]))


@pytest.mark.parametrize(
    ("name", "other", "is_list", "expected"),
    [
        ("recent_items", "item_id", True, True),
        ("itemHistory", "item", True, True),
        ("item_tags", "item_id", True, False),
        ("categories_seen", "category_id", True, True),
        ("last_item_id", "item_id", False, True),
        ("item_category", "item_id", False, False),
        ("shopping_level", "age_level", False, False),
        ("follow_user_num", "user_id", False, False),
        ("history", "item_id", True, False),
    ],
)
def test_names_of_the_same_ids(name: str, other: str, is_list: bool, expected: bool) -> None:
    assert names_ids_of(name, other, is_list=is_list) is expected
