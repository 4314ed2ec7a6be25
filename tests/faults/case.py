"""A case: a fault, the command that meets it, and what is right then.

Cases are made of three verbs. ``works`` is a command that must succeed, ``refused`` one that must
say what is wrong and change nothing, ``either`` one that may do the one or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.process import Running

# Changes a private copy of the workspace before the command starts.
Change = Callable[[Path], None]
# A verdict and what it is about, or None.
Complaint = tuple[str, str] | None
# Complains about what commands that succeeded have made; a mere text is of verdict "silent".
Check = Callable[["Made"], str | Complaint]
# Acts while the command runs: sends a signal, starts a second command.
Act = Callable[["Running"], Complaint]

# From bad to good; a case has the first that applies.
VERDICTS = {
    "silent": "exit code 0, though the input is wrong or the result is",
    "lost": "an artifact or a file that was whole is gone or changed",
    "hang": "still running at its time limit",
    "trace": "a traceback or a crash instead of a message",
    "left": "processes or temporary files stay",
    "unclear": "a wrong exit code, or not one line of the agreed form with the key on each rank",
    "ok": "as it should be",
}


@dataclass(frozen=True)
class Made:
    """What commands have made, beside a workspace without fault."""

    folder: Path
    reference: Path
    figures: list[dict[str, Any]]


def unchanged(folder: Path) -> None:
    """The workspace as it is."""


@dataclass(frozen=True)
class Case:
    """One fault.

    Args:
        name: unique; its class, a slash, and what it is.
        words: the command line after ``hotrec``; several commands are run in turn, and all but
            the last that is reached succeed.
        change: makes the fault.
        exit_codes: that are right.
        key: what every error line must name: a key, a file, a column. Several, separated by "|",
            are alternatives.
        outputs: what the command may write: paths that begin with one of these.
        check: looks at what was made, if the exit code is 0.
        act: what happens while the command runs.
        variables: more of the environment; None removes a variable.
        disk_bytes: size of a small disk mounted at ``small/``.
        is_exec: start an interpreter instead of forking one that has imported the program.
        is_privileged: False takes root's right to read and write everything away.
        ranks: of which ranks one must say what is wrong; None for a single process.
        speaks: whether there is an error line at all; a process that a signal ends has none.
        may_leave: whether temporary files may stay, for the next start to remove.
        limit_s: after which it hangs.
        grace_s: for which processes may outlive the command.
    """

    name: str
    words: tuple[str, ...]
    change: Change = unchanged
    exit_codes: tuple[int, ...] = (1,)
    key: str = ""
    outputs: tuple[str, ...] = ()
    check: Check | None = None
    act: Act | None = None
    variables: Mapping[str, str | None] = field(default_factory=dict)
    disk_bytes: int | None = None
    is_exec: bool = False
    is_privileged: bool = True
    ranks: tuple[int, ...] | None = None
    speaks: bool = True
    may_leave: bool = False
    limit_s: float = 60.0
    grace_s: float = 3.0

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def refused(name: str, words: str, key: str, change: Change = unchanged, **more: Any) -> Case:
    """A command that ends with exit code 1, names ``key``, and changes nothing."""
    return Case(name, tuple(words.split("\n")), change, key=key, **more)


def works(name: str, words: str, change: Change = unchanged, **more: Any) -> Case:
    """A command that succeeds, and makes what it makes without the fault."""
    return Case(name, tuple(words.split("\n")), change, exit_codes=(0,), **more)


def either(name: str, words: str, key: str, change: Change = unchanged, **more: Any) -> Case:
    """A command that works or is refused."""
    return Case(name, tuple(words.split("\n")), change, exit_codes=(0, 1), key=key, **more)
