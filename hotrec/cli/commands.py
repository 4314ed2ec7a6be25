"""The commands, their summaries and their root configurations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One command; its code is ``run`` in the module of its name.

    Args:
        summary: One line for the list of commands.
        config_name: The root configuration in ``conf/``. Commands that share one accept the same
            overrides, so one ``experiment=`` describes a whole chain of them.
        is_parallel: Whether several ranks can share the work.
        first: The override for a first word that is a path, with {} for the path or paths.
    """

    summary: str
    config_name: str = "config"
    is_parallel: bool = False
    first: str = ""

    @property
    def word(self) -> str:
        """The kind of the first words, for its help."""
        key, _, value = self.first.partition("=")
        several = " ..." if "[" in value else ""
        return f"<{key}>{several}" if key else ""


COMMANDS = {
    "init": Command("inspect a log and describe it in conf/data", "init", first="path={}"),
    "run": Command("prepare, calibrate, plan, train and report; skip what is current"),
    "prepare": Command(
        "turn raw click logs into a dataset, and count the lookups of its rows", is_parallel=True
    ),
    "calibrate": Command(
        "measure how long each part of a step takes on this machine", is_parallel=True
    ),
    "plan": Command("choose the hot rows and the sharding plan for a number of ranks"),
    "train": Command("train a model; one process, or many under torchrun", is_parallel=True),
    "evaluate": Command(
        "evaluate a run's checkpoint on a split of its dataset",
        "evaluate",
        is_parallel=True,
        first="run_dir={}",
    ),
    "compare": Command(
        "interleave training with the plans of runs, or those of plans=, and compare their speed",
        "compare",
        is_parallel=True,
        first="runs=[{}]",
    ),
    "export": Command(
        "write a run's model for serving: tables, vocabularies and layers",
        "export",
        first="run_dir={}",
    ),
    "predict": Command(
        "score raw files with a run's model, into Parquet",
        "predict",
        is_parallel=True,
        first="input=[{}]",
    ),
    "report": Command(
        "make one HTML page and one JSON file from run directories or a sweep",
        "report",
        first="runs=[{}]",
    ),
    "doctor": Command("check the installed versions and the machine", "doctor"),
}
