"""The page of `benchmarks/quality.py`."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchrec

from hotrec.report.render import markdown_table

PAGE = """# Quality: AUC of what is not exact

16-bit exchange changes gradients and rows in the last places, dense layers in bf16 or tf32 multiply
with fewer digits, and the order by all-hot samples trains on the samples of an epoch in another
order. None of them gives the same weights as exact training in shuffled order; here is what that
does to the AUC on held-out data. Made by

```
{command}
```

Each run is one `hotrec train`; ranks: {num_ranks}, device: {device}, one CPU thread per rank. With
the same seed all variants start from the same weights and, all_hot aside, read the same samples in
the same order, so differences are taken within a seed. Differences are in units of 0.0001 AUC. The
spread of `exact` itself over the seeds, another draw of weights and order, says how large a
difference means something; `look_ahead` is as exact as `exact`, its additions are made in another
order.

Variants: {variants}.{not_run}

{machine}
"""
SCALE = 1e4


def _number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def auc_rows(of_data: Mapping[str, Any]) -> list[list[str]]:
    """By variant: AUC of every seed, mean and standard deviation."""
    return [
        [
            variant,
            *(f"{auc:.5f}" for auc in found["auc"]),
            f"{found['mean']:.5f}",
            _number(found["std"], ".5f"),
        ]
        for variant, found in of_data["compared"].items()
    ]


def difference_rows(of_data: Mapping[str, Any]) -> list[list[str]]:
    """By variant: AUC minus that of exact training, 1e-4, and what a step sent."""
    runs = of_data["runs"]
    rows = []
    for variant, found in of_data["compared"].items():
        if "difference" not in found:
            continue
        difference = found["difference"]
        scaled = {
            key: None if difference[key] is None else SCALE * difference[key]
            for key in ("mean", "std", "min", "max")
        }
        sent, of_exact = (
            sum(run["sent_bytes_total"] for run in runs[name].values())
            for name in (variant, "exact")
        )
        share = next(iter(runs[variant].values()))["all_hot_samples_frac"]
        rows.append(
            [
                variant,
                _number(scaled["mean"], "+.2f"),
                _number(scaled["std"], ".2f"),
                _number(scaled["min"], "+.2f"),
                _number(scaled["max"], "+.2f"),
                _number(sent / of_exact if of_exact else None, ".2f"),
                _number(share, ".1%"),
            ]
        )
    return rows


def write_page(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page; what a person concludes from it is kept, below the last table."""
    variants = ", ".join(
        f"{name} (`{' '.join(settings)}`)" if settings else name
        for name, settings in document["variants"].items()
    )
    machine = (
        f"{platform.machine()}, torch {torch.__version__}, torchrec {torchrec.__version__}, "
        f"seeds {', '.join(map(str, document['seeds']))}."
    )
    if document["max_steps"] is not None:
        machine += f" **Tried out only: {document['max_steps']} steps of each run.**"
    parts = [
        PAGE.format(
            command=shlex.join(["python", *sys.argv]),
            num_ranks=document["num_ranks"],
            device=document["device"],
            not_run="".join(
                f" {name}: not run: {why}." for name, why in document["not_run"].items()
            ),
            variants=variants,
            machine=machine,
        )
    ]
    seeds = [f"seed {seed}" for seed in document["seeds"]]
    for name, of_data in document["data"].items():
        exact = next(iter(of_data["runs"]["exact"].values()))
        parts += [
            f"## {name}",
            f"{of_data['what']}. {exact['num_steps']} steps; "
            f"{exact['hot_lookup_frac']:.0%} of the lookups are of hot rows. "
            f"`{' '.join(of_data['settings'])}`",
            markdown_table(("AUC", *seeds, "mean", "std"), auc_rows(of_data)),
            markdown_table(
                (
                    "difference to exact, 1e-4",
                    "mean",
                    "std",
                    "min",
                    "max",
                    "bytes sent, of exact",
                    "all-hot samples",
                ),
                difference_rows(of_data),
            ),
        ]
    heading = "## Conclusion"
    if path.exists() and heading in path.read_text():
        parts.append(heading + path.read_text().split(heading)[1])
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")
