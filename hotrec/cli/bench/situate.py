"""What predictions of a benchmark's case are for."""

from __future__ import annotations

from collections.abc import Mapping

from hotrec.cli.bench.cases import Case, case_config, machine_of
from hotrec.cli.schema import BenchRootConfig
from hotrec.cli.situation import Situation, describe_situation, planned_pipeline
from hotrec.costs import Costs
from hotrec.distributed import Ranks
from hotrec.placement.histogram import CountHistogram
from hotrec.types import Schema


def situate(
    config: BenchRootConfig,
    case: Case,
    schema: Schema,
    histograms: Mapping[str, CountHistogram],
    num_samples: int,
    costs: Costs,
    ranks: Ranks,
) -> Situation:
    """The situation in which the case is run; see ``describe_situation``."""
    machine, trained = machine_of(config, ranks), case_config(config, case)
    return describe_situation(
        trained,
        schema,
        histograms,
        num_samples,
        machine,
        costs,
        None,
        pipeline=planned_pipeline(trained, machine),
    )
