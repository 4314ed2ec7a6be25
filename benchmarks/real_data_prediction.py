"""Compares predicted with counted coverage and distinct rows of a step, on real data.

    python benchmarks/real_data_prediction.py DATASET PROFILE [DATASET PROFILE ...]
        [--split valid] [--batch-sizes 256 2048] [--hot-fracs 0.01 0.1] [--num-ranks 2]
        [--page benchmarks/results/real_data_prediction.md [--prepared-by ARGUMENTS ...]]

Reads prepared datasets and their profiles. For each batch size and share of hot rows (the most
looked-up rows of all tables together) it predicts the share of the lookups that are hot, the
distinct hot and cold rows that a rank's batch reads, and the hot rows that any rank reads: with the
profile's locality, and with independent lookups. It counts the same over batches of all ranks in
the loader's order: shuffled ones of train and of the held-out split, and the held-out split in its
order of evaluation, by time. Held-out batches are predicted twice: from train alone, and with the
held-out counts and locality. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import build_demand, coverage, expected_distinct, prob_drawn
from hotrec.cost_model.histogram import build_histogram
from hotrec.cost_model.locality import step_draws
from hotrec.cost_model.profile import Profile, read_profile
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader, num_steps
from hotrec.planner.policies import choose_fraction
from hotrec.report.render import markdown_table
from hotrec.types import Partition, Rows, Schema

DIM = 16
WHAT = ("coverage", "hot rows", "cold rows", "hot rows of any rank")
COLUMNS = ("batches", "predicted from", "batch", "hot", *WHAT, "cold if independent", "steps")
PROMISED_FRAC = 0.03
SUMMARY = (
    "batches",
    "predicted from",
    f"within {PROMISED_FRAC:.0%}",
    "largest error",
    "largest if independent",
)
# A mean over fewer steps is mostly noise: a small split is read again, in another order.
MIN_STEPS = 24


@dataclass(frozen=True)
class Source:
    """A dataset and its profile."""

    path: Path
    schema: Schema
    profile: Profile


@dataclass(frozen=True)
class Case:
    """Batches that are counted, and the inputs of their prediction."""

    batches: str
    split: str
    is_shuffled: bool
    predictions: Mapping[str, bool]  # name: whether from the held-out part


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", metavar="DATASET PROFILE")
    parser.add_argument(
        "--split", default="valid", help="the split of the profile's held-out counts"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(256, 2048))
    parser.add_argument("--hot-fracs", type=float, nargs="+", default=(0.01, 0.1))
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--page", type=Path, help="file for the tables")
    parser.add_argument(
        "--prepared-by",
        nargs="+",
        default=(),
        metavar="ARGUMENTS",
        help="arguments of `hotrec prepare` and `hotrec profile` for each dataset, for the page",
    )
    parsed = parser.parse_args(arguments)
    if len(parsed.paths) % 2:
        parser.error(f"expected pairs of DATASET and PROFILE, got {len(parsed.paths)} paths")
    return parsed


def predict(
    source: Source,
    partition: Partition,
    *,
    batch_size: int,
    num_ranks: int,
    is_heldout: bool,
    with_locality: bool,
) -> dict[str, float]:
    """From the counts of a part, and the distinct rows that its batches were seen to read."""
    profile = source.profile
    counts, num_samples, of_counts, locality = (
        (
            profile.heldout,
            profile.num_heldout_samples,
            {table: build_histogram(heldout) for table, heldout in profile.heldout.items()},
            profile.heldout_locality,
        )
        if is_heldout
        else (profile.counts, profile.num_samples, profile.build_histograms(), profile.locality)
    )
    hot = cold = hot_of_any = hot_lookups = lookups = 0.0
    for table in source.schema.tables:
        name = table.name
        per_sample = float(counts[name].sum()) / num_samples
        num_draws = step_draws(
            of_counts[name],
            locality.get(name) if with_locality else None,
            batch_size=batch_size,
            world_size=num_ranks,
            lookups_per_sample=per_sample,
        )
        if is_heldout:
            distinct, covered = expect_heldout(counts[name], partition.hot(name), num_draws)
        else:
            demand = build_demand(
                name,
                of_counts[name],
                dim=DIM,
                row_bytes=4 * DIM,
                lookups_per_sample=per_sample,
                num_columns=len(source.schema.features_of(name)),
                batch_size=batch_size,
                world=World(num_ranks, num_ranks),
                num_draws=num_draws,
            )
            distinct = expected_distinct(demand, partition.num_hot(name))
            covered = coverage(demand, partition.num_hot(name))
        hot, cold, hot_of_any = hot + distinct[0], cold + distinct[1], hot_of_any + distinct[2]
        lookups += per_sample
        hot_lookups += per_sample * covered
    return dict(zip(WHAT, (hot_lookups / lookups, hot, cold, hot_of_any), strict=True))


def expect_heldout(
    counts: Rows, hot_rows: Rows, num_draws: tuple[float, float]
) -> tuple[tuple[float, float, float], float]:
    """Distinct rows of a step as ``expected_distinct`` has them, and the share of hot lookups.

    By the held-out counts of the rows, of which training made some hot.
    """
    read = np.flatnonzero(counts)
    is_hot = np.isin(read, hot_rows)
    counts_R = counts[read].astype(np.float64)
    total = counts_R.sum()
    by_rank_R, by_any_R = (prob_drawn(counts_R, total, draws) for draws in num_draws)
    distinct = (by_rank_R[is_hot].sum(), by_rank_R[~is_hot].sum(), by_any_R[is_hot].sum())
    return distinct, float(counts_R[is_hot].sum() / max(total, 1))


def count(
    source: Source, partitions: Sequence[Partition], case: Case, batch_size: int, num_ranks: int
) -> tuple[list[dict[str, float]], int]:
    """Means over every full step, for each partition; and how many steps there were."""
    schema = source.schema
    is_hot = [
        {table.name: _mask(partition, table.name, table.num_rows) for table in schema.tables}
        for partition in partitions
    ]
    totals = np.zeros((len(partitions), 5))
    steps = 0
    for ranks in steps_of(source, case, batch_size, num_ranks):
        for table in schema.tables:
            features = [feature.name for feature in schema.features_of(table.name)]
            rows = [np.concatenate([rank[name] for name in features]) for rank in ranks]
            distinct = [np.unique(of_rank) for of_rank in rows]
            union = np.unique(np.concatenate(distinct))
            for total, masks in zip(totals, is_hot, strict=True):
                hot = masks[table.name]
                num_hot = sum(np.count_nonzero(hot[found]) for found in distinct)
                num_all = sum(found.size for found in distinct)
                total += (
                    sum(np.count_nonzero(hot[of_rank]) for of_rank in rows),
                    sum(of_rank.size for of_rank in rows),
                    num_hot / num_ranks,
                    (num_all - num_hot) / num_ranks,
                    np.count_nonzero(hot[union]),
                )
        steps += 1
    figures = []
    for hot_lookups, lookups, *rows in totals.tolist():
        means = (hot_lookups / lookups, *(of_all_steps / steps for of_all_steps in rows))
        figures.append(dict(zip(WHAT, means, strict=True)))
    return figures, steps


def _mask(partition: Partition, table: str, num_rows: int) -> np.ndarray:
    mask = np.zeros(num_rows, bool)
    mask[partition.hot(table)] = True
    return mask


def steps_of(
    source: Source, case: Case, batch_size: int, num_ranks: int
) -> Iterator[list[Mapping[str, np.ndarray]]]:
    """The ids of every rank's batch, step by step; at least ``MIN_STEPS`` if shuffled."""
    dataset = Dataset.open(source.path)
    per_epoch = num_steps(dataset, case.split, batch_size, num_ranks, drop_last=True)
    loaders = [
        make_loader(
            source.path,
            case.split,
            batch_size=batch_size,
            rank=rank,
            world_size=num_ranks,
            epochs=-(-MIN_STEPS // per_epoch) if case.is_shuffled else 1,
            shuffle=case.is_shuffled,
            drop_last=True,
        )
        for rank in range(num_ranks)
    ]
    for batches in zip(*loaders, strict=True):
        yield [
            {name: ids.values().numpy() for name, ids in batch.sparse.to_dict().items()}
            for batch in batches
        ]


def compare(source: Source, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    both = {"train": False, "held-out": True}
    cases = (
        Case("train", "train", True, {"train": False}),
        Case("held-out, shuffled", arguments.split, True, both),
        Case("held-out, by time", arguments.split, False, both),
    )
    ranks = arguments.num_ranks
    dataset = Dataset.open(source.path)
    partitions = [
        choose_fraction(source.profile.counts, hot_frac=frac) for frac in arguments.hot_fracs
    ]
    results = []
    for case in cases:
        for batch_size in arguments.batch_sizes:
            if num_steps(dataset, case.split, batch_size, ranks, drop_last=True) == 0:
                continue
            counted, steps = count(source, partitions, case, batch_size, ranks)
            for partition, found in zip(partitions, counted, strict=True):
                for origin, is_heldout in case.predictions.items():
                    predicted, independent = (
                        predict(
                            source,
                            partition,
                            batch_size=batch_size,
                            num_ranks=ranks,
                            is_heldout=is_heldout,
                            with_locality=with_locality,
                        )
                        for with_locality in (True, False)
                    )
                    results += [
                        {
                            "batches": case.batches,
                            "predicted_from": origin,
                            "batch_size": batch_size,
                            "hot_rows": partition.total_hot,
                            "what": what,
                            "predicted": predicted[what],
                            "independent": independent[what],
                            "counted": found[what],
                            "error_frac": predicted[what] / found[what] - 1,
                            "independent_error_frac": independent[what] / found[what] - 1,
                            "steps": steps,
                        }
                        for what in WHAT
                        if found[what]
                    ]
    return results


def as_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row of text for all figures of some batches, as ``COLUMNS``."""
    groups: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for result in results:
        key = tuple(result[name] for name in ("batches", "predicted_from", "batch_size"))
        groups.setdefault((*key, result["hot_rows"]), {})[result["what"]] = result
    rows = []
    for (batches, origin, batch_size, hot_rows), figures in groups.items():
        cold = figures.get("cold rows")
        rows.append(
            [
                batches,
                origin,
                f"{batch_size:,}",
                f"{hot_rows:,}",
                *(_show(figures[what]) if what in figures else "-" for what in WHAT),
                f"{cold['independent_error_frac']:+.1%}" if cold else "-",
                str(next(iter(figures.values()))["steps"]),
            ]
        )
    return rows


def _show(figure: Mapping[str, Any]) -> str:
    shown = [
        f"{v:.3f}" if v <= 1 else f"{v:,.0f}" for v in (figure["predicted"], figure["counted"])
    ]
    return f"{shown[0]} / {shown[1]} ({figure['error_frac']:+.1%})"


def summarize(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each kind of batches and origin of the prediction the largest errors, as ``SUMMARY``."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["batches"], result["predicted_from"]), []).append(result)
    rows = []
    for (batches, origin), group in groups.items():
        kept = sum(abs(r["error_frac"]) <= PROMISED_FRAC for r in group)
        row = [batches, origin, f"{kept} of {len(group)}"]
        for key in ("error_frac", "independent_error_frac"):
            worst = max(group, key=lambda r: abs(r[key]))
            row.append(
                f"{worst[key]:+.1%}: {worst['what']}, batch {worst['batch_size']:,}, "
                f"{worst['hot_rows']:,} hot"
            )
        rows.append(row)
    return rows


PAGE = """# Predicted against counted: distinct rows of a step on real data

`hotrec plan` predicts from the profile how many distinct rows a step reads. Here those predictions
are held against what the loader's batches read, on {num_ranks} ranks. Made by

```
{command}
```

The profile counts rows and, in the same pass, draws batches from single chunks and counts the
distinct rows they read (`hotrec/cost_model/locality.py`). "If independent" is the prediction
without the latter, as if the lookups of a batch were independent.

* **train**: shuffled batches of an epoch, predicted from the train counts.
* **held-out, shuffled**: the validation split in the order in which training would read it, several
  times over where it is small.
* **held-out, by time**: the validation split as it is evaluated, in the order of the log. Its
  batches are stretches of time, which no prediction here knows of.
* predicted from **train**: train counts and train batches alone, as a plan is made; the error holds
  the drift from the train data to the held-out data. From **held-out**: hot rows by train counts,
  all else by the held-out counts and batches. Where a vocabulary drops ids that train holds less
  than `min_count` times, every row of the table is read that often in train, but not held out,
  where ids that are new share one row: cold rows predicted from train are then too many.

Rows are per rank, of all tables together; "hot rows of any rank" is the union over the ranks.
Figures are predicted / counted, means over the steps. The goal is {promised:.0%}.
"""
COMMANDS = ("prepare", "profile")


def write_page(
    path: Path, found: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> None:
    command = [f"hotrec {what} {choice}" for choice in arguments.prepared_by for what in COMMANDS]
    measured = shlex.join(["python", *sys.argv]).replace(" --", " \\\n    --")
    # Which lines prepared the data stands above it.
    command.append(measured.split(" \\\n    --prepared-by")[0])
    parts = [
        PAGE.format(
            command="\n".join(command), num_ranks=arguments.num_ranks, promised=PROMISED_FRAC
        )
    ]
    for name, of_dataset in found.items():
        parts += [
            f"## {name}",
            f"{of_dataset['num_samples']:,} train samples in {of_dataset['num_chunks']} chunk(s), "
            f"{of_dataset['num_heldout_samples']:,} held-out ones.",
            markdown_table(SUMMARY, summarize(of_dataset["results"])),
            markdown_table(COLUMNS, as_rows(of_dataset["results"])),
        ]
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parse(arguments)
    found = {}
    for path, profile_path in zip(parsed.paths[::2], parsed.paths[1::2], strict=True):
        source = Source(path, Dataset.open(path).schema, read_profile(profile_path)[0])
        results = compare(source, parsed)
        found[str(path)] = {
            "num_samples": source.profile.num_samples,
            "num_chunks": len(Dataset.open(path).chunks("train")),
            "num_heldout_samples": source.profile.num_heldout_samples,
            "results": results,
        }
        print(markdown_table(COLUMNS, as_rows(results)), file=sys.stderr)
        print(markdown_table(SUMMARY, summarize(results)), file=sys.stderr)
    if parsed.page:
        write_page(parsed.page, found, parsed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
