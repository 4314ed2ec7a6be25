"""A table in memory, trained on two ranks and scored with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import hotrec as library
from benchmarks.own_data import write_log
from hotrec.cli.call import override_words
from tests.e2e.conftest import environment, hotrec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = """
import pyarrow.parquet as pq
import hotrec

table = pq.read_table("events.parquet")
hotrec.fit(table, label="clicked", time="shown_at", ranks=2, name="events", workdir="other")
"""


def fit(events: pa.Table, workdir: Path) -> library.Run:
    """``hotrec.fit`` with commands that start as those of other tests."""

    def command(name: str, settings: dict[str, Any], *, workdir: Path, **_: Any) -> dict[str, Any]:
        return hotrec(name, *override_words(settings), cwd=workdir).figures

    settings = {"planner.costs": "cpu_1gbit"}
    with mock.patch("hotrec.cli.fit.command", command):
        return library.fit(events, label="clicked", time="shown_at", ranks=2, name="events",
                           workdir=workdir, settings=settings)  # fmt: skip


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    file = tmp_path_factory.mktemp("log") / "events.csv"
    write_log(file, 3000)
    options = pyarrow.csv.ConvertOptions(null_values=["NULL", ""], strings_can_be_null=True)
    return pyarrow.csv.read_csv(file, convert_options=options)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, events: pa.Table) -> library.Run:
    made = fit(events, tmp_path_factory.mktemp("fit") / "work")
    assert made.figures["made"] == ["prepare", "plan", "train", "evaluate", "report"]
    return made


def test_a_run_like_any_other(run: library.Run, events: pa.Table) -> None:
    assert run.auc is not None
    assert 0.6 < run.auc < 1
    assert run.page.exists()
    assert (run.summary["auc"], run.summary["world_size"]) == (run.auc, 2)
    again = fit(events, run.workdir)
    assert (again.figures["made"], again.directory) == ([], run.directory)
    words = {"run_dir": run.directory, "output": "model"}
    exported = library.command("export", words, workdir=run.workdir, quiet=True)
    assert exported["auc"] == pytest.approx(run.auc, abs=1e-5)
    rows = events.take(np.random.default_rng(0).permutation(events.num_rows))
    pq.write_table(rows, run.workdir / "rows.parquet")
    given = ["input=[rows.parquet]", "output=scores", f"run_dir={run.directory}"]
    hotrec("predict", *given, cwd=run.workdir)
    expected = pq.read_table(run.workdir / "scores" / "scores")["score"].to_numpy()
    scores = library.predict(run, rows)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, expected)
    clicked = rows["clicked"].to_numpy()
    assert scores[clicked == 1].mean() > scores[clicked == 0].mean() + 0.05


def test_rows_to_score_are_as_they_come(
    run: library.Run, events: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = events.slice(0, 4).drop_columns(["clicked", "session"]).to_pylist()
    usual = library.predict(run, events.slice(0, 4))
    # Labels are not read; the order of columns and rows, and the type of ids, do not matter.
    columns = {name: [row[name] for row in rows[::-1]] for name in sorted(rows[0])}
    columns["clicked"] = [None, 5, None, 5]
    monkeypatch.chdir(run.workdir)
    by_path = library.predict(str(run.directory.relative_to(run.workdir)), columns)
    np.testing.assert_array_equal(by_path[::-1], usual)
    # What is missing or new is scored, too.
    columns["user_id"] = ["nobody", None, rows[1]["user_id"], rows[0]["user_id"]]
    columns["age"] = [float("nan"), None, rows[1]["age"], rows[0]["age"]]
    scores = library.predict(run, columns)
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores[:1:-1], usual[:2])
    assert library.predict(run, events.slice(0, 0)).shape == (0,)


def test_wrong_rows_and_settings_are_refused_in_a_line(run: library.Run, events: pa.Table) -> None:
    strangers = events.set_column(
        events.column_names.index("user_id"), "user_id", [[f"x{n}" for n in range(len(events))]]
    )
    price = events.column_names.index("price")
    at = events.column_names.index("shown_at")
    times = events["shown_at"].cast(pa.timestamp("s"))
    cases: list[tuple[Any, str]] = [
        (events.set_column(at, "shown_at", times.cast(pa.int64())), "^table column shown_at: .*"),
        (events.drop_columns(["user_id"]), "input table: .* got 'user_id'"),
        (strangers, "^table column user_id: expected at most .* such as 'x0'"),
        (events.set_column(price, "price", [["much"] * len(events)]), "^table .*1: .* got 'much'"),
    ]
    for table, said in cases:
        with pytest.raises(ValueError, match=said) as caught:
            library.predict(run, table)
        assert "\n" not in str(caught.value)
    in_ns = events.set_column(at, "shown_at", times.cast(pa.timestamp("ns")))
    np.testing.assert_array_equal(library.predict(run, in_ns), library.predict(run, events))
    assert library.predict(run, strangers, max_unknown_frac=1).shape == (len(events),)
    with pytest.raises(ValueError, match=r"^trainer\.batch_sze: expected trainer\.batch_size"):
        library.fit(events, label="clicked", time="shown_at", name="events", workdir=run.workdir,
                    settings={"trainer.batch_sze": 64}, quiet=True)  # fmt: skip


def test_ctrl_c_ends_the_run_and_its_ranks(tmp_path: Path, events: pa.Table) -> None:
    """As in a notebook whose cell is interrupted; of a script without a guard."""
    pq.write_table(events, tmp_path / "events.parquet")
    # A shell starts a background job with SIGINT ignored, and what it starts inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment(),
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.stderr is not None
    next(line for line in child.stderr if " 2/" in line)
    os.kill(child.pid, signal.SIGINT)
    said = child.stderr.read()
    assert child.wait(60) != 0
    assert said.rstrip().endswith("KeyboardInterrupt")
