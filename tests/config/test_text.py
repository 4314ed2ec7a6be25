"""config.yaml is read as what it was written from, whoever made the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from hotrec.cli.store import build_config, compose_config, read_config
from hotrec.config.data import DataSpec
from hotrec.config.roots import Config
from hotrec.config.text import as_document, as_yaml

WORDS = [
    "",
    "data=criteo_terabyte",
    "data=synthetic model=dcnv2",
    "experiment=quickstart placement=coverage order=time optimizer=adam profiler=trace",
    "run_name='1e5' trainer.warm_start='007'",
    "run_name='a: b # c'",
    "+trainer.label_weights={a:1} trainer.max_steps=null",
]


def read_back(config: Config, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(as_yaml(as_document(config)))
    return read_config(path, Config)


@pytest.mark.parametrize("words", WORDS)
def test_a_configuration_is_read_as_it_was(words: str, tmp_path: Path) -> None:
    composed = compose_config("config", words.split() if "#" not in words else [words])
    config = build_config(composed)
    assert read_back(config, tmp_path) == config
    assert (tmp_path / "config.yaml").read_text() == OmegaConf.to_yaml(composed, resolve=True)


@pytest.mark.parametrize("name", ["${x}", "nan", "null", "1_000", "\u00e9", "", "~", "2024-05-01"])
def test_a_name_is_a_text(name: str, tmp_path: Path) -> None:
    config = replace(build_config(compose_config("config", [])), run_name=name)
    assert read_back(config, tmp_path).run_name == name


def test_what_python_programs_put_into_it(tmp_path: Path) -> None:
    config: Config = build_config(compose_config("config", []))
    paths = replace(config.paths, dataset=tmp_path / "d")  # type: ignore[arg-type]
    trainer = replace(config.trainer, batch_size=np.int64(64), eval_splits=("valid",))  # type: ignore[arg-type]
    found = read_back(replace(config, paths=paths, trainer=trainer, data=DataSpec()), tmp_path)
    assert found.paths.dataset == str(tmp_path / "d")
    assert (found.trainer.batch_size, found.trainer.eval_splits) == (64, ["valid"])
    assert found.data == DataSpec()
