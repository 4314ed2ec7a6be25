"""``model.onnx``: an exported model as an ONNX graph, next to the files of its weights.

Tables are not copied: the graph refers to their places in the safetensors files (ONNX external
data), so its size and write time do not depend on the tables.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.onnx.errors import OnnxExporterError

from hotrec.models.plain import SCALE, WEIGHT, Architecture, PlainModel, TableRows
from hotrec.runs.exported import Forms, layout, table_file

ONNX_FILE = "model.onnx"
# Sizes of the inputs to trace with; 0 and 1 would become constants.
_BATCH, _BAG = 3, 2


def check_packages() -> None:
    """Check that a graph can be written.

    Raises:
        ValueError: If a package is missing.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ValueError(
            "export.onnx: expected the packages onnx and onnxscript, missing "
            f"{', '.join(missing)}. Run `pip install 'hotrec[onnx]'`."
        )


def write_onnx(
    directory: Path,
    shape: Architecture,
    dense: Mapping[str, torch.Tensor],
    tables: Mapping[str, Forms],
) -> None:
    """Write the graph of an exported model.

    Inputs are ``dense``, float32 (B, N), and ``ids.<feature>``, int64 (B, L) with -1 for padding;
    B, and L of each feature, are dynamic. The output is ``logits``.

    Args:
        directory: Directory of the exported model.
        shape: Its architecture.
        dense: Its weights except the tables.
        tables: Type and shape of each tensor in each table's file.

    Raises:
        ValueError: If ONNX does not support the layers.
    """
    import onnx_ir

    features = [name for name, _ in shape.features]
    batch = torch.export.Dim("batch")
    bags = {name: torch.export.Dim(f"num_ids_{index}") for index, name in enumerate(features)}
    program = _quietly_exported(
        _outline(shape, dense, tables),
        kwargs={
            "dense_BN": torch.zeros(_BATCH, len(shape.dense)),
            "ids": {name: torch.zeros(_BATCH, _BAG, dtype=torch.int64) for name in features},
        },
        dynamic_shapes={
            "dense_BN": {0: batch},
            "ids": {name: {0: batch, 1: bag} for name, bag in bags.items()},
        },
        input_names=["dense", *(f"ids.{name}" for name in features)],
        output_names=["logits"],
        dynamo=True,
        # It would compute constants from missing tables.
        optimize=False,
        verbose=False,
    )
    for node in program.model.graph:
        node.metadata_props.clear()  # paths and lines of this machine's code
    weights = program.model.graph.initializers
    for table, forms in tables.items():
        for tensor, (begin, end) in layout(forms).places.items():
            value = weights[f"tables.{table}.{tensor}"]
            value.const_value = onnx_ir.ExternalTensor(
                table_file(table),
                begin,
                end - begin,
                value.dtype,
                shape=value.shape,
                name=value.name,
                base_dir=directory,
            )
    onnx_ir.save(program.model, directory / ONNX_FILE)


def _quietly_exported(model: PlainModel, **settings: Any) -> torch.onnx.ONNXProgram:
    """Export without torch's irrelevant warnings about packages and axis names."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(model, **settings)
    except OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(
            "export.onnx: expected layers supported by torch.export and ONNX, got "
            f"{reason.rstrip('.')}. Change the layers, or omit export.onnx."
        ) from error
    assert program is not None  # None only with the older exporter
    return program


def _outline(
    shape: Architecture, dense: Mapping[str, torch.Tensor], tables: Mapping[str, Forms]
) -> PlainModel:
    """The model with tables of the right shape without memory."""

    def empty(form: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        dtype, size = form
        return torch.zeros((), dtype=getattr(torch, dtype)).expand(size)

    rows = {
        table: TableRows(
            empty(forms[WEIGHT]),
            empty(forms[SCALE]) if SCALE in forms else None,
            shape.pooling == "mean",
        )
        for table, forms in tables.items()
    }
    return PlainModel(shape, dense, rows)
