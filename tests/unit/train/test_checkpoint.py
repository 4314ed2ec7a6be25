from __future__ import annotations

import io
import json
import logging
import random
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from hotrec import artifact
from hotrec.artifact import ArtifactError
from hotrec.embedding.canonical import canonical_parts
from hotrec.runtime.ranks import Ranks
from hotrec.train import tensor_files
from hotrec.train.checkpoint import (
    Checkpoints,
    Position,
    find_latest,
    lineage_of,
    load_checkpoint,
    load_rows,
    open_tensors,
    restore_random_state,
    save_checkpoint,
)
from hotrec.train.pipelines import make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.helpers.tiny import NUM_ROWS, TinyLoader, build_tiny

FACTS = {"dataset": "3f2a91", "partition": None, "model": {"name": "dlrm", "dim": 4}}


class Run:
    """A tiny model that can train, be saved and be loaded."""

    def __init__(self, **kwargs: Any) -> None:
        self.model, self.optimizer = build_tiny(**kwargs)
        self.loader = TinyLoader(num_batches=40)
        self.pipeline = make_pipeline(
            PipelineSpec(PipelineKind.sparse_dist), self.model, self.optimizer, torch.device("cpu")
        )
        self.iterator: Any = None
        self.step = 0
        self.lineage = "0" * 32

    def train(self, num_steps: int) -> list[float]:
        if self.iterator is None:
            self.iterator = iter(self.loader)
        batches = iter([next(self.iterator) for _ in range(num_steps)])
        self.step += num_steps
        return [float(self.pipeline.progress(batches)[0]) for _ in range(num_steps)]

    def save(self, directory: Path, keep_last: int = 3, facts: dict[str, Any] = FACTS) -> Path:
        return save_checkpoint(
            Checkpoints(directory, facts, keep_last, lineage=self.lineage),
            Position(self.step, self.step * 8),
            self.model,
            self.optimizer,
            self.loader,
        )

    def load(self, path: Path, facts: dict[str, Any] = FACTS) -> Position:
        position = load_checkpoint(
            path, model=self.model, optimizer=self.optimizer, loader=self.loader, facts=facts
        )
        self.step = position.step
        return position


