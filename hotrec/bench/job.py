"""The door: turns a configuration of ``hotrec compare`` into the inputs of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hotrec.assemble.job import architecture_of, label_weights_of, optimizer_specs
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.policies import ColdRows
from hotrec.bench.benchmark import Benchmark
from hotrec.bench.cases import Case, Subject, split_case
from hotrec.bench.measure import Turns
from hotrec.bench.samples import ZipfTables
from hotrec.bench.stored import StoredSamples
from hotrec.config.groups import ModelConfig, OptimizerConfig, OrderAssign
from hotrec.config.roots import (
    HOT_COLD_CASES,
    BenchCase,
    BenchConfig,
    BenchRouting,
    BenchVariant,
    CompareConfig,
    TrainerConfig,
)
from hotrec.cost_model.profile import Profile
from hotrec.models.zoo import make_checked_layers
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.planner.policies import (
    choose_all_cold,
    choose_all_hot,
    choose_fraction,
    choose_popular_rows,
)
from hotrec.runtime.ranks import Ranks
from hotrec.types import Partition, PipelineSpec, PopularRows, Rows, Schema, TorchrecPlan

# Keys of bench that are copied to the document.
SETTINGS = (
    *("name", "network", "interface", "dataset", "rounds", "block_steps", "block_skip"),
    *("warmup_rounds", "counted_steps", "loss_tolerance"),
)

CaseChooser = Callable[[BenchConfig, Mapping[str, Rows], int, str], list[Case]]


def make_subject(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    schema: Schema,
    *,
    batch_size: int,
    seed: int = 0,
    columns: Schema | None = None,
) -> Subject:
    """The subject of a benchmark with a configured model on tables of this schema.

    Args:
        model: The model.
        optimizer: The update rules.
        schema: Its features and tables.
        batch_size: Batch size per rank.
        seed: Seed of the weights.
        columns: The columns of the log with the same features, where tables are not those of the
            log.

    Raises:
        ValueError: If the model names a column that is not in the schema.
    """
    embedding, dense = optimizer_specs(optimizer)
    shape = architecture_of(model, schema if columns is None else columns)
    if columns is not None:
        features = [[f.name, t.name] for t in schema.tables for f in schema.features_of(t.name)]
        shape = replace(shape, features=features, labels=list(schema.labels))
    if model.names_columns:
        make_checked_layers(shape, seed)
    weights = label_weights_of(TrainerConfig(), schema)
    spec = ModelSpec(schema, shape, embedding, dense, seed=seed, label_weights=weights)
    return Subject(spec, batch_size)


def subject_of(config: CompareConfig, schema: Schema) -> Subject:
    """The model of a benchmark's cases, on tables of this schema."""
    bench, planner = config.plans, config.planner
    subject = make_subject(
        config.model, config.optimizer, schema, batch_size=bench.batch_size, seed=bench.seed
    )
    return replace(subject, hbm_gib=planner.hbm_gib, host_gib=planner.host_gib)


def choose_hot_rows(bench: BenchConfig, counts: Mapping[str, Rows]) -> Partition:
    """The hot rows of the case hot_cold."""
    total_rows = sum(of_table.size for of_table in counts.values())
    if bench.num_hot_rows > total_rows:
        raise ValueError(
            f"bench.num_hot_rows: expected at most the tables' {total_rows} rows, got "
            f"{bench.num_hot_rows}."
        )
    chosen = choose_fraction(counts, hot_frac=bench.num_hot_rows / total_rows)
    return replace(chosen, policy=f"the {chosen.total_hot} most accessed rows")


def make_cases(
    bench: BenchConfig, counts: Mapping[str, Rows], world_size: int, device: str
) -> list[Case]:
    """The chosen cases, in the configuration's order."""
    variants = {name: bench.variants.get(name) for name in bench.cases}
    return [
        _make_case(
            name, variant or BenchVariant(BenchCase[name]), bench, counts, world_size, device
        )
        for name, variant in variants.items()
    ]


def _make_case(
    name: str,
    variant: BenchVariant,
    bench: BenchConfig,
    counts: Mapping[str, Rows],
    world_size: int,
    device: str,
) -> Case:
    pipeline = PipelineSpec(
        variant.pipeline or bench.pipeline,
        variant.wire,
        variant.depth,
        micro_batches=variant.micro_batches,
        levels=variant.levels,
    )
    if variant.placement not in HOT_COLD_CASES:
        plan = TorchrecPlan[variant.placement.name]
        tables = TorchrecTables(plan, variant.tier, variant.cache_load_frac)
        return Case(name, Plan(tables, pipeline))
    partition = _hot_rows(variant, bench, counts, world_size)

    def popular(load_frac: float) -> dict[str, PopularRows]:
        return choose_popular_rows(
            partition,
            Profile(bench.profile_samples, 0, counts),
            load_frac=load_frac,
            global_batch_size=bench.batch_size * world_size,
            world_size=world_size,
        )

    cold = ColdRows(variant.cold_tier, variant.cache_load_frac)
    placement = cold.place(partition, device, popular)
    return split_case(
        name,
        placement,
        pipeline,
        is_routed_by_loader=bench.routing is BenchRouting.loader,
        is_by_owner=variant.assign is OrderAssign.by_owner,
    )


def _hot_rows(
    variant: BenchVariant, bench: BenchConfig, counts: Mapping[str, Rows], world_size: int
) -> Partition:
    if variant.placement is BenchCase.all_cold:
        return choose_all_cold(counts)
    if variant.placement is BenchCase.all_hot:
        return choose_all_hot(counts)
    if variant.num_hot_rows is not None:
        bench = replace(bench, num_hot_rows=variant.num_hot_rows)
    return choose_hot_rows(bench, counts)


def make_turns(bench: BenchConfig) -> Turns:
    """The schedule of the interleaved cases."""
    return Turns(
        rounds=bench.rounds,
        block_steps=bench.block_steps,
        block_skip=bench.block_skip,
        warmup_steps=bench.warmup_rounds,
        counted_steps=bench.counted_steps,
        interface=bench.interface,
    )


def make_benchmark(
    config: CompareConfig, ranks: Ranks, choose_cases: CaseChooser = make_cases
) -> Benchmark:
    """The benchmark of a configuration.

    Args:
        config: A validated configuration.
        ranks: The ranks that will measure it.
        choose_cases: Chooses the cases, given the configuration, the lookups per row by table, the
            number of ranks and the device.

    Raises:
        ValueError: If a case cannot be placed on this machine, or there are fewer rows than should
            be hot.
        ArtifactError: If there is no complete dataset at ``bench.dataset``.
    """
    bench = config.plans
    samples: ZipfTables | StoredSamples
    if bench.dataset is None:
        samples = ZipfTables(
            bench.table_rows,
            exponent=bench.zipf_exponent,
            num_dense=bench.num_dense,
            seed=bench.seed,
            by_popularity=bench.rows_by_popularity,
        )
    else:
        samples = StoredSamples(Path(bench.dataset), seed=bench.seed)
        counted = min(bench.profile_samples, samples.num_samples)
        bench = replace(bench, profile_samples=counted)
    counts = samples.count(bench.profile_samples)
    return Benchmark(
        subject_of(config, samples.schema),
        samples,
        choose_cases(bench, counts, ranks.world_size, ranks.device.type),
        make_turns(bench),
        loss_tolerance=bench.loss_tolerance,
        settings={
            **{name: getattr(bench, name) for name in SETTINGS},
            **{name: getattr(bench, name).name for name in ("pipeline", "routing")},
        },
    )
