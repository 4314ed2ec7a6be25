"""Infers the role of a column from its name."""

from __future__ import annotations

import re

LABEL_NAMES = (
    *("label", "clicked", "click", "is_click", "is_clicked", "target", "y", "converted"),
    *("conversion", "is_conversion", "purchased", "purchase", "bought", "liked", "like", "clk"),
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IDS = _words(
    """
    id ids uid gid pid sid aid cid vid uuid guid key code hash zip zipcode postal postcode sku
    asin isbn ip mac phone device session user member customer client visitor account item
    product goods article document doc news post video movie film song track music book author
    artist creator seller merchant shop store brand category categories cat cate subcategory
    genre tag topic keyword query ad advert adgroup advertiser campaign creative banner site app
    page url domain host publisher channel placement slot source medium referrer referer city
    region country state province location geo zone locale lang language os browser carrier
    operator network isp model type kind class level grade tier range group segment cluster
    bucket bin cohort gender sex occupation job status version nbr vendor supplier warehouse
    department owner sender receiver friend provider company organization hotel restaurant
    """
)
_QUANTITIES = _words(
    """
    price cost amount amt revenue income salary budget bid fee tax discount balance age duration
    length len size width height depth weight count counts cnt num nums qty quantity total sum
    avg average mean median std min max ratio rate ctr cvr pct percent percentage frac fraction
    prob probability score scores rating ratings temperature temp speed distance dist dur
    seconds secs sec minutes mins hours days weeks months years ms millis time times spent bytes
    views clicks likes impressions plays comments shares followers fans follows friends orders
    visits purchases sales stock volume latitude lat longitude lon lng elapsed recency frequency
    freq tenure dwell delay latency gap interval population power
    """
)
_TIMES = _words(
    """
    time date datetime timestamp stamp ts at day dt when hour unix epoch
    """
)
_VECTORS = _words("emb embed embedding embeddings vec vector vectors")
# A first word of these makes it a quantity, whatever follows: num_items, avg_session.
_COUNTED = _words("num n nb count cnt total avg mean sum number")
# A last word of these makes it an id, whatever precedes: count_code.
_SURE_IDS = _words("id ids uuid guid code key hash")
_ID_END = re.compile(r"(id|ids|code|hash)$")
_QUANTITY_END = re.compile(r"(price|count|time|duration|amount|length|score)$")
_TIME_END = re.compile(r"(time|date|stamp)s?$")
_NO_TIMES = frozenset(("candidate", "mandate"))
_NO_IDS = frozenset(
    ("paid", "valid", "grid", "avoid", "solid", "liquid", "void", "rapid", "hybrid")
)


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case: "userId", "user_id" and "user.ID2" have the same two."""
    return [word.lower() for word in _WORD.findall(name)]


def names_ids(name: str) -> bool | None:
    """Whether the name suggests ids (True), a quantity (False), or neither (None).

    The last known word decides: ``user_age`` is a quantity, ``age_group`` is not.
    """
    words = words_of(name)
    if words and words[0] in _COUNTED and (len(words) > 1 and words[-1] not in _SURE_IDS):
        return False
    for word in reversed(words):
        if word in _QUANTITIES:
            return False
        if word in _IDS or (_ID_END.search(word) and word not in _NO_IDS):
            return True
        if _QUANTITY_END.search(word):
            return False
    return None


def names_times(name: str) -> bool:
    """Whether the name may denote times."""
    words = words_of(name)
    if words and words[-1] in _SURE_IDS:
        return False
    return any(
        word in _TIMES or (_TIME_END.search(word) and word not in _NO_TIMES) for word in words
    )


def names_vectors(name: str) -> bool:
    """Whether the name denotes vectors, such as an item's embedding."""
    return not _VECTORS.isdisjoint(words_of(name))


def names_ids_of(name: str, other: str, *, is_list: bool) -> bool:
    """Whether a name denotes ids of another column: "recent_items", "last_item" and "item_id".

    The subject comes last: "item_tags" are not items. A "shopping_level" is not an "age_level", so
    for single values the other column must be an id by its name.
    """
    if names_ids(other) is not True or names_ids(name) is False:
        return False
    if not is_list and not _ID_END.search(words_of(other)[-1]):
        return False
    words = [_singular(word) for word in words_of(name)]
    subject = next((_singular(w) for w in reversed(words_of(other)) if w not in _SURE_IDS), None)
    if subject not in words:
        return False
    after = words[len(words) - words[::-1].index(subject) :]
    return not any(word in _IDS and word not in _SURE_IDS for word in after)


def _singular(word: str) -> str:
    return f"{word[:-3]}y" if word.endswith("ies") else word.removesuffix("s")
