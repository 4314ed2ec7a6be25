"""``plan.txt`` and ``plan.html``: what they show of a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hotrec.report.plan import RecordedPrediction, plan_report_text
from hotrec.report.plan_page import write_plan_page
from tests.unit.report.pages import check_html
from tests.unit.report.predictions import prediction, table

Document = dict[str, Any]


def many_ranks() -> Document:
    """No plan but one of TorchRec's, more tables than are shown, of the first little is known."""
    document = prediction(num_ranks=64, ranks_per_host=8) | {"costs": None}
    document |= {"chosen": "torchrec hand_tuned"}
    document["plans"] = {document["chosen"]: document["plans"][document["chosen"]]}
    document["tables"] = [table(f"<b>{i:02}", 1000 - i, 10, host_rows=3) for i in range(23)]
    unknown = ("exchange", "sharding", "torchrec_sharding", "sent_bytes_before", "sent_bytes_after")
    document["tables"][0] |= dict.fromkeys(unknown)
    return document


OURS = ("45.5 ms", "65.0 ms", "0.70x", "4.00 MB", "130,007", "rack7", "user", "81.2%", "3.30 GB")


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        (prediction(), OURS),
        (prediction(num_ranks=1, ranks_per_host=1), ("45.5 ms", "45,011 /s")),
        (many_ranks(), ("91.0 ms", "<b>00", "1,000")),
    ],
)
def test_text_and_page_show_the_figures(
    document: Document, shown: tuple[str, ...], tmp_path: Path
) -> None:
    text = plan_report_text(document)
    assert [figure for figure in shown if figure not in text] == []
    check_html(write_plan_page(document, tmp_path / "deep").read_text(), text)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.html"]


@pytest.mark.parametrize(
    ("change", "got"),
    [({"plans": None}, "plans"), ({"chosen": "gone"}, "'gone'"), ({"plans": {"a": {}}}, "step_s")],
)
def test_a_broken_document_is_refused(change: Document, got: str, tmp_path: Path) -> None:
    for show in (plan_report_text, lambda d: write_plan_page(d, tmp_path / "page")):
        with pytest.raises(ValueError, match=f"expected .* got .*{got}"):
            show(prediction() | {"chosen": "a"} | change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("label", "facts", "name"),
    [
        ("hot_cold look_ahead", {}, "hotrec, 130,007 hot rows, look_ahead"),
        ("all_cold", {}, "hotrec, no hot rows"),
        ("torchrec planner fused_uvm_caching prefetch", {},
         "TorchRec's planner, fused_uvm_caching, prefetch"),
        ("torchrec table_wise base", {}, "TorchRec's table-wise plan, base"),
    ],
)  # fmt: skip
def test_a_plan_is_called_what_it_is(label: str, facts: Document, name: str) -> None:
    plans = prediction()["plans"]
    document = prediction() | {"plans": plans | {label: plans["hot_cold"] | facts}}
    assert RecordedPrediction(document).name(label) == name


def test_what_a_document_says_of_its_plans_goes_before_their_labels() -> None:
    document = prediction()
    ours = {**document["plans"]["hot_cold"], "title": "theirs", "is_hotrec": False}
    ours |= {"torchrec_plan": "planner", "step_s": 1e-6}
    found = RecordedPrediction(document | {"plans": document["plans"] | {"hot_cold": ours}})
    assert found.name("hot_cold") == "theirs"
    assert found.baseline == found.planner == "hot_cold"
