"""``model.onnx``: an exported model as an ONNX graph, beside the files that hold its weights.

Tables are not copied: the graph names their places in the safetensors files, which ONNX calls
external data, so that it is as small and as quick to write for any size of tables.
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
            "export.onnx: expected the packages onnx and onnxscript, got no "
            f"{' and no '.join(missing)}. Run `pip install 'hotrec[onnx]'`."
        )


def write_onnx(
    directory: Path,
    shape: Architecture,
    dense: Mapping[str, torch.Tensor],
    tables: Mapping[str, Forms],
) -> None:
    """Write the graph of an exported model.

    Inputs are ``dense``, float32 (B, N), and ``ids.<feature>``, int64 (B, L) with -1 where there is
    none; B, and L of each feature, may be anything. The output is ``logits``.

    Args:
        directory: Where the model is exported.
        shape: Its architecture.
        dense: Its weights but the tables.
        tables: Type and shape of each tensor in each table's file.

    Raises:
        ValueError: If the layers do something that ONNX has no form for.
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
        # It would compute constants from tables that are not there.
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
    """Export without what torch says about packages and names of axes that do not matter here."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(model, **settings)
    except OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ValueError(
            "export.onnx: expected layers that torch.export and ONNX have a form for, got "
            f"{reason.rstrip('.')}. Change the layers, or leave export.onnx out."
        ) from error
    assert program is not None  # None is of the older exporter
    return program


def _outline(
    shape: Architecture, dense: Mapping[str, torch.Tensor], tables: Mapping[str, Forms]
) -> PlainModel:
    """The model with tables of the right shape that take no memory."""

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
