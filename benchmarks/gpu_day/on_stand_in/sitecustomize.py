"""Python imports this when it starts with this directory on its path, as a rehearsal has it.

So each of its processes, down to the ranks that a test spawns, has the stand-in for a CUDA device
before it has torch. Like ranks that share one GPU, all of them have device 0.
"""

import atexit
import os

given = os.environ.pop("LOCAL_RANK", None)
from tests.stand_in import device  # noqa: E402

if given is not None:
    os.environ["LOCAL_RANK"] = given
atexit.register(device.close)
