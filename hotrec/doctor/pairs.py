"""Which releases of torch, torchrec and fbgemm go together, and which hotrec is tested with.

The one list of them in the project: the locks in ``requirements/`` and the readme's table are held
to it by ``tests/policy/test_locks.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

# fbgemm 1.X and torchrec 1.X are built for torch 2.(X+5).
MINOR_OFFSET = 5


@dataclass(frozen=True)
class Pair:
    """A torch with its torchrec and its fbgemm, as they were released.

    Args:
        torch: the last release of this minor version.
        torchrec: the last release for it.
        fbgemm: the same for fbgemm-gpu and fbgemm-gpu-cpu.
        is_tested: whether hotrec's whole suite is run with it (``make test-pairs``).
    """

    torch: str
    torchrec: str
    fbgemm: str
    is_tested: bool = True

    def pip_line(self, fbgemm: str, *, force: bool = False) -> str:
        """The command that installs this pair with the fbgemm package of that name."""
        options = "--force-reinstall --no-deps " if force else ""
        torch = f"pip install {options}torch=={self.torch}"
        # torchrec's metadata asks for the CUDA fbgemm-gpu; the CPU's must not stand beside it.
        others = f"torchrec=={self.torchrec} {fbgemm}=={self.fbgemm}"
        return f"{torch} {others}" if force else f"{torch} && pip install --no-deps {others}"


# By torch's minor version. Nothing here is a guess: each release is on the package index.
PAIRS = {
    11: Pair("2.11.0", "1.6.1", "1.6.0"),
    12: Pair("2.12.1", "1.7.0", "1.7.0", is_tested=False),
    13: Pair("2.13.0", "1.8.0", "1.8.0"),
    14: Pair("2.14.1", "1.9.2", "1.9.0"),
}
OLDEST_MINOR, NEWEST_MINOR = min(PAIRS), max(PAIRS)
# What requirements/cpu.lock and cuda.lock hold, and what is advised where no usable torch is there.
PINNED_MINOR = 13
PINNED = PAIRS[PINNED_MINOR]
TESTED = ", ".join(f"2.{minor}" for minor, pair in PAIRS.items() if pair.is_tested)
