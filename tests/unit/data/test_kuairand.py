"""The click log that is shipped with the project, prepared as the quickstart does it."""

from pathlib import Path

import pytest

from hotrec.cli.store import build_config, compose_config
from hotrec.data.chunks import Dataset
from hotrec.data.days import Day, days_of
from hotrec.data.prepare import prepare

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
