"""``hotrec bench``: hot/cold against TorchRec's own plans on unsplit tables, in one run.

The cases take turns in blocks of steps, on the same batches, with the same weights to begin with,
so that whatever disturbs the machine disturbs all of them, and a ratio of two cases is that of
blocks made soon after one another.
"""

from hotrec.bench.command import run

__all__ = ["run"]
