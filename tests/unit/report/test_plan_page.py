"""The text, the picture and the page of a plan: their numbers are those of the document."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.plan_figures import STAGE_LOOKS, build_plan_figure, draw_plan
from hotrec.report.plan_page import plan_report_text, write_plan_page
from tests.unit.report.predictions import prediction, table

Document = dict[str, Any]


def row_of(text: str, name: str) -> list[str]:
    """The cells of a table's row, two spaces apart."""
    line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
    return re.split(r"\s{2,}", line.strip())


def figure_texts(document: Document) -> str:
    figure = build_plan_figure(document)
    texts = []
    for axes in figure.axes:
        texts += [axes.get_title(loc="left"), axes.get_xlabel()]
        texts += [text.get_text() for text in axes.texts]
        texts += [label.get_text() for label in axes.get_yticklabels()]
        legend = axes.get_legend()
        texts += [text.get_text() for text in legend.get_texts()] if legend else []
    return "\n".join(texts)


def test_plans_are_set_against_the_best_of_torchrec() -> None:
    text = plan_report_text(prediction())
    heads = ["65.0 ms", "1.00x", "126,031 /s", "14.5 MB", "2.75 GB", "2.50 GB"]
    assert row_of(text, "torchrec planner") == ["torchrec planner", *heads]
    chosen = ["45.5 ms", "0.70x", "180,044 /s", "4.00 MB", "3.30 GB", "1.50 GB"]
    assert row_of(text, "hot_cold (chosen)") == ["hot_cold (chosen)", *chosen]
    assert row_of(text, "torchrec hand_tuned")[2] == "1.40x"
    assert "45.5 ms instead of 65.0 ms by TorchRec's best plan (torchrec planner): " in " ".join(
        text.split()
    )


def test_the_fastest_of_torchrecs_plans_is_before() -> None:
    document = prediction()
    document["plans"]["torchrec hand_tuned"]["step_s"] = 0.05
    assert "instead of 50.0 ms by TorchRec's best plan (torchrec hand_tuned)" in " ".join(
        plan_report_text(document).split()
    )


def test_stages_before_and_after() -> None:
    text = plan_report_text(prediction())
    assert row_of(text, "rows_exchange") == [
        *("rows_exchange", "11.0 ms", "2.00 ms", "1.50 ms", "1.50 ms", "6.50 MB", "900 kB")
    ]
    assert row_of(text, "route")[1:3] == ["0", "3.00 ms"]
    totals = ["65.0 ms", "45.5 ms", "1.50 ms", "1.50 ms", "14.5 MB", "4.00 MB"]
    assert row_of(text, "step") == ["step", *totals]


def test_a_table_says_where_its_rows_are() -> None:
    text = plan_report_text(prediction())
    assert row_of(text, "item") == [
        *("item", "1,200,000", "90,000", "0", "200,000", "1,110,000", "rows", "row_wise"),
        *("80.0%", "1.25 MB", "500 kB", "row_wise"),
    ]
    assert row_of(text, "tag")[6:8] == ["pooled", "table_wise"]
    # sums: exact, over all four tables
    assert row_of(text, "all tables") == [
        *("all tables", "6,200,807", "130,007", "1,000,800", "200,000", "5,070,000"),
        *("5.00 MB", "2.00 MB"),
    ]


def test_tables_beyond_twenty_are_summed() -> None:
    document = prediction()
    document["tables"] = [table(f"t{i:02}", 1000 - i, 10, host_rows=3) for i in range(23)]
    text = plan_report_text(document)
    assert "  t19 " in text
    assert "  t20 " not in text
    assert row_of(text, "3 more")[:3] == ["3 more", "2,937", "30"]
    assert row_of(text, "all tables")[:3] == ["all tables", "22,747", "230"]
    assert "20 largest tables" in figure_texts(document)


