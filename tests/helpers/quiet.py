"""Libraries without work that no test looks at, and that takes much of a small run's time.

``torchrec.distributed.logger`` writes every argument of the calls that it logs as a text, models
with the weights of their tables among them, whatever the level of its loggers: a fifth of a test
that shards a small model several times.

Hydra composes the configuration of every job twice, first only to read ``hydra.mode``, of which
hotrec makes no use: half of a command's processor time before it starts.
"""

from __future__ import annotations


def log_little() -> None:
    """Leave the texts out in this process."""
    from torchrec.distributed import logger

    logger._get_input_from_func = lambda *_args, **_kwargs: ""


def compose_once() -> None:
    """Leave the mode at what Hydra's own configuration and that of hotrec have: none."""
    from hydra._internal.hydra import Hydra

    Hydra.get_mode = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
