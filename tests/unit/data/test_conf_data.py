"""Every data/*.yaml composes with the schema and passes the checks."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from hotrec.config.check_data import check_data_spec
from hotrec.config.data import DataSpec, SourceSpec, tables_of

CONF = Path(__file__).parents[3] / "conf" / "data"
OUTCOMES = {
    "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view", "play_time_ms",
}  # fmt: skip


def load(name: str, **changes: object) -> DataSpec:
    merged = OmegaConf.merge(
        OmegaConf.structured(DataSpec), OmegaConf.load(CONF / f"{name}.yaml"), changes
    )
    return OmegaConf.to_object(merged)


NAMES = sorted(path.stem for path in CONF.glob("*.yaml"))


def test_the_promised_datasets_are_there():
    assert set(NAMES) >= {
        "kuairand", "criteo_kaggle", "criteo_terabyte", "delimited_example", "parquet_example",
        "synthetic", "synthetic_criteo_like",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_composes_and_passes_the_checks(name):
    check_data_spec(load(name))


def test_unknown_keys_and_values_are_refused():
    with pytest.raises(ConfigKeyError, match="source.colums"):
        load("kuairand", source={"colums": {}})
    with pytest.raises(ValidationError, match="source.format"):
        load("kuairand", source={"format": "xml"})


def test_kuairand_uses_no_outcome_of_the_impression():
    source = load("kuairand").source
    assert isinstance(source, SourceSpec)
    used = {column.source or name for name, column in source.columns.items()}
    assert not used & OUTCOMES
    assert {name for name, c in source.columns.items() if c.table == "video"} == {
        "video_id", "watched", "watched_long",
    }  # fmt: skip
    assert "video" in tables_of(source)


def test_criteo_like_tables_sum_to_4_95_million_rows():
    spec = load("synthetic_criteo_like").synthetic
    assert spec is not None
    assert len(spec.num_rows) == 26
    assert sum(spec.num_rows) == 4_950_000
    assert spec.zipf_exponent == 1.05
