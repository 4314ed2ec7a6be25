"""Counts what crosses the network in one level and in two, on 2 to 512 hosts, from drawn batches.

    python benchmarks/host_scale.py [--page benchmarks/results/host_scale.md]

Batches of some hosts are drawn as `hotrec bench` draws them (criteo_like tables, Zipf 1.05), and
pass the code that finds owners and drops a host's duplicates in training. No rank is started.
The last line on stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.bench.samples import ZipfTables
from hotrec.embedding.owned_rows import RowOwners, Shard
from hotrec.embedding.relay import Relay
from hotrec.report.render import markdown_table
from hotrec.report.units import show_bytes, show_count
from hotrec.runtime.hosts import Hosts
from hotrec.types import RowOrder

CONF = Path(__file__).parents[1] / "conf/bench/criteo_like_b2048.yaml"
TABLE_ROWS = tuple(yaml.safe_load(CONF.read_text())["table_rows"])
NUM_ROWS = {f"C{number}": rows for number, rows in enumerate(TABLE_ROWS, start=1)}
DIM, BATCH_SIZE, EXPONENT, SEED = 64, 2048, 1.05, 0
SHAPES = ((2, 2), (2, 4), (8, 8), (64, 8), (512, 8))
# Hosts whose batches are drawn; the others are alike.
NUM_DRAWN = 2


@dataclass(frozen=True)
class Counts:
    """What the mean of the drawn hosts sends in a step, in forward and in backward together.

    Args:
        one_rows: Rows that its ranks read and other hosts own, once for each rank.
        two_rows: The same rows, once for the host.
        busiest_rail: Rows of the busiest rail over the mean.
        busiest_owner: Rows that the busiest host owns over the mean of the other hosts.
        one_messages: Messages of a rank in an exchange.
        two_messages: The same on the rail and inside the host.
    """

    num_hosts: int
    ranks_per_host: int
    one_rows: float
    two_rows: float
    busiest_rail: float
    busiest_owner: float
    one_messages: int
    two_messages: int

    @property
    def bytes_per_row(self) -> int:
        """A row in forward, its gradient in backward."""
        return 2 * 4 * DIM


def make_owners(
    num_rows: Mapping[str, int], hosts: Hosts, orders: Mapping[str, RowOrder] | None = None
) -> RowOwners:
    """Row-wise shards as TorchRec makes them: ceil(R / W) consecutive rows each."""
    world_size = hosts.num_hosts * hosts.ranks_per_host
    shards = []
    for rank in range(world_size):
        held, position = [], 0
        for name, num in num_rows.items():
            size = -(-num // world_size)
            first = min(rank * size, num)
            held.append(Shard(name, first, min(size, num - first), position))
            position += held[-1].num_rows
        shards.append(held)
    return RowOwners(list(num_rows), num_rows, shards, torch.device("cpu"), hosts, orders)


def distinct_rows(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The distinct rows of each table, ascending."""
    rows = [torch.unique(jagged.values()) for jagged in ids.to_dict().values()]
    lengths = torch.tensor([part.numel() for part in rows])
    return KeyedJaggedTensor(ids.keys(), torch.cat(rows), lengths=lengths)


def count(samples: ZipfTables, num_hosts: int, ranks_per_host: int) -> Counts:
    hosts = Hosts(num_hosts, ranks_per_host)
    world_size = num_hosts * ranks_per_host
    owners = make_owners(NUM_ROWS, hosts)
    one, two, rails, owned = [], [], [], []
    for host in range(min(NUM_DRAWN, num_hosts)):
        asked = []
        for rank in hosts.members[host]:
            [batch] = samples.batches(1, batch_size=BATCH_SIZE, rank=rank, world_size=world_size)
            asked.append(owners.find(distinct_rows(batch.sparse), 0))
        # By rank of the host, rail and host of the owner.
        nums = np.stack([part.num_to_W.numpy() for part in asked if part.num_to_W is not None])
        nums = nums.reshape(ranks_per_host, ranks_per_host, num_hosts)
        one.append(nums.sum() - nums[:, :, host].sum())
        of_rails = []
        for rail in range(ranks_per_host):
            parts = [
                part.positions_U.split(nums[rank].sum(axis=1).tolist())[rail]
                for rank, part in enumerate(asked)
            ]
            relay = Relay(torch.cat(parts).long(), nums[:, rail].tolist(), owners)
            of_rails.append(relay.num_to_H.numpy())
        of_others = np.delete(np.stack(of_rails), host, axis=1)
        two.append(of_others.sum())
        rails.append(of_others.sum(axis=1).max() / of_others.sum(axis=1).mean())
        owned.append(of_others.sum(axis=0).max() / of_others.sum(axis=0).mean())
    return Counts(
        num_hosts,
        ranks_per_host,
        float(np.mean(one)),
        float(np.mean(two)),
        float(np.mean(rails)),
        float(np.mean(owned)),
        world_size - 1,
        num_hosts - 1 + ranks_per_host - 1,
    )


def render(found: Sequence[Counts]) -> str:
    columns = [
        "hosts", "ranks of a host", "one level", "two levels", "ratio", "messages of a rank",
        "in two levels", "bytes of a message", "on a rail", "busiest rail", "busiest owner",
    ]  # fmt: skip
    rows = []
    for of in found:
        size = of.bytes_per_row / 2
        rows.append(
            [
                str(of.num_hosts),
                str(of.ranks_per_host),
                show_bytes(of.one_rows * of.bytes_per_row),
                show_bytes(of.two_rows * of.bytes_per_row),
                f"{of.one_rows / of.two_rows:.2f}",
                show_count(of.one_messages),
                show_count(of.two_messages),
                # To the ranks of other hosts.
                show_bytes(of.one_rows * size / of.ranks_per_host**2 / (of.num_hosts - 1)),
                show_bytes(of.two_rows * size / of.ranks_per_host / (of.num_hosts - 1)),
                f"{of.busiest_rail:.2f}",
                f"{of.busiest_owner:.2f}",
            ]
        )
    return "\n".join(
        [
            "# What crosses the network, by levels and number of hosts",
            "",
            "Made by `python benchmarks/host_scale.py --page benchmarks/results/host_scale.md`. "
            "Counted from drawn batches with the code that trains; no rank was started.",
            "",
            f"The tables of `hotrec bench`, Zipf {EXPONENT:g}, {BATCH_SIZE:,} samples per rank, "
            f"rows of {DIM} values in fp32. Bytes are what a host sends per step, rows and "
            "gradients, without ids, dense layers and headers; a message is one of an exchange of "
            "rows.",
            "",
            markdown_table(columns, rows),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=None)
    options = parser.parse_args(arguments)
    samples = ZipfTables(TABLE_ROWS, exponent=EXPONENT, num_dense=13, seed=SEED)
    found = [count(samples, *shape) for shape in SHAPES]
    page = render(found)
    if options.page is not None:
        options.page.write_text(page)
    print(page)
    print(json.dumps([asdict(of) for of in found]))


if __name__ == "__main__":
    main()
