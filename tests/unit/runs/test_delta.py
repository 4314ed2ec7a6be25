"""A delta and the export that it is applied to make the whole export, across generations too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import hotrec
from hotrec.artifact import (
    ArtifactError,
    Verify,
    checksum_of,
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
from tests.faults.edits import agree
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


def test_another_version_of_the_code_is_the_same_export(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may have another hotrec than the trainer, whose next delta names the hash."""
    other = tmp_path / "encoder.py"
    other.write_text("# of another version\n")
    monkeypatch.setitem(exported.CODE, "encoder.py", other)
    made = apply_delta(exports.base, exports.delta, tmp_path / "made")
    found, expected = (
        read_artifact(path, kind=exported.KIND, verify=Verify.full)
        for path in (made, exports.whole)
    )
    assert (made / "encoder.py").read_text() == other.read_text()
    assert found.files["encoder.py"] != expected.files["encoder.py"]
    assert found.content_hash == expected.content_hash
    (made / "encoder.py").write_text("# altered since\n")
    with pytest.raises(ArtifactError, match=r"encoder\.py: expected"):
        read_artifact(made, kind=exported.KIND, verify=Verify.full)


def test_an_export_is_brought_up_to_date_in_place(exports: Exports) -> None:
    apply_delta(exports.base, exports.delta, exports.base)
    found, expected = (read_artifact(p, kind=exported.KIND) for p in (exports.base, exports.whole))
    assert found.content_hash == expected.content_hash


def test_rows_that_differ_in_a_bit_are_changed() -> None:
    before = {"weight": np.array([[0.0, 5], [1.0, 5], [2.0, 5]], np.float32)}
    more_than_2 = np.nextafter(np.float32(2), np.float32(3))
    after = np.array([[-0.0, 5], [1.0, 5], [more_than_2, 5], [4.0, 5]], np.float32)
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


# What another writer, or somebody, may have made of the files, with a manifest that agrees.

Forge = Callable[[Path], object]
once = pytest.mark.parametrize("folder", [0], indirect=True, ids=["grown"])


def hash_of(directory: Path) -> str:
    found: str = json.loads((directory / "manifest.json").read_text())["content_hash"]
    return found


def tensors(file: str, change: Callable[[dict[str, np.ndarray]], object]) -> Forge:
    def forge(directory: Path) -> None:
        held = dict(load_file(directory / file))
        change(held)
        save_file(held, directory / file)

    return forge


def user(change: Callable[[dict[str, np.ndarray]], object]) -> Forge:
    return tensors("tables/user.safetensors", change)


def dense(change: Callable[[dict[str, np.ndarray]], object]) -> Forge:
    return tensors("dense.safetensors", change)


def described(change: Callable[[dict[str, Any]], object]) -> Forge:
    def forge(directory: Path) -> None:
        (path,) = (found for found in directory.glob("*.json") if found.stem in ("model", "delta"))
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return forge


def vocabulary(values: list[str | None], rows: list[int | None]) -> Forge:
    return lambda directory: pq.write_table(
        pa.table({"value": pa.array(values, pa.large_string()), "row": pa.array(rows, pa.int64())}),
        directory / "vocab/user.parquet",
    )


def linked(file: str) -> Forge:
    """The very file, but elsewhere."""

    def forge(directory: Path) -> None:
        elsewhere = directory.parent / f"elsewhere-{Path(file).name}"
        (directory / file).rename(elsewhere)
        (directory / file).symlink_to(elsewhere)

    return forge


def cast(name: str, dtype: type) -> Callable[[dict[str, np.ndarray]], object]:
    return lambda held: held.update({name: held[name].astype(dtype)})


def put(name: str, at: Any, value: float) -> Callable[[dict[str, np.ndarray]], object]:
    def change(held: dict[str, np.ndarray]) -> None:
        held[name] = held[name].copy()
        held[name][at] = value

    return change


def shape_of(**changes: Any) -> Forge:
    return described(lambda document: document["architecture"].update(changes))


def tables_of(**changes: Any) -> Forge:
    return described(lambda document: document["tables"][0].update(changes))


