"""Run directories, profiles and partitions made by hand, with numbers that a test can check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotrec.artifact import commit_artifact, scratch_directory

Record = dict[str, Any]
SUMMARY: Record = {
    "name": "hot_cold", "placement": "hot_cold", "model": "dlrm", "world_size": 2,
    "batch_size": 2048, "num_steps": 300, "finished": True,
    "dataset": "0123456789abcdef", "dataset_name": "events", "eval_split": "test",
    "num_eval_samples": 5000, "auc": 0.78125, "log_loss": 0.4571,
    "samples_per_s": 33000.0, "step_p50_s": 0.124, "step_p90_s": 0.139,
    "sent_bytes": {"cold_all_to_all": 2.5e6, "hot_gradients": 2.0e6}, "sent_bytes_total": 4.5e6,
    "bound_bytes": 4.0e6, "hot_rows": 62840, "total_rows": 4_950_000, "hot_lookup_frac": 0.9123,
}  # fmt: skip
TORCHREC: Record = {
    **SUMMARY, "name": "planner", "placement": "torchrec planner", "auc": 0.78115,
    "step_p50_s": 0.248, "hot_rows": 0, "sent_bytes": {"embedding_all_to_all": 15.0e6},
    "sent_bytes_total": 15.0e6,
}  # fmt: skip
COMPARED: Record = {
    "compared_from_step": 50, "predicted_step_s": 0.100, "measured_step_s": 0.125,
    "step_error_frac": -0.2, "predicted_sent_bytes": 4.59e6,
    "predicted_stage_s": {"route": 0.010, "dense": 0.080, "hot_exchange": 0.010, "other": 0.0},
    "measured_stage_s": {"route": 0.005, "dense": 0.095, "hot_exchange": 0.020, "other": 0.005},
    "slowest_rank_stage_s": {"route": 0.006, "dense": 0.097, "hot_exchange": 0.03, "other": 0.01},
}  # fmt: skip
CACHE: Record = {
    "num_steps": 200, "num_lookups": 4_000_000, "num_rows": 1_000_000, "num_hits": 875_000,
    "num_misses": 125_000, "num_conflict_misses": 4_000, "num_evictions": 110_000,
    "read_bytes": 64_000_000, "written_bytes": 57_000_000,
}  # fmt: skip
TEXTS = {
    "config.yaml": "model: dlrm\n",
    "plan.txt": "t_user_hot  data_parallel <x>\n",
    "environment.json": '{"torch": "2.13.0"}',
}


def metrics_line(step: int, **changes: Any) -> Record:
    return {
        "step": step, "loss": 0.7 - step / 1000, "step_p50_s": 0.125, "data_wait_s": 0.002,
        "sent_bytes": {"cold_all_to_all": 2.6e6, "hot_gradients": 1.9e6}, "bound_bytes": 4.1e6,
        "stage_s": {"forward": 0.03, "backward": 0.05}, **changes,
    }  # fmt: skip


def eval_line(step: int, auc: float, split: str = "valid") -> Record:
    return {"step": step, "split": split, "auc": auc, "log_loss": 0.46}


def write_run(
    path: Path,
    summary: Record | None = None,
    metrics: list[Record] | None = None,
    evals: list[Record] | None = None,
    texts: dict[str, str] | None = None,
) -> Path:
    path.mkdir(parents=True)
    files = dict(texts or {})
    if summary is not None:
        files["summary.json"] = json.dumps(summary)
    for name, lines in (("metrics.jsonl", metrics), ("eval.jsonl", evals)):
        if lines is not None:
            files[name] = "".join(json.dumps(line) + "\n" for line in lines)
    for name, text in files.items():
        (path / name).write_text(text)
    return path


def write_whole_run(path: Path, summary: Record = SUMMARY) -> Path:
    metrics = [metrics_line(step) for step in (100, 200, 300)]
    evals = [eval_line(150, 0.75), eval_line(300, 0.78), eval_line(300, 0.77, "test")]
    return write_run(path, summary, metrics, evals, TEXTS)


PROFILE: Record = {
    "num_samples": 1000, "num_heldout_samples": 100,
    "tables": {"user": {"num_rows": 80}, "<item>": {"num_rows": 20}},
    "coverage": {"rows_frac": [0.0, 1.0], "train": [0.0, 1.0], "heldout": [0.0, 1.0]},
}  # fmt: skip


def hot_part(num_rows: int, num_hot: int) -> Record:
    return {
        **{"num_rows": num_rows, "hot_rows": num_hot, "hot_rows_frac": num_hot / num_rows},
        **{"hot_bytes": num_hot * 260, "row_bytes": 260},
        **{"coverage_train": 0.8125, "coverage_heldout": 0.7},
    }


SPLIT: Record = {
    "policy": "budget < 2,600 bytes",
    "tables": {"user": hot_part(80, 8), "<item>": hot_part(20, 2)},
    "total": hot_part(100, 10),
}


def write_artifact(path: Path, kind: str, content: Record, made_from: dict[str, str]) -> str:
    """Commit an artifact and return its content hash."""
    with scratch_directory(path, kind=kind) as scratch:
        artifact = commit_artifact(scratch, path, kind=kind, content=content, made_from=made_from)
    return artifact.content_hash
