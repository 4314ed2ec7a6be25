"""Draws the figures of the pages into docs/_static: ``PYTHONPATH=. python docs/draw_figures.py``.

Those of why_and_when.md are computed: requests from the batches of ``hotrec compare``, bytes from
``benchmarks/results/locality.md``.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt
import yaml

from hotrec.bench.samples import ZipfTables

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "docs/_static"
COMPUTE, HIDDEN, EXPOSED, PLAIN = "#cfe0f5", "#d3ecd2", "#fbd9b5", "#eef0f3"
INK, FAINT, GRID = "#1f2933", "#8793a1", "#dfe3e8"
COLD, HOT, OTHER = "#5b8fc9", "#e8964a", "#9aa5b1"
LIGHT_COLD, LIGHT_HOT = "#bcd4ee", "#f6cfa6"

# Package and role, from the top of tests/policy/test_layers.py down: its ORDER, reversed.
LAYERS = [
    ("cli", "the commands; composes the configuration with Hydra"),
    ("doctor", "checks of the installation"),
    ("bench, calibrate", "cases to compare; measurements of the machine"),
    ("runs", "a training run and an evaluation, from top to bottom"),
    ("report", "run directories to figures and pages"),
    ("program", "the library: counts, a parallel model, its pipeline"),
    ("assemble", "configuration to plan, plan to model, loader, pipeline"),
    ("train", "loop, pipelines, dense synchronization, checkpoints"),
    ("embedding", "row exchange, prefetch, hot rows"),
    ("models", "DLRM, DCNv2"),
    ("planner", "requests, candidates, search, predictions, the plan"),
    ("cost_model", "costs, demand, predicted step, memory"),
    ("routing", "ids to hot slots and cold rows"),
    ("data", "readers, prepare, chunks, loader"),
    ("runtime", "ranks, communication, stages, watchdog"),
    ("config", "dataclasses of all groups"),
    ("types, lock, artifact", "value objects, enumerations, locks, manifests"),
]
# Begin, width and text of each span, in units of a twentieth of a step.
COMPUTING = [
    (0, 3, "pool t", COMPUTE),
    (3, 5, "forward t", COMPUTE),
    (8, 5, "backward\nto the rows", COMPUTE),
    (13, 7, "weight gradients of\nthe dense layers t", COMPUTE),
    (20, 3, "pool t+1", COMPUTE),
    (23, 5, "forward t+1", COMPUTE),
    (28, 5, "backward\nto the rows", COMPUTE),
]
COMMUNICATING = [
    (0, 3.5, "row requests\nof t+1", HIDDEN),
    (3.5, 4, "late gradients\nof t-1", HIDDEN),
    (7.5, 5.5, "rows of t+1 that\nstep t does not read", HIDDEN),
    (13, 7, "gradients of rows that t+1\nreads; these rows, updated", EXPOSED),
    (20, 3.5, "row requests\nof t+2", HIDDEN),
    (23.5, 4, "late gradients\nof t", HIDDEN),
    (27.5, 5.5, "rows of t+2 that\nstep t+1 does not read", HIDDEN),
]


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A box."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="4" fill="{fill}" stroke="{FAINT}" stroke-width="0.8"/>'


def text(x: float, y: float, content: str, *, size: float = 12, style: str = "") -> str:
    """Lines of text, centred on y."""
    lines = content.split("\n")
    first = y - (len(lines) - 1) * size * 0.62 + size * 0.35
    return "".join(
        f'<text x="{x:g}" y="{first + i * size * 1.24:g}" font-size="{size:g}" {style}>'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    )


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
            f'font-family="system-ui, sans-serif" fill="{INK}">',
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def look_ahead() -> str:
    """Computation and communication of the two threads over a step and a half."""
    left, unit, top, height = 132, 25, 52, 56
    middle = 'text-anchor="middle"'
    parts = []
    for row, (name, spans) in enumerate(
        [("main thread", COMPUTING), ("communication\nthread", COMMUNICATING)]
    ):
        y = top + row * (height + 14)
        parts.append(text(14, y + height / 2, name, size=12.5, style='font-weight="600"'))
        for begin, length, content, fill in spans:
            x = left + begin * unit
            parts.append(rectangle(x, y, length * unit - 2, height, fill))
            size = 9.6 if length <= 2.5 else 10.6
            parts.append(
                text(x + length * unit / 2 - 1, y + height / 2, content, size=size, style=middle)
            )
    end = left + 33 * unit
    boundary = left + 20 * unit - 1
    parts.append(
        f'<line x1="{boundary}" y1="24" x2="{boundary}" y2="{top + 2 * height + 22}" '
        f'stroke="{INK}" stroke-dasharray="4 3"/>'
    )
    bold = f'{middle} font-weight="600"'
    parts.append(text(left + 10 * unit, 32, "step t", size=13, style=bold))
    parts.append(text(left + 26.5 * unit, 32, "step t+1", size=13, style=bold))
    x, y = left, top + 2 * height + 38
    for fill, label in [
        (COMPUTE, "computation"),
        (HIDDEN, "communication that hides behind it"),
        (EXPOSED, "communication that the next step waits for"),
    ]:
        parts += [rectangle(x, y, 16, 12, fill), text(x + 22, y + 6, label, size=11.5)]
        x += 60 + 6.2 * len(label)
    title = "Computation and communication of two steps under look-ahead"
    return picture(end + 14, y + 28, title, parts)


def layers() -> str:
    """One box for each package; imports go down."""
    width, row, left, top = 620, 30, 62, 18
    parts = []
    for i, (name, role) in enumerate(LAYERS):
        y = top + i * row
        parts.append(rectangle(left, y, width - left - 14, row - 5, PLAIN))
        mono = 'font-family="ui-monospace, monospace" font-weight="600"'
        parts.append(text(left + 12, y + row / 2 - 2.5, name, size=12.5, style=mono))
        parts.append(text(left + 180, y + row / 2 - 2.5, role, size=12))
    bottom = top + len(LAYERS) * row - 5
    parts.append(
        f'<path d="M34 {top} V{bottom - 8}" stroke="{INK}" stroke-width="1.6"/>'
        f'<path d="M28 {bottom - 10} L34 {bottom} L40 {bottom - 10} Z"/>'
    )
    parts.append(
        f'<text transform="translate(22 {(top + bottom) / 2}) rotate(-90)" font-size="12" '
        'text-anchor="middle">imports</text>'
    )
    return picture(width, bottom + 16, "The packages in the order of their imports", parts)


def idea() -> str:
    """Three ranks: each with the hot rows, a third of the cold ones, and the dense layers."""
    middle = 'text-anchor="middle"'
    boxes = [
        ("dense layers", PLAIN, 30, "replicated; gradients all-reduced"),
        ("hot rows", LIGHT_HOT, 34, "replicated; gradients all-gathered"),
        (
            "a third of the\ncold rows",
            LIGHT_COLD,
            62,
            "sharded; each distinct row once, all-to-all",
        ),
    ]
    parts = []
    for rank in range(3):
        x, y = 14 + rank * 154, 34
        bold = f'{middle} font-weight="600"'
        parts.append(text(x + 72, 18, f"rank {rank}", size=14, style=bold))
        for name, fill, tall, _ in boxes:
            parts.append(rectangle(x, y, 144, tall, fill))
            parts.append(text(x + 72, y + tall / 2, name, size=14, style=middle))
            y += tall + 8
    for _, fill, _, how in boxes:
        parts += [rectangle(14, y + 6, 16, 12, fill), text(38, y + 12, how, size=14)]
        y += 24
    title = "Every rank holds the hot rows and the dense layers, and a share of the cold rows"
    return picture(480, y + 10, title, parts)


def count_requests(num_ranks: int, num_hot: int) -> dict[str, npt.NDArray[np.int64]]:
    """Requests that each rank answers in one step of the benchmark's tables, its own among them.

    Row-wise shards are contiguous blocks, as TorchRec cuts them. A rank sends every lookup
    (``lookups``), each distinct row once (``distinct``), or each distinct row that is not among
    the ``num_hot`` most looked-up ones of a profile (``cold``).
    """
    plans = yaml.safe_load((ROOT / "conf/plans/criteo_like_b2048.yaml").read_text())["plans"]
    tables = ZipfTables(plans["table_rows"], exponent=1.05, num_dense=1, seed=0)
    names = [table.name for table in tables.schema.tables]
    counts = tables.count(1_000_000)
    least = np.sort(np.concatenate([counts[name] for name in names]))[-num_hot]
    answered = {how: np.zeros(num_ranks, np.int64) for how in ("lookups", "distinct", "cold")}
    for rank in range(num_ranks):
        size = int(plans["batch_size"])
        (batch,) = tables.batches(1, batch_size=size, rank=rank, world_size=num_ranks)
        for name, feature in batch.sparse.to_dict().items():
            rows = feature.values().numpy()
            distinct = np.unique(rows)
            cold = distinct[counts[name][distinct] < least]
            block = -(-counts[name].size // num_ranks)
            for how, asked in (("lookups", rows), ("distinct", distinct), ("cold", cold)):
                answered[how] += np.bincount(asked // block, minlength=num_ranks)
    return answered


def requests() -> str:
    """What each of eight owners answers: every lookup, distinct rows, distinct cold rows."""
    num_ranks, num_hot = 8, 20_000
    answered = count_requests(num_ranks, num_hot)
    left, top, height, panel, most = 44, 84, 170, 146, 70_000
    middle = 'text-anchor="middle"'
    parts = []
    for tick in range(0, most + 1, 20_000):
        y = top + height * (1 - tick / most)
        line = f'<line x1="{left}" y1="{y:g}" x2="{left + 3 * panel - 6}" y2="{y:g}"'
        parts.append(f'{line} stroke="{GRID}"/>')
        label = f"{tick // 1000}k" if tick else "0"
        parts.append(text(left - 6, y, label, size=13, style='text-anchor="end"'))
    titles = [
        "every lookup\nis sent",
        "each distinct\nrow once",
        f"{num_hot:,} hot\nrows replicated",
    ]
    for i, (title, (how, bars)) in enumerate(zip(titles, answered.items(), strict=True)):
        x = left + i * panel
        bold = f'{middle} font-weight="600"'
        parts.append(text(x + 70, 54, title, size=14, style=bold))
        for rank, number in enumerate(bars):
            tall = height * number / most
            place = f'x="{x + 6 + rank * 16.5:g}" y="{top + height - tall:.1f}"'
            fill = OTHER if how == "lookups" else COLD
            parts.append(f'<rect {place} width="13" height="{tall:.1f}" fill="{fill}"/>')
        below = f"{bars.mean():,.0f} a rank\nbusiest {bars.max():,}"
        parts.append(text(x + 70, top + height + 24, below, size=13, style=middle))
    parts.insert(0, text(14, 20, "Requests that each of 8 ranks answers in a step", size=15))
    title = "Requests that each of eight ranks answers, without and with hot rows"
    return picture(left + 3 * panel + 4, top + height + 54, title, parts)


def read_sent() -> list[tuple[int, float, float, float, float]]:
    """Ranks, and MB of cold and hot rows without hot rows and with 20,000, at B = 2,048."""
    page = (ROOT / "benchmarks/results/locality.md").read_text()
    zipf = page.split("\n## Zipf 1.05")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (\d+) \| 2,048 \| (0|20,000) \| ([\d.]+) \+ ([\d.]+) \|", zipf, re.M)
    sent = {(int(ranks), hot): (float(cold), float(warm)) for ranks, hot, cold, warm in cells}
    return [(ranks, *sent[ranks, "0"], *sent[ranks, "20,000"]) for ranks, hot in sent if hot == "0"]


def replicas() -> str:
    """Bytes that a rank sends for rows, without hot rows and with them, over 2 to 8 ranks."""
    left, top, unit, row = 164, 62, 31, 26
    parts = [text(14, 20, "MB that a rank sends for rows in a step", size=15)]
    x = 14.0
    for fill, label in [(COLD, "cold rows, all-to-all"), (HOT, "gradients of hot rows")]:
        parts += [rectangle(x, 34, 16, 12, fill), text(x + 22, 40, label, size=13)]
        x += 190
    y = float(top)
    for ranks, *sent in read_sent():
        parts.append(text(14, y + row, f"{ranks} ranks", size=14, style='font-weight="600"'))
        for name, cold, hot in [("none hot", *sent[:2]), ("20,000 hot", *sent[2:])]:
            parts.append(text(left - 8, y + row / 2, name, size=13, style='text-anchor="end"'))
            begin = float(left)
            for megabytes, fill in ((cold, COLD), (hot, HOT)):
                wide = unit * megabytes
                place = f'x="{begin:g}" y="{y + 3:g}" width="{wide:.1f}" height="{row - 6}"'
                parts.append(f'<rect {place} fill="{fill}"/>' if megabytes else "")
                begin += wide
            parts.append(text(begin + 6, y + row / 2, f"{cold + hot:.2f}", size=13))
            y += row
        y += 12
    title = (
        "Bytes that a rank sends for rows, without hot rows and with 20,000, on 2, 4 and 8 ranks"
    )
    return picture(494, round(y), title, parts)


if __name__ == "__main__":
    (STATIC / "look_ahead.svg").write_text(look_ahead())
    (STATIC / "layers.svg").write_text(layers())
    (STATIC / "idea.svg").write_text(idea())
    (STATIC / "requests.svg").write_text(requests())
    (STATIC / "replicas.svg").write_text(replicas())
