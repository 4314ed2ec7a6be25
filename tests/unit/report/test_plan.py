"""``plan.txt``: what it shows of a prediction."""

from __future__ import annotations

from typing import Any

import pytest

from hotrec.report.plan import plan_report_text
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
        (prediction(num_ranks=1, ranks_per_host=1), ("45.5 ms", "45,000 /s")),
        (many_ranks(), ("91.0 ms", "<b>00", "1,000")),
    ],
)
def test_the_text_shows_the_figures(document: Document, shown: tuple[str, ...]) -> None:
    text = plan_report_text(document)
    assert [figure for figure in shown if figure not in text] == []