FORGED_EXPORTS: dict[str, tuple[Forge, str]] = {
    "fewer-rows": (
        user(lambda held: held.update(weight=held["weight"][:-1])),
        r"user.safetensors: expected rows of shape \(\d, 4\), got",
    ),
    "fewer-rows-told": (tables_of(num_rows=2), r"user.safetensors: expected rows of shape \(2, 4"),
    "no-rows-told": (tables_of(num_rows=0), r"model.json: .*0 rows of table user"),
    "nan": (user(put("weight", (1, 2), np.nan)), r"user.safetensors: .*in weight of row 1"),
    "infinite": (user(put("weight", (0, 0), np.inf)), r"user.safetensors: .*in weight of row 0"),
    "wider": (user(cast("weight", np.float64)), r"expected weight of type torch.float32, got"),
    "narrower": (user(cast("weight", np.float16)), r"expected weight of type torch.float32, got"),
    "int8-without-scale": (user(cast("weight", np.int8)), r"got weight of type torch.int8"),
    "scaled": (
        user(lambda held: held.update(scale=np.ones(len(held["weight"]), np.float32))),
        r"expected weight of type torch.float32, got scale",
    ),
    "no-weight": (user(lambda held: held.update(rows=held.pop("weight"))), r"got rows of type"),
    "other-layers": (
        dense(lambda held: held.update({name: value + 1 for name, value in held.items()})),
        r"dense.safetensors: expected the layers of this model",
    ),
    "layer-missing": (
        dense(lambda held: held.popitem()),
        r"dense.safetensors: expected the layers",
    ),
    "layers-not-named": (
        lambda at: (dense(put("top.0.bias", 0, np.nan))(at), sign(at)),
        r"dense.safetensors: expected finite values .* in top.0.bias",
    ),
    "layers-of-other-sizes": (shape_of(over_layer_sizes=[64, 1]), r"expected a whole exported"),
    "unsigned": (described(lambda d: d.pop("dense_sha256")), r"with SHA-256 None"),
    "pooling": (shape_of(pooling="max"), r"model.json: .*a pooling 'max'"),
    "kind": (shape_of(kind="transformer"), r"model.json: .*a kind 'transformer'"),
    "more-keys": (shape_of(heads=4), r"model.json: expected the description"),
    "dimension": (shape_of(embedding_dim=2**40), r"expected rows of shape"),
    "no-dimension": (shape_of(embedding_dim="4"), r"an embedding_dim of '4'"),
    "feature-of-no-table": (shape_of(features=[["user", "guest"]]), r"model.json: .*'guest'"),
    "rows-of-no-type": (described(lambda d: d.update(rows="fp8")), r"a rows 'fp8'"),
    "file-elsewhere": (
        tables_of(file="../whole/tables/user.safetensors"),
        r"model.json: .*the file '../whole/tables",
    ),
    "name-elsewhere": (
        described(
            lambda d: (
                d["tables"][0].update(name="../u", file="tables/../u.safetensors"),
                d["architecture"].update(features=[["user", "../u"], ["videos", "videos"]]),
            )
        ),
        r"model.json: .*a table '../u', whose files would be elsewhere",
    ),
    "table-twice": (
        described(lambda d: d["tables"].append(d["tables"][0])),
        r"model.json: .*tables",
    ),
    "link": (linked("tables/user.safetensors"), r"user.safetensors: expected a file in the direc"),
    "link-of-description": (linked("model.json"), r"model.json: expected a file in the directory"),
    "link-of-directory": (linked("tables"), r"user.safetensors: expected a file in the directory"),
    "link-of-layers": (linked("dense.safetensors"), r"dense.safetensors: expected a file in the"),
}


def sign(directory: Path) -> None:
    """The description of the layers as they are."""
    checksum = checksum_of(directory / "dense.safetensors", "sha256")
    described(lambda document: document.update(dense_sha256=checksum))(directory)


@once
@pytest.mark.parametrize("name", FORGED_EXPORTS)
def test_a_forged_export_is_refused(
    folder: Path, exports: Exports, tmp_path: Path, name: str
) -> None:
    """By ``load_model``, ``apply_delta`` and ``hotrec export since=``."""
    forge, message = FORGED_EXPORTS[name]
    forge(exports.base)
    if "link" not in name:
        agree(exports.base)
        agree(exports.delta, {exported.KIND: hash_of(exports.base)})
    with pytest.raises(ValueError, match=message) as error:
        hotrec.load_model(exports.base)
    assert "\n" not in str(error.value)
    with pytest.raises(ArtifactError, match=message):
        apply_delta(exports.base, exports.delta, tmp_path / "made")
    config = config_of(folder, *warm_words(folder))
    with pytest.raises(ArtifactError, match=rf"{message}|since .*base: expected rows of"):
        export(config, folder / "warm", tmp_path / "made", exports.base)
    assert not (tmp_path / "made").exists()


