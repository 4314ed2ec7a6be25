"""The HTML page: one file, nothing fetched, readable on paper and without colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hotrec.report.compare import GROUPS, Figure, show_against
from hotrec.report.read import CONFIG, ENVIRONMENT, PLANS, Run
from hotrec.report.style import run_color
from hotrec.report.units import NOT_RECORDED, show_bytes, show_count, show_frac

CSS = """
:root { --ink:#1f2933; --soft:#5b6672; --line:#e3e7eb; --tint:#f5f7f9; --accent:#0072B2; }
* { box-sizing:border-box; }
body { margin:0; color:var(--ink); background:#fff; line-height:1.55; font-size:15px;
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif; }
main, header > div, nav > div { max-width:1120px; margin:0 auto; padding:0 28px; }
header { background:var(--tint); border-bottom:1px solid var(--line); padding:34px 0 26px; }
h1 { font-size:28px; line-height:1.25; margin:0 0 6px; letter-spacing:-.01em; }
h2 { font-size:20px; margin:46px 0 6px; letter-spacing:-.005em; }
h3 { font-size:15px; margin:22px 0 6px; }
p { margin:6px 0 12px; max-width:78ch; }
.soft, figcaption, .against { color:var(--soft); }
nav { border-bottom:1px solid var(--line); position:sticky; top:0; background:#fffffff2;
  z-index:5; }
nav a { display:inline-block; padding:10px 20px 10px 0; color:var(--soft); text-decoration:none;
  font-size:14px; }
nav a:hover { color:var(--accent); }
section { scroll-margin-top:48px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(190px,1fr)); gap:14px;
  margin:22px 0 4px; }
