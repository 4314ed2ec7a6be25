"""``trainer.metrics_port``: a run is scraped while it trains."""

from __future__ import annotations

import threading
import urllib.request
from contextlib import suppress

from tests.e2e.conftest import SMOKE, Workspace, hotrec


def test_a_run_is_scraped_while_it_trains(workspace: Workspace, free_port: int) -> None:
    seen: list[str] = []
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(0.01):
            with (
                suppress(OSError),  # not yet, or no longer
                urllib.request.urlopen(f"http://localhost:{free_port}/metrics") as answer,
            ):
                seen.append(answer.read().decode())

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        outcome = hotrec(
            "train",
            SMOKE,
            "placement=coverage",
            "pipeline=base",
            f"trainer.metrics_port={free_port}",
            "trainer.max_steps=30",
            "trainer.log_every_steps=5",
            "trainer.eval_every_steps=10",
            cwd=workspace.folder,
        )
    finally:
        is_over.set()
        scraper.join()
    assert outcome.exit_code == 0, outcome.stderr
    names = {line.partition(" ")[0] for text in seen for line in text.splitlines()}
    assert {
        "hotrec_train_step",
        "hotrec_train_loss",
        "hotrec_train_step_p50_s",
        "hotrec_train_samples_per_s",
        "hotrec_train_hot_lookup_frac",
        'hotrec_train_sent_bytes{part="all_reduce"}',
        'hotrec_eval_auc{split="valid"}',
    } <= names
