"""``hotrec init``: inspect a log, and describe it in a file of the user's configuration."""

from __future__ import annotations

import logging
import os
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

from omegaconf import ListConfig, OmegaConf

from hotrec.artifact import naming
from hotrec.cli.store import USER_CONF, options_of
from hotrec.config.data import DataSpec
from hotrec.config.roots import InitConfig, TrainerConfig
from hotrec.config.validate import validate
from hotrec.data.infer import Inferred, infer, to_yaml
from hotrec.data.log import open_log
from hotrec.data.sample import Sample, read_sample

logger = logging.getLogger(__name__)

# With fewer steps a model learns little, so a short log is trained in smaller batches.
_MIN_STEPS, _MIN_BATCH, _MAX_RANKS = 300, 64, 2


def run(config: InitConfig, run_dir: Path) -> dict[str, Any]:
    """Write <directory>/data/<name>.yaml; never over another file."""
    if config.path is None:
        raise ValueError("path: expected a file or directory, got none. Run `hotrec init PATH`.")
    name = config.name or _name_of(config.path)
    file = Path(config.directory) / "data" / f"{name}.yaml"
    if file.exists():
        raise ValueError(
            f"{file}: expected a new file, got an existing one. Use or remove it, or add "
            "name=<another name>."
        )
    check_name(name)
    sample = read_sample(config.path)
    found = infer(sample, _labels(config.label), config.time)
    settings = first_settings(sample)
    batch_size = settings.pop("trainer.batch_size", None)
    words = [*_config_dir(config.directory), f"data={name}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    command = shlex.join(["hotrec", "run", *words])
    heading = [
        f"Created by `hotrec init {shlex.quote(config.path)}`. Check it, then run:",
        f"  {command}",
    ]
    text = to_yaml(sample, found, heading)
    check_text(text)
    if batch_size is not None:
        text = with_batch_size(text, batch_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming(file), file.open("x", encoding="utf-8") as stream:
        stream.write(text)
    labels = found.labels
    remarks = remarks_of(sample, found)
    for remark in remarks:
        logger.warning("%s", remark)
    logger.info("%s: %s", file, summary_of(found))
    logger.info("check it, then run: %s", command)
    return {
        "command": "init",
        "file": file,
        "name": name,
        "label": labels[0] if len(labels) == 1 else labels,
        "columns": {entry.name: entry.spec["kind"] for entry in found.entries if entry.is_used},
        "left_out": _left_out(found),
        "remarks": remarks,
        "split": found.split,
        "num_rows": sample.num_rows,
        "is_whole": sample.is_whole,
        "next": command,
    }


def summary_of(found: Inferred) -> str:
    """The guesses about a log, in one line."""
    kinds = [entry.spec["kind"] for entry in found.entries if entry.is_used]
    split = "time" if found.split["kind"] == "time" else "chance, at random"
    return (
        f"label {', '.join(found.labels)}, {kinds.count('dense')} "
        f"dense, {kinds.count('categorical')} categorical, {kinds.count('categorical_list')} "
        f"lists; split by {split}; skipped: {', '.join(_left_out(found)) or 'nothing'}"
    )


def _left_out(found: Inferred) -> list[str]:
    used = {entry.name for entry in found.entries if entry.is_used}
    return sorted({entry.name for entry in found.entries} - used)


def _labels(asked: Any) -> list[str] | None:
    """The columns that ``label`` names, one or a list of them."""
    if asked is None:
        return None
    names = list(asked) if isinstance(asked, list | ListConfig) else [asked]
    if not all(isinstance(name, str | int) for name in names):
        raise ValueError(f"label: expected the name of a column, or a list of them, got {asked!r}.")
    return [str(name) for name in names]


def remarks_of(sample: Sample, found: Inferred) -> list[str]:
    """Remarks about a log, one per line."""
    sources = {entry.spec.get("source", entry.name) for entry in found.entries if entry.is_used}
    remarks = [
        f"{name}: read from the names of the directories"
        for name in sample.partitions
        if name in {*sources, found.split.get("column")}
    ]
    if sample.num_bad:
        lines = "1 line" if sample.num_bad == 1 else f"{sample.num_bad:,} lines"
        remarks.append(
            f"{lines} unreadable: {sample.fault}. `hotrec prepare` would stop there: fix "
            "the file, or set data.source.on_bad_line=skip"
        )
    return [*remarks, *found.remarks]


def _name_of(path: str) -> str:
    """The first usable part of the name of the file or directory."""
    stem = Path(path).name.split(".")[0] or Path(path).parent.name
    name = re.sub(r"\W+", "_", stem, flags=re.ASCII).strip("_").lower()
    if not name:
        raise ValueError(
            f"name: expected a file name with letters or digits, got {path!r}. Add name=<a name>."
        )
    return name if name[0].isalpha() else f"log_{name}"


def check_name(name: str) -> None:
    """Refuse invalid names of a dataset, and those of hotrec's own datasets."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, flags=re.ASCII):
        raise ValueError(f"name: expected letters, digits and '_', got {name!r}.")
    if name in options_of("data"):
        raise ValueError(
            f"name: expected another name than {', '.join(options_of('data'))}, got {name}. Add "
            "name=<another name>."
        )


def with_batch_size(text: str, batch_size: int) -> str:
    """The file of a log with the batch size that it needs; an override still wins."""
    heading, _, entries = text.partition("source:\n")
    entries = textwrap.indent(f"source:\n{entries}", "  ")
    note = "for enough steps: the log is short"
    return (
        f"# @package _global_\n{heading}trainer:\n  batch_size: {batch_size}  # {note}\n"
        f"data:\n{entries}"
    )


def check_text(text: str) -> None:
    """Read the specification like Hydra, and check the log with it like ``prepare``."""
    merged = OmegaConf.merge(OmegaConf.structured(DataSpec), OmegaConf.create(text))
    spec: Any = OmegaConf.to_object(merged)
    validate(spec, "data")
    open_log(spec.source)


def _config_dir(directory: str) -> list[str]:
    return [] if Path(directory) == USER_CONF else ["--config-dir", directory]


def first_settings(sample: Sample, num_ranks: int | None = None) -> dict[str, int]:
    """The settings that a first run of this log needs on this host besides the defaults.

    Args:
        sample: Rows of the log.
        num_ranks: Number of ranks; None to choose it for this host.
    """
    num_ranks = num_ranks or min(_MAX_RANKS, len(os.sched_getaffinity(0)))
    num_train = 0.8 * sample.num_rows
    batch_size = TrainerConfig().batch_size
    while batch_size > _MIN_BATCH and num_train < _MIN_STEPS * num_ranks * batch_size:
        batch_size //= 2
    settings = {"launch.num_ranks": num_ranks} if num_ranks > 1 else {}
    if batch_size < TrainerConfig().batch_size:
        settings["trainer.batch_size"] = batch_size
    return settings
