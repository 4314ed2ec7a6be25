import html.parser
import json
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from hotrec.artifact import ArtifactError
from hotrec.report import plot_coverage, write_report
from tests.unit.report.runs import (
    SUMMARY,
    TORCHREC,
    metrics_line,
    partition_content,
    profile_content,
    write_artifact,
    write_run,
    write_whole_run,
)

MADE_AT = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)


class PageReader(html.parser.HTMLParser):
    """Cells by table row, visible text, and tags that were left open."""

    VOID = frozenset({"meta", "br", "link", "img", "use", "path"})

    def __init__(self):
        super().__init__()
        self.rows, self.text, self.open, self.ids, self.links = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "section":
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.text.append(data)
        if {"td", "th"} & set(self.open) and data.strip():
            cell = self.rows[-1]
            cell[-1] = f"{cell[-1]} {data.strip()}".strip()


def read_page(path):
    text = path.read_text()
    reader = PageReader()
    reader.feed(text)
    assert reader.open == []
    return text, reader


@pytest.fixture
def runs(tmp_path):
    return [write_whole_run(tmp_path / "a"), write_whole_run(tmp_path / "b", TORCHREC)]


@pytest.fixture
def artifacts(tmp_path):
    profile, partition = tmp_path / "profile", tmp_path / "partition"
    profile_hash = write_artifact(profile, "profile", profile_content(), {"dataset": "d"})
    write_artifact(partition, "partition", partition_content(), {"profile": profile_hash})
    return {"profile": profile, "partition": partition}


def test_page_states_the_figures(tmp_path, runs, artifacts):
    write_report(runs, tmp_path / "out", title="A <title>", made_at=MADE_AT, **artifacts)
    text, page = read_page(tmp_path / "out" / "report.html")
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows[""] == ["hot_cold", "planner baseline"]
    assert rows["Placement"] == ["hot_cold", "torchrec_planner"]
    assert rows["Model"] == ["dlrm", "dlrm"]
    assert rows["Ranks"] == ["2", "2"]
    assert rows["Batch per rank, samples"] == ["2,048", "2,048"]
    assert rows["AUC"] == ["0.7812 +0.0001", "0.7812"]
    assert rows["Step time, median"] == ["124 ms 0.50x", "248 ms"]
    assert rows["Samples, all ranks"] == ["33,000 /s 2.00x", "16,500 /s"]
    assert rows["Bytes sent"] == ["4.50 MB 0.30x", "15.0 MB"]
    assert rows["Lower bound of exact training"] == ["4.00 MB", "4.00 MB"]
    assert rows["Hot rows"] == ["62,840", "0"]
    assert rows["Hot rows, share of all rows"] == ["1.3%", "0.0%"]
    assert rows["Lookups that hit a hot row"] == ["91.2%", "0.0%"]
    assert rows["Waiting for data, share of the time"] == ["1.2%", "1.2%"]
    assert rows["Exposed communication, mean"] == ["9.30 ms 0.10x", "93.0 ms"]
    assert rows["Exposed communication, slowest rank"] == ["10.5 ms 0.08x", "130 ms"]
    assert rows["Exposed communication, share of the step"] == ["7.5%", "50.0%"]
    assert rows["user"] == ["80", "8", "10.0%", "2.08 kB", "81.2%", "70.0%", "260 B"]
    assert rows["<item>"] == ["20", "2", "10.0%", "520 B", "81.2%", "no lookups", "260 B"]
    assert rows["All tables"] == ["100", "10", "10.0%", "2.60 kB", "81.2%", "70.0%", ""]
    visible = " ".join(page.text)
    for expected in (
        "A <title>",
        "2 runs | dlrm | 2030-01-02 03:04 UTC",
        "Partition: budget < 2,600 bytes",
        "Counted exactly over 1,000 samples and 100 held out.",
        "t_user_hot data_parallel <x>",
        "0.30x of planner",
        "1.12x bytes sent against the lower bound",
        "91.2% of lookups hit the 1.3% hot rows",
    ):
        assert expected in re.sub(r"\s+", " ", visible), expected
    assert text.count("<svg") == 4


