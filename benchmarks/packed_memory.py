"""Measures the memory of sequences' output and of the first layer on it: expanded, packed, late.

    PYTHONPATH=. python benchmarks/packed_memory.py [--page benchmarks/results/packed_memory.md]

The layer is the first of DLRMv4's content MLP, on the rows of item, album and artist next to each
other, at the distinct rows that DLRMv4 reports for a step of a rank and fewer ids. Every case has a
process of its own, without tables: it starts from the distinct rows, as after their exchange. Then
two ranks train on the first shape (`benchmarks/packed_training.py`). The last line on stdout is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks import packed_training
from benchmarks.packed_training import memory_of
from hotrec.embedding.collection import SequenceLayout
from hotrec.embedding.late import LateLinear
from hotrec.embedding.packed import PackedLayout
from hotrec.report.render import markdown_table
from hotrec.report.units import show_bytes, show_count
from hotrec.routing.router import Router
from hotrec.types import Partition

# Distinct rows over ids.
DISTINCT_FRAC = {"item": 0.024, "album": 0.015, "artist": 0.006}
# Ids of a feature, dimension of its rows, width of the layer; DLRMv4 has 2.69 million, 512 and 256.
SHAPES = ((300_000, 256, 128), (100_000, 512, 256))
DLRMV4_IDS, DLRMV4_DIM = 2_690_000, 512
LENGTH, NUM_REPEATS, SEED = 1000, 5, 0
Layer = Callable[[Mapping[str, Any]], torch.Tensor]
Output = Callable[[], torch.Tensor]


def expanded(layer: LateLinear) -> Layer:
    """The usual model: rows copied to the ids, concatenated, and multiplied."""
    return lambda found: F.linear(
        torch.cat([found[name].values() for name in DISTINCT_FRAC], dim=1), layer.weight, layer.bias
    )


def materialized(layer: LateLinear) -> Layer:
    """Each feature copied and multiplied by its block before the next."""

    def forward(found: Mapping[str, Any]) -> torch.Tensor:
        total: Any = None
        for name, block in zip(DISTINCT_FRAC, layer.weight.split(layer.dims, dim=1), strict=True):
            bias = layer.bias if total is None else None
            term = F.linear(found[name].materialize().values(), block, bias)
            total = term if total is None else total.add_(term)
            del term
        return total

    return forward


def late(layer: LateLinear) -> Layer:
    """Distinct rows multiplied, and the results copied."""
    return lambda found: layer([found[name] for name in DISTINCT_FRAC])


CASES = {
    "expanded": (SequenceLayout, expanded),
    "packed, materialized": (PackedLayout, materialized),
    "packed, late": (PackedLayout, late),
}


def measure(case: str, num_ids: int, dim: int, width: int) -> dict[str, Any]:
    """One case in this process: bytes above what was there before, and processor seconds."""
    torch.set_num_threads(1)
    make_layout, make_layer = CASES[case]
    generator = torch.Generator().manual_seed(SEED)
    num_rows = {name: round(frac * num_ids) for name, frac in DISTINCT_FRAC.items()}
    ids = [torch.randint(rows, (num_ids,), generator=generator) for rows in num_rows.values()]
    features = KeyedJaggedTensor(
        list(num_rows),
        torch.cat(ids),
        lengths=torch.full((len(ids) * num_ids // LENGTH,), LENGTH),
    )
    layout = make_layout(
        [EmbeddingConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=[name])
         for name, rows in num_rows.items()]
    )  # fmt: skip
    routed = Router(layout.groups, Partition(num_rows), need_indices=False)(features)
    del features, ids
    rows_UD = torch.randn(routed.groups[0].rows.values().numel(), dim, generator=generator)
    rows_UD.requires_grad_()
    layer = LateLinear([dim] * len(num_rows), width)
    forward = make_layer(layer)
    upstream = torch.randn(num_ids, width, generator=generator)

    def output() -> torch.Tensor:
        parts = [layout.of_rows(rows_UD, routed.groups[0], len(num_rows))]
        return forward(layout.assemble(parts, routed))

    # The libraries' own memory first: a step of the same layers on few ids.
    nn.Linear(dim, width)(torch.zeros(8, dim, requires_grad=True)).sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
    before = memory_of("VmRSS")
    out = output()
    forward_peak, kept = memory_of("VmHWM"), memory_of("VmRSS")
    out.backward(upstream)
    peak = memory_of("VmHWM")
    del out
    forward_s, backward_s = [], []
    for _ in range(NUM_REPEATS):
        rows_UD.grad, _ = None, layer.zero_grad()
        start_s = time.process_time()
        out = output()
        middle_s = time.process_time()
        out.backward(upstream)
        forward_s.append(middle_s - start_s)
        backward_s.append(time.process_time() - middle_s)
        del out
    return {
        "case": case,
        "num_ids": num_ids,
        "dim": dim,
        "width": width,
        "num_rows": rows_UD.shape[0],
        "kept_bytes": kept - before,
        "forward_peak_bytes": forward_peak - before,
        "peak_bytes": peak - before,
        "saved_bytes": saved_bytes(output, {rows_UD, *layer.parameters()}),
        "forward_s": median(forward_s),
        "backward_s": median(backward_s),
    }


def saved_bytes(output: Output, others: set[torch.Tensor]) -> int:
    """Bytes of the tensors that autograd saves for backward, except these."""
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output()
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


PAGE = """# Memory of sequences' output: expanded, packed, late

