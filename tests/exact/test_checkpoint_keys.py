"""The keys of checkpoints stand in a file: who changes one makes older checkpoints unreadable."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from hotrec.artifact import read_artifact
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture
from hotrec.train.checkpoint import KIND, Checkpoints, Position, open_tensors, save_checkpoint
from hotrec.types import ModelKind
from tests.exact.case import TORCHREC_PLANS, Case
from tests.exact.training import Training
from tests.helpers.dense import POOLED_KINDS, shape_of
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader

GOLDEN = Path(__file__).with_name("checkpoint_keys.txt")
CASE = Case(hosts="00", seed=1, partition="half", optimizer="adagrad", is_uniform_dim=False)
# Of the same model, in which hot rows and slots leave no trace.
PLACEMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"partition": "all_hot"},
    {"placement": "mixed", "partition": "random"},
    {"placement": "pooled"},
    {"tier": "cached", "row_type": "bf16", "slots": 1.0, "pipeline": "look_ahead"},
    *({"placement": plan, "partition": "all_cold"} for plan in TORCHREC_PLANS),
)


def shapes_of(case: Case, folder: Path) -> tuple[dict[str, tuple[int, ...]], list[str], list[str]]:
    """The tensors of a checkpoint, the keys of its manifest, and its other files."""
    with Training(replace(case, steps=1)) as training:
        training.train()
        path = save_checkpoint(
            Checkpoints(folder, facts={}), Position(1, 1), training.model, training.optimizer,
            TinyLoader(num_batches=1), training.hot_set,
        )  # fmt: skip
    with open_tensors(path) as files:
        others = [p.name for p in path.iterdir() if p.is_file()]
        return dict(files.shapes), sorted(read_artifact(path, kind=KIND).content), sorted(others)


def lines_of_training(folder: Path) -> list[str]:
    """On a rank: the lines of the file that say what training writes."""

    def said(shapes: dict[str, tuple[int, ...]]) -> str:
        return "".join(f"\n  {name} {list(shape)}" for name, shape in sorted(shapes.items()))

    shapes, content, files = shapes_of(replace(CASE, adapt=True), folder / "first")
    found = [f"manifest\n  {' '.join(content)}", f"files of 2 ranks\n  {' '.join(files)}"]
    for output in ("bags", "sequences", "packed"):
        case = replace(CASE, output=output, optimizer="sgd")
        found.append(f"{output}, sgd{said(shapes_of(case, folder / output)[0])}")
    for optimizer in ("adagrad", "rowwise_adagrad", "adam"):
        case = replace(CASE, optimizer=optimizer, dense="adam", partition="all_hot")
        of_optimizer, *_ = shapes_of(case, folder / optimizer)
        states = {name: shape for name, shape in of_optimizer.items() if "/" in name}
        found.append(f"bags, state of {optimizer}, of layers adam{said(states)}")
    for at, changes in enumerate(PLACEMENTS):
        other, *_ = shapes_of(replace(CASE, **changes), folder / f"{at}")
        assert other == shapes, changes
    return found


def lines_of_models() -> Iterator[str]:
    for kind in ModelKind:
        names = ["item", "places", "other"]
        is_pooled = kind in POOLED_KINDS
        config: Any = EmbeddingBagConfig if is_pooled else EmbeddingConfig
        collection: Any = EmbeddingBagCollection if is_pooled else EmbeddingCollection
        tables = collection(
            [config(name=n, num_embeddings=9, embedding_dim=4, feature_names=[n]) for n in names]
        )
        features = [(name, name) for name in names]
        sizes: Any = {"dense_layer_sizes": [8, 4], "over_layer_sizes": [8, 1]}
        shape = shape_of(kind, 3, features, 4, **sizes)
        model = ClickTask(build_architecture(shape, tables, 1, torch.device("cpu")), 1)
        modules: dict[str, list[str]] = {}
        for name in sorted(model.state_dict()):
            modules.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
        said = [f"{module}: {' '.join(names)}" for module, names in modules.items()]
        yield "\n  ".join([f"model {kind.value}", *said])


def test_keys_of_checkpoints_only_change_knowingly(tmp_path: Path) -> None:
    first, other = run_ranks(lines_of_training, 2, folder=tmp_path)
    assert first == other
    assert GOLDEN.read_text() == "\n".join([*first, *lines_of_models()]) + "\n"
