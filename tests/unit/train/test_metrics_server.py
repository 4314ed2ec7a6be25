"""The lines of a run as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from hotrec.train.metrics_server import serve_metrics
from hotrec.train.run_log import RunLog


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
    }


def test_the_newest_lines_are_gauges(tmp_path: Path, free_port: int) -> None:
    with (
        serve_metrics(free_port) as listen,
        RunLog(tmp_path, start_step=0, listeners=[listen]) as log,
    ):
        assert scrape(free_port) == {}
        for step, loss in ((5, 0.5), (10, 0.25)):
            sent = {"all_reduce": 8, "all_to_all": step}
            line = {"step": step, "loss": loss, "sent_bytes": sent, "bound_bytes": None}
            log.append("metrics.jsonl", "train", line)
        for split, auc in (("valid", 0.75), ("test", 0.5)):
            log.append("eval.jsonl", split, {"step": 10, "split": split, "auc": auc})
        assert scrape(free_port) == {
            "hotrec_train_step": 10,
            "hotrec_train_loss": 0.25,
            'hotrec_train_sent_bytes{part="all_reduce"}': 8,
            'hotrec_train_sent_bytes{part="all_to_all"}': 10,
            'hotrec_eval_step{split="valid"}': 10,
            'hotrec_eval_step{split="test"}': 10,
            'hotrec_eval_auc{split="valid"}': 0.75,
            'hotrec_eval_auc{split="test"}': 0.5,
        }
    with pytest.raises(OSError, match="refused"):
        scrape(free_port)


def test_a_port_that_is_taken_is_refused(free_port: int) -> None:
    with (
        serve_metrics(free_port),
        pytest.raises(ValueError, match=rf"^trainer\.metrics_port: .*{free_port}"),
        serve_metrics(free_port),
    ):
        pass
