"""Configurations by their words."""

from __future__ import annotations

from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import Config


def config_of(*words: str) -> Config:
    config: Config = build_config(compose_config("config", list(words)))
    return config
