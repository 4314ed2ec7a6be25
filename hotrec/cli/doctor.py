"""``hotrec doctor``: check the installed packages and the machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotrec.cli.output import EndedEarly
from hotrec.config.roots import DoctorConfig
from hotrec.doctor import diagnose

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def run(config: DoctorConfig, run_dir: Path) -> dict[str, Any]:
    """Print each check on stderr; the figures list them too."""
    checks = diagnose()
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{MARKS[check.status]}  {check.name:<{width}}  {check.found}", file=sys.stderr)
        if check.status != "ok":
            print(f"      expected {check.expected}. Run: {check.fix}", file=sys.stderr)
    is_ok = all(check.status != "fail" for check in checks)
    figures = {"ok": is_ok, "checks": [asdict(check) for check in checks]}
    if not is_ok:
        raise EndedEarly(figures, 1)
    return figures
