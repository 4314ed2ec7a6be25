"""What ``fit`` writes before it starts the run, and what it and ``predict`` refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrec.cli import fit as module
from hotrec.cli.fit import Run, fit, predict
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import ColumnKind, ColumnSpec, DataSpec, SourceFormat, SourceSpec
from hotrec.config.roots import PredictConfig

NUM = 400
TABLE: dict[str, list[Any]] = {
    "clicked": [n % 3 // 2 for n in range(NUM)],
    "bought": [n % 9 // 8 for n in range(NUM)],
    "user": [f"u{n % 41}" for n in range(NUM)],
    "age": [float("nan") if n % 7 == 0 else 18 + n % 50 for n in range(NUM)],
    "price": [1.5 + n % 97 for n in range(NUM)],
}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The settings of the runs that were started."""
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = []

    def note(name: str, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
        calls.append({"command": name, **settings, **options})
        return {"run_dir": str(tmp_path / "runs/run/1"), "auc": 0.7, "page": "runs/run/1/a.html"}

    monkeypatch.setattr(module, "command", note)
    return calls


def source_of(name: str, workdir: Path = Path()) -> Any:
    words = [f"hydra.searchpath=[file://{workdir.absolute() / 'conf'}]", f"data={name}"]
    return build_config(compose_config("config", words)).data.source


def test_a_table_becomes_a_dataset(started: list[dict[str, Any]], tmp_path: Path) -> None:
    run = fit(TABLE, label="clicked", ranks=2, name="events", workdir="work", quiet=True,
              settings={"model": "dcnv2"})  # fmt: skip
    assert run == Run(tmp_path / "runs/run/1", tmp_path / "work", run.figures)
    assert (run.auc, run.page) == (0.7, tmp_path / "work/runs/run/1/a.html")
    assert started == [
        {"command": "run", "data": "events", "launch.num_ranks": 2, "trainer.batch_size": 64,
         "model": "dcnv2", "workdir": Path("work"), "quiet": True}
    ]  # fmt: skip
    source = source_of("events", Path("work"))
    assert source.files == ["data/events/table.parquet"]
    assert {name: column.kind for name, column in source.columns.items()} == {
        "label": "label", "bought": "categorical", "user": "categorical", "age": "dense",
        "price": "dense",
    }  # fmt: skip
    assert pq.read_table("work/data/events/table.parquet")["age"].null_count == 58
    left = [path.name for path in Path("work").iterdir()]
    assert sorted(left) == ["conf", "data"]


def test_the_same_table_is_not_written_again(started: list[dict[str, Any]]) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}

    for name in ("events", None):
        fit(TABLE, label="clicked", name=name, quiet=True)
        before = times()
        fit(TABLE, label="clicked", name=name, ranks=1, quiet=True)
        assert times() == before
    assert started[-1]["data"] == started[-2]["data"]
    # Another table, label or role is another dataset.
    others: list[dict[str, Any]] = [
        {"table": {**TABLE, "price": TABLE["price"][::-1]}},
        {"label": "bought"},
        {"columns": {"bought": None}},
    ]
    for other in others:
        fit(**{"table": TABLE, "label": "clicked", "quiet": True, **other})
        with pytest.raises(ValueError, match=r"^(conf|data)/.*events.*: expected the .*, got"):
            fit(**{"table": TABLE, "label": "clicked", "name": "events", **other})
    assert len({call["data"] for call in started}) == 5
    assert before.items() <= times().items()


@pytest.mark.parametrize(
    ("arguments", "key", "got"),
    [
        ({"label": "nope"}, "label", "'nope'"),
        ({"time": "price"}, "time", "'price'"),
        ({"name": "kuairand"}, "name", ""),
        ({"columns": {"age": {"kind": "categoricl"}}}, r"columns\.age\.kind", "'categoricl'"),
        ({"columns": {"usr": {"kind": "dense"}}}, "columns.usr", "'usr'"),
        ({"table": {name: [] for name in TABLE}}, "table", "none"),
        ({"table": {**TABLE, "odd": [1, "x"] * (NUM // 2)}}, "table column odd", ""),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], key: str, got: str, started: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=rf"^[\w.]*{key}.*: expected .*, got .*{got}") as caught:
        fit(**{"table": TABLE, "label": "clicked", **arguments})
    assert "\n" not in str(caught.value)
    assert started == []
    assert [path for path in Path().rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("labels", [["clicked"], ["clicked", "bought"]])
def test_scores_stand_at_their_rows(
    labels: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the log's labels are, and where a row could not be read."""
    columns = {"label" if len(labels) == 1 else name: ColumnSpec(ColumnKind.label, source=name)
               for name in labels}  # fmt: skip
    columns |= {name: ColumnSpec(ColumnKind.dense) for name in ("user", "age", "price")}
    source = SourceSpec(SourceFormat.arrow, ["log"], columns=columns)
    trained = replace(build_config(compose_config("config", ["paths.dataset=dataset"])),
                      data=DataSpec(source=source))  # fmt: skip

    def score(config: PredictConfig, of_run: Any, trained_dir: Path) -> Any:
        assert of_run.paths.dataset == str(tmp_path / "work" / "dataset")
        assert pq.read_table(config.input[0]).column_names == ["user", "age", "price"]
        found = {"line": [3, 1], **{f"score_{name}": [0.25, 0.5] for name in labels}}
        if len(labels) == 1:
            found["score"] = found.pop("score_clicked")
        (Path(config.output) / "scores").mkdir(parents=True)
        pq.write_table(pa.table(found), Path(config.output) / "scores" / "00000.parquet")
        return {"unknown_ids": {}}

    monkeypatch.setattr(module, "find_trained", Path)
    monkeypatch.setattr(module, "read_config", lambda *_: trained)
    monkeypatch.setattr(module, "predict_run", score)
    table = {name: values[:3] for name, values in TABLE.items() if name in {
        *labels, "user", "age", "price"}}  # fmt: skip
    table["not read"] = [1, "x", {}]
    scores = predict(Run(tmp_path / "run", tmp_path / "work", {}), table)
    expected = np.array([0.5, np.nan, 0.25], np.float32)
    if len(labels) == 1:
        scores = {"clicked": scores}
    assert list(scores) == labels
    for values in scores.values():
        np.testing.assert_array_equal(values, expected)


def test_what_predict_cannot_score_with_is_refused() -> None:
    with pytest.raises(ValueError, match="^run_dir: expected .*, got nope "):
        predict("nope", TABLE)