@once
def test_the_class_that_a_description_names_is_not_imported(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("open('imported', 'w')\nclass Model: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    shape_of(kind="own", target="evil.Model")(exports.base)
    agree(exports.base)
    agree(exports.delta, {exported.KIND: hash_of(exports.base)})
    with pytest.raises(
        ValueError, match=r"got one of the class evil.Model. Call .*allow_code=True"
    ):
        hotrec.load_model(exports.base)
    apply_delta(exports.base, exports.delta, tmp_path / "made")
    assert not Path("imported").exists()


WHOLE = r"user.parquet: expected a value for each of the rows 1 to \d once, in order"
ROWS = r"user.safetensors: expected increasing rows below \d"
FORGED_DELTAS: dict[str, tuple[Forge, str]] = {
    "row-outside": (user(put("row", -1, 99)), ROWS),
    "row-negative": (user(put("row", 0, -1)), ROWS),
    "row-twice": (user(lambda h: put("row", 1, h["row"][0])(h)), ROWS),
    "rows-unsorted": (
        user(lambda h: h.update({n: np.ascontiguousarray(v[::-1]) for n, v in h.items()})),
        ROWS,
    ),
    "new-row-missing": (user(lambda h: h.update({n: v[:-1] for n, v in h.items()})), ROWS),
    "rows-of-floats": (user(cast("row", np.float32)), r"expected the rows' numbers of type int64"),
    "no-rows": (user(lambda h: h.pop("row")), r"user.safetensors: expected .*, got"),
    "fewer-weights": (user(lambda h: h.update(weight=h["weight"][:-1])), r"expected rows of shape"),
    "nan": (user(put("weight", (0, 0), np.nan)), r"user.safetensors: expected finite values"),
    "other-type": (user(cast("weight", np.float16)), r"expected weight of type torch.float32"),
    "other-layers": (dense(put("top.0.bias", 0, 7)), r"dense.safetensors: expected the layers"),
    "grown-without-rows": (tables_of(num_rows=40), r"user.safetensors: expected .*40"),
    "shrunk": (tables_of(num_rows=1), r"tables: expected .* none with fewer rows"),
    "name-of-another": (
        described(
            lambda d: (
                d["tables"][0].update(name="../../base/u", file="tables/../../base/u.safetensors"),
                d["architecture"].update(features=[["user", "../../base/u"], ["videos", "videos"]]),
            )
        ),
        r"delta.json: .*whose files would be elsewhere",
    ),
    "other-table": (
        described(
            lambda d: (
                d["tables"][0].update(name="guest", file="tables/guest.safetensors"),
                d["architecture"].update(features=[["user", "guest"], ["videos", "videos"]]),
            )
        ),
        r"tables/guest.safetensors among|tables: expected",
    ),
    "vocabulary-null": (vocabulary(["x", None], [3, 5]), WHOLE),
    "vocabulary-outside": (vocabulary(["x", "y"], [3, 99]), WHOLE),
    "vocabulary-row-0": (vocabulary(["x"], [0]), WHOLE),
    "vocabulary-negative": (vocabulary(["x"], [-3]), WHOLE),
    "vocabulary-twice": (vocabulary(["x", "y"], [3, 3]), WHOLE),
    "vocabulary-row-null": (vocabulary(["x", "y"], [3, None]), WHOLE),
    "vocabulary-unsorted": (vocabulary(["x", "y"], [4, 3]), WHOLE),
    "vocabulary-of-numbers": (
        lambda at: pq.write_table(pa.table({"v": [1]}), at / "vocab/user.parquet"),
        r"user.parquet: expected",
    ),
    "link": (linked("tables/user.safetensors"), r"user.safetensors: expected a file in the direc"),
    "graph-not-listed": (
        lambda at: (at / "model.onnx").write_bytes(b"graph"),
        r"expected the file model.onnx among",
    ),
}


@once
@pytest.mark.parametrize("name", FORGED_DELTAS)
def test_a_forged_delta_is_refused(exports: Exports, tmp_path: Path, name: str) -> None:
    forge, message = FORGED_DELTAS[name]
    forge(exports.delta)
    if name not in ("link", "graph-not-listed"):
        agree(exports.delta)
    before = {path: path.read_bytes() for path in exports.base.rglob("*") if path.is_file()}
    with pytest.raises(ArtifactError, match=message) as error:
        apply_delta(exports.base, exports.delta, tmp_path / "made")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "made").exists()
    assert before == {path: path.read_bytes() for path in exports.base.rglob("*") if path.is_file()}


@once
@pytest.mark.parametrize("output", ["base/new", "delta/tables/new", "delta"])
def test_it_is_not_written_into_what_it_is_made_from(exports: Exports, output: str) -> None:
    with pytest.raises(ValueError, match=r"expected a directory outside|expected an empty direct"):
        apply_delta(exports.base, exports.delta, exports.base.parent / output)
    for path, kind in ((exports.base, exported.KIND), (exports.delta, DELTA_KIND)):
        read_artifact(path, kind=kind, verify=Verify.full)


@once
@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        (np.arange(3, dtype=np.uint64), r"expected \d hashes"),
        (np.array(["a", None], object), r"user.npy: expected an array of numpy"),
        (lambda held: np.full_like(held, 7), r"different hash for each row"),
        (lambda held: held.astype(np.float64), r"of type uint64, got float64"),
    ],
    ids=["fewer", "pickled", "twice", "floats"],
)
def test_forged_hashes_are_refused(exports: Exports, hashes: Any, message: str) -> None:
    path = exports.base / "vocab/user.npy"
    held = np.load(path)
    np.save(path, hashes(held) if callable(hashes) else hashes, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        hotrec.load_encoder(exports.base)
