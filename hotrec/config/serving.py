"""The configurations of what leads out of a run: export and predict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hotrec.config.fields import Rules, key, section

RowType = StrEnum("RowType", "fp32 fp16 int8")

# Meanings of keys that both have.
RUN = "directory of the finished training run; latest: the newest under runs/"
CHECKPOINT = "checkpoint: latest, or a name in the run's checkpoints/"
BATCH = "number of samples that are scored at once"


@dataclass
class ExportFormConfig:
    """The form of the exported model."""

    rows: RowType = key(
        "type of the embedding rows: fp32 (exact), fp16, or int8 (each row times a scale of its "
        "own)",
        RowType.fp32,
    )
    eval_split: str | None = key(
        "split of the run's dataset on which the exported model is evaluated; null: none", "test"
    )
    batch_size: int = key(BATCH, 4096, ge=1)


@dataclass
class ExportConfig:
    """The configuration of export."""

    output: str = key("directory of the exported model")
    run_dir: str = key(RUN, "latest")
    checkpoint: str = key(CHECKPOINT, "latest")
    export: ExportFormConfig = section("the form of the exported model", ExportFormConfig)

    def rules(self) -> Rules:
        yield bool(self.output), "output: expected a directory, got an empty path."


@dataclass
class PredictConfig:
    """The configuration of predict."""

    input: list[str] = key(
        "files to score, in the format of the log that the run's dataset was prepared from: paths, "
        "directories or glob patterns",
        size=1,
    )
    output: str = key("directory of the scores, with a Parquet file for each file of input")
    run_dir: str = key(RUN, "latest")
    checkpoint: str = key(CHECKPOINT, "latest")
    joins: dict[str, list[str]] = key(
        "files of side tables by name, in place of those in the run's data.source.joins", {}
    )
    batch_size: int = key(BATCH, 4096, ge=1)

    def rules(self) -> Rules:
        yield bool(self.output), "output: expected a directory, got an empty path."
