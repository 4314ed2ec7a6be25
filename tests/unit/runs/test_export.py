"""The files of an exported model, written in pieces."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from hotrec.artifact import ArtifactError, commit_artifact, scratch_directory
from hotrec.config.roots import RowType
from hotrec.embedding.canonical import TensorPart, TensorParts
from hotrec.runs import export
from hotrec.runs.export import check_place, quantize, write_table
from hotrec.train.checkpoint import KIND, open_tensors
from hotrec.train.tensor_files import TensorFiles, make_index, own_shares, write_tensors

NUM_ROWS, DIM = 50, 8


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(0))


def saved(rows: torch.Tensor, directory: Path) -> TensorFiles:
    """A checkpoint whose table "t" two ranks have written."""
    pieces = []
    with scratch_directory(directory, kind=KIND) as scratch:
        for rank, first in enumerate((0, 20)):
            held = rows[first : 20 if rank == 0 else None]
            part = TensorPart("t", (NUM_ROWS, DIM), held, (first, 0), is_shard=True)
            parts = TensorParts([part], [], {}, frozenset("t"))
            shares = own_shares(parts, rank, 2)
            pieces += write_tensors(shares, scratch, "tensors", rank)[0]
        commit_artifact(scratch, directory, kind=KIND, content={"tensors": make_index(pieces)})
    return open_tensors(directory)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 50])
@pytest.mark.parametrize("row_type", RowType)
def test_a_table_in_chunks(
    rows: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_type: RowType,
    rows_per_chunk: int,
) -> None:
    monkeypatch.setattr(export, "_CHUNK_BYTES", rows_per_chunk * 4 * DIM)
    with saved(rows, tmp_path / "step-00000001") as files:
        write_table(tmp_path / "t", files, "t", row_type)
    found = load_file(tmp_path / "t")
    if row_type is RowType.int8:
        scales, quantized = quantize(rows.numpy())
        np.testing.assert_array_equal(found["scale"], scales)
        np.testing.assert_array_equal(found["weight"], quantized)
    else:
        expected = rows.numpy().astype({"fp32": np.float32, "fp16": np.float16}[row_type.name])
        assert found["weight"].dtype == expected.dtype
        np.testing.assert_array_equal(found["weight"], expected)


@pytest.mark.parametrize(
    ("value", "row_type", "said"),
    [
        (70_000.0, RowType.fp16, r"rows=fp16, got 70000"),
        (float("nan"), RowType.fp32, "expected finite values in t, got nan"),
    ],
)
def test_values_outside_the_type_are_refused(
    rows: torch.Tensor, tmp_path: Path, value: float, row_type: RowType, said: str
) -> None:
    rows[30, 2] = value
    with saved(rows, tmp_path / "step-00000001") as files, pytest.raises(ArtifactError, match=said):
        write_table(tmp_path / "t", files, "t", row_type)


def test_outputs_stand_outside_of_artifacts(rows: torch.Tensor, tmp_path: Path) -> None:
    """A pipe or a link to itself is no artifact, and neither is waited for nor followed."""
    with saved(rows, tmp_path / "step-00000001"):
        pass
    with pytest.raises(ValueError, match=r"^output .*: expected a directory outside .*, got"):
        check_place(tmp_path / "step-00000001" / "deep" / "output")
    os.mkfifo(tmp_path / "manifest.json")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("output", "loop", "loop/output"):
        check_place(tmp_path / name)


def test_int8_is_within_half_a_step_and_keeps_zeros(rows: torch.Tensor) -> None:
    rows[7] = 0
    scales, quantized = quantize(rows.numpy())
    errors = np.abs(quantized * scales[:, None] - rows.numpy())
    assert (errors <= scales[:, None] / 2 + 1e-6).all()
    assert not quantized[7].any()
