"""Prediction documents made by hand, with numbers that a test can check."""

from __future__ import annotations

from typing import Any

from hotrec.types import STAGES

# Seconds in the order of STAGES, from route to other; 65 ms and 45.5 ms.
TORCHREC_S = (0.0, 0.004, 0.006, 0.011, 0.0, 0.020, 0.013, 0.007, 0.002, 0.001, 0.001)
HOT_COLD_S = (0.003, 0.001, 0.004, 0.002, 0.003, 0.020, 0.0025, 0.002, 0.005, 0.002, 0.001)
EXCHANGES = [stage for stage in STAGES if stage.endswith("_exchange")]
TORCHREC_SENT, HOT_COLD_SENT = (8e5, 6.5e6, 6.5e6, 7e5), (1e5, 9e5, 9e5, 2.1e6)


def prediction(*, num_ranks: int = 4, ranks_per_host: int = 2) -> dict[str, Any]:
    """A whole document: hot/cold chosen over two plans of TorchRec."""
    batch = 2048 * num_ranks

    def plan(
        seconds: tuple[float, ...], sent: tuple[float, ...], device: float, host: float
    ) -> dict[str, Any]:
        return {
            "step_s": sum(seconds),
            "stage_s": dict(zip(STAGES, seconds, strict=True)),
            "hidden_s": {"rows_exchange": 0.0015},
            "sent_bytes": dict(zip(EXCHANGES, sent, strict=True)),
            "total_sent_bytes": sum(sent),
            "samples_per_s": batch / sum(seconds),
            "memory": [
                {"device_bytes": device * (1 + 0.05 * (rank % 3)), "host_bytes": host}
                for rank in range(num_ranks)
            ],
        }

    slower = tuple(1.4 * seconds for seconds in TORCHREC_S)
    return {
        "costs": {"name": "rack7", "origin": "measured", "note": "measured on another host: box"},
        "world": {"num_ranks": num_ranks, "ranks_per_host": ranks_per_host},
        "batch_size": 2048,
        "device": "cuda",
        "chosen": "hot_cold",
        "why": "The step is 0.70x of torchrec planner's.",
        "plans": {
            "hot_cold": {
                **plan(HOT_COLD_S, HOT_COLD_SENT, 3e9, 1.5e9),
                **{"title": "hotrec, 130,007 hot rows", "is_hotrec": True, "torchrec_plan": None},
            },
            "all_cold": {
                **plan(TORCHREC_S, TORCHREC_SENT, 2e9, 2e9),
                "title": "hotrec, no hot rows",
            },
            "torchrec hand_tuned": {
                **plan(slower, TORCHREC_SENT, 4e9, 0),
                **{"title": "TorchRec's hand-tuned plan", "is_hotrec": False},
                "torchrec_plan": "hand_tuned",
            },
            "torchrec planner": {
                **plan(TORCHREC_S, TORCHREC_SENT, 2.5e9, 2.5e9),
                **{"title": "TorchRec's planner", "is_hotrec": False, "torchrec_plan": "planner"},
            },
        },
        "tables": [
            table("user", 5_000_000, 40_000, device_rows=1_000_000, host_rows=3_960_000),
            table("item", 1_200_000, 90_000, cached_rows=200_000, device_rows=0, host_rows=1110000),
            table("tag", 800, 0, exchange="pooled", sharding="table_wise", coverage_frac=0.0),
            table("day", 7, 7, torchrec_sharding="data_parallel", coverage_frac=1.0),
        ],
        "expected": {
            "coverage_frac": 0.8125,
            "cold_rows": 3210.0,
            "hot_rows": 4321.0,
            "union_rows": 6543.0,
            "all_hot_frac": 0.17,
            "cache_hit_frac": 0.55,
        },
    }


def table(name: str, num_rows: int, num_hot: int, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "num_rows": num_rows, "hot_rows": num_hot, "device_rows": num_rows - num_hot,
        "cached_rows": 0, "host_rows": 0, "exchange": "rows", "sharding": "row_wise",
        "coverage_frac": 0.8, "sent_bytes_before": 1.25e6, "sent_bytes_after": 0.5e6,
        "torchrec_sharding": "row_wise", **changes,
    }  # fmt: skip
