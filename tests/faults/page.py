"""The table of verdicts by class, and the page of the documentation that holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.case import VERDICTS

COLUMNS = ("ok", *(verdict for verdict in VERDICTS if verdict != "ok"), "skipped")
KINDS = {
    "artifact": "Files of artifacts and checkpoints: cut, emptied, flipped, swapped, deleted.",
    "manifest": "Manifests: edited, re-hashed, broken, of another kind or version.",
    "rundir": "Files of run directories.",
    "data": "Logs to prepare: text, compressed, Parquet, Arrow, joins, splits.",
    "names": "Names of columns and tables.",
    "append": "Samples appended again in any form, or divided otherwise than before.",
    "generations": "Datasets that have grown: replaced, pruned, used by earlier runs.",
    "target": "Commands aimed at directories of others.",
    "config": "Overrides and configuration files.",
    "machine": "Locale, limits, ports, variables, streams.",
    "resume": "Runs resumed, refused and started again.",
    "together": "Commands that run at the same time.",
    "payload": "Forged pickles in every file that a command reads.",
    "worker": "Errors inside loader workers.",
    "signal": "Signals to launchers, agents, ranks and workers.",
    "export": "Models exported, whole or what has changed.",
    "predict": "Files scored.",
    "disk": "A disk that is full.",
}
HEAD = """# Faults

What hotrec does with damaged files, bad data, wrong settings, full disks and signals. `make faults`
runs every case in a private copy of a tiny workspace, and after each looks at the exit code, the
error lines, the processes and files that are left, and at every file that was there before.
"""


def results_table(document: Mapping[str, Any]) -> str:
    """Counts of verdicts by class, as a table of Markdown."""
    kinds = dict.fromkeys(_kind(result) for result in document["results"])
    lines = [f"| class | cases | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) + 1)]
    for kind in [*sorted(kinds), ""]:
        verdicts = Counter(
            result["verdict"] for result in document["results"] if kind in ("", _kind(result))
        )
        counts = " | ".join(str(verdicts[column]) for column in COLUMNS)
        lines.append(f"| {kind or 'all'} | {verdicts.total()} | {counts} |")
    return "\n".join(lines)


def write_page(document: Mapping[str, Any], page: Path) -> None:
    """Write the page: the table, what the words mean, and each case that is not ok."""
    meanings = [f"* {verdict}: {meaning}." for verdict, meaning in VERDICTS.items()]
    kinds = [f"* {kind}: {meaning}" for kind, meaning in KINDS.items()]
    failures = [
        f"* `{result['name']}` ({result['verdict']}): expected {result['expected']}; got "
        f"{result['got'][:200]}"
        for result in document["results"]
        if result["verdict"] != "ok"
    ]
    run = (
        f"{len(document['results'])} cases in {document['seconds']:.0f} s, at {document['commit']}."
    )
    parts = [HEAD, run, "", results_table(document), "", "Verdicts:", "", *meanings, ""]
    parts += ["Classes:", "", *kinds, "", "## Not ok", "", *(failures or ["None."]), ""]
    page.write_text("\n".join(parts))


def _kind(result: Mapping[str, Any]) -> str:
    return str(result["name"]).partition("/")[0]
