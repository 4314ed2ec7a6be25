"""The page of `benchmarks/locality.py`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.report.render import markdown_table

Found = Mapping[str, Any]

COLUMNS = (
    "ranks",
    "batch",
    "hot rows",
    "as read: cold + hot MB",
    "by owner",
    "net",
    "largest rank",
    "ms",
    "by labels",
    "ms",
    "and swaps",
    "net",
    "ms",
)

PAGE = """# Locality: which rank computes which sample

The samples of a global batch can change ranks: the batch, and so the update, stays as it is. Does
it save bytes to put a sample where its cold rows are, or where other samples read them too? Made by

```
{command}
```

D = 64, 32 bits on the wire, cold rows row-wise over the ranks in contiguous blocks, every rank with
as many samples as before. Bytes are those that a rank sends per step for embedding rows, mean over
the ranks: 2 x 256 for every distinct cold row that a rank reads and another one owns, and the
gradients of hot rows by the cheaper of all-gather and owner-reduce. Means over up to 3 global
batches. The hot rows are the most looked-up ones of all tables together.

* **as read**: as the loader deals the samples out today, at random.
* **by owner**: to the rank that owns most of the sample's cold rows, a row counted 1 / (samples
  that read it); the samples that lose most by their second choice choose first. One pass.
* **by labels**: label propagation from there, over owners and samples with the same rows, 8 rounds.
* **and swaps**: then exact local search, samples of two ranks changing places while rows sent
  become fewer, 30 rounds.
* **saved** fractions are of the bytes as read. **net** has the samples themselves taken off: int32
  ids, dense values and label of each one that changes ranks, as if each rank read its own share of
  the log and sent them; ranks that read each other's ids from disk send none. **largest rank** is
  the change of the cold bytes of the rank that sends most.
* **ms**: one core, for all samples of the global batch. Not timed quietly: the machine was shared.
"""


def _saved(found: Found, name: str, *, is_net: bool = False) -> float:
    before, after = found["assignments"]["as read"], found["assignments"][name]
    num_bytes = after["cold"] + after["hot"] + (after["moved"] if is_net else 0.0)
    return float(1 - num_bytes / (before["cold"] + before["hot"]))


def as_line(found: Found) -> str:
    """Progress, for people."""
    saved = ", ".join(f"{name} {_saved(found, name):.1%}" for name in found["assignments"])
    return (
        f"{found['source']} W={found['num_ranks']} B={found['batch_size']} "
        f"H={found['num_hot']}: {saved}"
    )


def as_row(found: Found) -> list[str]:
    """One row of text, as ``COLUMNS``."""
    before = found["assignments"]["as read"]
    owner, labels, swaps = (
        found["assignments"][name] for name in ("by owner", "by labels", "by labels, then swaps")
    )
    return [
        f"{found['num_ranks']}",
        f"{found['batch_size']:,}",
        f"{found['num_hot']:,}",
        f"{before['cold'] / 1e6:.2f} + {before['hot'] / 1e6:.2f}",
        f"{_saved(found, 'by owner'):.1%}",
        f"{_saved(found, 'by owner', is_net=True):.1%}",
        f"{owner['largest_cold'] / before['largest_cold'] - 1:+.0%}",
        f"{1e3 * owner['seconds']:.0f}",
        f"{_saved(found, 'by labels'):.1%}",
        f"{1e3 * labels['seconds']:.0f}",
        f"{_saved(found, 'by labels, then swaps'):.1%}",
        f"{_saved(found, 'by labels, then swaps', is_net=True):.1%}",
        f"{1e3 * swaps['seconds']:.0f}",
    ]


HOST_COLUMNS = (
    "samples",
    "hosts x ranks",
    "batch",
    "hot rows",
    "one level: as read, MB",
    "to ranks",
    "to hosts",
    "two levels: as read, MB",
    "to ranks",
    "to hosts",
    "inside: as read, MB",
    "to ranks",
    "to hosts",
)
HOST_HEADING = "## Hosts of several ranks"
HOST_PAGE = """
With hosts of several ranks only what crosses between hosts is slow. `order.assign=by_owner` then
first gives a sample to the host whose ranks own most of its cold rows, by the same rule and with
the sum of its ranks' shares, then to a rank of that host. Made by

```
{command}
```

Bytes of cold rows and their gradients that a host sends in a step, counted as above, by hotrec's
own assignment; the batch is that of a rank, and the largest that the samples suffice for.

* **one level**: between hosts, each rank for itself; **two levels**: between hosts, each row once
  for all ranks of a host (`pipeline.levels=two`); **inside**: between the ranks of a host, in one
  level.
* **to ranks**: to the rank that owns most of them, wherever it is; **to hosts**: to hosts first.
  Both are changes of the bytes as read.
"""


def as_host_row(found: Found) -> list[str]:
    """One row of text, as ``HOST_COLUMNS``."""
    row = [
        found["source"],
        f"{found['num_hosts']} x {found['ranks_per_host']}",
        f"{found['batch_size']:,}",
        f"{found['num_hot']:,}",
    ]
    for link in ("one_level", "two_levels", "inside"):
        before, *after = (of[link] for of in found["assignments"].values())
        row += [f"{before / 1e6:.2f}", *(f"{num_bytes / before - 1:+.1%}" for num_bytes in after)]
    return row


def write_hosts(path: Path, results: Sequence[Found]) -> None:
    """Write the part about hosts, which is the last of the page."""
    table = markdown_table(HOST_COLUMNS, [as_host_row(found) for found in results])
    page = path.read_text().split(HOST_HEADING)[0].strip()
    command = shlex.join(["python", *sys.argv]).replace(" --", " \\\n    --")
    parts = [page, HOST_HEADING, HOST_PAGE.format(command=command).strip(), table]
    path.write_text("\n\n".join(parts) + "\n")


def write(path: Path, results: Sequence[Found], prepared_by: Sequence[str]) -> None:
    """Write the page; what a person concludes from it is kept, below the last table."""
    lines = [f"hotrec prepare {choice}" for choice in prepared_by]
    measured = shlex.join(["python", *sys.argv]).replace(" --", " \\\n    --")
    lines.append(measured.split(" \\\n    --prepared-by")[0])
    parts = [PAGE.format(command="\n".join(lines))]
    for source in dict.fromkeys(found["source"] for found in results):
        rows = [as_row(found) for found in results if found["source"] == source]
        parts += [f"## {source}", markdown_table(COLUMNS, rows)]
    heading = "## Conclusion"
    if path.exists() and heading in path.read_text():
        parts.append(heading + path.read_text().split(heading)[1])
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")
