"""Whatever conf/ offers composes, is valid, and is read back as it was from config.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import build_config, compose_config, conf_dir, options_of, read_config
from hotrec.config.data import DataSpec
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS, Config
from hotrec.config.text import as_document, as_yaml
from tests.helpers.samples import sample

GROUPS = (
    *("data", "model", "placement", "optimizer", "order", "pipeline"),
    "experiment",
)
# What these commands and models have no default for.
REQUIRED = {
    "compare": ["runs=[x,y]"],
    "export": ["output=x"],
    "predict": ["input=[x]", "output=x"],
    "din": ["+model.attention.history=item"],
    "hstu": ["+model.history.seen=item"],
    "sasrec": ["+model.history.seen=item"],
    "own": ["model._target_=my_model.MyModel"],
    "two_tower": ["model.item_columns=[item]"],
}
# Choices that are another one's kind with other settings.
KIND_OF = {"micro_batches": "look_ahead"}


def composed(*words: str) -> Config:
    config: Config = build_config(compose_config("config", words))
    return config


def read_back(config: Config, folder: Path) -> Config:
    (folder / "config.yaml").write_text(as_yaml(as_document(config)))
    found: Config = read_config(folder / "config.yaml", Config)
    return found


@pytest.mark.parametrize(("at", "experiment"), enumerate(options_of("experiment")))
def test_experiment_takes_other_choices(at: int, experiment: str, tmp_path: Path) -> None:
    """So an experiment can be swept over placements and optimizers."""
    for group in ("placement", "optimizer", "order", "pipeline"):
        for choice in sample([*options_of(group)], at % 6, 6):
            config = composed(f"experiment={experiment}", f"{group}={choice}")
            assert getattr(config, group).kind.name == KIND_OF.get(choice, choice)
            assert config.paths.dataset == f"data/{config.dataset_name}/dataset"
    assert read_back(config, tmp_path) == config


@pytest.mark.parametrize(
    ("group", "choice"), [(group, choice) for group in GROUPS for choice in options_of(group)]
)
def test_choice(group: str, choice: str) -> None:
    required = REQUIRED.get(choice, []) if group == "model" else []
    config = composed(f"{group}={choice}", *required)
    if group in VARIANTS:
        assert type(getattr(config, group)) is VARIANTS[group][choice]


@pytest.mark.parametrize("choice", options_of("plans"))
def test_bench_choice(choice: str) -> None:
    words = [f"plans={choice}", "model.embedding_dim=32"]
    config = build_config(compose_config("compare", words))
    assert config.plans.name == choice
    assert config.model.dense_layer_sizes[-1] == 32


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_root(name: str) -> None:
    config_name = COMMANDS[name].config_name
    config = build_config(compose_config(config_name, REQUIRED.get(name, [])))
    assert type(config) is ROOTS[config_name]


def test_every_file_is_a_choice_and_every_variant_has_a_file() -> None:
    folders = {path.parent.name for path in conf_dir().rglob("*.yaml")}
    assert folders - {"conf", "hydra", "launcher", "sweeper", "plans"} == set(GROUPS)
    assert all(set(options_of(group)) == set(VARIANTS[group]) for group in VARIANTS)


def test_kuairand_uses_no_outcome_of_the_impression() -> None:
    source = composed("data=kuairand").data.source
    assert source is not None
    used = {column.source or name for name, column in source.columns.items()}
    outcomes = {"is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"}
    assert not used & {*outcomes, "play_time_ms"}


def test_overrides_of_tables_take_every_form() -> None:
    words = "+placement.overrides={a: hot, b: cold, c: 12, d: 0.25}"
    overrides = composed("placement=coverage", words).placement.overrides
    assert overrides == {"a": "hot", "b": "cold", "c": 12, "d": 0.25}
    assert [type(value) for value in overrides.values()] == [str, str, int, float]


@pytest.mark.parametrize(
    "name", ["${x}", "nan", "null", "1_000", "\u00e9", "", "~", "2024-05-01", "1e5", "a: b # c"]
)
def test_a_name_is_a_text(name: str, tmp_path: Path) -> None:
    config = replace(composed(), run_name=name)
    assert read_back(config, tmp_path).run_name == name


def test_what_python_programs_put_into_it(tmp_path: Path) -> None:
    config = composed("+trainer.label_weights={a:1}")
    paths = replace(config.paths, dataset=tmp_path / "d")  # type: ignore[arg-type]
    trainer = replace(config.trainer, batch_size=np.int64(64), eval_splits=("valid",))  # type: ignore[arg-type]
    found = read_back(replace(config, paths=paths, trainer=trainer, data=DataSpec()), tmp_path)
    assert found.paths.dataset == str(tmp_path / "d")
    assert (found.trainer.batch_size, found.trainer.eval_splits) == (64, ["valid"])
    assert found.trainer.label_weights == {"a": 1}


def test_recorded_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(as_yaml(as_document(composed())).replace("num_epochs:", "num_eras:"))
    for file in (path, tmp_path / "absent.yaml"):
        with pytest.raises(ValueError, match=f"{file.name}: expected .*got"):
            read_config(file, Config)
