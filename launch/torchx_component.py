"""A torchx component: the ranks of a hotrec command as a torchx application.

    torchx run -s local_cwd launch/torchx_component.py:train --nproc_per_node 2 \
        experiment=quickstart

torchx is an optional extra (``pip install 'hotrec[torchx]'``). Each replica is one host and starts
``launch/torchrun.sh``, so an application differs from a run by hand in nothing but who starts it.
The run's directory is decided here, at submission, and given to all replicas.
"""

import secrets
import shlex
import time
from pathlib import PurePosixPath
from typing import Dict, List, Optional

from torchx import specs
from torchx.specs import AppDef, Role, macros

RUN_DIR = "HOTREC_RUN_DIR"


def train(  # noqa: PLR0913
    *overrides: str,
    command: str = "train",
    nnodes: int = 1,
    nproc_per_node: int = 1,
    image: str = "hotrec",
    checkout: str = ".",
    python: Optional[str] = None,
    run_dir: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memory_mib: int = 8192,
    host: Optional[str] = None,
    rdzv_port: int = 29500,
    max_restarts: int = 0,
    max_retries: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
) -> AppDef:
    """Run a hotrec command with one torchrun per host.

    Args:
        overrides: Hydra overrides, e.g. experiment=quickstart trainer.max_steps=100
        command: the hotrec command
        nnodes: number of hosts
        nproc_per_node: ranks on each host
        image: image of docker/, for schedulers that use one
        checkout: where launch/ is, from the working directory of the job
        python: interpreter; by default the checkout's .venv, else python3
        run_dir: directory of the run; by default runs/torchx/<time of submission>
        cpu: cores of a host
        gpu: GPUs of a host
        memory_mib: memory of a host, in MiB
        host: a named torchx resource, instead of cpu, gpu and memory_mib
        rdzv_port: port of the rendezvous on the first host
        max_restarts: how often torchrun starts the ranks again
        max_retries: how often the scheduler starts the job again
        env: environment of the ranks, e.g. GLOO_SOCKET_IFNAME=eth1
        mounts: e.g. type=bind,src=/data,dst=/data,readonly
    """
    launcher = ["bash", str(PurePosixPath(checkout) / "launch" / "torchrun.sh")]
    options = {"--nnodes": nnodes, "--nproc-per-node": nproc_per_node}
    options["--max-restarts"] = max_restarts
    words = [*launcher, *(str(word) for option in options.items() for word in option)]
    if python is not None:
        words += ["--python", python]
    line = "exec " + shlex.join(words)
    if nnodes > 1:
        # The scheduler sets the first host's name on all replicas, in a variable whose name
        # torchx substitutes when it submits; the shell of the replica reads it. "$$" is torchx's
        # escape of "$". Replica 0 may lack the variable.
        line += f' --rdzv-endpoint "$${{{macros.rank0_env}:-localhost}}:{rdzv_port}"'
        line += f" --rdzv-id {macros.app_id} --node-rank {macros.replica_id}"
    # torchx must not substitute anything in the overrides.
    line += " " + shlex.join([command, *overrides]).replace("$", "$$")
    # The random suffix separates submissions within a second.
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    directory = run_dir or f"runs/torchx/{stamp}"
    return AppDef(
        name=f"hotrec-{command}",
        roles=[
            Role(
                name="ranks",
                image=image,
                entrypoint="bash",
                args=["-c", line],
                env={**(env or {}), RUN_DIR: directory},
                num_replicas=nnodes,
                resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memory_mib, h=host),
                port_map={"c10d": rdzv_port},
                max_retries=max_retries,
                mounts=specs.parse_mounts(mounts) if mounts else [],
            )
        ],
    )
