"""The plain model computes what the trained one does, from any form of ids and type of rows."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.models.plain import Architecture, Ids, PlainModel, TableRows, load_model
from hotrec.models.zoo import build_architecture
from hotrec.runs.export import quantize
from hotrec.types import ModelKind
from tests.helpers.dense import shape_of

DIM, NUM_SAMPLES = 8, 6
# Features in another order than their tables, and two that share one.
FEATURES = {"user": "u", "item": "i", "seen": "i"}
NUM_ROWS = {"i": 30, "u": 20}


def make_shape(kind: ModelKind, num_dense: int, pooling: str, num_labels: int) -> Architecture:
    return shape_of(
        kind,
        num_dense,
        [("item", "i"), ("seen", "i"), ("user", "u")],
        DIM,
        dense_layer_sizes=[5, DIM],
        over_layer_sizes=[7, 4, 1],
        pooling=pooling,
        labels=[f"label{number}" for number in range(num_labels)],
    )


def both(
    kind: ModelKind, num_dense: int, pooling: str = "sum", num_labels: int = 1
) -> tuple[nn.Module, PlainModel]:
    """A trained model, and the plain one with its weights."""
    shape = make_shape(kind, num_dense, pooling, num_labels)
    make, holder, bags = EmbeddingConfig, EmbeddingCollection, "embedding_collection.embeddings"
    if not shape.reads_sequences:
        make = partial(EmbeddingBagConfig, pooling=PoolingType[pooling.upper()])
        holder = EmbeddingBagCollection
        bags = "embedding_bag_collection.embedding_bags"
    tables = [
        make(name=name, num_embeddings=rows, embedding_dim=DIM,
             feature_names=[feature for feature, table in FEATURES.items() if table == name])
        for name, rows in NUM_ROWS.items()
    ]  # fmt: skip
    model = build_architecture(shape, holder(tables=tables), 1, torch.device("cpu"))
    weights = {name: value.detach() for name, value in model.named_parameters()}
    rows = {
        table: TableRows(weights.pop(f"{bags}.{table}.weight"), None, pooling == "mean")
        for table in NUM_ROWS
    }
    return model, PlainModel(
        shape, {n.removeprefix("layers."): w for n, w in weights.items()}, rows
    )


def inputs(num_dense: int) -> tuple[torch.Tensor, dict[str, Ids]]:
    """One id of user and item a sample; bags of seen, the first and last of them empty."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([0, 2, 1, 3, 1, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids: dict[str, Ids] = {
        "user": torch.randint(0, NUM_ROWS["u"], (NUM_SAMPLES,), generator=generator),
        "item": torch.randint(0, NUM_ROWS["i"], (NUM_SAMPLES,), generator=generator),
        "seen": (torch.randint(0, NUM_ROWS["i"], (7,), generator=generator), offsets),
    }
    return torch.randn(NUM_SAMPLES, num_dense, generator=generator), ids


def jagged(ids: dict[str, Ids]) -> KeyedJaggedTensor:
    ones = torch.ones(NUM_SAMPLES, dtype=torch.int64)
    bags = [(bag, ones) if isinstance(bag, torch.Tensor) else bag for bag in ids.values()]
    values = [found for found, _ in bags]
    lengths = [second if second is ones else second.diff() for _, second in bags]
    return KeyedJaggedTensor(list(ids), torch.cat(values), lengths=torch.cat(lengths))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("kind", ModelKind)
