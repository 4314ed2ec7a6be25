"""A delta and the export that it is applied to make the whole export, across generations too."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import hotrec
from hotrec.artifact import (
    ArtifactError,
    Verify,
    commit_artifact,
    read_artifact,
    scratch_directory,
)
from hotrec.config.data import TableSpec
from hotrec.config.roots import Config, ExportConfig, ExportFormConfig, RowType
from hotrec.data.prepare import prepare
from hotrec.runs import exported
from hotrec.runs.delta import DELTA_KIND, apply_delta, changed_rows
from hotrec.runs.export import ExportedModel, export_run
from hotrec.runtime.ranks import Ranks
from tests.unit.data.logs import spec_by_day, write_day
from tests.unit.runs.test_generations import DAYS, config_of, run


@dataclass(frozen=True)
class Exports:
    """A model and its next state, exported, and the delta between them."""

    base: Path
    delta: Path
    whole: Path


def export(
    config: Config, run_dir: Path, output: Path, since: Path | None = None, **form: Any
) -> ExportedModel:
    form = {"eval_split": None, **form}
    words = ExportConfig(
        output=str(output),
        since=None if since is None else str(since),
        export=ExportFormConfig(**form),
    )
    return export_run(words, config, run_dir)


def warm_words(folder: Path) -> tuple[str, ...]:
    """A run on what is new in the next generation."""
    start = f"trainer.warm_start={folder}/before"
    return f"paths.dataset={folder}/grown", start, "order.new_only=true"


@pytest.fixture(scope="module", params=[0, 6], ids=["grown", "evicted"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_rank: Ranks
) -> Path:
    """A run exported in all forms, then a run on the next generation that went on from it."""
    folder = tmp_path_factory.mktemp("delta")
    first, second = (write_day(folder, day, users) for day, users in enumerate(DAYS))
    spec = spec_by_day(first, user=TableSpec(num_rows=request.param))
    prepare(spec, folder / "dataset")
    # Of its own, because this process may still have the dataset of its run open.
    grown = Path(shutil.copytree(folder / "dataset", folder / "grown"))
    run(folder, "before", one_rank)
    for rows in RowType:
        export(config_of(folder), folder / "before", folder / f"base-{rows.name}", rows=rows)
    prepare(spec, grown, append=[second])
    warm = warm_words(folder)
    run(folder, "warm", one_rank, *warm)
    for rows in RowType:
        base, output = folder / f"base-{rows.name}", folder / f"delta-{rows.name}"
        config = config_of(folder, *warm)
        export(config, folder / "warm", output, base, rows=rows)
        export(config, folder / "warm", folder / f"whole-{rows.name}", rows=rows)
    return folder


@pytest.fixture
def exports(folder: Path, tmp_path: Path) -> Exports:
    """Copies in fp32, to be changed."""
    for name in ("base", "delta", "whole"):
        shutil.copytree(folder / f"{name}-fp32", tmp_path / name)
    return Exports(tmp_path / "base", tmp_path / "delta", tmp_path / "whole")


@pytest.mark.parametrize("rows_per_chunk", [3, 100])
@pytest.mark.parametrize("row_type", RowType)
def test_applied_it_is_the_whole_export(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row_type: RowType,
    rows_per_chunk: int,
) -> None:
    monkeypatch.setattr(exported, "_CHUNK_BYTES", rows_per_chunk * 4 * 4)
    base, delta, whole = (folder / f"{name}-{row_type.name}" for name in ("base", "delta", "whole"))
    made = hotrec.apply_delta(base, delta, tmp_path / "made")
    found = read_artifact(made, kind=exported.KIND, verify=Verify.full)
    expected = read_artifact(whole, kind=exported.KIND)
    assert found.files == expected.files
    assert found.content_hash == expected.content_hash


def test_it_holds_what_differs_and_no_more(folder: Path) -> None:
    folders = [folder / f"{name}-fp32" for name in ("base", "delta", "whole")]
    base, delta, whole = (load_file(path / exported.table_file("user")) for path in folders)
    before, after = base["weight"], whole["weight"]
    is_kept = (before == after[: len(before)]).all(axis=1)
    rows = [*np.flatnonzero(~is_kept), *range(len(before), len(after))]
    assert 0 < len(rows) < len(after)
    assert delta["row"].tolist() == rows
    np.testing.assert_array_equal(delta["weight"], after[rows])
    ids = [
        {tuple(pair.values()) for pair in pq.read_table(path).to_pylist()}
        for path in (path / exported.vocabulary_file("user") for path in folders)
    ]
    assert ids[1] == ids[2] - ids[0]
    assert {value for value, _ in ids[1]} == {"x", "y"}


def test_an_export_is_brought_up_to_date_in_place(exports: Exports) -> None:
    apply_delta(exports.base, exports.delta, exports.base)
    found, expected = (read_artifact(p, kind=exported.KIND) for p in (exports.base, exports.whole))
    assert found.content_hash == expected.content_hash


def test_rows_that_differ_in_a_bit_are_changed() -> None:
    before = {"weight": np.array([[0.0], [1.0], [2.0]], np.float32)}
    more_than_2 = np.nextafter(np.float32(2), np.float32(3))
    after = np.array([[-0.0], [1.0], [more_than_2], [4.0]], np.float32)
    chunks = [{"weight": after[:1]}, {"weight": after[1:]}]
    assert [chunk["row"].tolist() for chunk in changed_rows(chunks, before)] == [[0], [2, 3]]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: flip(e.delta / "tables/user.safetensors"), r"delta/tables/user.safetensors: "),
        (lambda e: flip(e.base / "tables/user.safetensors"), r"base/tables/user.safetensors: "),
        (lambda e: (e.delta / "vocab/user.parquet").unlink(), r"delta/vocab/user.parquet: "),
        (lambda e: (e.delta / "manifest.json").unlink(), r"delta/manifest.json: "),
        (
            lambda e: (shutil.rmtree(e.base), e.whole.rename(e.base)),
            r"delta: expected a model delta made from the model export",
        ),
        (
            lambda e: (shutil.rmtree(e.delta), e.whole.rename(e.delta)),
            r"delta/manifest.json: expected kind 'model delta'",
        ),
    ],
    ids=["damaged", "base-damaged", "file-missing", "missing", "other-base", "no-delta"],
)
def test_what_does_not_fit_is_refused(
    exports: Exports, tmp_path: Path, change: Callable[[Exports], object], message: str
) -> None:
    change(exports)
    with pytest.raises(ArtifactError, match=message):
        apply_delta(exports.base, exports.delta, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def describe_otherwise(base: Path, old: str, new: str) -> None:
    """Another description, in a manifest that agrees with it."""
    content = read_artifact(base, kind=exported.KIND).content
    with scratch_directory(base, kind=exported.KIND) as scratch:
        shutil.copytree(base, scratch, ignore=lambda *_: ["manifest.json"], dirs_exist_ok=True)
        text = (base / "model.json").read_text()
        (scratch / "model.json").write_text(re.sub(old, new, text))
        commit_artifact(scratch, base, kind=exported.KIND, content=content)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r'"dataset": "\w+"', '"dataset": "0123456789abcdef"', r"got one of 0123456789ab"),
        ('"rows": "fp32"', '"rows": "int8"', r"of 4 values in fp32, got rows of 4 in int8"),
        ('"embedding_dim": 4', '"embedding_dim": 8', r"of 4 values .* got rows of 8 in fp32"),
    ],
)
def test_a_base_of_another_kind_is_refused(
    folder: Path, exports: Exports, tmp_path: Path, old: str, new: str, message: str
) -> None:
    describe_otherwise(exports.base, old, new)
    config = config_of(folder, *warm_words(folder))
    with pytest.raises(ArtifactError, match=rf"since .*base: expected .*{message}"):
        export(config, folder / "warm", tmp_path / "new", exports.base)
    assert not (tmp_path / "new").exists()


def test_the_manifest_names_what_it_is_applied_to(folder: Path) -> None:
    delta = read_artifact(folder / "delta-fp32", kind=DELTA_KIND)
    base = read_artifact(folder / "base-fp32", kind=exported.KIND)
    assert delta.made_from[exported.KIND] == base.content_hash