.tile { background:#fff; border:1px solid var(--line); border-radius:8px; padding:14px 16px 12px; }
.tile b { display:block; font-size:25px; line-height:1.3; font-weight:650; letter-spacing:-.01em; }
.tile span { display:block; font-size:13px; color:var(--soft); line-height:1.4;
  overflow-wrap:anywhere; }
.wide { overflow-x:auto; border:1px solid var(--line); border-radius:8px; margin:12px 0; }
table { border-collapse:collapse; width:100%; font-size:14px; font-variant-numeric:tabular-nums; }
th, td { padding:7px 14px; text-align:right; white-space:nowrap; vertical-align:top; }
th:first-child, td:first-child { text-align:left; position:sticky; left:0; background:#fff; }
thead th { border-bottom:1px solid #9aa5b1; font-weight:600; vertical-align:bottom; }
tbody tr + tr td, tbody tr + tr th { border-top:1px solid var(--line); }
tbody th { font-weight:400; }
tr.group th { background:var(--tint) !important; color:var(--soft); font-size:12px; font-weight:600;
  text-align:left; letter-spacing:.03em; padding:5px 14px; }
td.none { color:#8a949e; font-style:italic; }
tfoot td { border-top:1px solid #9aa5b1; font-weight:600; }
.against { font-weight:400; font-size:12px; display:block; line-height:1.3; }
.dot { display:inline-block; width:10px; height:10px; border-radius:50%; margin-right:7px; }
.name { white-space:normal; min-width:150px; max-width:240px; overflow-wrap:anywhere; }
figure { margin:14px 0 6px; }
figure svg { width:100%; height:auto; display:block; }
figcaption { font-size:13.5px; max-width:88ch; margin-top:8px; }
.missing { background:var(--tint); border-left:3px solid #9aa5b1; padding:10px 16px; margin:12px 0;
  color:var(--soft); }
details { border:1px solid var(--line); border-radius:8px; margin:8px 0; }
summary { cursor:pointer; padding:9px 14px; }
pre { margin:0; padding:12px 16px; overflow-x:auto; font-size:12.5px; line-height:1.45;
  background:var(--tint); border-top:1px solid var(--line); max-height:520px;
  font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace; }
ul.notes { margin:6px 0 12px; padding-left:20px; color:var(--soft); font-size:14px; }
footer { color:var(--soft); font-size:13px; padding:30px 0 50px; }
@media print { nav { display:none; } .wide { overflow:visible; } }
"""


@dataclass(frozen=True)
class Section:
    """A heading of the page, with an anchor for the navigation."""

    anchor: str
    title: str
    body: str


def build_page(
    title: str,
    subtitle: str,
    tiles: str,
    sections: Sequence[Section],
    *,
    data_file: str = "report.json",
) -> str:
    """The whole page.

    Args:
        title: plain text.
        subtitle: plain text.
        tiles: HTML of ``build_tiles``.
        sections: in reading order.
        data_file: where the numbers are, beside the page.
    """
    links = "".join(f'<a href="#{s.anchor}">{escape(s.title)}</a>' for s in sections)
    bodies = "\n".join(
        f'<section id="{s.anchor}"><h2>{escape(s.title)}</h2>\n{s.body}</section>' for s in sections
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header><div><h1>{escape(title)}</h1><div class="soft">{escape(subtitle)}</div>
{tiles}</div></header>
<nav><div>{links}</div></nav>
<main>
{bodies}
<footer>Sizes are decimal: 1 MB is 10<sup>6</sup> bytes. Bytes are those that one rank sends in one
step. Every number is in {data_file} beside this page.</footer>
</main>
</body>
</html>
"""


def build_tiles(focus: Run, baseline: Run | None) -> str:
    """The headline: a few figures of one run, against the baseline where there is one."""
    against = "" if baseline is None else f" of {escape(baseline.name)}"
    by_name = {figure.name: figure for _, figures in GROUPS for figure in figures}
    tiles = []
    for name, text in (
        ("auc", "AUC, held out"),
        ("step_p50_s", "median step"),
        ("sent_bytes_total", "sent per step and rank"),
    ):
        value = focus.number(name)
        if value is None:
            continue
        relation = show_against(by_name[name], focus, baseline)
        if relation:
            joint = f" against {escape(baseline.name)}" if name == "auc" and baseline else against
            text += f"<br>{relation}{joint}"
        tiles.append((by_name[name].show(value), text))
    sent, bound = focus.number("sent_bytes_total"), focus.number("bound_bytes")
    if sent is not None and bound:
        tiles.append(
            (f"{sent / bound:.2f}x", "bytes sent against the lower bound of exact training")
        )
    rows, lookups = focus.number("hot_rows_frac"), focus.number("hot_lookup_frac")
    if rows is not None and lookups is not None and rows > 0:
        tiles.append((show_frac(lookups), f"of lookups hit the {show_frac(rows)} hot rows"))
    cells = "".join(f'<div class="tile"><b>{v}</b><span>{text}</span></div>' for v, text in tiles)
    return f'<div class="tiles">{cells}</div>' if cells else ""


def build_comparison(runs: Sequence[Run], baseline: Run | None) -> str:
    """The table of all runs side by side, a column each."""
    heads = "".join(
        f'<th class="name">{_dot(i)}{escape(run.name)}'
        f"{'<span class=against>baseline</span>' if run is baseline else ''}</th>"
        for i, run in enumerate(runs)
    )
    kinds = "".join(_text_cell(run.summary.get("placement")) for run in runs)
    models = "".join(_text_cell(run.summary.get("model")) for run in runs)
    layers = "".join(_text_cell(_dense_layers(run.summary)) for run in runs)
    finished = "".join(
        f"<td>{'yes' if run.summary.get('finished') is True else 'no'}</td>" for run in runs
    )
    rows = [
        f"<tr><td>Placement</td>{kinds}</tr>",
        f"<tr><td>Model</td>{models}</tr>",
        f"<tr><td>Dense layers</td>{layers}</tr>",
        f"<tr><td>Finished</td>{finished}</tr>",
    ]
    for group, figures in GROUPS:
        rows.append(
            f'<tr class="group"><th>{escape(group)}</th><th colspan="{len(runs)}"></th></tr>'
        )
        for figure in figures:
            cells = "".join(_figure_cell(figure, run, baseline) for run in runs)
            rows.append(f"<tr><td>{escape(figure.label)}</td>{cells}</tr>")
    note = (
        "No run uses TorchRec's own plan, so nothing is set against a baseline."
        if baseline is None
        else f"Small figures are set against {escape(baseline.name)}: a ratio for times and bytes, "
        f"a difference for quality."
    )
    return (
        f'<p class="soft">{note}</p><div class="wide"><table><thead><tr><th></th>{heads}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _dense_layers(summary: Mapping[str, Any]) -> str | None:
    """How they computed, such as "bf16, compiled, gradients clipped to 1"; None if not recorded."""
    if summary.get("precision") is None:
        return None
    texts = [str(summary["precision"])]
    if summary.get("compile"):
        texts.append("compiled")
    if summary.get("grad_clip_norm") is not None:
        texts.append(f"gradients clipped to {summary['grad_clip_norm']:g}")
    return ", ".join(texts)


def _dot(position: int) -> str:
    return f'<span class="dot" style="background:{run_color(position)}"></span>'


def _text_cell(value: object) -> str:
    if value is None:
        return f'<td class="none">{NOT_RECORDED}</td>'
    return f"<td>{escape(str(value))}</td>"


def _figure_cell(figure: Figure, run: Run, baseline: Run | None) -> str:
    value = run.number(figure.name)
    if value is None:
        return f'<td class="none">{NOT_RECORDED}</td>'
    relation = show_against(figure, run, baseline)
    small = f'<span class="against">{relation}</span>' if relation else ""
    return f"<td>{figure.show(value)}{small}</td>"


def build_hot_table(partition: Mapping[str, Any]) -> str:
    """What is hot, a row per table, largest first."""
    tables = partition["tables"]
    order = sorted(tables, key=lambda table: (-tables[table]["num_rows"], table))
    rows = [
        f"<tr><td>{escape(t)}</td>{_hot_cells(tables[t])}"
        f"<td>{show_bytes(tables[t]['row_bytes'])}</td></tr>"
        for t in order
    ]
    heads = (
        "Table",
        "Rows",
        "Hot rows",
        "Hot share",
        "Hot bytes",
        "Lookups hot, train",
        "Lookups hot, held out",
        "Row and its state",
    )
    head = "".join(f"<th>{text}</th>" for text in heads)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"<tfoot><tr><td>All tables</td>{_hot_cells(partition['total'])}<td></td></tr></tfoot>"
        f"</table></div>"
    )


def _hot_cells(summary: Mapping[str, Any]) -> str:
    texts: list[str | None] = [
        show_count(summary["num_rows"]),
        show_count(summary["hot_rows"]),
        show_frac(summary["hot_rows_frac"]),
        show_bytes(summary["hot_bytes"]),
    ]
    for part in ("coverage_train", "coverage_heldout"):
        texts.append(None if summary[part] is None else show_frac(summary[part]))
    return "".join(
        '<td class="none">no lookups</td>' if text is None else f"<td>{text}</td>" for text in texts
    )


def build_figure(svg: str | None, caption: str, missing: str) -> str:
    """A picture with its caption, or a line that says what was not recorded."""
    if svg is None:
        return build_missing(missing)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def build_missing(text: str) -> str:
    """A line that stands where something was not recorded."""
    return f'<div class="missing">{escape(text)}</div>'


def build_run_details(runs: Iterable[Run]) -> str:
    """Where each run lies, what is missing of it, and its files as they are."""
    parts = []
    titles = {CONFIG: "Configuration", ENVIRONMENT: "Environment"} | dict.fromkeys(PLANS, "Plan")
    for position, run in enumerate(runs):
        parts.append(f"<h3>{_dot(position)}{escape(run.name)}</h3>")
        notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        parts.append(f'<ul class="notes"><li>{escape(str(run.path))}</li>{notes}</ul>')
        parts.extend(
            f"<details><summary>{titles[name]} <span class='soft'>{escape(name)}</span></summary>"
            f"<pre>{escape(text)}</pre></details>"
            for name, text in run.texts.items()
        )
    return "\n".join(parts)
