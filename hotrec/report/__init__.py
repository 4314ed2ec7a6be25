"""Report: run directories in, one self-contained HTML page and a JSON document out.

Reads files only, imports no torch and trains nothing. What it reads in a run directory, all but one
of ``summary.json`` and ``metrics.jsonl`` optional; what is absent is said on the page:

``metrics.jsonl``
    A line per logged step: ``step``, ``num_samples`` (since the start), ``loss``, ``lr``,
    ``samples_per_s``, ``step_p50_s``, ``step_p90_s``, ``data_wait_s`` (per step), ``sent_bytes``
    {collective: bytes per step and rank}, ``bound_bytes`` (per step and rank), ``hot_lookup_frac``,
    ``elapsed_s``, and any number of stages of the step, ``stage_s`` {stage: seconds per step} or
    flat ``stage_s.<stage>``. Of a run with device caches ``cache``, added up over ranks and the
    ``num_steps`` steps since the line before: ``num_lookups``, ``num_rows`` (distinct in a step),
    ``num_hits``, ``num_misses``, ``num_conflict_misses``, ``num_evictions``, ``read_bytes``,
    ``written_bytes``.
``eval.jsonl``
    A line per evaluation: ``step``, ``split``, ``auc``, ``log_loss``, ``normalized_entropy``,
    ``num_samples``, ``elapsed_s``.
``summary.json``
    ``name``, ``placement``, ``model``, ``world_size``, ``batch_size``, ``num_steps``, ``auc``,
    ``log_loss``, ``normalized_entropy``, ``samples_per_s``, ``step_p50_s``, ``step_p90_s``,
    ``data_wait_frac``, ``sent_bytes`` (as above), ``sent_bytes_total`` (their sum, per step and
    rank), ``bound_bytes``, ``hot_rows``, ``total_rows``, ``hot_rows_frac``, ``hot_lookup_frac``,
    ``finished``, ``stage_s`` as above, and ``cache`` as above, of all steps since the start. Where
    the run was predicted or its stages measured: ``predicted_step_s``, ``measured_step_s`` (median
    from ``compared_from_step`` on), ``step_error_frac``, ``predicted_sent_bytes``,
    ``sent_bytes_error_frac``, and by stage ``predicted_stage_s``, ``measured_stage_s``,
    ``slowest_rank_stage_s``. An error is (predicted - measured) / measured.
``environment.json``, ``config.yaml``, ``plan.txt`` (else ``plan.json``)
    Shown as they are.

A profile or partition directory is read through its manifest, see ``hotrec.cost_model.profile`` and
``hotrec.planning.partition`` for the contents.
"""

from hotrec.report.coverage import plot_coverage
from hotrec.report.write import write_report

__all__ = ["plot_coverage", "write_report"]
