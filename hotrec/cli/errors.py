"""How an error reaches the user: one line that says what to do; a trace only where it helps.

What hotrec raises on purpose, an operating system's refusal and a configuration that does not
compose explain themselves. Anything else is a bug, ours or a library's, and shows its trace.
"""

from __future__ import annotations

import difflib
import sys
import traceback
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hotrec.cli.environment import rank_prefix
from hotrec.config.groups import VARIANTS

PACKAGE = Path(__file__).resolve().parents[1]
FULL_TRACE = "HYDRA_FULL_ERROR"


class CommandFailed(Exception):  # noqa: N818 (an exit code, not an error)
    """A command failed and its error has been printed; carries the exit code through Hydra."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


class EndedEarly(Exception):  # noqa: N818 (nothing is wrong)
    """A command ended in good order, with figures, but not with exit code 0."""

    def __init__(self, figures: dict[str, Any], exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.figures = figures
        self.exit_code = exit_code


def print_error(error: BaseException, *, wants_trace: bool) -> None:
    """Print an error on stderr, in one write, so that the lines of several ranks do not mix."""
    lines = []
    if wants_trace or not explains_itself(error):
        lines += "".join(traceback.format_exception(error)).rstrip().splitlines()
    lines.append(f"error: {describe(error)}")
    sys.stderr.write("".join(f"{rank_prefix()}{line}\n" for line in lines))
    sys.stderr.flush()


def describe(error: BaseException) -> str:
    """One paragraph, beginning with the full configuration key where the error has one."""
    if isinstance(error, OmegaConfBaseException):
        return _describe_key_error(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _describe_missing_option(error)
    if isinstance(error, HydraException):
        if isinstance(error.__cause__, OmegaConfBaseException):
            return _describe_key_error(error.__cause__)
        return " ".join(str(error).split())
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return str(error) or type(error).__name__


def explains_itself(error: BaseException) -> bool:
    """Whether the message alone is enough: see the module's first lines."""
    if isinstance(error, HydraException | OmegaConfBaseException | OSError):
        return True
    return isinstance(error, ValueError | RuntimeError) and _raised_in_hotrec(error.__traceback__)


def _describe_key_error(error: OmegaConfBaseException) -> str:
    message = (error.msg or str(error)).split("\n")[0].strip()
    key = str(error.full_key or "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: expected a value, got none. Give {key}=..."
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return _describe_unknown_key(key, error.object_type)
    return f"{key}: {message}" if key and not message.startswith(key) else message


def _describe_unknown_key(full_key: str, kind: Any) -> str:
    parent, _, name = full_key.rpartition(".")
    if not is_dataclass(kind):
        return (
            f"{full_key}: expected a key that is there, got {name!r}. To add an entry to a "
            f"mapping put a plus before it: +{full_key}=..."
        )
    return describe_unknown_field(parent, name, kind)


def describe_unknown_field(parent: str, name: str, kind: Any) -> str:
    """The message for a key that a dataclass of the configuration does not have."""
    known = [item.name for item in fields(kind)]
    prefix = f"{parent}." if parent else ""
    close = difflib.get_close_matches(name, known, n=1)
    advice = f"Did you mean {prefix}{close[0]}?" if close else "See --help."
    for group, variants in VARIANTS.items():
        if kind in variants.values():
            owners = [choice for choice, variant in variants.items() if _has_field(variant, name)]
            if owners:
                advice = f"It is a key of {', '.join(f'{group}={owner}' for owner in owners)}."
    return f"{prefix}{name}: expected one of {', '.join(known)}, got {name!r}. {advice}"


def _has_field(kind: type, name: str) -> bool:
    return any(item.name == name for item in fields(kind))


def _describe_missing_option(error: MissingConfigException) -> str:
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    if not group or not error.options:
        return f"{error.missing_cfg_file}: expected a file in the configuration, got none."
    return f"{group}: expected one of {', '.join(sorted(error.options))}, got {choice!r}."


def _raised_in_hotrec(trace: TracebackType | None) -> bool:
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return PACKAGE in Path(trace.tb_frame.f_code.co_filename).resolve().parents
