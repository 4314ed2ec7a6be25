"""What ``fit`` writes before it starts the run, and what it and ``predict`` refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hotrec.cli import fit as module
from hotrec.cli.fit import Run, fit, predict
from hotrec.cli.store import build_config, compose_config

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
    fit({**TABLE, "price": TABLE["price"][::-1]}, label="clicked", quiet=True)
    fit(TABLE, label="bought", quiet=True)
    fit(TABLE, label="clicked", columns={"bought": None}, quiet=True)
    assert len({call["data"] for call in started}) == 5
    assert before.items() <= times().items()


def test_roles_are_corrected(capfd: pytest.CaptureFixture[str]) -> None:
    columns = {
        "bought": None,  # a leak
        "age": {"kind": "categorical", "table": "ages"},
        "price": {"transform": "none", "fill": 3},
        "price_bucket": {"kind": "categorical", "source": "price", "derive": "log_bucket"},
    }
    fit(TABLE, label="clicked", name="events", columns=columns)
    found = source_of("events").columns
    assert list(found) == ["label", "user", "age", "price", "price_bucket"]
    assert (found["age"].kind, found["age"].table) == ("categorical", "ages")
    assert (found["age"].fill, found["age"].standardize) == (0, False)  # of another kind
    price = found["price"]
    assert (price.kind, price.transform, price.fill, price.standardize) == (
        "dense",
        "none",
        3,
        True,
    )
    assert found["price_bucket"].derive == "log_bucket"
    said = capfd.readouterr().err
    assert "conf/data/events.yaml: label clicked, 1 dense, 3 categorical" in said
    assert "left out: bought" in said
    assert "bought: alone" not in said


def test_given_roles_are_enough() -> None:
    numbers = {"clicked": TABLE["clicked"], "price": TABLE["price"]}
    with pytest.raises(ValueError, match="^table: expected a column of ids, got"):
        fit(numbers)
    fit(numbers, columns={"price": {"kind": "categorical"}}, name="events")
    assert source_of("events").columns["price"].kind == "categorical"


def test_another_table_or_description_is_not_replaced() -> None:
    fit(TABLE, label="clicked", name="events")
    with pytest.raises(
        ValueError, match=r"^data/events/table.parquet: expected this table or none"
    ):
        fit({**TABLE, "price": TABLE["price"][::-1]}, label="clicked", name="events")
    for changed in ({"label": "bought"}, {"columns": {"bought": None}}):
        with pytest.raises(ValueError, match=r"^conf/data/events.yaml: expected the description"):
            fit(TABLE, **{"label": "clicked", "name": "events", **changed})
    file = Path("conf/data/events.yaml")
    file.write_text(file.read_text() + "# by hand\n")
    with pytest.raises(ValueError, match="`hotrec run data=events` trains with it as it is"):
        fit(TABLE, label="clicked", name="events")
    assert file.read_text().endswith("# by hand\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"label": "nope"}, r"^label: expected columns of 0 and 1, .* got 'nope'\."),
        ({"label": []}, r"^label: expected columns of 0 and 1, .* got none\."),
        ({"time": "price"}, r"^time: expected a column of times"),
        ({"name": "a b"}, r"^name: expected letters, digits and '_', got 'a b'\."),
        ({"name": "kuairand"}, r"^name: expected another name than "),
        (
            {"columns": {"age": {"kind": "categoricl"}}},
            r"columns\.age\.kind: expected one of label",
        ),
        ({"columns": {"age": {"kin": "dense"}}}, r"columns\.age\.kin: expected one of kind"),
        ({"columns": {"usr": {"kind": "dense"}}}, r"columns\.usr.* got 'usr'\."),
        ({"columns": {"usr": None}}, r"^columns\.usr: expected one of .*, got 'usr'\."),
        ({"table": {name: [] for name in TABLE}}, r"^table: expected rows, got none"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], said: str, started: list[dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        fit(**{"table": TABLE, "label": "clicked", **arguments})
    assert "\n" not in str(caught.value)
    assert started == []
    assert [path for path in Path().rglob("*") if path.is_file()] == []


def test_predict_needs_a_run() -> None:
    with pytest.raises(ValueError, match="^run_dir: expected a run directory with .*, got nope,"):
        predict("nope", TABLE)