CHANGES: dict[str, tuple[Callable[[Document], None], str]] = {
    "why": (lambda d: d.update(why="Because of the moon."), "Because of the moon."),
    "note": (lambda d: d["costs"].update(note="costs of host q9"), "costs of host q9"),
    "costs": (lambda d: d["costs"].update(name="rack8", origin="fitted"), "rack8 (fitted)"),
    "bound": (lambda d: d.update(bound_s=0.0433333), "faster than 43.3 ms"),
    "gap": (lambda d: d.update(bound_s=0.0433333), "is 5.0% slower"),
    "break-even": (lambda d: d["break_even"].update({"64": 0.123}), "from 0.123 lookups"),
    "coverage": (lambda d: d["expected"].update(coverage_frac=0.777), "77.7%"),
    "all hot": (lambda d: d["expected"].update(all_hot_frac=0.331), "33.1%"),
    "cold rows": (lambda d: d["expected"].update(cold_rows=98765.0), "98,765"),
    "balance": (lambda d: d["balance"].update(served_rows=[1.0, 1.0, 1.0, 5.0]), "2.50x of the"),
    "sensitivity": (lambda d: d["sensitivity"][0].update(step_s=0.1234), "123 ms"),
    "infeasible": (lambda d: d["sensitivity"][4].update(why="short of 7 GB"), "short of 7 GB"),
    "device": (lambda d: d.update(device="cpu"), "On CPU there is one memory"),
    "batch": (lambda d: d.update(batch_size=512), "batch 512 per rank"),
    "hosts": (lambda d: d["world"].update(ranks_per_host=4), "4 ranks on 1 host,"),
    "memory": (
        lambda d: d["plans"]["hot_cold"]["memory"][2].update(host_bytes=7.77e9),
        "7.77 GB",
    ),
    "hidden": (
        lambda d: d["plans"]["hot_cold"]["hidden_s"].update(rows_exchange=0.00444),
        "4.44 ms",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_the_document_changes_on_text_and_page(what: str, tmp_path: Path) -> None:
    change, shown = CHANGES[what]
    document = prediction()
    text, page = plan_report_text(document), write_plan_page(document, tmp_path).read_text()
    assert shown not in text
    assert shown not in page
    change(document)
    assert shown in " ".join(plan_report_text(document).split())
    assert shown in write_plan_page(document, tmp_path).read_text()


def test_a_bound_that_is_reached_says_so() -> None:
    assert "what was chosen is as fast" in " ".join(plan_report_text(prediction()).split())


def test_torchrecs_own_plan_is_shown_beside_what_it_was_chosen_over() -> None:
    document = prediction()
    document["chosen"] = "torchrec planner"
    text = plan_report_text(document)
    assert "torchrec planner (chosen)" in text
    assert "instead of" not in text
    assert "how hot_cold would place them, which was not chosen" in " ".join(text.split())
    assert row_of(text, "rows_exchange")[1:3] == ["11.0 ms", "2.00 ms"]


def test_only_what_is_needed_is_enough(tmp_path: Path) -> None:
    whole = prediction()
    plan = {
        name: whole["plans"]["torchrec planner"][name]
        for name in ("step_s", "stage_s", "sent_bytes", "total_sent_bytes", "samples_per_s")
    }
    document = {name: whole[name] for name in ("world", "batch_size")}
    document |= {"chosen": "torchrec planner", "plans": {"torchrec planner": plan}}
    text = plan_report_text(document)
    assert row_of(text, "torchrec planner (chosen)")[-2:] == ["-", "-"]
    assert row_of(text, "dense")[1:] == ["20.0 ms", "-", "0"]
    for absent in ("Tables", "What if", "Memory", "expected to read"):
        assert absent not in text
    assert "Costs: not recorded." in text
    draw_plan(document, tmp_path / "plan.png")
    assert "<svg" in write_plan_page(document, tmp_path).read_text()


def test_no_plan_of_torchrec_leaves_nothing_to_set_against() -> None:
    document = prediction()
    document["plans"] = {"hot_cold": document["plans"]["hot_cold"]}
    text = plan_report_text(document)
    assert "None of TorchRec's own plans was predicted" in text
    assert row_of(text, "hot_cold (chosen)")[2] == "-"


def test_values_that_are_null_are_shown_as_such() -> None:
    document = prediction()
    nulls = dict.fromkeys(("exchange", "sharding", "tier", "sent_bytes_before", "sent_bytes_after"))
    document["tables"][0] |= nulls | {"torchrec_sharding": None}
    document |= {"expected": None, "balance": {"served_rows": None}, "bound_s": None}
    document["break_even"] = {}
    text = plan_report_text(document)
    assert row_of(text, "user")[6:] == ["-", "-", "80.0%", "-", "-", "-"]
    assert row_of(text, "all tables")[-2:] == ["-", "-"]  # a sum of unknown parts is unknown
    assert "expected to read" not in text
    assert "serves" not in text


def test_many_ranks_are_summed_up() -> None:
    text = plan_report_text(prediction(num_ranks=64, ranks_per_host=8))
    assert row_of(text, "least")[1] == "2.50 GB"
    assert row_of(text, "median")[1] == "2.62 GB"
    assert row_of(text, "most")[1] == "2.75 GB"
    assert row_of(text, "most")[-1] == "1,130"


@pytest.mark.parametrize("name", ["world", "batch_size", "plans", "chosen"])
def test_a_document_without_a_needed_part_is_refused(name: str, tmp_path: Path) -> None:
    document = prediction()
    del document[name]
    for show in (
        lambda: plan_report_text(document),
        lambda: draw_plan(document, tmp_path / "plan.png"),
        lambda: write_plan_page(document, tmp_path / "page"),
    ):
        with pytest.raises(ValueError, match=f"got none of {name}"):
            show()
    assert list(tmp_path.iterdir()) == []


def test_a_choice_that_is_no_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of the plans .*'all_cold'.* got 'gone'"):
        plan_report_text(prediction() | {"chosen": "gone"})


def test_a_plan_without_its_step_is_refused() -> None:
    document = prediction()
    document["plans"]["all_cold"]["step_s"] = None
    with pytest.raises(ValueError, match="plan all_cold: .* got none of step_s"):
        plan_report_text(document)


def test_the_bars_of_the_picture_are_the_stages() -> None:
    document = prediction()
    axes = build_plan_figure(document).axes[0]
    bars = {
        str(container.get_label()): [patch.get_width() for patch in container.patches]
        for container in axes.containers
    }
    plans = ["torchrec planner", "hot_cold", "all_cold", "torchrec hand_tuned"]
    assert set(bars) == {stage.replace("_", " ") for stage in STAGE_LOOKS}
    for stage in STAGE_LOOKS:
        expected = [document["plans"][plan]["stage_s"].get(stage, 0.0) for plan in plans]
        assert bars[stage.replace("_", " ")] == pytest.approx(expected), stage
    # end to end, up to the step
    ends = [patch.get_x() + patch.get_width() for patch in axes.containers[-1].patches]
    assert ends == pytest.approx([document["plans"][plan]["step_s"] for plan in plans])


def test_the_picture_shows_rows_memory_and_sensitivity() -> None:
    document = prediction()
    figure = build_plan_figure(document)
    rows = {
        str(line.get_label()): [float(x) for x in line.get_xdata()] for line in figure.axes[1].lines
    }
    assert rows["hot, on every rank"] == [40_000, 90_000, 7]
    assert rows["cached by the device"] == [200_000]
    assert rows["host"] == [3_960_000, 1_110_000]
    heights = {round(bar.get_height() / 1e9, 3) for bar in figure.axes[2].patches}
    assert heights == {2.5, 2.625, 2.75, 3.0, 3.15, 3.3, 1.5}
    tops = [round((bar.get_y() + bar.get_height()) / 1e9, 3) for bar in figure.axes[2].patches]
    assert max(tops) == 5.25  # 2.75 of device and 2.5 of host, before, on rank 2
    text = figure_texts(document)
    assert "165,495 /s, 0.92x" in text
    assert "does not fit or was not predicted" in text
    assert "45.5 ms, 4.00 MB sent, 0.70x of the time" in text


def test_stages_unknown_to_the_picture_are_drawn_all_the_same() -> None:
    document = prediction()
    document["plans"]["hot_cold"]["stage_s"]["pondering"] = 0.004
    assert "pondering" in figure_texts(document)


def test_no_two_stages_look_the_same() -> None:
    assert len(set(STAGE_LOOKS.values())) == len(STAGE_LOOKS)


def test_the_png_is_one_and_nothing_else_is_left(tmp_path: Path) -> None:
    draw_plan(prediction(), tmp_path / "deep" / "plan.png")
    assert (tmp_path / "deep" / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.png"]


def test_the_page_fetches_nothing_and_escapes_names(tmp_path: Path) -> None:
    document = prediction()
    document["tables"][0]["name"] = "<b>user"
    page = write_plan_page(document, tmp_path)
    assert page == tmp_path / "plan.html"
    text = page.read_text()
    assert "&lt;b&gt;user" in text
    assert "<b>user" not in text
    assert "prediction.json beside this page" in text
    assert not re.findall(r'(?:src|href)="(?!#)', re.sub(r"<svg.*?</svg>", "", text, flags=re.S))
