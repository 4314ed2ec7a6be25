"""What came of a case: looks at exit code, output, processes and files, and gives the verdict."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.case import VERDICTS, Case
from tests.faults.forge import MARKER
from tests.faults.process import SHM
from tests.faults.workspace import whole

Files = dict[str, str]

LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d (\[rank \d+\] )?[DIWEC] ")
ERROR_LINE = re.compile(r"^(?:\[rank (\d+)\] )?error: (.*)$")
# With which the commands of a case end that come before the one that fails.
CLOSING_WORDS = "dataset|left out|profile|hot rows|picture|costs|chosen|page|next|done|AUC|best"
CLOSING_WORDS += "|evaluate|export|exported|checkpoint|scored"
CLOSING_LINE = re.compile(rf"^({CLOSING_WORDS}) +\S")
LAUNCHER_LINE = re.compile(r"^rank \d+ ended first, with exit code -?\d+\.$")
# <thing>: expected X, got Y. <what to do>.
FORM = re.compile(r"^[^:].*?: expected .+?, got .+[.?!:] \S.*[.?!`]$")
TRACE = re.compile(r"Traceback \(most|terminate called|Fatal Python error|Segmentation|what\(\): ")
HIDDEN = (".tmp", ".old", ".lock")
# Torch's cache of compiled code, one for all runs of a user.
TORCH_CACHE = "torchinductor_"
# Directories of runs and of what they learn about the machine, which are never artifacts.
RECORDS = ("runs/", "small/runs/", "data/trials/")


@dataclass
class Findings:
    """Everything that is not as it should be, each with its verdict."""

    found: list[tuple[str, str]] = field(default_factory=list)

    def add(self, verdict: str, text: str) -> None:
        assert verdict in VERDICTS
        self.found.append((verdict, text))

    @property
    def verdict(self) -> str:
        order = list(VERDICTS)
        return min((verdict for verdict, _ in self.found), key=order.index, default="ok")


def list_files(folder: Path) -> Files:
    """Every file and link below a folder with a hash of its content, every directory with none."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            files[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            files[name] = _hash(path)
        elif path.is_dir():
            files[name] = "directory"
        else:
            files[name] = "special"
    return files


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def judge_files(case: Case, findings: Findings, before: Files, after: Files, code: int) -> None:
    """Nothing is lost; new are only outputs and records under runs/."""
    outputs = case.outputs if code == 0 or case.act else ()
    for name, content in before.items():
        if after.get(name) == content or name.startswith(outputs) or name.endswith("log.txt"):
            continue
        is_gone = name not in after
        findings.add("lost", f"{name} {'is gone' if is_gone else 'was changed'}")
    for name in sorted(after.keys() - before.keys()):
        is_hidden = any(part.startswith(".") and part.endswith(HIDDEN) for part in Path(name).parts)
        if name == MARKER:
            findings.add("silent", "code from a file was run")
        elif after[name] == "directory" or (is_hidden and case.may_leave):
            continue
        elif code == 0 and 0 not in case.exit_codes:
            continue  # what it should not have made at all
        elif is_hidden or not name.startswith((*RECORDS, *case.outputs)):
            findings.add("left", f"{name} stays")
        elif code == 1 and not case.act and len(case.words) == 1 and not name.startswith(RECORDS):
            findings.add("left", f"{name} was made by a command that was refused")


def judge_latest(findings: Findings, folder: Path, before: Files) -> None:
    """What a run names as its latest checkpoint is one, and whole."""
    for pointer in folder.rglob("checkpoints/latest"):
        name = pointer.relative_to(folder).as_posix()
        if not pointer.is_file() or _hash(pointer) == before.get(name):
            continue
        complaint = whole(pointer.parent / pointer.read_text().strip())
        if complaint is not None:
            findings.add("lost", f"{name} names {complaint}")


def judge_scratch(
    case: Case, findings: Findings, scratch: Path, shm_before: set[str], left: list[str]
) -> None:
    """Nothing runs on, and no temporary file stays."""
    for command in left:
        findings.add("left", f"process: {command[:200]}")
    if case.may_leave:
        return
    for path in sorted((scratch / "tmp").iterdir()):
        if not path.name.startswith(TORCH_CACHE):
            findings.add("left", f"$TMPDIR/{path.name} stays")
    for name in sorted(set(os.listdir(SHM)) - shm_before):
        findings.add("left", f"/dev/shm/{name} stays")


def judge_output(case: Case, findings: Findings, code: int, out: str, err: str) -> None:
    """The exit code, and one line of the agreed form from everyone who must speak."""
    if TRACE.search(err):
        lines = [line for line in err.splitlines() if line.strip()]
        findings.add("trace", lines[-1][:300])
    if code not in case.exit_codes:
        expected = " or ".join(map(str, case.exit_codes))
        verdict = "silent" if code == 0 else "unclear"
        last = err.strip().splitlines()[-1][:300] if err.strip() else "nothing on stderr"
        findings.add(verdict, f"expected exit code {expected}, got {code}: {last}")
        return
    if code == 0:
        if len(out.splitlines()) != len(case.words):
            findings.add("unclear", f"expected a line of figures a command, got {out[:200]!r}")
        return
    if case.act is None:
        if out.count("\n") >= len(case.words):
            findings.add("unclear", f"expected nothing on stdout, got {out[-200:]!r}")
        for line in err.splitlines():
            forms = (LOG_LINE, ERROR_LINE, CLOSING_LINE)
            if line.strip() and not any(form.match(line) for form in forms):
                findings.add("unclear", f"expected log and error lines on stderr, got {line[:200]}")
                break
    if case.speaks:
        _judge_errors(case, findings, err)


def _judge_errors(case: Case, findings: Findings, err: str) -> None:
    said: dict[int | None, list[str]] = {}
    for line in err.splitlines():
        match = ERROR_LINE.match(line)
        if match and not LAUNCHER_LINE.match(match[2]):
            rank = None if match[1] is None else int(match[1])
            said.setdefault(rank, []).append(match[2])
    # One process says it for all where it is seen before the ranks are started.
    speakers: Sequence[int | None] = case.ranks if case.ranks and None not in said else (None,)
    everything = [line for lines in said.values() for line in lines]
    # Of ranks that would say the same, one does; others have something else to say.
    is_once = len(everything) == len(set(everything)) == len(said) > 0
    if not is_once or not set(said) <= set(speakers):
        counts = {("all" if rank is None else rank): len(lines) for rank, lines in said.items()}
        wanted = "one" if speakers == (None,) else f"one, of a rank of {list(speakers)}"
        findings.add("unclear", f"expected error lines: {wanted}, got {counts or 'none'}")
    for lines in said.values():
        for line in lines:
            if not FORM.match(line):
                missing = "what to do" if re.search(r": expected .+, got ", line) else "the form"
                findings.add("unclear", f"error line without {missing}: {line[:300]}")
            if case.key and not any(key in line for key in case.key.split("|")):
                findings.add("unclear", f"error line without {case.key}: {line[:300]}")


def read_figures(out: str) -> list[dict[str, Any]]:
    """The lines of figures; a line that is no JSON object is left out."""
    figures = []
    for line in out.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            figures.append(document)
    return figures
