"""The page and the picture of sequence_counts.py.

    PYTHONPATH=. python benchmarks/sequence_counts_page.py PAGE

Writes both from the figures next to the page, which sequence_counts.py has written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from hotrec.report.render import markdown_table
from hotrec.report.style import light_grid, report_style, run_color
from hotrec.report.units import DASH, show_bytes, show_count, show_frac, show_known

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

PUBLISHED = {"item": 0.024, "album": 0.015, "artist": 0.006}
DEPTHS = (1, 4, 16)
NAMES = {
    "row_wise": "row-wise, every id",
    "row_wise_distinct": "row-wise, distinct ids",
    "column_wise": "column-wise",
    "hot_cold": "distinct ids, hot rows",
    "two_levels": "distinct ids, two levels",
}
LINES = {**dict.fromkeys(NAMES, "-"), "hot_cold": "--", "two_levels": ":"}
ORDERS = {"user_major": "by user", "shuffled": "shuffled", "by_time": "by time"}

PAGE = """# What sequences exchange, and what look-ahead can fetch early

Counted from drawn batches with the code that routes and exchanges in training; no rank was started.
Made by

```
hotrec prepare data=kuairand
{command}
```

{processor}, {processor_s:,} s of one core; Python {python}, torch {torch}, torchrec {torchrec}.

The log is the generated one (`benchmarks/yambda_like.py`), the batches are those of DLRMv4's main
tables: a history of up to 3 x 1,362 events and the candidate, of items, albums and artists, and the
user: {rows}.
DLRMv4's tables of crosses are left out: one id a sample. Rows have {dim} values in fp32. Hosts have
{ranks_per_host} ranks. The reference has 1,024 samples a rank; **B** is the number here, and 8
ranks are shown with both.

* **by user**: the order of the reference: of a day, all samples of one user after the other; ranks
  take them in turn, so that all of them read nearly the same rows, and more ranks more users' rows.
* **shuffled**: samples drawn from all users and the last hundred days.

{picture}

## Distinct rows of a rank

{distinct}

The published shares are those of DLRMv4 by user; the generator was fitted to them.

## Exchange

* **row-wise, every id**: TorchRec's row-wise sharding on CPU. An id is 8 bytes.
* **row-wise, distinct ids**: each rank asks once for a row, by a position of 4 bytes (look-ahead
  adds 2 bytes of answers). TorchRec de-duplicates on CUDA only; this is hotrec without hot rows.
* **column-wise**: every table in as many column shards as ranks; every id goes to all of them.
* **distinct ids, hot rows**: {hot_frac} of the rows are on every rank, those that {num_profiled}
  batches of other samples look up most: {hot}.
  Their gradients go the cheapest of three ways, and are added up inside hosts first.
* **distinct ids, two levels**: of the ranks of a host one asks for a row; on one host there is one
  level.

Bytes are those that a rank sends in one counted step, in the mean, and receives: **requests**,
**rows** in forward, as many gradients in backward, and in **sent** also gradients of **hot** rows.
Lengths and headers are not counted. **busiest rank** sends most, over the mean. **busiest owner**
is the number of rows that it serves over the mean, of rows in blocks by id, and spread
(`placement.spread_rows`, on by default where ids are rows). Bytes of hotrec's placements are those
of spread rows, of the first line those of blocks. In two levels a row travels twice, once of these
inside a host.

{exchange}

## Memory

Rows of a rank: **expanded** has a row per id, **gradients** those of expanded and of distinct rows,
**served** is what the busiest owner reads for all ranks at once, in two levels also what the
busiest relay holds. **bytes** are all of them, with replicas. It is a lower bound: exchanges make
copies. Packed outputs, which are not counted here, leave out expanded rows.

{memory}

## Urgent rows

hotrec calls a row's lag the number of steps since the last global batch that reads it. A row with a
lag of 1 is **urgent**: its gradients must be applied and the row be sent again between two steps,
at any depth. With depth d, rows with a lag of at most d are not final when the batch is requested;
all others are fetched at once, d steps ahead, and of lag k those k - 1 steps ahead. So the first
column is what a step waits for, and the others are what depths 4 and 16 cannot fetch at the first
opportunity. The lags are those that the owners answer (`ColdExchange`), for every distinct row of
every rank, in **steps** that come after 16 others.

By user, batches that follow each other have other users, and share popular rows only. A shuffled
batch reads several times as many rows, and so meets more of them again. The generated log has no
drift: popularity is the same every day.

{urgent}

KuaiRand is the sample of `samples/kuairand_pure`, prepared with `conf/data/kuairand.yaml`:
`watched` (up to 50 videos) and `video_id`, which share a table of videos. A user's history does not
change during the log.

## Conclusion

