"""Commands as calls from Python: their words, and their errors."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hotrec.cli.call import command, override_words
from hotrec.cli.store import build_config, compose_config
from hotrec.types import WireType


def test_values_reach_the_configuration_as_they_are() -> None:
    settings = {
        "data": "kuairand",
        "model": "dcnv2",
        "model.embedding_dim": np.int64(8),
        "trainer": {"max_steps": None, "timeout_s": 1e-3, "keep_best": False},
        "trainer.eval_splits": ("valid",),
        "pipeline.wire": WireType.bf16,
        "paths": {"dataset": Path("a b, [c]=d"), "costs": 'it\'s "here"'},
        "data.source.files": ["a,b.tsv", "c.tsv"],
    }
    config = build_config(compose_config("config", list(override_words(settings))))
    assert (config.model.kind.name, config.model.embedding_dim) == ("dcnv2", 8)
    trainer = config.trainer
    assert (trainer.max_steps, trainer.timeout_s, trainer.keep_best) == (None, 1e-3, False)
    assert trainer.eval_splits == ["valid"]
    assert config.pipeline.wire is WireType.bf16
    assert config.paths.dataset == "a b, [c]=d"
    assert config.paths.costs == 'it\'s "here"'
    assert config.data.source.files == ["a,b.tsv", "c.tsv"]


@pytest.mark.parametrize("words", [{}, {"pth": "x"}, {"path": "a,b"}])
def test_what_a_command_refuses_is_an_exception(words: dict[str, str], tmp_path: Path) -> None:
    here, variables = Path.cwd(), dict(os.environ)
    with pytest.raises(ValueError, match=r"^(path|pth|a,b).*: expected "):
        command("init", words, workdir=tmp_path, quiet=True)
    assert (Path.cwd(), dict(os.environ)) == (here, variables)
    assert not any(tmp_path.rglob("*.yaml")) or "pth" not in words
