"""A run that predicts too well names the columns to look at; an evaluation counts unknown ids."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hotrec.cli.store import build_config, compose_config, read_config
from hotrec.config.data import ColumnKind, ColumnSpec, SplitKind, SplitSpec
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.chunks import Dataset
from hotrec.data.prepare import prepare
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.suspicious import suspicious_columns
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import Ranks
from tests.unit.data.logs import delimited_spec

NUM_SAMPLES = 2000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log in which only a click has seconds, and whose last tenth is of new users alone."""
    draw, lines = random.Random(1), ["clicked,user,seconds,price"]
    for number in range(NUM_SAMPLES):
        click = int(draw.random() < 0.3)
        user = f"new{number}" if number >= 0.9 * NUM_SAMPLES else f"u{draw.randrange(40)}"
        lines.append(f"{click},{user},{click * draw.randrange(1, 9)},{draw.random():.3f}")
    (tmp_path / "log.csv").write_text("\n".join([*lines, ""]))
    columns = dict.fromkeys(("seconds", "price"), ColumnSpec(ColumnKind.dense, standardize=True))
    columns["label"] = ColumnSpec(ColumnKind.label, source="clicked")
    columns["user"] = ColumnSpec(ColumnKind.categorical)
    split = SplitSpec(kind=SplitKind.last, valid_frac=0.1, test_frac=0.1)
    spec = delimited_spec([tmp_path / "log.csv"], columns=columns, split=split)
    prepare(spec, tmp_path / "dataset")
    return tmp_path


@pytest.mark.slow
def test_a_run_with_a_leak_names_it(folder: Path, one_rank: Ranks) -> None:
    words = [
        *("data=synthetic", f"paths.dataset={folder}/dataset", "placement=torchrec"),
        *("model.embedding_dim=8", "model.dense_layer_sizes=[32,8]"),
        *("model.over_layer_sizes=[32,1]", "optimizer.learning_rate=0.02"),
        *("trainer.batch_size=20", "trainer.num_workers=0", "trainer.num_epochs=3"),
    ]
    config = build_config(compose_config("config", words))
    summary = run_training(config, folder / "run", one_rank).summary
    assert summary["auc"] > 0.99
    alone = summary["suspicious"]["label"]["alone"]
    assert next(iter(alone)) == "seconds"
    assert alone["seconds"] > 0.99
    assert alone["price"] < 0.6
    # What the run recorded is all that is needed to evaluate it.
    recorded = read_config(folder / "run/config.yaml", Config)
    found = evaluate_run(EvaluateConfig(), recorded, folder / "run", one_rank)
    assert found.quality.auc == pytest.approx(summary["auc"], abs=1e-6)
    assert next(iter(found.suspicious["label"]["alone"])) == "seconds"
    # Each of the new users is one without a row.
    known = evaluate_run(EvaluateConfig(split="valid"), recorded, folder / "run", one_rank)
    for evaluated, frac in ((found, 1.0), (known, 0.0)):
        assert evaluated.unknown is not None
        assert evaluated.unknown.fracs == {"user": frac}


def test_an_ordinary_auc_is_not_suspicious(folder: Path) -> None:
    dataset = Dataset.open(folder / "dataset")
    assert suspicious_columns(dataset, 0.98, {}) == suspicious_columns(dataset, None, {}) == {}
    # Of one label of several, whatever their mean.
    assert suspicious_columns(dataset, 0.8, {"label": 0.995}).keys() == {"label"}
