"""``python -m hotrec``: the same program as ``hotrec``, and the entry point of ranks."""

import atexit
import os
import sys

from hotrec.cli import main


def _leave(exit_code: int) -> None:
    """Exit a rank without unloading its libraries.

    Seen twice at the exit of rank 0, when all work was done and written: a C++ thread that had not
    ended was destroyed ("terminate called without an active exception"), which aborts the process
    and with it the run. Python's exit handlers still run; the exit code is reported.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(main())
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    _leave(code)
