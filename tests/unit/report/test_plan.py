"""``plan.txt`` and ``plan.html``: golden pages, and how they depend on the document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.pictures import bar_figure
from hotrec.report.plan import (
    NEEDED_OF_PLAN,
    RecordedPrediction,
    plan_report_text,
)
from hotrec.report.plan_page import draw_stages, write_plan_page
from hotrec.report.style import PART_LABELS, PART_LOOKS
from hotrec.types import STAGES
from tests.unit.report.golden import check_golden, check_html
from tests.unit.report.predictions import prediction, table

Document = dict[str, Any]


def look_ahead() -> Document:
    """Look-ahead on CPU."""
    document = prediction() | {"pipeline": "look_ahead", "device": "cpu"}
    document["expected"]["urgent_rows"] = 1234.0
    document["plans"]["hot_cold"] |= {"pipeline": "look_ahead", "wire": "bf16"}
    document["plans"]["torchrec planner"] |= {"pipeline": "sparse_dist", "wire": "fp32"}
    return document


def torchrec_chosen() -> Document:
    """TorchRec's plan chosen, the other one the baseline, with more tables than are shown."""
    document = prediction() | {"chosen": "torchrec hand_tuned"}
    document["plans"]["torchrec hand_tuned"]["step_s"] = 0.04
    document["tables"] = [table(f"<b>{i:02}", 1000 - i, 10, host_rows=3) for i in range(23)]
    return document


def one_rank() -> Document:
    """One rank, which sends nothing whatever the plan."""
    document = prediction(num_ranks=1, ranks_per_host=1)
    for plan in document["plans"].values():
        plan |= {"sent_bytes": {}, "total_sent_bytes": 0.0}
    return document


def many_ranks() -> Document:
    """64 ranks on 8 hosts, no plan of TorchRec's, nothing known of the costs or of one table."""
    document = prediction(num_ranks=64, ranks_per_host=8) | {"costs": None}
    document["between_hosts_bound_bytes"] = 2e6
    most = {"planned": 1.05, "ordered": 25.0, "spread": 1.05}
    document["balance"] |= {
        "most_over_mean": most,
        "rail_most_over_mean": {"planned": 1.01, "ordered": 3.5, "spread": 1.01},
    }
    document["plans"] = {"hot_cold": document["plans"]["hot_cold"] | {"between_hosts_bytes": 3e6}}
    unknown = ("exchange", "sharding", "torchrec_sharding", "sent_bytes_before", "sent_bytes_after")
    document["tables"][0] |= dict.fromkeys(unknown)
    return document


def only_needed() -> Document:
    whole, name = prediction(), "torchrec planner"
    plan = {field: whole["plans"][name][field] for field in NEEDED_OF_PLAN}
    document = {field: whole[field] for field in ("world", "batch_size")}
    return document | {"chosen": name, "plans": {name: plan}}


@pytest.mark.parametrize(
    "make", [prediction, look_ahead, torchrec_chosen, one_rank, many_ranks, only_needed]
)
def test_golden_plan(make: Callable[[], Document], tmp_path: Path) -> None:
    text = plan_report_text(make())
    check_golden(f"plan_{make.__name__}.md", text)
    check_html(write_plan_page(make(), tmp_path / "deep").read_text(), text)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.html"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": None, "plans": None}, "got none of world, plans"),
        ({"chosen": "gone"}, "one of the plans .*'all_cold'.* got 'gone'"),
        ({"plans": {"hot_cold": {}}}, "plan hot_cold: .* got none of step_s"),
    ],
)
def test_a_broken_document_is_refused(change: Document, message: str, tmp_path: Path) -> None:
    for show in (plan_report_text, lambda d: write_plan_page(d, tmp_path / "page")):
        with pytest.raises(ValueError, match=message):
            show(prediction() | change)
    assert list(tmp_path.iterdir()) == []


