"""Whatever conf/ offers composes, and is valid."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from hotrec.cli.commands import COMMANDS
from hotrec.cli.store import build_config, compose_config, conf_dir, options_of, read_config
from hotrec.config.fields import VARIANTS
from hotrec.config.groups import SavedPlacement
from hotrec.config.roots import ROOTS, Config
from tests.helpers.samples import sample

GROUPS = (
    "data",
    "model",
    "placement",
    "optimizer",
    "order",
    "pipeline",
    "profiler",
    "trainer",
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


@pytest.mark.parametrize(("at", "experiment"), enumerate(options_of("experiment")))
def test_experiment_takes_other_choices(at: int, experiment: str) -> None:
    """So an experiment can be swept over placements and optimizers."""
    for group in ("placement", "optimizer", "order", "pipeline"):
        for choice in sample([*options_of(group)], at % 6, 6):
            words = [f"experiment={experiment}", f"{group}={choice}"]
            config = build_config(compose_config("config", words))
            assert getattr(config, group).kind.name == KIND_OF.get(choice, choice)
            assert config.paths.dataset == f"data/{config.dataset_name}/dataset"


@pytest.mark.parametrize(
    ("group", "choice"), [(group, choice) for group in GROUPS for choice in options_of(group)]
)
def test_choice(group: str, choice: str) -> None:
    required = REQUIRED.get(choice, []) if group == "model" else []
    config = build_config(compose_config("config", [f"{group}={choice}", *required]))
    if group in VARIANTS:
        assert type(getattr(config, group)) is VARIANTS[group][choice]


@pytest.mark.parametrize("name", ["config", "bench"])
def test_the_embedding_dimension_can_be_changed_alone(name: str) -> None:
    model = build_config(compose_config(name, ["model.embedding_dim=32"])).model
    assert model.dense_layer_sizes[-1] == model.embedding_dim == 32


@pytest.mark.parametrize("choice", options_of("bench"))
def test_bench_choice(choice: str) -> None:
    config = build_config(compose_config("bench", [f"bench={choice}"]))
    assert config.bench.name == choice


@pytest.mark.parametrize("group", VARIANTS)
def test_every_variant_has_a_file(group: str) -> None:
    assert set(options_of(group)) == set(VARIANTS[group])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_root(name: str) -> None:
    config_name = COMMANDS[name].config_name
    config = build_config(compose_config(config_name, REQUIRED.get(name, [])))
    assert type(config) is ROOTS[config_name]


def test_every_file_is_a_choice() -> None:
    folders = {path.parent.name for path in conf_dir().rglob("*.yaml")}
    of_others = {"conf", "hydra", "launcher", "sweeper", "bench"}
    assert folders - of_others == set(GROUPS)


def test_saved_placement_follows_the_partition_path() -> None:
    composed = compose_config("config", ["placement=saved", "paths.partition=elsewhere"])
    placement = build_config(composed).placement
    assert isinstance(placement, SavedPlacement)
    assert placement.partition_dir == "elsewhere"


def test_paths_follow_the_data_choice() -> None:
    config = build_config(compose_config("config", ["data=synthetic"]))
    assert config.paths.profile == "data/synthetic/profile"
    assert config.run_name == "cost"


def test_kuairand_uses_no_outcome_of_the_impression() -> None:
    source = build_config(compose_config("config", ["data=kuairand"])).data.source
    used = {column.source or name for name, column in source.columns.items()}
    outcomes = {"is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"}
    assert not used & {*outcomes, "play_time_ms"}
    of_video = {name for name, column in source.columns.items() if column.table == "video"}
    assert of_video == {"video_id", "watched", "watched_long"}


def test_criteo_like_tables_sum_to_4_95_million_rows() -> None:
    composed = compose_config("config", ["data=synthetic_criteo_like"])
    spec = build_config(composed).data.synthetic
    assert (len(spec.num_rows), sum(spec.num_rows)) == (26, 4_950_000)


def test_overrides_of_tables_take_every_form() -> None:
    words = ["placement=coverage", "+placement.overrides={a: hot, b: cold, c: 12, d: 0.25}"]
    overrides = build_config(compose_config("config", words)).placement.overrides
    assert overrides == {"a": "hot", "b": "cold", "c": 12, "d": 0.25}
    assert [type(value) for value in overrides.values()] == [str, str, int, float]


@pytest.mark.parametrize("experiment", options_of("experiment"))
def test_recorded_configuration_reads_back(experiment: str, tmp_path) -> None:
    composed = compose_config("config", [f"experiment={experiment}"])
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(composed, resolve=True))
    assert read_config(path, Config) == build_config(composed)


def test_recorded_configuration_of_another_version_is_refused(tmp_path) -> None:
    path = tmp_path / "config.yaml"
    text = OmegaConf.to_yaml(compose_config("config", []), resolve=True)
    path.write_text(text.replace("num_epochs:", "num_eras:"))
    with pytest.raises(ValueError, match="config.yaml: expected the configuration of a run"):
        read_config(path, Config)
    with pytest.raises(ValueError, match="got no such file"):
        read_config(tmp_path / "absent.yaml", Config)
