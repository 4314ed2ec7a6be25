import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hotrec.artifact import ArtifactError
from hotrec.cost_model.blocks import Block, sample_mask
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.profile import (
    Profile,
    Sampling,
    count_rows,
    cover_lookups,
    coverage_curve,
    read_profile,
    summarize_profile,
    wilson_interval,
    write_profile,
)
from hotrec.types import Feature, Schema, Table
from tests.unit.cost_model.samples import SCHEMA, as_lists, count_slowly, cut, make_samples


def lists(counts):
    return {table: values.tolist() for table, values in counts.items()}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10),
    size=st.integers(1, 70),
    dtype=st.sampled_from([np.int32, np.int64]),
    heldout_frac=st.sampled_from([0.0, 0.1, 0.25, 0.5]),
    frac=st.sampled_from([1.0, 0.3]),
    half_life=st.sampled_from([None, 9.0, 1e9]),
)
def test_counts_are_the_loop_over_samples(seed, size, dtype, heldout_frac, frac, half_life):
    """Exact, sampled and fading, whole and with the last part held out, whatever the blocks."""
    block = make_samples(60, seed=seed, dtype=dtype)
    sampling = Sampling(frac, seed, half_life=half_life)
    options = {"num_samples": 60, "heldout_frac": heldout_frac, "sampling": sampling}
    profile = count_rows(cut(block, size), SCHEMA, **options)
    drawn, samples = sample_mask(0, 60, frac=frac, seed=seed), as_lists(block)
    num_train = 60 - int(60 * heldout_frac)
    of_train = list(drawn)
    if half_life is not None:
        chances = [frac * 0.5 ** ((num_train - 1 - i) / half_life) for i in range(num_train)]
        of_train = [
            sample_mask(i, 1, frac=chance, seed=seed)[0] for i, chance in enumerate(chances)
        ]
    train = [samples[i] for i in range(num_train) if of_train[i]]
    heldout = [samples[i] for i in range(num_train, 60) if drawn[i]]
    assert lists(profile.counts) == count_slowly(train)
    assert lists(profile.heldout) == (count_slowly(heldout) if heldout_frac else {})
    assert (profile.num_samples, profile.num_heldout_samples) == (len(train), len(heldout))
    assert profile.num_total_samples == 60
    assert all(counts.dtype == np.int64 for counts in profile.counts.values())
    assert profile.num_rows == {"users": 50, "words": 20, "tags": 9}


def test_a_sample_counts_half_as_often_after_a_half_life():
    """Row d is read in stretch d alone, each as long as the half-life."""
    rows = np.repeat(np.arange(4), 20_000)
    schema = Schema((), (Feature("a", "t"),), (Table("t", 4),))
    sampling = Sampling(0.8, half_life=20_000)
    profile = count_rows(
        [Block(rows.size, {"a": rows})], schema, num_samples=80_000, sampling=sampling
    )
    counts = profile.counts["t"]
    # The mean over a stretch is 1 / (2 ln 2) of the chance at its end.
    expected = 0.8 * 20_000 / (2 * np.log(2)) * 0.5 ** np.arange(3, -1, -1)
    assert abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    assert abs(counts[1:] / counts[:-1] - 2).max() < 0.2
    assert profile.num_samples == counts.sum()
    assert abs(sampling.num_drawn(80_000) - counts.sum()) < 5 * np.sqrt(counts.sum())
    assert profile.num_total_samples == 80_000


def test_separate_heldout_stream():
    train, heldout = make_samples(40, seed=1), make_samples(30, seed=2)
    profile = count_rows(cut(train, 9), SCHEMA, heldout_blocks=cut(heldout, 7))
    assert lists(profile.counts) == count_slowly(as_lists(train))
    assert lists(profile.heldout) == count_slowly(as_lists(heldout))
    assert (profile.num_samples, profile.num_heldout_samples) == (40, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heldout_frac": 0.1}, "num_samples: expected the length"),
        ({"heldout_frac": 1.0, "num_samples": 10}, "heldout_frac: .*got 1.0"),
        ({"heldout_frac": 0.1, "num_samples": 10, "heldout_blocks": []}, "heldout_frac: .*got 0.1"),
        ({"num_samples": 11}, "expected 11 samples in the stream, got 10"),
        ({"sampling": Sampling(half_life=5.0)}, "num_samples: expected the length"),
    ],
)
def test_refuses_contradictions(options, message):
    with pytest.raises(ValueError, match=message):
        count_rows([make_samples(10)], SCHEMA, **options)


def write(path, **options):
    options = {"num_samples": 200, "heldout_frac": 0.25, **options}
    return write_profile(cut(make_samples(200), 33), SCHEMA, path, dataset_hash="d1", **options)


