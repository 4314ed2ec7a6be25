"""What runs leave in their directories."""

from __future__ import annotations

import json
from pathlib import Path


def losses(run_dir: Path) -> dict[int, float]:
    """The loss of every logged step; where a step was computed twice, the last."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
