"""The newest lines of a run's records over HTTP, in the form that Prometheus reads.

``RunLog`` passes on each line it writes; a scrape turns the newest ones into gauges, in a thread of
the server, so scraping never affects a training step.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hotrec.runtime.figures import FIGURES
from hotrec.train.run_log import Listener, numbers_of

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily


class NewestLines:
    """A collector of prometheus_client that holds one line of each kind.

    A number ``loss`` of metrics.jsonl is the gauge ``hotrec_train_loss``, ``all_reduce`` within
    ``sent_bytes`` is ``hotrec_train_sent_bytes{part="all_reduce"}``, and ``auc`` of eval.jsonl is
    ``hotrec_eval_auc{split="test"}``.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Mapping[str, Any]] = {}

    def keep(self, prefix: str, line: Mapping[str, Any]) -> None:
        """Replace the line of ``prefix``; see ``RunLog.append``."""
        self._lines[prefix] = line

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges of all lines; prometheus_client calls this for each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        gauges: dict[str, GaugeMetricFamily] = {}
        for prefix, line in list(self._lines.items()):
            split = line.get("split")
            numbers = {f"{prefix}/step": line["step"], **numbers_of(line, prefix)}
            for tag, number in numbers.items():
                key, _, part = tag.removeprefix(f"{prefix}/").partition("/")
                labels = {"split": split, "part": part}
                given = {name: value for name, value in labels.items() if value}
                name = f"hotrec_{'eval' if split else prefix}_{key}"
                gauge = gauges.get(name)
                if gauge is None:
                    figure = FIGURES.get(key) or FIGURES[f"{prefix}.{key}"]
                    gauge = GaugeMetricFamily(name, figure.label, labels=list(given))
                    gauges[name] = gauge
                gauge.add_metric(list(given.values()), number)
        yield from gauges.values()


@contextmanager
def serve_metrics(port: int) -> Iterator[Listener]:
    """Serve /metrics on all addresses of this host; yields the function that takes the lines.

    Raises:
        ValueError: If the port is taken, or prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise ValueError(
            f"trainer.metrics_port: expected the package prometheus-client, got {error}. Run "
            "`pip install 'hotrec[metrics]'`, or set trainer.metrics_port=0."
        ) from error
    lines, registry = NewestLines(), CollectorRegistry()
    registry.register(lines)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise ValueError(
            f"trainer.metrics_port: expected a free port on {platform.node()}, got {port} "
            f"({error.strerror}). Choose another one, or 0 to disable."
        ) from error
    try:
        yield lines.keep
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