Made by

```
PYTHONPATH=. python benchmarks/packed_memory.py --page benchmarks/results/packed_memory.md
```

The rows (D values, fp32) of three features with as many ids each, and a linear layer of width N on
the three rows of each id: the first layer of DLRMv4's content MLP, which has 2.69 million ids of a
feature on a rank, D = 512 and N = 256. Distinct rows over ids as reported there:
{shares}; ids are drawn uniformly from as many rows. Each case
is a process without tables, which starts from the distinct rows, as after their exchange, and from
the gradient of the layer's output.

* **expanded**: rows are copied to the ids, concatenated and multiplied, as without packed output.
* **packed, materialized**: each feature is copied and multiplied by its block of the weights before
  the next.
* **packed, late**: `LateLinear` multiplies distinct rows, then each id adds up its results.
* **peak**: the most that the process grows in forward and backward (VmHWM); **forward**: in forward
  alone. **kept**: after forward, with the layer's output. **saved**: by autograd for backward,
  without that output, distinct rows, weights and indices. **bytes an id**: the peak over ids of a
  feature.
* **CPU s**: processor time of one thread, median of {repeats}; an indication, on a shared machine.

{table}

{scaled}

## Training on two ranks

The most that a rank grows by, from before its tables are made, in {steps} steps of {ids} ids of
each feature, D = {dim} and N = {width}, over gloo, `pipeline=sparse_dist`, all rows cold: with the
libraries' own memory, tables, exchange and one batch read ahead. **TorchRec's own** is its
`EmbeddingCollection` with its planner's plan, without hotrec's; **ratio** is to that. All cases
train the same weights.

{trained}
"""


def render(found: Sequence[Mapping[str, Any]], trained: Sequence[Mapping[str, Any]]) -> str:
    columns = [
        "ids of a feature", "D", "N", "case", "peak", "ratio", "forward", "kept", "saved",
        "bytes an id", "forward, CPU s", "backward, CPU s",
    ]  # fmt: skip
    rows = []
    for of in found:
        if of["case"] == "expanded":
            first = of["peak_bytes"]
        rows.append(
            [
                show_count(of["num_ids"]),
                str(of["dim"]),
                str(of["width"]),
                of["case"],
                show_bytes(of["peak_bytes"]),
                f"{first / of['peak_bytes']:.1f}",
                show_bytes(of["forward_peak_bytes"]),
                show_bytes(of["kept_bytes"]),
                show_bytes(of["saved_bytes"]),
                show_count(round(of["peak_bytes"] / of["num_ids"])),
                f"{of['forward_s']:.2f}",
                f"{of['backward_s']:.2f}",
            ]
        )
    scaled = ", ".join(
        f"{show_bytes(of['peak_bytes'] / of['num_ids'] * DLRMV4_IDS)} ({of['case']})"
        for of in found
        if of["dim"] == DLRMV4_DIM
    )
    return PAGE.format(
        shares=", ".join(f"{name} {frac:.1%}" for name, frac in DISTINCT_FRAC.items()),
        repeats=NUM_REPEATS,
        table=markdown_table(columns, rows),
        scaled=f"At DLRMv4's ids, in proportion: {scaled}. Computed, not measured.",
        steps=packed_training.NUM_STEPS,
        ids=show_count(found[0]["num_ids"]),
        dim=found[0]["dim"],
        width=found[0]["width"],
        trained=packed_training.render(trained),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", type=Path, default=None)
    parser.add_argument("--divide-by", type=int, default=1, help="fewer ids, to try it")
    options = parser.parse_args(arguments)
    found = []
    for num_ids, dim, width in SHAPES:
        for case in CASES:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                size = num_ids // options.divide_by
                found.append(pool.apply(measure, (case, size, dim, width)))
            print(f"{found[-1]}", file=sys.stderr)
    trained = []
    num_ids, dim, width = SHAPES[0]
    shape = num_ids // options.divide_by, dim, width
    for case in packed_training.CASES:
        trained.append(packed_training.measure(case, shape, DISTINCT_FRAC))
        print(f"{trained[-1]}", file=sys.stderr)
    page = render(found, trained)
    if options.page is not None:
        options.page.write_text(page)
    print(page)
    print(json.dumps([*found, *trained]))


if __name__ == "__main__":
    main()
