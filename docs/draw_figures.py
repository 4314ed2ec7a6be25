"""Draws the figures of how_it_works.md into docs/_static: ``python docs/draw_figures.py``."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

STATIC = Path(__file__).parent / "_static"
COMPUTE, HIDDEN, EXPOSED, PLAIN = "#cfe0f5", "#d3ecd2", "#fbd9b5", "#eef0f3"
INK, FAINT = "#1f2933", "#8793a1"

# Package and role, from the top of tests/policy/test_layers.py down: its ORDER, reversed.
LAYERS = [
    ("cli", "the commands; composes the configuration with Hydra"),
    ("doctor", "checks of the installation"),
    ("bench, calibrate", "cases to compare; measurements of the machine"),
    ("runs", "a training run and an evaluation, from top to bottom"),
    ("report", "run directories to figures and pages"),
    ("program", "the library: counts, a parallel model, its pipeline"),
    ("build", "configuration and plan to model, loader, pipeline"),
    ("planning", "policies, baselines, search, TorchRec's plan"),
    ("train", "loop, pipelines, dense synchronization, checkpoints"),
    ("embedding", "row exchange, prefetch, hot rows"),
    ("models", "DLRM, DCNv2"),
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


if __name__ == "__main__":
    (STATIC / "look_ahead.svg").write_text(look_ahead())
    (STATIC / "layers.svg").write_text(layers())
