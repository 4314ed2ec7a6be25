"""Write the plan and the environment of a run."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.types import ShardingPlan

from hotrec.planning.torchrec_plan import plan_document, plan_text
from hotrec.report.plan import plan_report_text
from hotrec.runtime.run_dir import ENVIRONMENT, PLAN_JSON, PLAN_TEXT, PREDICTION

PACKAGES = ("hotrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchdata", "numpy")


def write_plan(
    plan: ShardingPlan, run_dir: Path, prediction: Mapping[str, Any] | None = None
) -> str:
    """Write ``plan.json``, ``plan.txt`` and ``prediction.json``.

    Args:
        plan: TorchRec's sharding plan.
        run_dir: Directory of the run.
        prediction: Document of ``hotrec.planning.document``, if there is one.

    Returns:
        The content of ``plan.txt``.
    """
    (run_dir / PLAN_JSON).write_text(json.dumps(plan_document(plan), indent=2) + "\n")
    text = plan_text(plan)
    if prediction is not None:
        (run_dir / PREDICTION).write_text(json.dumps(prediction, indent=2) + "\n")
        text = f"{plan_report_text(prediction)}\n{text}"
    (run_dir / PLAN_TEXT).write_text(text)
    return text


def write_environment(run_dir: Path, *, world_size: int, num_hosts: int, device: str) -> None:
    """Write versions, host and command line of the run to ``environment.json``."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    document = {
        "argv": sys.argv,
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "world_size": world_size,
        "num_hosts": num_hosts,
    }
    (run_dir / ENVIRONMENT).write_text(json.dumps(document, indent=2) + "\n")