def test_logits_are_those_of_the_trained_model(
    kind: ModelKind, num_dense: int, pooling: str
) -> None:
    num_labels = 1 if kind is ModelKind.two_tower else 1 + num_dense % 2
    model, exported = both(kind, num_dense, pooling, num_labels)
    dense, ids = inputs(num_dense)
    expected = model(dense, jagged(ids)).detach()
    assert expected.shape == (NUM_SAMPLES, num_labels)
    found = exported(dense, ids).view(NUM_SAMPLES, num_labels)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match=r"expected every feature .*seen"):
        exported(dense, {name: ids[name] for name in ("user", "item")})


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_all_forms_of_ids_give_the_same(dtype: str, is_mean: bool) -> None:
    rows = torch.randn(30, DIM)
    table = TableRows(rows.to(torch.float16) if dtype == "float16" else rows, None, is_mean)
    if dtype == "int8":
        scales, quantized = map(torch.from_numpy, quantize(rows.numpy()))
        table = TableRows(quantized, scales, is_mean)
    bags: list[list[int]] = [[], [4, 4, 29], [0], [7, 1]]
    none, ids = torch.zeros(DIM), [4, 4, 29, 0, 7, 1]
    pooled = [rows[bag].mean(0) if is_mean else rows[bag].sum(0) for bag in bags[1:]]
    jagged_ids = torch.tensor(ids), torch.tensor([0, 0, 3, 4, 6])
    padded = torch.tensor([[-1, -1, -1], [4, 4, 29], [-1, 0, -1], [7, 1, -1]])
    close = partial(
        torch.testing.assert_close, rtol=0, atol={"float32": 1e-6, "float16": 0.01}.get(dtype, 0.1)
    )
    for form in (jagged_ids, padded):
        found, (unpooled, lengths) = table(form), table.unpooled(form)
        assert found.dtype == torch.float32
        close(found, torch.stack([none, *pooled]))
        assert lengths.tolist() == [0, 3, 1, 2]
        close(unpooled, rows[ids])
    close(table(torch.tensor([0])), rows[:1])
    unpooled, lengths = table.unpooled(torch.tensor([0, 7]))
    assert lengths.tolist() == [1, 1]
    close(unpooled, rows[[0, 7]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that ``load_model`` reads."""
    folder = tmp_path_factory.mktemp("exported")
    _, model = both(ModelKind.dlrm, 0)
    files = {table: f"tables/{table}.safetensors" for table in NUM_ROWS}
    (folder / "tables").mkdir()
    for name, table in model.tables.items():
        save_file({"weight": table.weight}, folder / files[name])
    save_file(model.layers.state_dict(), folder / DENSE)
    description = {
        "format_version": 2,
        "architecture": asdict(model.shape),
        "rows": "fp32",
        "tables": [{"name": t, "num_rows": n} for t, n in NUM_ROWS.items()],
        "dense_sha256": hashlib.sha256((folder / DENSE).read_bytes()).hexdigest(),
    }
    (folder / MODEL).write_text(json.dumps(description))
    load_model(folder)
    return folder


Change = Callable[[dict[str, Any]], object]
MODEL, DENSE, TABLE = "model.json", "dense.safetensors", "tables/i.safetensors"


def weight(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[str, Change]:
    return TABLE, lambda held: held.update(weight=change(held["weight"]))


def shape(**changes: Any) -> tuple[str, Change]:
    return MODEL, lambda description: description["architecture"].update(changes)


def put(row: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: rows.index_fill(0, torch.tensor([row]), value)


def described(**changes: Any) -> tuple[str, Change]:
    return MODEL, lambda description: description.update(changes)


FORGED: dict[str, tuple[tuple[str, Change], str]] = {
    "fewer-rows": (weight(lambda rows: rows[:3].clone()), r"\(3, 8\)"),
    "infinite": (weight(put(1, torch.inf)), "row 1"),
    "int8-without-scale": (weight(torch.Tensor.char), "torch.int8"),
    "other-layers": (
        (DENSE, lambda held: held.update({name: value + 1 for name, value in held.items()})),
        "dense",
    ),
    "unsigned": (described(dense_sha256=None), "None"),
    "kind": (shape(kind="transformer"), "'transformer'"),
    "feature-of-no-table": (shape(features=[["user", "guest"]]), "'guest'"),
    "version": (described(format_version=99), "99"),
    "table-elsewhere": (
        (MODEL, lambda held: held.update(json.loads(json.dumps(held).replace('"i"', '"../i"')))),
        r"expected a file in the directory, got one at .*forged/i\.safetensors",
    ),
    "table-twice": ((MODEL, lambda held: held["tables"].append(held["tables"][0])), "tables"),
    "code": (shape(kind="own", target="evil.Model"), "evil.Model.*allow_code"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_export_is_refused(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "evil.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (file, change), message = FORGED[name]
    path = Path(shutil.copytree(exported, tmp_path / "forged")) / file
    held = json.loads(path.read_text()) if file == MODEL else load_file(path)
    change(held)
    if file == MODEL:
        path.write_text(json.dumps(held))
    else:
        save_file(held, path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "forged")


@pytest.mark.parametrize("name", [MODEL, DENSE, TABLE])
def test_links_are_not_followed(exported: Path, tmp_path: Path, name: str) -> None:
    """Not even to the very file; nor is a pipe waited for, or a file taken that is cut short."""
    path = Path(shutil.copytree(exported, tmp_path / "forged")) / name
    whole = path.read_bytes()
    path.rename(tmp_path / "elsewhere")
    for make in (
        lambda: path.symlink_to(tmp_path / "elsewhere"),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(whole[:-2]),
    ):
        make()
        with pytest.raises(ValueError, match=name):
            load_model(tmp_path / "forged")
        path.unlink()
