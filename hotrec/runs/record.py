"""Write the configuration, the plan and the environment of a run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.types import ShardingPlan

from hotrec.artifact import move_artifact, read_record
from hotrec.assemble.order import ALL_HOT
from hotrec.assemble.torchrec_plan import plan_document, plan_text
from hotrec.config.roots import Config
from hotrec.config.text import as_document, as_yaml
from hotrec.data.all_hot import KIND as ALL_HOT_KIND
from hotrec.planner.partition import KIND as PARTITION_KIND
from hotrec.report.plan import plan_report_text
from hotrec.runtime.run_dir import (
    CONFIG_FILE,
    ENVIRONMENT,
    PARTITION,
    PLAN_JSON,
    PLAN_TEXT,
    PREDICTION,
    RECORD,
    STAGED,
)

PACKAGES = ("hotrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy")


@contextmanager
def staged_record(run_dir: Path, *, is_first: bool) -> Iterator[Path]:
    """The directory for the record of a run that may still be refused; removed at the end.

    Until ``accept_record`` only the log changes in the run directory.
    """
    staged = run_dir / STAGED
    try:
        if is_first:
            # What a killed run staged must not be accepted with this one.
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        yield staged
    finally:
        if is_first:
            shutil.rmtree(staged, ignore_errors=True)


def accept_record(staged: Path, run_dir: Path) -> None:
    """Move the record of an accepted run into its directory."""
    if not (staged / PREDICTION).exists():
        (run_dir / PREDICTION).unlink(missing_ok=True)  # of the plan before a resume
    kinds = {PARTITION: PARTITION_KIND, ALL_HOT: ALL_HOT_KIND}
    for path in sorted(staged.iterdir()):
        if path.is_dir():
            move_artifact(path, run_dir / path.name, kinds[path.name])
        else:
            path.replace(run_dir / path.name)


def write_config(config: Config, content_hash: str, staged: Path) -> None:
    """Write config.yaml, which is read by ``evaluate``, ``export`` and ``predict``.

    Args:
        config: The configuration of the run.
        content_hash: That of its dataset. If the configuration has no data source, the record of
            ``hotrec prepare`` next to the dataset is used.
        staged: Where the record of the run is staged.
    """
    document = as_document(config)
    if config.data.source is None and config.data.synthetic is None:
        document["data"] |= read_prepared(Path(config.paths.dataset), content_hash) or {}
    (staged / CONFIG_FILE).write_text(as_yaml(document), encoding="utf-8")


def read_prepared(dataset: Path, content_hash: str) -> dict[str, Any] | None:
    """The configuration ``data`` from which ``hotrec prepare`` made a dataset, if known."""
    try:
        made = json.loads(read_record(dataset.with_name(f"{dataset.name}.{RECORD}")))
        return dict(made["data"]) if made["figures"]["content_hash"] == content_hash else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def write_plan(
    plan: ShardingPlan, run_dir: Path, prediction: Mapping[str, Any] | None = None
) -> str:
    """Write ``plan.json``, ``plan.txt`` and ``prediction.json``.

    Args:
        plan: TorchRec's sharding plan.
        run_dir: Directory of the run.
        prediction: Document of ``hotrec.planner.document``, if there is one.

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