def test_artifact_round_trip_is_mapped_and_read_only(tmp_path):
    written, artifact = write(tmp_path / "profile", sampling=Sampling(0.5, 7, 2, 0.9))
    assert artifact.made_from == {"dataset": "d1"}
    profile, again = read_profile(tmp_path / "profile")
    assert again.content_hash == artifact.content_hash
    options = {"num_samples": 200, "heldout_frac": 0.25, "sampling": Sampling(0.5, 7, 2, 0.9)}
    in_memory = count_rows([make_samples(200)], SCHEMA, **options)
    for found in (written, profile):
        assert lists(found.counts) == lists(in_memory.counts)
        assert lists(found.heldout) == lists(in_memory.heldout)
        assert found.sampling == in_memory.sampling
        assert found.num_samples == in_memory.num_samples
        assert found.num_heldout_samples == in_memory.num_heldout_samples
        assert found.num_total_samples == 200
    assert isinstance(profile.counts["users"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        profile.counts["users"][0] = 1
    files = {path.name for path in (tmp_path / "profile" / "counts").iterdir()}
    assert files == {"tags.npy", "users.npy", "words.npy"}


def test_locality_is_read_back(tmp_path):
    blocks = [make_samples(300, seed=seed) for seed in range(4)]
    options = {"num_samples": 1200, "heldout_frac": 0.25}
    written, artifact = write_profile(
        blocks, SCHEMA, tmp_path / "profile", dataset_hash="d", **options
    )
    in_memory = count_rows(blocks, SCHEMA, **options)
    profile = read_profile(tmp_path / "profile")[0]
    for found in (written, profile):
        assert found.locality == in_memory.locality
        assert found.heldout_locality == in_memory.heldout_locality
    assert set(profile.locality) == set(profile.heldout_locality) == {"users", "words", "tags"}
    in_manifest = artifact.content["locality"]["train"]
    assert in_manifest["batch_sizes"] == [64, 128, 256]
    assert in_manifest["tables"]["users"]["lookups"] == [64, 128, 256]
    assert in_manifest["tables"]["words"]["lookups"] == [128, 256, 512]


def test_profiles_of_older_versions_have_no_locality(tmp_path, monkeypatch):
    def summarize_as_once(profile):
        content = summarize_profile(profile)
        del content["locality"]
        return content

    monkeypatch.setattr("hotrec.cost_model.profile.summarize_profile", summarize_as_once)
    write_profile([make_samples(300)], SCHEMA, tmp_path / "profile", dataset_hash="d")
    profile, artifact = read_profile(tmp_path / "profile")
    assert "locality" not in artifact.content
    assert profile.locality == profile.heldout_locality == {}
    assert profile.num_samples == 300


def test_content_of_the_manifest(tmp_path):
    _, artifact = write(tmp_path / "profile")
    content = json.loads((tmp_path / "profile" / "manifest.json").read_text())["content"]
    assert content == artifact.content
    samples = as_lists(make_samples(200))
    train, heldout = count_slowly(samples[:150]), count_slowly(samples[150:])
    assert (content["num_samples"], content["num_heldout_samples"]) == (150, 50)
    assert content["sampling"] == {
        **{"frac": 1.0, "seed": 0, "min_count": 1, "confidence": 0.95},
        "half_life": None,
    }
    for table in SCHEMA.tables:
        counts, held = np.array(train[table.name]), np.array(heldout[table.name])
        facts = content["tables"][table.name]
        assert facts["num_rows"] == table.num_rows
        assert facts["num_lookups"] == counts.sum()
        assert facts["num_distinct"] == (counts > 0).sum()
        assert facts["num_heldout_lookups"] == held.sum()
        assert facts["heldout_unseen_frac"] == pytest.approx(held[counts == 0].sum() / held.sum())
    everything = np.concatenate([train[t.name] for t in SCHEMA.tables])
    top = np.sort(everything)[::-1]
    landmark = next(p for p in content["landmarks"] if p["rows_frac"] == 0.1)
    at = 0.1 * top.size
    expected = (top[: int(at)].sum() + (at - int(at)) * top[int(at)]) / top.sum()
    assert landmark["train"] == pytest.approx(expected)


def test_without_heldout_data_the_share_is_unknown(tmp_path):
    profile, artifact = write(tmp_path / "profile", heldout_frac=0.0)
    assert profile.heldout == {}
    assert artifact.content["coverage"]["heldout"] is None
    assert artifact.content["tables"]["users"]["heldout_unseen_frac"] is None
    assert not (tmp_path / "profile" / "heldout").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables.clear(), r"tables \[\] and files"),
        (lambda tables: tables["users"].update(num_lookups=1), "num_lookups 1 of table users"),
        (lambda tables: tables["tags"].update(num_heldout_lookups=1), "num_heldout_lookups 1"),
    ],
)
def test_facts_that_contradict_the_counts_are_refused(tmp_path, monkeypatch, change, message):
    def summarize_otherwise(profile):
        content = summarize_profile(profile)
        change(content["tables"])
        return content

    monkeypatch.setattr("hotrec.cost_model.profile.summarize_profile", summarize_otherwise)
    with pytest.raises(ArtifactError, match=message):
        write(tmp_path / "profile")


