from __future__ import annotations

import io
import json
import logging
import random
import re
from collections.abc import Callable
from contextlib import nullcontext
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


def test_latest_and_keep_last(one_rank: Ranks, tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    killed = tmp_path / ".step-00000001.0a1b2c3d.tmp" / "tensors"  # while it saved
    killed.mkdir(parents=True)
    run = Run()
    for _ in range(4):
        run.train(1)
        path = run.save(tmp_path, keep_last=2)
        assert find_latest(tmp_path) == path
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000003", "step-00000004"]


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
    with pytest.raises(ArtifactError):
        Run().load(saved)
    assert not (tmp_path / "ran").exists()


TENSORS = "tensors/00000-00000.safetensors"
TABLE = "rows.embeddings.row_wise.weight"


def index_of(saved: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((saved / artifact.MANIFEST).read_text())["content"][
        "tensors"
    ]
    return index


def put(part: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """A value in the last place of a tensor."""

    def change(whole: dict[str, torch.Tensor]) -> None:
        name = next(name for name in sorted(whole) if re.search(part, name))
        whole[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole.update({TABLE: torch.zeros(21, 3)}),
        lambda whole: whole.update({TABLE: whole[TABLE].double()}),
        lambda whole: whole.update({TABLE: whole[TABLE].int()}),
        lambda whole: whole.pop(TABLE),
        put(r"row_wise.weight$", float("nan")),
        put(r"row_wise.weight$", float("inf")),
        put(r"row_wise.weight/momentum1", -1.0),
        put(r"row_wise.weight/momentum1", float("nan")),
        put(r"over_arch.*weight$", float("-inf")),
        put(r"over_arch.*/sum", -0.5),
    ],
)
def test_values_with_which_a_run_is_lost_are_refused(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    index, whole = index_of(saved), load((saved / TENSORS).read_bytes())
    change(whole)
    replace_file(saved, TENSORS, save(whole))
    dtype = str(whole.get(TABLE, torch.zeros(1)).dtype).removeprefix("torch.")
    edit_manifest(saved, tensors={**index, TABLE: {**index[TABLE], "dtype": dtype}})
    with pytest.raises(ArtifactError, match=r"row_wise\.weight|over_arch"):
        Run().load(saved)


@pytest.mark.parametrize(
    "change",
    [
        *({"first": first} for first in ([-1, 0], [9, 0], [11, 0], [10, 1], [10])),
        *({"shape": shape} for shape in ([-11, -4], [44, 1], None)),
    ],
)
def test_pieces_hold_each_row_once(saved: Path, change: dict[str, Any]) -> None:
    index = index_of(saved)
    [piece] = index[TABLE]["pieces"]
    for changed, is_whole in (({}, True), (change, False)):
        halves = [
            {**piece, "shape": [10, 4]},
            {**piece, "first": [10, 0], "shape": [11, 4], **changed},
        ]
        edit_manifest(saved, tensors={**index, TABLE: {**index[TABLE], "pieces": halves}})
        opens = nullcontext() if is_whole else pytest.raises(ArtifactError)
        with opens, open_tensors(saved) as files:
            assert files.shapes[TABLE] == (21, 4)


@pytest.mark.parametrize(
    "content",
    [
        *({"step": -1}, {"step": True}, {"num_samples": -4}, {"num_samples": 1.5}),
        *({"loader": None}, {"loader": {}}, {"loader": [1]}, {"best": {}}),
        {"best": {"step": 1, "loss": float("inf"), "last_step": 1, "num_worse": 0}},
        {"tensors": []},
        {"tensors": [{"file": "../manifest.json"}]},
    ],
)
def test_a_forged_manifest_is_refused(saved: Path, content: dict[str, Any]) -> None:
    if (pieces := content.get("tensors")) is not None:
        index = index_of(saved)
        content = {"tensors": {**index, TABLE: {**index[TABLE], "pieces": pieces}}}
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
        with pytest.raises(ArtifactError, match=rf"{name}\b.*{re.escape(repr(value))}"):
            Run().load(saved, facts={**FACTS, name: value})
    for other, name in ((Run(num_over=9), "over_arch"), (Run(optimizer=torch.optim.SGD), "/")):
        with pytest.raises(ArtifactError, match=name):
            other.load(saved)


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
    lines = [message for message in caplog.messages if message.startswith("warm start: ")]
    for said in (SEQUENCE, f"{TOP}.weight"):
        assert any(said in line for line in lines)
    assert not any("dlrm.dense_arch" in line for line in lines)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"user": "table_wise"}, r"warm_start_names\.user\b"),
        ({"table_wise": "user"}, r"warm_start_names\.table_wise\b.* user"),
        ({"table_wise": TOP}, rf"warm_start_names\.table_wise\b.* {TOP}"),
        ({"table_wise": "row_wise", "row_wise": "row_wise"}, r"warm_start_names\.row_wise\b"),
        ({"table_wise": None, TABLE_WISE: "row_wise"}, "warm_start_names"),
        ({}, r"dlrm\.over_arch.*warm_start_names"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    names: dict[str, str | None], said: str, saved: Path
) -> None:
    other = Run(num_over=6)
    before = weights_of(other)
    with pytest.raises(ArtifactError, match=said):
        load_named(other, saved, names)
    for name, value in weights_of(other).items():
        assert torch.equal(value, before[name])
