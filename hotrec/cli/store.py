"""Hydra's side of the configuration: ``conf/``, the schemas, and composing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict

from hotrec.cli.output import describe_unknown_field
from hotrec.config.fields import VARIANTS
from hotrec.config.roots import ROOTS
from hotrec.config.text import read_yaml
from hotrec.config.validate import validate

PACKAGE = Path(__file__).resolve().parents[1]
VERSION_BASE = "1.3"
USER_CONF = Path("conf")
FLAGS_OF_CONFIG_DIR = ("--config-dir", "-cd")


def conf_dir() -> Path:
    """The directory of YAML files: inside the package in a wheel, next to it in a checkout.

    Raises:
        RuntimeError: If neither exists.
    """
    places = [PACKAGE / "conf", PACKAGE.parent / "conf"]
    for place in places:
        if (place / "config.yaml").exists():
            return place
    raise RuntimeError(
        f"conf: expected config.yaml in one of {[str(place) for place in places]}, got none. "
        "Install hotrec again."
    )


def user_conf_dir() -> Path | None:
    """``conf`` in the current directory, if it has groups of the user."""
    if not USER_CONF.is_dir() or USER_CONF.samefile(conf_dir()):
        return None
    groups = (path.name for path in conf_dir().iterdir() if path.is_dir())
    return USER_CONF if any((USER_CONF / group).is_dir() for group in groups) else None


def options_of(group: str, own: Iterable[Path] = ()) -> dict[str, Path]:
    """The choices of a configuration group, by name: those of the user's directories first."""
    files = [file for path in (*own, conf_dir()) for file in sorted((path / group).glob("*.yaml"))]
    return {file.stem: file for file in files}


def groups_of(root: str) -> dict[str, str | None]:
    """The groups of a root configuration, with the choice by default if there is one."""
    entries = _read_yaml(conf_dir() / f"{root}.yaml").get("defaults", [])
    pairs = (entry for entry in entries if isinstance(entry, dict) and "hydra" not in entry)
    return {group: choice for pair in pairs for group, choice in pair.items()}


def _read_yaml(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text()) or {}


@functools.cache
def register_schemas() -> None:
    """Register the dataclasses with Hydra, under the names that the YAML files use."""
    store = ConfigStore.instance()
    for name, root in ROOTS.items():
        store.store(name=f"{name}_schema", node=root)
    for group, variants in VARIANTS.items():
        for name, variant in variants.items():
            store.store(name=f"{group}_{name}_schema", node=variant)


def compose_config(config_name: str, overrides: Sequence[str]) -> DictConfig:
    """Compose inside a run, or without one: for tests and the documentation. Not validated."""
    register_schemas()
    is_inside = GlobalHydra.instance().is_initialized()
    with (
        nullcontext()
        if is_inside
        else initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE)
    ):
        composed = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        # `${hydra:...}` reads the choices from here.
        HydraConfig.instance().set_config(composed)
        with open_dict(composed):
            del composed["hydra"]
        OmegaConf.resolve(composed)
    return composed


def build_config(composed: DictConfig) -> Any:
    """The composed configuration as a validated dataclass.

    Raises:
        ValueError: If a key is unknown or a value is out of range.
        MissingMandatoryValue: If a required value is missing.
    """
    _check_known_keys(composed, "")
    config = OmegaConf.to_object(composed)
    validate(config)
    return config


def without_flags(words: Sequence[str]) -> list[str]:
    """The overrides among words that may begin with Hydra's flag for a directory of groups."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not word.startswith("-") and before not in FLAGS_OF_CONFIG_DIR
    ]


def quoted(text: str) -> str:
    """A text as a value of an override, with any special characters."""
    # In double quotes, because the shell's are single.
    return QuotedString(text.replace("${", "\\${"), Quote.double).with_quotes()


def _check_known_keys(node: DictConfig, parent: str) -> None:
    """Refuse keys that Hydra's ``+key=value`` forced into a dataclass."""
    kind = OmegaConf.get_type(node)
    known = {item.name for item in dataclasses.fields(kind)} if is_dataclass(kind) else None
    for name in map(str, node):
        if known is not None and name not in known:
            raise ValueError(describe_unknown_field(parent, name, kind))
        child = None if OmegaConf.is_missing(node, name) else node[name]
        if isinstance(child, DictConfig):
            _check_known_keys(child, f"{parent}.{name}" if parent else name)


def read_config(path: Path, root: type) -> Any:
    """Read the config.yaml of a run into the configuration's dataclasses.

    Raises:
        ValueError: If it is missing or does not fit this version's schema.
    """
    if not path.exists():
        raise ValueError(
            f"{path}: expected the recorded configuration of a run, got no such file. Pass a "
            "directory written by `hotrec train`."
        )
    try:
        recorded: Any = OmegaConf.create(read_yaml(path))
        schema = OmegaConf.structured(root)
        for group, variants in VARIANTS.items():
            if group in schema:
                schema[group] = OmegaConf.structured(variants[recorded[group].kind])
        merged = OmegaConf.merge(schema, recorded)
        assert isinstance(merged, DictConfig)
        return build_config(merged)
    except Exception as error:
        raise ValueError(
            f"{path}: expected the configuration of a run of this version, got {error}. "
            "Train again, or use the version that wrote it."
        ) from error
