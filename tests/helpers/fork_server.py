"""``python -m tests.helpers.fork_server DESCRIPTOR``: imports the program, then forks from that."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pkgutil
import socket
import subprocess
import sys

from tests.helpers.forked import Process, exit_code_of, leave, serve


def import_program() -> None:
    """Import all of hotrec, and what its commands import later."""
    from hydra.core.hydra_config import HydraConfig

    import hotrec
    from tests.helpers.quiet import compose_once, log_little

    for module in pkgutil.walk_packages(hotrec.__path__, "hotrec."):
        if module.name != "hotrec.__main__":
            importlib.import_module(module.name)
    for name in ("matplotlib.pyplot", "torch.distributed.run", "torch.utils.tensorboard"):
        importlib.import_module(name)
    log_little()
    compose_once()
    # Grammars and schemas are read at the first composing.
    hotrec.cli.store.compose_config("config", ["experiment=synthetic_smoke"])
    HydraConfig.instance().cfg = None
    # A command sets its handlers before torch is imported, which then adds none.
    logging.getLogger().handlers.clear()


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Where they are now, _show writes later; libraries may hold pointers to what getenv gave them.
    Process.started = dict(os.environ)
    os.environ.clear()
    os.environ.update(Process.started)
    # Before torch is imported, which holds the class by a name of its own.
    subprocess.Popen = Process  # type: ignore[misc]
    import_program()
    gc.collect()
    gc.freeze()  # so that collections in the programs copy no pages of these objects
    program = serve(connection)
    leave(exit_code_of(program.run))


if __name__ == "__main__":
    main()
