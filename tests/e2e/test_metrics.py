"""``trainer.metrics_port``: a run is scraped while it trains."""

from __future__ import annotations

import threading
import urllib.request
from contextlib import suppress

from tests.e2e.conftest import Workspace


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
        words = ["placement=coverage", "pipeline=base", f"trainer.metrics_port={free_port}"]
        words += ["trainer.max_steps=30", "trainer.log_every_steps=5"]
        workspace.train("scraped", *words, "trainer.eval_every_steps=10")
    finally:
        is_over.set()
        scraper.join()
    names = {line.partition(" ")[0] for text in seen for line in text.splitlines()}
    assert {
        f"hotrec_train_{name}" for name in ("step", "loss", "step_p50_s", "samples_per_s")
    } <= names
    assert 'hotrec_eval_auc{split="valid"}' in names
