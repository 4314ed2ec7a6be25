"""Prediction documents made by hand, with numbers that a test can check."""

from __future__ import annotations

from typing import Any

TORCHREC_STAGES = {
    "ids_exchange": 0.004,
    "row_lookup": 0.006,
    "rows_exchange": 0.011,
    "dense": 0.020,
    "grads_exchange": 0.013,
    "row_update": 0.007,
    "hot_exchange": 0.002,
    "optimizer": 0.001,
    "other": 0.001,
}
HOT_COLD_STAGES = {
    "route": 0.003,
    "ids_exchange": 0.001,
    "row_lookup": 0.004,
    "rows_exchange": 0.002,
    "pool": 0.003,
    "dense": 0.020,
    "grads_exchange": 0.0025,
    "row_update": 0.002,
    "hot_exchange": 0.005,
    "optimizer": 0.002,
    "other": 0.001,
}


def plan(
    stage_s: dict[str, float], sent: dict[str, float], memory: list[dict[str, float]], *, batch: int
) -> dict[str, Any]:
    step_s = sum(stage_s.values())
    return {
        "step_s": step_s,
        "stage_s": dict(stage_s),
        "hidden_s": {"rows_exchange": 0.0015},
        "sent_bytes": dict(sent),
        "total_sent_bytes": sum(sent.values()),
        "samples_per_s": batch / step_s,
        "memory": memory,
    }


def table(name: str, num_rows: int, num_hot: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_rows": num_rows,
        "dim": 64,
        "hot_rows": num_hot,
        "device_rows": num_rows - num_hot,
        "cached_rows": 0,
        "host_rows": 0,
        "exchange": "rows",
        "sharding": "row_wise",
        "tier": "device",
        "coverage_frac": 0.8,
        "sent_bytes_before": 1.25e6,
        "sent_bytes_after": 0.5e6,
        "torchrec_sharding": "row_wise",
        **changes,
    }


def prediction(*, num_ranks: int = 4, ranks_per_host: int = 2) -> dict[str, Any]:
    """A whole document: hot/cold chosen over two plans of TorchRec."""
    batch = 2048 * num_ranks

    def memory(device: float, host: float) -> list[dict[str, float]]:
        return [
            {"device_bytes": device * (1 + 0.05 * (rank % 3)), "host_bytes": host}
            for rank in range(num_ranks)
        ]

    hot_sent = {"ids_exchange": 1e5, "rows_exchange": 9e5, "grads_exchange": 9e5}
    hot_sent["hot_exchange"] = 2.1e6
    torchrec_sent = {"ids_exchange": 8e5, "rows_exchange": 6.5e6, "grads_exchange": 6.5e6}
    torchrec_sent["hot_exchange"] = 7e5
    slower = {stage: 1.4 * seconds for stage, seconds in TORCHREC_STAGES.items()}
    return {
        "costs": {"name": "rack7", "origin": "measured", "note": "measured on another host: box"},
        "world": {"num_ranks": num_ranks, "ranks_per_host": ranks_per_host},
        "batch_size": 2048,
        "device": "cuda",
        "chosen": "hot_cold",
        "why": "The step is 0.70x of torchrec planner's.",
        "plans": {
            "hot_cold": plan(HOT_COLD_STAGES, hot_sent, memory(3e9, 1.5e9), batch=batch),
            "all_cold": plan(TORCHREC_STAGES, torchrec_sent, memory(2e9, 2e9), batch=batch),
            "torchrec hand_tuned": plan(slower, torchrec_sent, memory(4e9, 0), batch=batch),
            "torchrec planner": plan(
                TORCHREC_STAGES, torchrec_sent, memory(2.5e9, 2.5e9), batch=batch
            ),
        },
        "tables": [
            table("user", 5_000_000, 40_000, device_rows=1_000_000, host_rows=3_960_000),
            table("item", 1_200_000, 90_000, cached_rows=200_000, device_rows=0, host_rows=1110000),
            table("tag", 800, 0, exchange="pooled", sharding="table_wise", coverage_frac=0.0),
            table("day", 7, 7, torchrec_sharding="data_parallel", coverage_frac=1.0),
        ],
        "break_even": {"64": 1.75, "128": None},
        "balance": {"served_rows": [float(500 + 10 * rank) for rank in range(num_ranks)]},
        "expected": {
            "coverage_frac": 0.8125,
            "cold_rows": 3210.0,
            "hot_rows": 4321.0,
            "union_rows": 6543.0,
            "all_hot_frac": 0.17,
            "cache_hit_frac": 0.55,
        },
        "sensitivity": [
            entry("hot budget x 0.5", 0.0495, batch, 65_000),
            entry("hot budget x 2", 0.0455, batch, 230_000),
            entry("batch x 0.5", 0.0265, batch / 2, 110_000),
            entry("batch x 2", 0.088, batch * 2, 150_000),
            {"what": "ranks x 0.5", "step_s": None, "hot_rows": None, "why": "needs 12 GB more."},
            entry("ranks x 2", 0.0465, batch * 2, 120_000),
        ],
    }


def entry(what: str, step_s: float, batch: float, hot_rows: int) -> dict[str, Any]:
    return {
        "what": what,
        "step_s": step_s,
        "samples_per_s": batch / step_s,
        "hot_rows": hot_rows,
        "sent_bytes": 3.3e6,
    }
