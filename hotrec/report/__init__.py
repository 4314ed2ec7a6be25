"""Run directories, predictions and sweeps as pages, figures and JSON documents; needs no torch."""
