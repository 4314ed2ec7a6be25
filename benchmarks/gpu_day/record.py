"""The output of a stage: a JSON document, complete after every part, and a page made from it.

No torch in this module: the process that starts the stages and renders their pages never loads it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotrec.report.render import markdown_table

REHEARSAL = "**Rehearsal on a stand-in for a CUDA device: no figure counts.**"
OK, FAILED, RUNNING = "ok", "failed", "running"
DOES_NOT_FIT, NOT_HERE = "does not fit", "not here"
# Parts that a stage started again need not repeat.
SETTLED = (OK, DOES_NOT_FIT, NOT_HERE)
# Exit code of a stage whose device does nothing any more, as after an illegal address.
BROKEN = 75
Document = dict[str, Any]
Parts = Mapping[str, Mapping[str, Any]]


class DoesNotFitError(Exception):
    """A case needs more memory than there is; the text has both amounts."""


class NotHereError(Exception):
    """The stand-in lacks what a part needs; on a GPU the part has failed."""


@dataclass(frozen=True)
class Table:
    """A table of a page, as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Summary:
    """What the parts of a stage come to.

    Args:
        verdict: one sentence.
        tables: of the page.
        is_ok: False if what was measured is itself a failure, such as a test that fails.
    """

    verdict: str
    tables: Sequence[Table]
    is_ok: bool = True


class Record:
    """The document of one stage under way.

    Args:
        path: of the document.
        facts: what must be the same for parts that are there already to be kept.
        machine: for the page.
        summarize: parts -> tables and verdict, called after every part.
        settle: waits for what a part has left on the device, inside of the part that it belongs to.
        is_broken: whether the device of this process does nothing any more.
        keeps_failed: parts that failed before are not made again either.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        machine: Mapping[str, Any],
        summarize: Callable[[Parts], Summary],
        settle: Callable[[], None] = lambda: None,
        is_broken: Callable[[], bool] = lambda: False,
        *,
        keeps_failed: bool = False,
    ) -> None:
        self._path, self._summarize = path, summarize
        self._settle, self._is_broken = settle, is_broken
        self._start_s = time.perf_counter()
        found = read_document(path)
        # As JSON reads it back: tuples become lists.
        facts = json.loads(json.dumps(facts))
        is_same = found is not None and found["facts"] == facts
        parts = dict(found["parts"]) if found is not None and is_same else {}
        kept = (*SETTLED, FAILED) if keeps_failed else SETTLED
        self.document: Document = {
            "facts": facts,
            "machine": dict(machine),
            "status": RUNNING,
            "parts": {name: part for name, part in parts.items() if part["status"] in kept},
        }
        self._write()

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        return self.document["parts"]

    def part(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure a part, unless it is there already; what it raises is recorded.

        Ends the process if the part has broken the device, for another to go on with the next part:
        at once, since freeing mapped memory of a broken device would abort it.
        """
        if name in self.parts:
            print(f"{name}: kept from before")
            return
        start_s = time.perf_counter()
        # For a process that ends in this part.
        self.parts[name] = {"status": FAILED, "error": "the process ended in it", "elapsed_s": 0.0}
        self._write()
        try:
            part = {"status": OK, **measure()}
            self._settle()
        except DoesNotFitError as reason:
            part = {"status": DOES_NOT_FIT, "error": str(reason)}
        except NotHereError as reason:
            status = NOT_HERE if self.document["facts"]["is_rehearsal"] else FAILED
            part = {"status": status, "error": str(reason)}
        except Exception as error:  # every kind: the other parts are to be measured all the same
            traceback.print_exc()
            part = {"status": FAILED, "error": f"{type(error).__name__}: {error}".strip()}
            if self._is_broken():
                self._keep(name, part, start_s)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(BROKEN)
        self._keep(name, part, start_s)

    def _keep(self, name: str, part: dict[str, Any], start_s: float) -> None:
        part["elapsed_s"] = time.perf_counter() - start_s
        self.parts[name] = part
        print(f"{name}: {part['status']}" + (f": {part['error']}" if "error" in part else ""))
        self._write()

    def finish(self) -> bool:
        """Whether every part and the whole are well."""
        failed = [name for name, part in self.parts.items() if part["status"] == FAILED]
        is_ok = not failed and self._summarize(self.parts).is_ok
        self.document["status"] = OK if is_ok else FAILED
        if failed:
            said = (f"{name}: {self.parts[name]['error'].splitlines()[-1]}" for name in failed)
            self.document["error"] = f"{len(failed)} part(s) failed: {'; '.join(said)}"
        elif not is_ok:
            self.document["error"] = "something measured is wrong in itself, see the tables"
        self._write()
        return is_ok

    def _write(self) -> None:
        summary = self._summarize(self.parts)
        self.document["verdict"] = summary.verdict
        self.document["tables"] = [vars(table) for table in summary.tables]
        self.document["elapsed_s"] = time.perf_counter() - self._start_s
        write_document(self._path, self.document)


def read_document(path: Path) -> Document | None:
    """A stage's document; None if there is none."""
    if not path.exists():
        return None
    document: Document = json.loads(path.read_text())
    return document


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the document in one go: a stage may be ended at any moment."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def render(title: str, document: Mapping[str, Any], log_tail: str = "") -> str:
    """The page of a stage, in Markdown."""
    facts, machine = document["facts"], document["machine"]
    parts = [f"# {title}"]
    if facts["is_rehearsal"]:
        parts.append(REHEARSAL)
    parts.append(document["verdict"])
    if document["status"] != OK:
        parts.append(f"**{document['status']}**: {document.get('error', 'not finished')}")
    for table in document["tables"]:
        parts += [f"## {table['title']}", markdown_table(table["header"], table["rows"])]
        if table["note"]:
            parts.append(table["note"])
    wrong = [
        f"* {name}: {part['status']}: {part['error']}"
        for name, part in document["parts"].items()
        if "error" in part
    ]
    if wrong:
        parts += ["## What failed, does not fit or is not here", "\n".join(wrong)]
    if log_tail:
        parts += ["## End of the log", f"```\n{log_tail}\n```"]
    packages = ", ".join(f"{name} {found}" for name, found in machine.get("packages", {}).items())
    parts += [
        "## Machine",
        f"{machine.get('gpu') or 'no GPU used'}; {machine.get('processor')}, "
        f"{machine.get('num_cores')} cores; Linux {machine.get('kernel')}, Python "
        f"{machine.get('python')}, {packages}; code {facts.get('code')}; {machine.get('date')}; "
        f"{document['elapsed_s']:.0f} s.",
    ]
    return "\n\n".join(parts) + "\n"
