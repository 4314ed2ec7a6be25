"""Run directories, predictions and sweeps as pages, figures and JSON documents; needs no torch."""

from hotrec.report.figures import plot_coverage
from hotrec.report.runs import write_report

__all__ = ["plot_coverage", "write_report"]
