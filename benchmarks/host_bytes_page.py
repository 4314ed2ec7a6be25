"""Bytes on a host's wire against what must cross it, from files of benchmarks/networks.sh -g.

    python benchmarks/host_bytes_page.py PAGE DIRECTORY...

Reads the JSON files of two hosts in each directory, and writes the page. The bytes depend neither
on the rate of the link nor on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotrec.report.render import markdown_table

COLUMNS = (
    "Zipf",
    "hosts x ranks",
    "B",
    "case",
    "wire",
    "dense layers",
    "wire without them",
    "bound",
    "over bound",
)

PAGE = """# Bytes on a host's wire

Two hosts, network namespaces of one machine, with several ranks each. MB that a host sends in a
step, mean over the counted steps. Made by

```
for zipf in 1.05 1.2; do
  for ranks in 2 4; do
    benchmarks/networks.sh -o bytes/$zipf -n 1gbit -w $((2 * ranks)) -g $ranks -b "2048 8192" \\
      -k 1 -c "look_ahead two_levels" bench.zipf_exponent=$zipf bench.block_steps=5
  done
done
python benchmarks/host_bytes_page.py benchmarks/results/host_bytes.md bytes/*
```

* **wire**: what the kernel says the host's interface has sent, with the headers of packets.
* **dense layers**: the gradients of the dense layers (all-reduce), counted by the senders.
* **bound**: the distinct rows that a host reads and the other one owns, and as many gradients, each
  once, in fp32.
* **over bound**: wire without dense layers over the bound. In two levels the excess is ids,
  sizes of messages and headers of packets; in one level also rows that several ranks of a host ask
  for.

{table}
"""


def rows_of(directory: Path) -> list[list[str]]:
    found = []
    for path in directory.glob("*.json"):
        match = re.fullmatch(r"\w+-w(\d+)-g(\d+)-b(\d+)", path.stem)
        if match:
            ranks, local, batch = (int(number) for number in match.groups())
            document = json.loads(path.read_text())
            zipf = document["data"]["zipf_exponent"]
            found += [
                ((zipf, ranks, batch, name), _row(case, local))
                for name, case in document["cases"].items()
            ]
    return [
        [f"{zipf:g}", f"2 x {ranks // 2}", f"{batch:,}", name, *cells]
        for (zipf, ranks, batch, name), cells in sorted(found)
    ]


def _row(case: Mapping[str, Any], ranks_per_host: int) -> list[str]:
    # Every rank reads the interface of its host, so the mean over the ranks is a host's.
    wire = case["wire_bytes"]
    dense = ranks_per_host * case["between_hosts_bytes_by_collective"]["all_reduce"]
    bound = ranks_per_host * case["between_hosts_bound_bytes"]
    return [
        *(f"{value / 1e6:.2f}" for value in (wire, dense, wire - dense, bound)),
        f"{(wire - dense) / bound:.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("directory", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    rows = [row for directory in options.directory for row in rows_of(directory)]
    table = markdown_table(list(COLUMNS), rows)
    options.page.write_text(PAGE.format(table=table))


if __name__ == "__main__":
    main()
