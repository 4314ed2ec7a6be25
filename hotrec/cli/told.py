"""What several ranks of a host would print is printed by one of them.

Ranks under torchrun leave notes for each other where torchrun has them write what ended them. A
note follows the error that it stands for: whatever ends a rank in between, what it has not printed
another rank prints.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hotrec.cli.launch import environment_rank

# How long to wait for a rank that is about to print, and between two looks.
WAIT_S, LOOK_S = 2.0, 0.02


def tell_once(text: str, tell: Callable[[], None], origin: int | None = None) -> None:
    """Call ``tell``, unless another rank of this host has told the same, or ``origin`` its error.

    Args:
        text: What is told, without the number of this rank.
        tell: Prints it.
        origin: The rank whose error ended this one, if another one's did.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    notes = notes_folder(error_file)
    if notes is None:
        tell()
        return
    _record(Path(error_file), text)
    if origin is not None and _appears(note_of(notes, origin)):
        return
    claim = notes / hashlib.sha256(text.encode()).hexdigest()
    told = claim.with_suffix(".told")
    if _claim(claim) or not _appears(told):
        tell()
        _write(told)
    _write(note_of(notes, environment_rank()))


def notes_folder(error_file: str) -> Path | None:
    """The folder that the ranks of a host share in one attempt; None if there is none.

    Args:
        error_file: Where torchrun has a rank record its error:
            ``<attempt>/<local rank>/error.json``.
    """
    if not error_file:
        return None
    folder = Path(error_file).parents[1]
    return folder if folder.is_dir() else None


def note_of(notes: Path, rank: int) -> Path:
    """The file that says that a rank's error has been printed, by itself or another."""
    return notes / f"rank-{rank}.told"


def _claim(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk: better twice than never
        return True
    return True


def _record(error_file: Path, text: str) -> None:
    """For torchrun's summary, unless torch has recorded the exception; that needs torch."""
    with suppress(OSError), error_file.open("x") as file:
        json.dump({"message": text, "timestamp": int(time.time())}, file)


def _write(path: Path) -> None:
    with suppress(OSError):
        path.touch()


def _appears(path: Path) -> bool:
    until_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until_s:
            return False
        time.sleep(LOOK_S)
    return True
