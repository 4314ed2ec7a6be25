"""Libraries without work that no test looks at, and that takes much of a small run's time.

``torchrec.distributed.logger`` writes every argument of the calls that it logs as a text, models
with the weights of their tables among them, whatever the level of its loggers: a fifth of a test
that shards a small model several times. torchrun's agent gives each of its events the name of the
calling method, for which Python looks through all modules: a second for a start of two ranks.

Hydra composes the configuration of every job twice, first only to read ``hydra.mode``, of which
hotrec makes no use: half of a command's processor time before it starts.
"""

from __future__ import annotations


def log_little() -> None:
    """Leave the texts out in this process."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torchrec.distributed import logger

    logger._get_input_from_func = lambda *_args, **_kwargs: ""
    dynamic_rendezvous.get_method_name = lambda depth=2: ""


def compose_once() -> None:
    """Leave the mode at what Hydra's own configuration and that of hotrec have: none."""
    from hydra._internal.hydra import Hydra

    Hydra.get_mode = lambda *_args, **_kwargs: None  # type: ignore[method-assign]