def test_the_bars_of_the_figure_are_the_stages() -> None:
    document = prediction()
    document["plans"]["hot_cold"]["stage_s"]["pondering"] = 0.004  # a stage without a style
    plans = ["torchrec planner", "hot_cold"]
    (axes,) = bar_figure(
        2, lambda axes: draw_stages(axes, RecordedPrediction(document), plans)
    ).axes
    stages = ["pondering", *STAGES]
    labels = [PART_LABELS.get(s, s.replace("_", " ")) for s in stages]
    assert [str(c.get_label()) for c in axes.containers] == labels
    for stage, container in zip(stages, axes.containers, strict=True):
        widths = [document["plans"][plan]["stage_s"].get(stage, 0.0) for plan in plans]
        assert [patch.get_width() for patch in container.patches] == pytest.approx(widths), stage
    assert axes.containers[-1].patches[1].get_x() == pytest.approx(0.0485)
    assert axes.texts[1].get_text() == "45.5 ms, 4.00 MB sent, 0.70x of the time"
    assert axes.get_yticklabels()[1].get_text() == "hotrec, 130,007 hot rows (chosen)"
    assert len({PART_LOOKS[stage] for stage in STAGES}) == len(STAGES)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ("hot_cold", "hotrec, 130,007 hot rows"),
        ("hot_cold look_ahead", "hotrec, 130,007 hot rows, look_ahead"),
        ("all_cold", "hotrec, no hot rows"),
        (
            "torchrec planner fused_uvm_caching prefetch",
            "TorchRec's planner, fused_uvm_caching, prefetch",
        ),
        ("torchrec planner base", "TorchRec's planner, base"),
        ("torchrec hand_tuned", "TorchRec's hand-tuned plan"),
        ("torchrec table_wise base", "TorchRec's table-wise plan, base"),
    ],
)
def test_the_chosen_plan_is_called_what_it_is(chosen: str, text: str) -> None:
    plans = prediction()["plans"]
    document = prediction() | {"chosen": chosen, "plans": plans | {chosen: plans["hot_cold"]}}
    assert RecordedPrediction(document).name(chosen) == text


def test_a_document_of_labels_alone_is_shown() -> None:
    """As versions before the plan was in it wrote it."""
    path = Path(__file__).parents[2] / "data" / "prediction_by_label.json"
    document = json.loads(path.read_text())
    assert "plan" not in document
    found = RecordedPrediction(document)
    assert {label: found.name(label) for label in document["plans"]} == {
        "hot_cold look_ahead": "hotrec, 1,010 hot rows, look_ahead",
        "hot_cold sparse_dist": "hotrec, 1,010 hot rows, sparse_dist",
        "hot_cold base": "hotrec, 1,010 hot rows, base",
        "all_cold": "hotrec, no hot rows, sparse_dist",
        "torchrec planner": "TorchRec's planner",
        "torchrec hand_tuned": "TorchRec's hand-tuned plan",
        "torchrec planner base": "TorchRec's planner, base",
        "torchrec hand_tuned base": "TorchRec's hand-tuned plan, base",
    }
    assert found.chosen == found.planner == "torchrec planner"
    assert found.baseline is not None
    assert found.baseline.startswith("torchrec")
    assert found.placed is not None
    assert found.placed.startswith("hot_cold")
    assert "TorchRec's planner (chosen)" in plan_report_text(document)


def test_what_a_document_says_of_its_plans_goes_before_their_labels() -> None:
    document = prediction()
    ours = {**document["plans"]["hot_cold"], "title": "theirs", "is_hotrec": False}
    ours |= {"torchrec_plan": "planner", "step_s": 1e-6}
    found = RecordedPrediction(document | {"plans": document["plans"] | {"hot_cold": ours}})
    assert found.name("hot_cold") == "theirs"
    assert found.baseline == found.planner == "hot_cold"


def test_a_placement_may_have_no_hot_rows() -> None:
    tables = [{**of, "hot_rows": 0} for of in prediction()["tables"]]
    without = RecordedPrediction(prediction() | {"tables": tables})
    assert without.name("hot_cold") == "hotrec, no hot rows"
    # It is all_cold, which is not shown a second time.
    assert "all_cold" not in without.order


def test_each_plan_has_its_own_hot_rows() -> None:
    plans = prediction()["plans"]
    other = {**plans["hot_cold"], "hot_rows": 12}
    document = prediction() | {"plans": plans | {"hot_cold look_ahead": other}}
    assert (
        RecordedPrediction(document).name("hot_cold look_ahead")
        == "hotrec, 12 hot rows, look_ahead"
    )


def test_the_planner_of_torchrec_is_that_of_its_fastest_pipeline() -> None:
    plans = prediction()["plans"]
    slow = {**plans["torchrec planner"], "step_s": 1.0}
    for name in ("torchrec planner base", "torchrec planner"):
        others = {"torchrec planner": slow, "torchrec planner base": slow}
        document = prediction() | {"plans": plans | others | {name: plans["torchrec planner"]}}
        assert RecordedPrediction(document).planner == name
    del plans["torchrec planner"]
    assert RecordedPrediction(prediction() | {"plans": plans}).planner is None
