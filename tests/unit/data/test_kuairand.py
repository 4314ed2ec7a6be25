"""The click log that is shipped with the project, prepared as the quickstart does it."""

from pathlib import Path

import numpy as np
import pyarrow.csv as pacsv
import pytest

from hotrec.cli.store import build_config, compose_config
from hotrec.data.chunks import Dataset, Jagged
from hotrec.data.days import Day, days_of
from hotrec.data.prepare import prepare
from hotrec.data.vocabulary import read_vocabulary
from tests.unit.data.logs import bag

ROOT = Path(__file__).parents[3]
LOG = ROOT / "samples" / "kuairand_pure" / "log_standard_val_test.tsv.zst"

pytestmark = pytest.mark.skipif(not LOG.exists(), reason=f"{LOG} is not there")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    source = build_config(compose_config("config", ["data=kuairand"])).data.source
    assert source is not None
    source.files = [str(ROOT / file) for file in source.files]
    for join in source.joins.values():
        join.files = [str(ROOT / file) for file in join.files]
    path = tmp_path_factory.mktemp("kuairand") / "dataset"
    prepare(source, path)
    return Dataset.open(path)


@pytest.mark.slow
def test_split_by_day(dataset):
    sizes = {split: dataset.num_samples(split) for split in ("train", "valid", "test")}
    assert sizes == {"train": 199_011, "valid": 13_737, "test": 15_581}
    assert sum(sizes.values()) == 228_329
    days = {split: days_of(dataset, split) for split in sizes}
    assert [len(of_split) for of_split in days.values()] == [13, 1, 1]
    assert days["train"][-1] == Day("2022-05-06", 13_834)
    clicks = dataset.artifact.content["source"]["num_clicks"]
    assert sum(clicks.values()) / 228_329 == pytest.approx(0.442, abs=0.001)


def test_history_and_video_share_a_table(dataset):
    tables = {feature.name: feature.table for feature in dataset.schema.features}
    assert tables["video_id"] == tables["watched"] == tables["watched_long"] == "video"
    assert 6_000 < dataset.schema.table("video").num_rows < 7_584
    block = dataset.block("train", 0)
    watched = block.features["watched"]
    assert isinstance(watched, Jagged)
    lengths = np.diff(watched.offsets)
    assert lengths.max() == 50
    assert (lengths == 0).any()


def test_values_are_sane(dataset):
    for split in ("train", "valid", "test"):
        for index in range(len(dataset.chunks(split))):
            block = dataset.block(split, index)
            assert np.isfinite(block.dense).all()
            assert np.abs(block.dense).max() < 20
    # No single column gives the label away.
    block = dataset.block("valid", 0)
    for name, ids in block.features.items():
        if not isinstance(ids, Jagged):
            num = np.bincount(ids)
            clicks = np.bincount(ids, block.label)
            popular = num > 200
            rates = clicks[popular] / num[popular]
            assert rates.size == 0 or rates.max() < 0.9, name


@pytest.mark.slow
def test_histories_are_the_earlier_impressions(tmp_path):
    source = build_config(compose_config("config", ["data=kuairand_histories"])).data.source
    source.files = [str(ROOT / file) for file in source.files]
    for join in source.joins.values():
        join.files = [str(ROOT / file) for file in join.files]
    prepare(source, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    log, watched = (
        pacsv.read_csv(LOG.parent / name, parse_options=pacsv.ParseOptions(delimiter="\t"))
        for name in (LOG.name, "user_train_history.tsv.zst")
    )
    before = dict(
        zip(watched["user_id"].to_pylist(), watched["watch_seq"].to_pylist(), strict=True)
    )
    bits = source.histories["history"].bits["history_action"]
    action = sum(log[name].to_numpy() * bit for name, bit in bits.items())
    users, times, videos = (log[name].to_numpy() for name in ("user_id", "time_ms", "video_id"))
    rows = {user: np.flatnonzero(users == user) for user in range(300)}
    texts = read_vocabulary(dataset.artifact.path, "video")["value"].to_pylist()
    row_of = {text: row for row, text in enumerate(texts, start=1)}
    first = np.flatnonzero(times >= source.split.bounds[0])[0]
    block, num_seen = dataset.block("valid", 0), 0
    for sample in range(len(block)):
        number = first + sample
        if (user := users[number]) not in rows:
            continue
        earlier = [row for row in rows[user] if times[row] < times[number]]
        seen = [*str(before.get(user, "") or "").split(), *(str(videos[row]) for row in earlier)]
        found = block.features["history_video"], block.features["history_action"]
        assert bag(found[0], sample) == [row_of.get(text, 0) for text in seen[-50:]]
        actions = [0] * (len(seen) - len(earlier)) + [int(action[row]) for row in earlier]
        assert bag(found[1], sample) == actions[-50:]
        num_seen += len(earlier)
    assert num_seen > 500
    lists = [block.features[f"history_{name}"] for name in ("video", "action", "play", "age")]
    assert len({tuple(of.offsets.tolist()) for of in lists}) == 1
    assert dataset.schema.labels == (*("label", "is_like", "is_follow", "is_comment"),
                                     *("is_forward", "is_hate", "long_view"))  # fmt: skip
