"""``plan.txt`` and ``plan.html``: golden pages, and how they depend on the document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.figures import bar_figure
from hotrec.report.plan import (
    NEEDED_OF_PLAN,
    Prediction,
    draw_stages,
    plan_report_text,
    write_plan_page,
)
from hotrec.report.style import STAGE_LOOKS
from tests.unit.report.golden import assert_self_contained, check_golden, visible_text
from tests.unit.report.predictions import prediction, table

Document = dict[str, Any]
PLANS = ["torchrec planner", "hot_cold", "all_cold", "torchrec hand_tuned"]


def look_ahead() -> Document:
    """Look-ahead on CPU."""
    document = prediction() | {"pipeline": "look_ahead", "device": "cpu"}
    document["expected"]["urgent_rows"] = 1234.0
    document["plans"]["hot_cold"] |= {"pipeline": "look_ahead", "wire": "bf16"}
    document["plans"]["all_cold"] |= {"pipeline": "look_ahead", "wire": "fp32"}
    document["plans"]["torchrec planner"] |= {"pipeline": "sparse_dist", "wire": "fp32"}
    return document


def torchrec_chosen() -> Document:
    """TorchRec's plan chosen, with more tables than are shown."""
    document = prediction() | {"chosen": "torchrec planner"}
    document["tables"] = [table(f"t{i:02}", 1000 - i, 10, host_rows=3) for i in range(23)]
    return document


def one_rank() -> Document:
    """One rank, which sends nothing whatever the plan."""
    document = prediction(num_ranks=1, ranks_per_host=1)
    for plan in document["plans"].values():
        plan |= {"sent_bytes": {}, "total_sent_bytes": 0.0}
    return document


def many_ranks() -> Document:
    """64 ranks, no plan of TorchRec's, and nothing known of the costs or of one table."""
    document = prediction(num_ranks=64, ranks_per_host=8) | {"costs": None}
    document["plans"] = {"hot_cold": document["plans"]["hot_cold"]}
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
    check_golden(f"plan_{make.__name__}.txt", text)
    page = write_plan_page(make(), tmp_path / "deep").read_text()
    assert_self_contained(page)
    visible = visible_text(page)
    lines = [line for line in text.splitlines()[1:] if "---" not in line]
    cells = {cell.strip(" #") for line in lines for cell in line.split(" | ")}
    assert [cell for cell in cells if cell.strip("| ") not in visible] == []
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.html"]


def test_the_fastest_of_torchrecs_plans_is_the_baseline() -> None:
    document = prediction()
    document["plans"]["torchrec hand_tuned"]["step_s"] = 0.05
    assert Prediction(document).baseline == "torchrec hand_tuned"
    assert Prediction(document).order[:2] == ["torchrec hand_tuned", "hot_cold"]


def test_names_are_escaped(tmp_path: Path) -> None:
    document = prediction()
    document["tables"][0]["name"] = "<b>user"
    page = write_plan_page(document, tmp_path).read_text()
    assert "&lt;b&gt;user" in page
    assert "<b>user" not in page


CHANGES: list[tuple[Callable[[Document], Any], str]] = [
    (lambda d: d.pop("world"), "got none of world"),
    (lambda d: d.pop("batch_size"), "got none of batch_size"),
    (lambda d: d.pop("plans"), "got none of plans"),
    (lambda d: d.pop("chosen"), "got none of chosen"),
    (lambda d: d.update(chosen="gone"), "one of the plans .*'all_cold'.* got 'gone'"),
    (lambda d: d["plans"]["all_cold"].update(step_s=None), "plan all_cold: .* got none of step_s"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_broken_document_is_refused(
    change: Callable[[Document], Any], message: str, tmp_path: Path
) -> None:
    document = prediction()
    change(document)
    for show in (plan_report_text, lambda d: write_plan_page(d, tmp_path / "page")):
        with pytest.raises(ValueError, match=message):
            show(document)
    assert list(tmp_path.iterdir()) == []


def test_the_bars_of_the_figure_are_the_stages() -> None:
    document = prediction()
    document["plans"]["hot_cold"]["stage_s"]["pondering"] = 0.004  # a stage without a style
    (axes,) = bar_figure(4, lambda axes: draw_stages(axes, Prediction(document), PLANS)).axes
    bars = {
        str(container.get_label()): [patch.get_width() for patch in container.patches]
        for container in axes.containers
    }
    stages = ["pondering", *STAGE_LOOKS]
    assert list(bars) == [stage.replace("_", " ") for stage in stages]
    for stage in stages:
        expected = [document["plans"][plan]["stage_s"].get(stage, 0.0) for plan in PLANS]
        assert bars[stage.replace("_", " ")] == pytest.approx(expected), stage
    ends = [patch.get_x() + patch.get_width() for patch in axes.containers[-1].patches]
    assert ends == pytest.approx([sum(document["plans"][p]["stage_s"].values()) for p in PLANS])
    assert axes.texts[1].get_text() == "45.5 ms, 4.00 MB sent, 0.70x of the time"
    assert axes.get_yticklabels()[1].get_text() == "hot_cold (chosen)"
    assert len(set(STAGE_LOOKS.values())) == len(STAGE_LOOKS)
