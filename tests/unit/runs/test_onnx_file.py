"""The ONNX graph of an exported model gives its logits, for any size of batch and of bags."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hotrec.config.roots import RowType
from hotrec.models.plain import Architecture, DenseLayers, PlainModel, TableRows
from hotrec.runs import onnx_file
from hotrec.runs.export import _forms, quantize
from hotrec.runs.exported import TensorWriter, map_tensors, table_file

DIM, NUM_ROWS = 8, {"i": 30, "u": 20}
FEATURES = [["item", "i"], ["seen", "i"], ["user", "u"]]


def architecture(kind: str, pooling: str, num_dense: int) -> Architecture:
    return Architecture(
        kind=kind,
        embedding_dim=DIM,
        pooling=pooling,
        dense_layer_sizes=[5, DIM],
        over_layer_sizes=[7, 4, 1],
        cross_num_layers=2,
        cross_low_rank_dim=3,
        dense=[f"d{column}" for column in range(num_dense)],
        features=FEATURES,
    )


def write_tables(directory: Path, row_type: RowType) -> None:
    (directory / "tables").mkdir()
    rng = np.random.default_rng(0)
    for table, num_rows in NUM_ROWS.items():
        rows = rng.normal(size=(num_rows, DIM)).astype(np.float32)
        tensors = {"weight": rows}
        if row_type is RowType.fp16:
            tensors = {"weight": rows.astype(np.float16)}
        elif row_type is RowType.int8:
            tensors = dict(zip(("scale", "weight"), quantize(rows), strict=True))
        with TensorWriter(directory / table_file(table), _forms(num_rows, DIM, row_type)) as writer:
            for name, values in tensors.items():
                writer.write(name, values)


@pytest.mark.parametrize(
    ("kind", "pooling", "row_type", "num_dense"),
    [
        ("dlrm", "sum", RowType.int8, 3),
        ("dcnv2", "mean", RowType.fp16, 0),
    ],
)
def test_onnx_runtime_gives_the_logits(
    tmp_path: Path, kind: str, pooling: str, row_type: RowType, num_dense: int
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    shape = architecture(kind, pooling, num_dense)
    write_tables(tmp_path, row_type)
    generator = torch.Generator().manual_seed(1)
    dense = {
        name: torch.randn(weight.shape, generator=generator)
        for name, weight in DenseLayers(shape).state_dict().items()
    }
    forms = {table: _forms(num_rows, DIM, row_type) for table, num_rows in NUM_ROWS.items()}
    onnx_file.write_onnx(tmp_path, shape, dense, forms)
    held = {table: map_tensors(tmp_path / table_file(table)) for table in NUM_ROWS}
    tables = {
        table: TableRows(
            torch.from_numpy(tensors["weight"]),
            torch.from_numpy(tensors["scale"]) if "scale" in tensors else None,
            pooling == "mean",
        )
        for table, tensors in held.items()
    }
    model = PlainModel(shape, dense, tables)
    session = runtime.InferenceSession(tmp_path / onnx_file.ONNX_FILE)
    for batch, bag in ((1, 1), (5, 4), (40, 9)):
        columns = torch.randn(batch, num_dense, generator=generator)
        ids = {
            "item": torch.randint(30, (batch, 1), generator=generator),
            "seen": torch.randint(-1, 30, (batch, bag), generator=generator),
            "user": torch.randint(20, (batch, 1), generator=generator),
        }
        inputs = {f"ids.{name}": bags.numpy() for name, bags in ids.items()}
        (logits,) = session.run(None, {"dense": columns.numpy(), **inputs})
        np.testing.assert_allclose(logits, model(columns, ids).numpy(), atol=1e-4, rtol=1e-5)
    graph = (tmp_path / onnx_file.ONNX_FILE).read_bytes()
    assert Path(onnx_file.__file__).parent.as_posix().encode() not in graph
    assert held["i"]["weight"].tobytes() not in graph


def test_layers_without_a_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")

    def forward(self: object, dense_BN: torch.Tensor, ids: object) -> torch.Tensor:
        return dense_BN if dense_BN.sum() > 0 else -dense_BN

    monkeypatch.setattr(PlainModel, "forward", forward)
    shape = architecture("dlrm", "sum", 3)
    dense = DenseLayers(shape).state_dict()
    weights = {name: torch.zeros(weight.shape) for name, weight in dense.items()}
    forms = {table: _forms(num_rows, DIM, RowType.fp32) for table, num_rows in NUM_ROWS.items()}
    with pytest.raises(ValueError, match=r"^export\.onnx: expected layers .*, got .+\. Change "):
        onnx_file.write_onnx(Path("nowhere"), shape, weights, forms)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: None if name == "onnx" else name)
    with pytest.raises(ValueError, match=r"^export.onnx: .* missing onnx\. .*'hotrec\[onnx\]'"):
        onnx_file.check_packages()