def test_failure_leaves_nothing_and_keeps_the_old_artifact(tmp_path):
    _, old = write(tmp_path / "profile")
    with pytest.raises(ValueError, match="expected 999 samples"):
        write(tmp_path / "profile", num_samples=999)
    assert read_profile(tmp_path / "profile")[1].content_hash == old.content_hash
    assert [p.name for p in tmp_path.iterdir()] == ["profile"]


def test_table_names_that_cannot_be_files_are_refused(tmp_path):
    schema = Schema((), (Feature("a", "a/b"),), (Table("a/b", 3),))
    block = Block(1, {"a": np.zeros(1, np.int32)})
    with pytest.raises(ValueError, match="table 'a/b': expected a valid file name"):
        write_profile([block], schema, tmp_path / "profile", dataset_hash="d")
    assert list(tmp_path.iterdir()) == []


# --- coverage


def test_wilson_reference_values():
    # Newcombe (Statistics in Medicine 1998), table I, method 3.
    newcombe = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)]
    for hits, trials, low, high in [*newcombe, (1, 29, 0.0061, 0.1718)]:
        found = wilson_interval(hits / trials, trials, confidence=0.95)
        assert found == pytest.approx([low, high], abs=5e-5)
    assert wilson_interval(0.0, 0, confidence=0.95) == [0.0, 1.0]


@given(trials=st.integers(1, 10**9), share=st.floats(0, 1), confidence=st.floats(0.5, 0.999))
def test_wilson_holds_its_estimate(trials, share, confidence):
    low, high = wilson_interval(share, trials, confidence=confidence)
    assert 0.0 <= low <= share <= high <= 1.0


def test_coverage_by_hand():
    counts, heldout = np.array([0, 6, 3, 1, 0]), np.array([2, 4, 0, 4, 0])
    fracs = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    train, held = cover_lookups(build_histogram(counts, heldout), fracs)
    assert train == pytest.approx([0, 0.6, 0.9, 1.0, 1.0, 1.0])
    # The two unseen rows hold 2 of 10 held-out lookups; half of them on average is in the first.
    assert held == pytest.approx([0, 0.4, 0.4, 0.8, 0.9, 1.0])
    train, held = cover_lookups(build_histogram(np.zeros(4, np.int64)), fracs)
    assert (train.tolist(), held) == ([0] * 6, None)


@given(counts=arrays(np.int64, st.integers(1, 40), elements=st.integers(0, 9)))
def test_curve_rises_bends_down_and_ends_at_one(counts):
    curve = coverage_curve(build_histogram(counts, counts))
    fracs, train = np.array(curve["rows_frac"]), np.array(curve["train"])
    assert (fracs[0], fracs[-1]) == (0.0, 1.0)
    assert (np.diff(fracs) > 0).all()
    assert (np.diff(train) >= -1e-12).all()
    if counts.sum():
        assert (train[0], train[-1]) == (0.0, pytest.approx(1.0))
        assert (train >= fracs - 1e-12).all()
        assert curve["heldout"] == pytest.approx(curve["train"])
    else:
        assert curve["heldout"] is None


@pytest.mark.parametrize("frac", [1.0, 0.5])
def test_landmarks_carry_intervals_only_for_samples(frac):
    counts = np.concatenate([np.full(10, 90), np.full(990, 1)])
    heldout = {"t": np.ones(1000, np.int64)}
    profile = Profile(1, 1, 2, Sampling(frac), {"t": counts}, heldout)
    point = {p["rows_frac"]: p for p in summarize_profile(profile)["landmarks"]}[0.01]
    expected = {"rows_frac": 0.01, "train": 900 / 1890, "heldout": 0.01}
    if frac < 1:
        for part, trials in (("train", 1890), ("heldout", 1000)):
            interval = wilson_interval(expected[part], trials, confidence=0.95)
            assert point.pop(f"{part}_interval") == pytest.approx(interval)
    assert point == pytest.approx(expected)