def test_page_needs_nothing_from_outside(tmp_path, runs, artifacts):
    write_report(runs, tmp_path / "out", **artifacts)
    text, page = read_page(tmp_path / "out" / "report.html")
    assert re.findall(r"<(?:script|link|img|iframe|object)\b", text) == []
    assert re.findall(r"""(?:src|srcset)\s*=|@import|url\((?!#)""", text) == []
    targets = re.findall(r'href="([^"]*)"', text)
    assert targets
    assert all(target.startswith("#") for target in targets)
    assert page.links == [f"#{anchor}" for anchor in page.ids]
    assert page.ids == [
        "compare",
        "hot",
        "learning",
        "steps",
        "predicted",
        "memory",
        "traffic",
        "runs",
    ]


def test_same_input_same_bytes(tmp_path, runs, artifacts):
    for name in ("x", "y"):
        write_report(runs, tmp_path / name, made_at=MADE_AT, **artifacts)
    for name in ("report.html", "report.json"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["report.html", "report.json"]


def test_json_document(tmp_path, runs, artifacts):
    returned = write_report(runs, tmp_path / "out", title="T", made_at=MADE_AT, **artifacts)
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert document == returned
    assert document["title"] == "T"
    assert document["made_at"] == "2030-01-02T03:04:00+00:00"
    assert document["baseline"] == "planner"
    hot_cold, planner = document["runs"]
    assert hot_cold["relative_to_baseline"] == pytest.approx(
        {
            "step_p50_s": 0.5,
            "step_p90_s": 1.0,
            "samples_per_s": 2.0,
            "sent_bytes_total": 0.3,
        }
    )
    assert hot_cold["sent_over_bound"] == pytest.approx(1.125)
    assert hot_cold["sent_bytes"] == {"cold_all_to_all": 2.5e6, "hot_gradients": 2.0e6}
    steps, losses = zip(*hot_cold["loss"], strict=True)
    assert steps == (100, 200, 300)
    assert losses == pytest.approx((0.6, 0.5, 0.4))
    assert hot_cold["auc_by_split"] == {"valid": [[150, 0.75], [300, 0.78]], "test": [[300, 0.77]]}
    assert hot_cold["auc"] == 0.78125
    assert hot_cold["finished"] is True
    assert planner["placement"] == "torchrec_planner"
    assert document["profile"] == profile_content()
    assert document["partition"] == partition_content()


def test_missing_parts_are_said(tmp_path):
    path = write_run(tmp_path / "a", summary={"name": "bare"})
    document = write_report([path], tmp_path / "out")
    _, page = read_page(tmp_path / "out" / "report.html")
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows["AUC"] == rows["Bytes sent"] == rows["Placement"] == ["not recorded"]
    assert rows["Finished"] == ["no"]
    visible = re.sub(r"\s+", " ", " ".join(page.text))
    for expected in (
        "Access profile: not recorded.",
        "Loss and AUC: not recorded.",
        "Step breakdown: not recorded.",
        "Bytes by collective: not recorded.",
        "metrics.jsonl: not recorded.",
        "the run has not finished",
        "No run uses TorchRec's own plan",
    ):
        assert expected in visible, expected
    assert document["runs"][0]["auc"] is None
    assert document["baseline"] is None


def test_one_rank_is_told_apart_from_nothing_recorded(tmp_path):
    summary = {**SUMMARY, "sent_bytes": {"cold_all_to_all": 0}, "sent_bytes_total": 0}
    summary["bound_bytes"] = 0
    document = write_report([write_run(tmp_path / "a", summary=summary)], tmp_path / "out")
    _, page = read_page(tmp_path / "out" / "report.html")
    assert "Bytes by collective: none were sent." in page.text
    assert document["runs"][0]["sent_over_bound"] is None


def test_profile_without_partition(tmp_path, runs, artifacts):
    write_report(runs, tmp_path / "out", profile=artifacts["profile"])
    _, page = read_page(tmp_path / "out" / "report.html")
    assert "Partition: not recorded." in page.text


def test_sampled_profile_says_so(tmp_path, runs):
    content = profile_content(heldout=False)
    content["sampling"]["frac"] = 0.05
    write_artifact(tmp_path / "profile", "profile", content, {"dataset": "d"})
    write_report(runs, tmp_path / "out", profile=tmp_path / "profile")
    text, _ = read_page(tmp_path / "out" / "report.html")
    assert "Counted on a 5.0% sample: 1,000 samples." in text


def test_nan_loss_is_null_in_json_and_no_crash(tmp_path):
    path = write_run(
        tmp_path / "a",
        summary={**SUMMARY, "auc": float("nan")},
        metrics=[metrics_line(1, loss=float("nan"))],
    )
    document = write_report([path], tmp_path / "out")
    assert document["runs"][0]["auc"] is None
    assert document["runs"][0]["loss"] == [[1, None]]
    assert "NaN" not in (tmp_path / "out" / "report.json").read_text()
    _, page = read_page(tmp_path / "out" / "report.html")
    assert next(row for row in page.rows if row[0] == "AUC") == ["AUC", "nan"]


def test_named_baseline(tmp_path, runs):
    document = write_report(runs, tmp_path / "out", baseline="hot_cold")
    assert document["baseline"] == "hot_cold"
    assert document["runs"][1]["relative_to_baseline"]["step_p50_s"] == pytest.approx(2.0)
    with pytest.raises(ValueError, match=r"one of the runs \['hot_cold', 'planner'\], got 'x'"):
        write_report(runs, tmp_path / "out", baseline="x")


def test_errors_leave_nothing_behind(tmp_path, runs, artifacts):
    with pytest.raises(ValueError, match="expected its profile as well, got none"):
        write_report(runs, tmp_path / "out", partition=artifacts["partition"])
    with pytest.raises(ValueError, match="got no such directory"):
        write_report([*runs, tmp_path / "gone"], tmp_path / "out")
    with pytest.raises(ArtifactError, match="expected kind 'profile', got 'partition'"):
        write_report(runs, tmp_path / "out", profile=artifacts["partition"])
    other = tmp_path / "other"
    write_artifact(other, "profile", profile_content(heldout=False), {"dataset": "d"})
    with pytest.raises(ArtifactError, match="expected a partition made from the profile"):
        write_report(runs, tmp_path / "out", profile=other, partition=artifacts["partition"])
    assert not (tmp_path / "out").exists()


def test_names_are_escaped(tmp_path):
    summary = {**SUMMARY, "name": "<script>alert(1)</script>", "model": "a&b"}
    write_report([write_whole_run(tmp_path / "a", summary)], tmp_path / "out")
    text, page = read_page(tmp_path / "out" / "report.html")
    assert "<script" not in text
    assert page.rows[0] == ["", "<script>alert(1)</script>"]
    assert next(row for row in page.rows if row[0] == "Model") == ["Model", "a&b"]


def test_coverage_png(tmp_path, artifacts):
    plot_coverage(artifacts["profile"], tmp_path / "deep" / "a.png")
    plot_coverage(artifacts["profile"], tmp_path / "b.png", partition=artifacts["partition"])
    sizes = []
    for path in (tmp_path / "deep" / "a.png", tmp_path / "b.png"):
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append((int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")))
    assert sizes == [(1080, 630), (1650, 630)]
    with pytest.raises(ArtifactError, match=r"manifest\.json: expected the manifest of a profile"):
        plot_coverage(tmp_path / "gone", tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()


def test_report_starts_without_torch_or_pyplot():
    code = (
        "import sys, hotrec.report; "
        "print([m for m in ('torch', 'pyarrow', 'matplotlib.pyplot') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