def weights_of(run: Run) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.named_parameters()}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_resumed_run_equals_the_uninterrupted_one(
    optimizer: type[torch.optim.Optimizer], one_rank: Ranks, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    whole = Run(optimizer=optimizer, dropout=0.4)
    whole.train(4)
    path = whole.save(tmp_path)
    expected = whole.train(6)
    expected_draws = (torch.rand(2).tolist(), np.random.rand(), random.random())  # noqa: NPY002

    torch.manual_seed(99)
    resumed = Run(optimizer=optimizer, dropout=0.4)
    resumed.train(2)
    resumed.iterator = None
    assert resumed.load(path) == Position(step=4, num_samples=32)
    assert resumed.loader.position == 4
    resumed.iterator = iter(resumed.loader)
    restore_random_state(path)
    assert resumed.train(6) == expected
    for name, value in weights_of(whole).items():
        torch.testing.assert_close(weights_of(resumed)[name], value, rtol=0, atol=0)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected_draws  # noqa: NPY002


def test_model_alone_can_be_loaded(one_rank: Ranks, tmp_path: Path) -> None:
    trained = Run()
    trained.train(3)
    path = trained.save(tmp_path)
    other = Run()
    load_checkpoint(path, model=other.model, facts=FACTS)
    for name, value in weights_of(trained).items():
        torch.testing.assert_close(weights_of(other)[name], value, rtol=0, atol=0)


def test_latest_and_keep_last(one_rank: Ranks, tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    (tmp_path / ".step-00000001.0a1b2c3d.tmp" / "tensors").mkdir(
        parents=True
    )  # killed while saving
    run = Run()
    for _ in range(4):
        run.train(1)
        path = run.save(tmp_path, keep_last=2)
        assert find_latest(tmp_path) == path
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000004",
    ]
    shutil.rmtree(tmp_path / "step-00000004")
    with pytest.raises(ArtifactError, match="got 'step-00000004'"):
        find_latest(tmp_path)
    with pytest.raises(ValueError, match="keep_last: expected 1 or more, got 0"):
        run.save(tmp_path, keep_last=0)


def test_another_lineage_is_kept(one_rank: Ranks, tmp_path: Path) -> None:
    run = Run()
    for _ in range(3):
        run.train(1)
        run.save(tmp_path, keep_last=2)
    resumed = Run()
    resumed.load(tmp_path / "step-00000002")
    resumed.lineage = "f" * 32
    for _ in range(3):
        resumed.train(1)
        path = resumed.save(tmp_path, keep_last=1)
        assert find_latest(tmp_path) == path
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000002", "step-00000003.00000000", "step-00000005"]
    assert lineage_of(tmp_path / "step-00000003.00000000") == "0" * 32


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def replace_file(saved: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and let the manifest agree."""
    (saved / name).write_bytes(content)
    edit_manifest(saved, files={name: content})


def edit_manifest(
    saved: Path, *, files: dict[str, bytes] | None = None, **content: Any
) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((saved / artifact.MANIFEST).read_text())
    del document["content_hash"]
    document["content"].update(content)
    for name in files or {}:
        document["files"][name] = {
            "num_bytes": (saved / name).stat().st_size,
            artifact.CHECKSUM: artifact.checksum_of(saved / name),
        }
    document["content_hash"] = artifact._hash_document(document)
    (saved / artifact.MANIFEST).write_text(json.dumps(document))
    return document


def test_no_file_runs_code(saved: Path, tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save({"torch": Payload(tmp_path / "ran")}, file)
    replace_file(saved, "random-00000.pt", file.getvalue())
    with pytest.raises(ArtifactError, match="may be malicious"):
        Run().load(saved)
    assert not (tmp_path / "ran").exists()


TENSORS = "tensors/00000-00000.safetensors"
TABLE = "rows.embeddings.row_wise.weight"


def test_files_that_differ_from_the_index_are_refused(saved: Path) -> None:
    index = json.loads((saved / artifact.MANIFEST).read_text())["content"]["tensors"]
    whole = load((saved / TENSORS).read_bytes())
    for content, found in (
        (save({**whole, TABLE: torch.zeros(21, 3)}), "got torch.float32 (21, 3)"),
        (save({**whole, TABLE: whole[TABLE].double()}), "got torch.float64 (21, 4)"),
        (save({name: value for name, value in whole.items() if name != TABLE}), TABLE),
        (b"no header", "Use another checkpoint"),
    ):
        replace_file(saved, TENSORS, content)
        with pytest.raises(ArtifactError, match=re.escape(found)):
            Run().load(saved)
    replace_file(saved, TENSORS, save(whole))
    Run().load(saved)
    for change in (
        {"pieces": []},
        {"pieces": index[TABLE]["pieces"] * 2},
        {"pieces": [{"file": "../manifest.json"}]},
        {"shape": None},
    ):
        edit_manifest(saved, tensors={**index, TABLE: {**index[TABLE], **change}})
        with pytest.raises(ArtifactError):
            Run().load(saved)


def shifted(index: dict[str, Any], **change: Any) -> dict[str, Any]:
    """The index with a change in the second of two halves of the table."""
    [piece] = index[TABLE]["pieces"]
    num_rows, dim = piece["shape"]
    first = {**piece, "shape": [num_rows // 2, dim]}
    second = {**piece, "first": [num_rows // 2, 0], "shape": [num_rows - num_rows // 2, dim]}
    return {**index, TABLE: {**index[TABLE], "pieces": [first, {**second, **change}]}}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"first": [-1, 0]}, "a piece at [-1, 0] of shape [11, 4] in [21, 4]"),
        ({"first": [9, 0]}, "the values at [9, 0] twice"),
        ({"first": [11, 0]}, "a piece at [11, 0] of shape [11, 4] in [21, 4]"),
        ({"first": [10, 1]}, "a piece at [10, 1]"),
        ({"first": [10]}, "a piece at [10] of shape [11, 4]"),
        ({"shape": [-11, -4]}, "a piece at [10, 0] of shape [-11, -4]"),
        ({"shape": [44, 1]}, "a piece at [10, 0] of shape [44, 1]"),
    ],
)
def test_pieces_hold_each_row_once(saved: Path, change: dict[str, Any], found: str) -> None:
    index = json.loads((saved / artifact.MANIFEST).read_text())["content"]["tensors"]
    edit_manifest(saved, tensors=shifted(index, **change))
    text = f"expected a complete tensor {TABLE}, got {found}"
    with pytest.raises(ArtifactError, match=re.escape(text)):
        open_tensors(saved)
    edit_manifest(saved, tensors=shifted(index))
    with open_tensors(saved) as files:
        assert files.shapes[TABLE] == (21, 4)


@pytest.mark.parametrize(
    ("part", "value", "found"),
    [
        ("row_wise.weight", float("nan"), "expected finite values"),
        ("row_wise.weight", float("inf"), "expected finite values"),
        ("over_arch", float("-inf"), "expected finite values"),
        ("row_wise.weight/momentum1", -1.0, "expected 0 or more"),
        ("row_wise.weight/momentum1", float("nan"), "expected 0 or more"),
        ("over_arch.*/sum", -0.5, "expected 0 or more"),
    ],
)
def test_values_with_which_a_run_is_lost_are_refused(
    saved: Path, part: str, value: float, found: str
) -> None:
    whole = load((saved / TENSORS).read_bytes())
    name = next(name for name in sorted(whole) if re.search(part, name))
    whole[name].view(-1)[-1] = value
    replace_file(saved, TENSORS, save(whole))
    with pytest.raises(ArtifactError, match=f"{TENSORS}: {found} in {re.escape(name)}, got "):
        Run().load(saved)


def test_another_type_of_weights_is_refused(saved: Path) -> None:
    index = json.loads((saved / artifact.MANIFEST).read_text())["content"]["tensors"]
    whole = load((saved / TENSORS).read_bytes())
    for dtype in (torch.float64, torch.int32):
        replace_file(saved, TENSORS, save({**whole, TABLE: whole[TABLE].to(dtype)}))
        name = str(dtype).removeprefix("torch.")
        edit_manifest(saved, tensors={**index, TABLE: {**index[TABLE], "dtype": name}})
        with pytest.raises(ArtifactError, match=rf"tensor {TABLE} in float32, got it in {name}"):
            Run().load(saved)


@pytest.mark.parametrize(
    "content",
    [
        {"step": -1},
        {"step": True},
        {"num_samples": -4},
        {"num_samples": 1.5},
        {"best": {}},
        {"best": {"step": 1, "loss": float("inf"), "last_step": 1, "num_worse": 0}},
        {"loader": None},
        {"loader": {}},
        {"loader": [1]},
    ],
)
def test_positions_that_are_none_are_refused(saved: Path, content: dict[str, Any]) -> None:
    edit_manifest(saved, **content)
    with pytest.raises(ArtifactError):
        Run().load(saved)


def test_states_of_random_generators_are_checked(saved: Path) -> None:
    state = torch.load(saved / "random-00000.pt", weights_only=True)
    for change in ({"torch": torch.ones(3)}, {"numpy": {}}, {"python": (1,)}):
        file = io.BytesIO()
        torch.save({**state, **change}, file)
        replace_file(saved, "random-00000.pt", file.getvalue())
        with pytest.raises(ArtifactError, match=r"random-00000.pt: expected the states of random"):
            restore_random_state(saved)


def test_a_damaged_name_of_the_best_checkpoint_ends_no_run(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved.parent / "best").write_bytes(b"\xff\x00")
    run = Run()
    run.load(saved)
    run.train(1)
    run.save(saved.parent)
    assert "best: expected a text file" in caplog.text


@pytest.fixture
def saved(one_rank: Ranks, tmp_path: Path) -> Path:
    run = Run()
    run.train(2)
    return run.save(tmp_path / "checkpoints")


def test_other_facts_are_refused(saved: Path) -> None:
    for name, value in (
        ("dataset", "77b0c4"),
        ("partition", "0011aa"),
        ("model", {"name": "dcnv2", "dim": 4}),
        ("embedding_dim", 8),
    ):
        with pytest.raises(ArtifactError, match=f"expected {name} ") as caught:
            Run().load(saved, facts={**FACTS, name: value})
        assert repr(value) in str(caught.value)


def test_other_model_and_other_optimizer_are_refused(saved: Path) -> None:
    with pytest.raises(ArtifactError, match=r"tensor .*over_arch.*got \(8"):
        Run(num_over=9).load(saved)
    with pytest.raises(
        ArtifactError,
        match=r"tensor .*/(sum|step|momentum1) of shape None",
    ):
        Run(optimizer=torch.optim.SGD).load(saved)


def test_cut_short_missing_or_edited_files_are_refused(saved: Path, tmp_path: Path) -> None:
    files = [path for path in saved.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(files) == 2
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ArtifactError, match=rf"{len(whole)} bytes, got {len(whole) // 2}"):
            Run().load(saved)
        file.unlink()
        with pytest.raises(ArtifactError, match="got none"):
            Run().load(saved)
        file.write_bytes(whole)
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["content"]["step"] = 1000
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="it was edited"):
        Run().load(saved)
    with pytest.raises(ArtifactError, match="got no such file"):
        Run().load(tmp_path / "nowhere")


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process cannot grow beyond 1000 bytes: writes fail as on a full disk.

    A context, not a fixture: pytest's own output may be a file.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def test_full_disk_leaves_what_was_there(saved: Path) -> None:
    before = sorted(saved.parent.rglob("*"))
    run = Run()
    run.train(3)
    failing = pytest.raises(Exception, match="File too large|rank 0|unexpected pos|write")
    with failing, full_disk():
        run.save(saved.parent)
    assert sorted(saved.parent.rglob("*")) == before
    assert find_latest(saved.parent) == saved


def test_a_checkpoint_is_named_when_it_is_in_its_place(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a run that is killed just before goes on from the one before."""
    run = Run()
    run.train(3)

    def fail(*_: object, **given: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr("hotrec.train.checkpoint.commit_artifact", fail)
    with pytest.raises(OSError, match="killed"):
        run.save(saved.parent)
    assert find_latest(saved.parent) == saved


def test_failure_while_writing_tensors_is_an_ordinary_error(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(saved.parent.rglob("*"))

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    run = Run()
    run.train(3)
    monkeypatch.setattr(tensor_files, "save_file", fail)
    with pytest.raises(OSError, match="No space left on device"):
        run.save(saved.parent)
    assert sorted(saved.parent.rglob("*")) == before


def test_loading_makes_no_gradients_for_tables(saved: Path) -> None:
    run = Run()
    run.load(saved)
    assert [name for name, value in run.model.named_parameters() if value.grad is not None] == []


TABLE_WISE = "dlrm.sparse_arch.embedding_bag_collection.embedding_bags.table_wise.weight"
SEQUENCE, TOP = "rows.embeddings.row_wise.weight", "dlrm.over_arch.model.1"


def load_named(run: Run, path: Path, names: dict[str, str | None]) -> dict[str, int]:
    """Rows that are beyond the checkpoint's table start anew."""

    def find_rows(table: str, rows: torch.Tensor) -> torch.Tensor:
        old = next((old for old, new in names.items() if new == table), table)
        return rows.where(rows < NUM_ROWS[old], -1)

    model, optimizer = run.model, run.optimizer
    return load_rows(path, model=model, optimizer=optimizer, find_rows=find_rows, names=names)


def test_what_is_called_otherwise_is_loaded_by_a_map_of_names(
    one_rank: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    trained = Run()
    trained.train(3)
    path = trained.save(tmp_path)
    other = Run(num_over=6)  # another width of the last layers
    before = {part.name: part.value.clone() for part in canonical_parts(other.model).parts}
    last = {"over_arch": None}
    # Every row of the shorter table is in the place of one of the longer table.
    num_rows = load_named(other, path, {"table_wise": "row_wise", "row_wise": "table_wise", **last})
    assert num_rows == {"data_parallel": 10, "row_wise": 21, "table_wise": 21}
    found = {part.name: part.value for part in canonical_parts(other.model, other.optimizer).parts}
    with open_tensors(path) as files:
        for state in ("", "/momentum1"):
            longer, shorter = files.whole(TABLE_WISE + state), files.whole(SEQUENCE + state)
            assert torch.equal(found[SEQUENCE + state], longer[:21])
            assert torch.equal(found[TABLE_WISE + state][:21], shorter)
            assert bool(longer.abs().sum() > 0)
        assert torch.equal(found[TABLE_WISE][21:], before[TABLE_WISE][21:])
        same = "dlrm.dense_arch.model._mlp.0._linear.weight"
        assert torch.equal(found[same], files.whole(same))
        assert torch.equal(found[f"{same}/sum"], files.whole(f"{same}/sum"))
    assert torch.equal(found[f"{TOP}.weight"], before[f"{TOP}.weight"])
    for line in (
        f"{SEQUENCE} loaded from {TABLE_WISE}",
        f"{TOP}.weight not in the checkpoint, initialized",
        f"{TOP}.weight in {path} unused",
    ):
        assert caplog.text.count(f"warm start: {line}") == 1
    assert "warm start: dlrm.dense_arch" not in caplog.text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            {"user": "table_wise"},
            r"warm_start_names\.user: expected an unmapped table or parameter of .*step",
        ),
        (
            {"table_wise": "user"},
            r"warm_start_names\.table_wise: .* of this model, .* got user\. Use",
        ),
        ({"table_wise": TOP}, rf"of this model, .* got {TOP}"),
        ({"table_wise": "row_wise", "row_wise": "row_wise"}, r"names\.row_wise: .* got row_wise"),
        ({"table_wise": None, TABLE_WISE: "row_wise"}, "expected an unmapped "),
        ({}, r"tensor dlrm\.over_arch.* \(6,\) .*got \(8,\).*warm_start_names=.dlrm: null"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    names: dict[str, str | None], message: str, one_rank: Ranks, tmp_path: Path
) -> None:
    trained = Run()
    trained.train(1)
    path = trained.save(tmp_path)
    other = Run(num_over=6)
    before = weights_of(other)
    with pytest.raises(ArtifactError, match=message):
        load_named(other, path, names)
    for name, value in weights_of(other).items():
        assert torch.equal(value, before[name])
