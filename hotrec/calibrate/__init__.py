"""The machine measured: collectives, kernels, memory; and costs corrected by runs."""
