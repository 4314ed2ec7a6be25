"""What Linux says of the memory of this process."""

from __future__ import annotations

from pathlib import Path


def flags_at(address: int) -> list[str] | None:
    """The flags of the mapping that holds an address, see proc_pid_smaps(5); None without one."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_here = begin <= address < end
        elif is_here and first == "VmFlags:":
            return line.split()[1:]
    return None
