"""Print an error that several ranks of a host share once.

Ranks under torchrun leave marker files in the directory of torchrun's error files. A rank writes
its marker after it has printed the error, so if it dies in between another rank prints it.
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

# How long to wait for a rank that is about to print, and the polling interval.
WAIT_S, LOOK_S = 2.0, 0.02


def print_once(text: str, show: Callable[[], None], origin: int | None = None) -> None:
    """Call ``show``, unless another rank of this host has printed the same text.

    Args:
        text: The message, without the number of this rank.
        show: Prints the message.
        origin: The rank whose error ended this one, if any: nothing is printed if that rank has
            printed its own message.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    notes = notes_folder(error_file)
    if notes is None:
        show()
        return
    _record(Path(error_file), text)
    if origin is not None and _appears(note_of(notes, origin)):
        return
    claim = notes / hashlib.sha256(text.encode()).hexdigest()
    printed = claim.with_suffix(".printed")
    if _claim(claim) or not _appears(printed):
        show()
        _write(printed)
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
    """The marker file of a printed error, by the rank itself or another."""
    return notes / f"rank-{rank}.printed"


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