{conclusion}
"""


def distinct_table(document: Mapping[str, Any]) -> str:
    header = ["order", "ranks", "B", "steps", "users", "ids of a table", *PUBLISHED]
    rows = [
        [
            ORDERS[name],
            *(f"{of[key]:,}" for key in ("num_ranks", "batch_size", "num_steps")),
            *(show_count(of[key]) for key in ("num_users", "num_ids")),
            *(f"{of['fracs'][table]:.2%}" for table in PUBLISHED),
        ]
        for name, order in document["orders"].items()
        for of in order["distinct"]
    ]
    fracs = (f"{frac:.1%}" for frac in PUBLISHED.values())
    published = ["8", "1,024", DASH, DASH, "2,690,000", *fracs]
    return markdown_table(header, [*rows, ["published", *published]])


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def exchange_table(counts: Sequence[Mapping[str, Any]]) -> str:
    header = [
        *("ranks", "B", "placement", "requests", "rows", "hot", "sent", "busiest rank"),
        *("sent to other hosts", "busiest owner", "spread"),
    ]
    rows = [
        [
            str(of["num_ranks"]),
            f"{of['batch_size']:,}",
            NAMES[of["placement"]],
            show_bytes(of["request_bytes"]),
            show_bytes(of["rows_bytes"]),
            show_bytes(of["hot_bytes"]) if of["hot_bytes"] else DASH,
            show_bytes(of["sent_bytes"]),
            _ratio(of["most_sent_bytes"] / of["sent_bytes"]),
            show_bytes(of["between_hosts_bytes"]) if of["between_hosts_bytes"] else DASH,
            show_known(_ratio, of["busiest"]),
            show_known(_ratio, of["busiest_spread"]),
        ]
        for of in counts
    ]
    return markdown_table(header, rows)


def memory_table(counts: Sequence[Mapping[str, Any]]) -> str:
    header = ["ranks", "B", "placement", "distinct", "expanded", "gradients", "served", "hot"]
    header.append("bytes")
    rows = [
        [
            str(of["num_ranks"]),
            f"{of['batch_size']:,}",
            NAMES[of["placement"]],
            show_count(of["num_distinct"]) if of["num_distinct"] else DASH,
            show_count(of["num_ids"]),
            show_count(of["num_ids"] + of["num_distinct"]),
            show_count(of["num_served"] + of["num_relayed"]),
            show_count(of["num_replicas"]) if of["num_replicas"] else DASH,
            show_bytes(of["peak_bytes"]),
        ]
        for of in counts
    ]
    return markdown_table(header, rows)


def _streams(document: Mapping[str, Any]) -> list[tuple[str, int, int, Mapping[str, Any]]]:
    """Log and order, ranks, samples of a rank, and figures; lags by table."""
    found: list[tuple[str, int, int, Mapping[str, Any]]] = []
    for name, of in document["orders"].items():
        first = of["distinct"][0]
        log = f"Yambda-like, {ORDERS[name]}"
        found.append((log, first["num_ranks"], first["batch_size"], of))
    for shape in document["kuairand"]:
        for name in ("by_time", "shuffled"):
            of = shape[name]
            log = f"KuaiRand, {ORDERS[name]}"
            lags = {"video": of["lags"], "all": of["lags"]}
            found.append((log, shape["num_ranks"], shape["batch_size"], {**of, "lags": lags}))
    return found


def urgent_table(document: Mapping[str, Any]) -> str:
    header = ["log", "ranks", "B", "steps", "table", "urgent: lag 1"]
    rows = [
        [
            *(log, str(num_ranks), f"{batch_size:,}", str(of["num_steps"]), table),
            *(show_frac(fracs[depth - 1]) for depth in DEPTHS),
        ]
        for log, num_ranks, batch_size, of in _streams(document)
        for table, fracs in of["lags"].items()
        if (log.startswith("Yambda"), table) != (False, "all")
    ]
    return markdown_table([*header, *(f"lag up to {depth}" for depth in DEPTHS[1:])], rows)


def conclude(document: Mapping[str, Any]) -> str:
    """What the tables say about de-duplication, hot rows, two levels and look-ahead."""
    lines = []
    for name, order in document["orders"].items():
        batch_size = order["distinct"][0]["batch_size"]
        of = {
            (c["num_ranks"], c["placement"]): c
            for c in order["counts"]
            if c["batch_size"] == batch_size
        }
        ranks = sorted({num for num, _ in of})

        def span(values: Sequence[float], show: Any) -> str:
            low, high = show(min(values)), show(max(values))
            return low if low == high else f"{low} to {high}"

        def figures(placement: str, key: str, of: Any = of, ranks: Any = ranks) -> list[float]:
            return [of[num, placement][key] for num in ranks if (num, placement) in of]

        every, distinct = (
            figures(part, "sent_bytes") for part in ("row_wise", "row_wise_distinct")
        )
        saved = [a / b for a, b in zip(every, distinct, strict=True)]
        hot = [a / b - 1 for a, b in zip(figures("hot_cold", "sent_bytes"), distinct, strict=True)]
        lines += [
            f"* **{ORDERS[name]}**, B = {batch_size:,}: the busiest owner serves "
            f"{span(figures('row_wise', 'busiest'), _ratio)} times the mean if every id is sent, "
            f"{span(figures('row_wise_distinct', 'busiest'), _ratio)} if distinct ids are "
            f"(spread: {span(figures('row_wise_distinct', 'busiest_spread'), _ratio)}), "
            f"{span(figures('hot_cold', 'busiest'), _ratio)} with hot rows. De-duplication divides "
            f"the bytes by {span(saved, lambda v: f'{v:.1f}')}; hot rows change them by "
            f"{span(hot, lambda v: f'{v:+.1%}')}."
        ]
        several = [num for num in ranks if (num, "two_levels") in of]
        if several:
            crossing = [
                of[num, "row_wise_distinct"]["between_hosts_bytes"]
                / of[num, "two_levels"]["between_hosts_bytes"]
                for num in several
            ]
            lines[-1] += (
                f" Two levels divide what crosses hosts by {span(crossing, lambda v: f'{v:.2f}')}."
            )
        urgent = [show_frac(order["lags"]["all"][depth - 1]) for depth in DEPTHS]
        lines[-1] += (
            f" Of the distinct rows {urgent[0]} are urgent; {urgent[1]} and {urgent[2]} were read "
            "in the last 4 and 16 steps."
        )
    return "\n".join(lines)


def draw(path: Path, document: Mapping[str, Any]) -> None:
    """Bytes by ranks on the left, one panel an order, and rows by lag on the right."""
    orders = document["orders"]
    with report_style():
        figure, panels = plt.subplots(1, len(orders) + 1, figsize=(16, 4), constrained_layout=True)
        for axes, (name, order) in zip(panels, orders.items(), strict=False):
            batch_size = order["distinct"][0]["batch_size"]
            for position, (placement, label) in enumerate(NAMES.items()):
                found = [
                    c
                    for c in order["counts"]
                    if (c["placement"], c["batch_size"]) == (placement, batch_size)
                ]
                axes.plot(
                    [str(c["num_ranks"]) for c in found],
                    [c["sent_bytes"] / 1e9 for c in found],
                    color=run_color(position),
                    linestyle=LINES[placement],
                    marker="o",
                    markersize=3,
                    label=label,
                )
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"GB that a rank sends, {ORDERS[name]}, B = {batch_size:,}")
            axes.set_xlabel("ranks")
            light_grid(axes, "y")
        panels[1].sharey(panels[0])
        panels[0].legend(fontsize=8)
        axes = panels[-1]
        for position, (log, num_ranks, batch_size, of) in enumerate(_streams(document)):
            fracs = of["lags"]["all"]
            axes.plot(
                range(1, len(fracs) + 1),
                [100 * frac for frac in fracs],
                color=run_color(position),
                marker="o",
                markersize=3,
                label=f"{log}, {num_ranks} x {batch_size:,}",
            )
        axes.set_ylim(0, 102)
        axes.set_title("% of distinct rows with at most this lag")
        axes.set_xlabel("lag, steps (1: urgent)")
        light_grid(axes, "y")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
        figure.savefig(path, dpi=110, metadata={"Software": None})
        plt.close(figure)


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the page, its figures and its picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    draw(picture, document)
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    num_rows = document["num_rows"]
    exchange, memory = (
        "\n\n".join(
            f"### {title}, {ORDERS[name]}\n\n{table(order['counts'])}"
            for name, order in document["orders"].items()
        )
        for title, table in (("Exchange", exchange_table), ("Memory", memory_table))
    )
    text = PAGE.format(
        command=document["command"].replace(" --", " \\\n    --"),
        picture=f"![Bytes by ranks, and rows by lag]({picture.name})",
        rows=", ".join(f"{show_count(num)} rows of {table}" for table, num in num_rows.items()),
        hot=", ".join(
            f"{show_count(num)} of {table}" for table, num in document["num_hot"].items()
        ),
        hot_frac=show_frac(document["hot_frac"]),
        distinct=distinct_table(document),
        exchange=exchange,
        memory=memory,
        urgent=urgent_table(document),
        conclusion=conclude(document),
        **{
            name: document[name]
            for name in (
                *("processor", "processor_s", "python", "torch", "torchrec"),
                *("dim", "ranks_per_host", "num_profiled"),
            )
        },
    )
    path.write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    page = parser.parse_args(arguments).page
    write(page, json.loads(page.with_suffix(".json").read_text()))


if __name__ == "__main__":
    main()
