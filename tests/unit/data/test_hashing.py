import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrec.data.hashing import hash_text

MASK = 2**64 - 1


def fmix(state: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        state ^= state >> 33
        state = state * factor & MASK
    return state ^ (state >> 33)


def reference(text: str) -> int:
    """The documented hash, written down a second time."""
    data = text.encode()
    state = fmix((len(data) + 0x9E3779B97F4A7C15) & MASK)
    for start in range(0, len(data), 8):
        state = fmix(state ^ int.from_bytes(data[start : start + 8], "little"))
    return state


@settings(deadline=None)
@given(st.lists(st.text(max_size=40), max_size=20))
def test_agrees_with_its_documentation(texts):
    for kind in (pa.string(), pa.large_string()):
        found = hash_text(pa.array(texts, kind))
        assert found.dtype == np.uint64
        assert found.tolist() == [reference(text) for text in texts]


def test_never_changes():
    # Rows of prepared datasets depend on these values.
    found = hash_text(pa.array(["", "a", "68fd1e64", "a longer text of 30 characters"]))
    assert [f"{value:016x}" for value in found] == [
        "9ca066f1a4ab2eea",
        "a70e84d52b813287",
        "dc1b63fd3fd2bf94",
        "20a6a58d18872490",
    ]


def test_slices_and_nulls_do_not_disturb_the_others():
    array = pa.array(["x", "abc", None, "abcdefghi", "y"])
    found = hash_text(array.slice(1, 3))
    assert found[0] == reference("abc")
    assert found[2] == reference("abcdefghi")
    assert hash_text(pa.array([], pa.string())).size == 0


def test_spreads_over_buckets():
    hashes = hash_text(pa.array([str(number) for number in range(50_000)]))
    for counts in (np.bincount(hashes % 97), np.bincount((hashes >> np.uint64(58)).astype(int))):
        expected = counts.mean()
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
