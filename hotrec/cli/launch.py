"""How a command is launched: its place under torchrun, its run directory, and its ranks.

Hydra would name the run directory by the time at which each process starts, so ranks would
disagree, and two runs that start within a second would share one. Here ``HOTREC_RUN_DIR`` wins;
without it a single process makes a new directory, and under torchrun rank 0 does, and the others
read its choice from torchrun's own store at MASTER_ADDR:MASTER_PORT, before Hydra starts. With
``launch.num_ranks=N`` the command runs again as N ranks in a child torchrun. Torch is only imported
if several ranks have to agree.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

RUN_DIR = "HOTREC_RUN_DIR"
# The expected parent of a child process.
PARENT = "HOTREC_PARENT"
# Set for the stages of ``hotrec run``, which write their tables only to files.
BRIEF = "HOTREC_BRIEF"
_STORE_KEY = "hotrec/run_dir"
# Set for a process whose parent reports the signal that ended it.
TOLD = "HOTREC_TOLD"
# The runs of these commands are named by the experiment, all others by the command.
_NAMED_BY_EXPERIMENT = ("train", "bench")
_FORWARDED = (signal.SIGTERM, signal.SIGINT)
# Set by torchrun for its ranks.
_AGENT = "TORCHELASTIC_RUN_ID"
# The number of tasks that a launcher started, and its name; SLURM_PROCID is this task's number.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "SLURM_PROCID": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
_TMP_PREFIX = "hotrec-"
_WORKER_END_S = 5.0
_LOOPBACK_S = 5.0
_SHUTDOWN_S = 150  # in which ranks save after a signal; as in launch/slurm.sbatch
# A socket's path has at most 107 bytes, of which multiprocessing adds about 40 to this.
_MAX_TMP_PATH = 60
_PR_SET_PDEATHSIG = 1  # prctl(2)
# If this process is the host, torch's server lives only as long as this reference.
_held_store: Store | None = None
# Created directories of this process's runs; existing parents are not removed.
_made_parents: list[Path] = []


def is_under_torchrun() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process.

    A single rank that torchrun did not start is an ordinary process: clusters and notebooks set
    RANK=0 and WORLD_SIZE=1 for all their processes.
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return is_rank and (environment_world_size() > 1 or _AGENT in os.environ)


def environment_rank() -> int:
    """This process's rank, 0 without torchrun."""
    return _integer("RANK", 0)


def environment_world_size() -> int:
    """The number of ranks, 1 without torchrun."""
    return _integer("WORLD_SIZE", 1)


def rank_prefix() -> str:
    """``"[rank 1] "`` if there are several ranks, otherwise empty."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"[rank {rank}] " if rank.isdecimal() and world_size != "1" else ""


def this_process() -> str:
    """A name of this process that is unique over all hosts."""
    return f"{platform.node()}:{os.getpid()}"


@dataclass(frozen=True)
class Host:
    """This host among those that share a job of a sweep.

    Args:
        number: From 0, the host of the rendezvous.
        num_hosts: Number of hosts.
        endpoint: Address and port of host 0.
        job: The cluster's unique id of the job.
    """

    number: int = 0
    num_hosts: int = 1
    endpoint: str = ""
    job: str = ""


def this_host() -> Host:
    """From submitit in a job's process; a single host elsewhere, and in the job's ranks."""
    if "SUBMITIT_EXECUTOR" not in os.environ or is_under_torchrun():
        return Host()
    from submitit import JobEnvironment

    job = JobEnvironment()
    if job.num_tasks != job.num_nodes:
        raise ValueError(
            "hydra.launcher.tasks_per_node: expected 1, which starts launch.num_ranks ranks, got "
            f"{job.num_tasks // job.num_nodes}. Leave it at 1."
        )
    if job.num_nodes == 1:
        return Host()
    # Jobs that share their first host must not share a port; as in launch/slurm.sbatch.
    port = 20000 + int(job.raw_job_id) % 10000
    return Host(job.node, job.num_nodes, f"{job.hostnames[0]}:{port}", job.job_id)


def check_environment(num_ranks: int | None = None, *, is_parallel: bool = True) -> None:
    """Check the launchers' variables against each other and the command line, before any wait.

    Args:
        num_ranks: The configured number of ranks of this host, if any.
        is_parallel: Whether the command could have several ranks.

    Raises:
        ValueError: If a variable is missing or contradicts another, or ``launch.num_ranks``.
    """
    rank, world_size = environment_rank(), environment_world_size()
    if not rank < world_size:
        raise ValueError(
            f"environment RANK: expected below WORLD_SIZE {world_size}, got {rank}. Use torchrun."
        )
    if world_size > 1:
        if "RANK" not in os.environ:
            raise ValueError(
                f"environment RANK: expected a rank below WORLD_SIZE {world_size}, got none. Use "
                "torchrun, or unset WORLD_SIZE."
            )
        if not os.environ.get("MASTER_ADDR"):
            raise ValueError(
                "environment MASTER_ADDR: expected the host of rank 0, got none. Use torchrun."
            )
        _integer("MASTER_PORT", -1)
    local_rank, local_size = _integer("LOCAL_RANK", 0), _integer("LOCAL_WORLD_SIZE", 0)
    if local_size > world_size or (local_size and local_rank >= local_size):
        raise ValueError(
            f"environment LOCAL_WORLD_SIZE: expected at most WORLD_SIZE {world_size} and above "
            f"LOCAL_RANK {local_rank}, got {local_size}. Use torchrun, or unset all of them."
        )
    if is_under_torchrun():
        _check_started_ranks(num_ranks)
    elif is_parallel:
        _check_pet(num_ranks)
    _check_tasks()


def _check_started_ranks(num_ranks: int | None) -> None:
    """Refuse another number of ranks than the launcher started on this host."""
    here, world_size = os.environ.get("LOCAL_WORLD_SIZE"), environment_world_size()
    if num_ranks is None or (here is not None and int(here) == num_ranks):
        return
    if here is None and num_ranks == 1:  # another launcher, with one rank per host or more
        return
    raise ValueError(
        f"launch.num_ranks: expected {here or 'none'}, since RANK and WORLD_SIZE are set for "
        f"{world_size} ranks, got {num_ranks}. Omit it, or unset RANK and WORLD_SIZE to start "
        "ranks here."
    )


def _check_pet(num_ranks: int | None) -> None:
    """Refuse contradictions with the variables of Kubeflow, which are torchrun's defaults."""
    for name, got, asked in (
        ("PET_NNODES", 1, "hosts"),
        ("PET_NPROC_PER_NODE", num_ranks, "ranks on this host"),
    ):
        text = os.environ.get(name, "")
        if got is not None and text.isdecimal() and int(text) != got:
            raise ValueError(
                f"environment {name}: expected {got} (the command line's number of {asked}), got "
                f"{text}. Start with launch/torchrun.sh on every host, or unset {name}."
            )


def _check_tasks() -> None:
    """Refuse to run as one of several independent tasks of srun or mpirun.

    Each would be a separate run, or each host if torchrun only started the ranks of its host.
    """
    if "SUBMITIT_EXECUTOR" in os.environ:  # see ``this_host``
        return
    for name, launcher in _TASKS.items():
        text = os.environ.get(name, "")
        num_tasks = int(text) if text.isdecimal() else 0
        if name == "SLURM_PROCID":  # in a batch script and in salloc's shell it is 0
            num_tasks += 1
        num_known = _integer("GROUP_WORLD_SIZE", environment_world_size())
        if num_tasks > 1 and num_known == 1:
            raise ValueError(
                f"environment {name}: expected a single task of {launcher}, got at least "
                f"{num_tasks}, each of which would be a separate run. Start launch/torchrun.sh in "
                f"each, as launch/slurm.sbatch does, or unset {name} if that is intended."
            )


def _integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or (name == "WORLD_SIZE" and int(text) < 1):
        raise ValueError(f"environment {name}: expected a count, got {text!r}. Use torchrun.")
    return int(text)


def decide_run_dir(
    command: str, overrides: Sequence[str], *, is_multirun: bool, is_made: bool = True
) -> str:
    """The run's directory, the same on every rank; also set in the environment for Hydra.

    Args:
        command: The command.
        overrides: Its words; the experiment names the directory of a run.
        is_multirun: Whether it is a sweep.
        is_made: Whether to create the directory, unless the environment has one, so that no
            command that starts at the same time can use it.
    """
    _made_parents.clear()
    chosen = os.environ.get(RUN_DIR)
    if chosen and "://" in chosen:
        raise ValueError(
            f"{RUN_DIR}: expected a directory of this host, got {chosen!r}. Use one, and copy it "
            "to the store afterwards."
        )
    if not chosen:
        folder = _propose(command, overrides, is_multirun=is_multirun)

        def decide() -> str:
            return (_make_new(folder) if is_made else folder).as_posix()

        chosen = _agree(decide) if is_under_torchrun() else decide()
        os.environ[RUN_DIR] = chosen
    return chosen


def _propose(command: str, overrides: Sequence[str], *, is_multirun: bool) -> Path:
    name = command
    if command in _NAMED_BY_EXPERIMENT:
        for override in overrides:
            key, _, value = override.partition("=")
            if key.lstrip("+") == "experiment" and value.isidentifier():
                name = value
    return Path("runs") / ("sweep" if is_multirun else "") / name / time.strftime("%Y%m%d-%H%M%S")


def _make_new(folder: Path) -> Path:
    """Create the directory, or one with a number after its name if it was just created.

    If none can be created, all ranks get the same error from Hydra, which tries again.
    """
    candidate, number = folder, 0
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = folder.with_name(f"{folder.name}-{number}")
        except FileNotFoundError:  # a finished command may have removed the empty parent
            _made_parents.extend(p.absolute() for p in folder.parents if not p.exists())
            with suppress(OSError):
                candidate.parent.mkdir(parents=True, exist_ok=True)
                continue
            return candidate
        except OSError:
            return candidate


def remove_if_empty(run_dir: Path) -> None:
    """Remove a run's empty directory, and parents that were only created for it."""
    with suppress(OSError):
        run_dir.rmdir()
        for parent in run_dir.absolute().parents:
            if parent in _made_parents:
                parent.rmdir()


def _agree(decide: Callable[[], str]) -> str:
    """Rank 0's decision, on every rank; after a restart by torchrun, the earlier decision.

    Rank 0 may be on another host then, so one rank of each host stores the decision in the
    directory that torchrun's agent there keeps for all its attempts.
    """
    note: Path | None = None
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # <agent>/<attempt>/<rank>/...
        note = Path(error_file).parents[2] / "run_dir"
    chosen = note.read_text() if note is not None and note.is_file() else ""
    if environment_world_size() == 1:
        chosen = chosen or decide()
    else:
        chosen = _tell_all(chosen or decide() if environment_rank() == 0 else "")
    if note is not None and note.parent.is_dir() and os.environ.get("LOCAL_RANK") == "0":
        note.write_text(chosen)
    return chosen


def _tell_all(chosen: str) -> str:
    """Rank 0's text, on every rank."""
    global _held_store
    from torch.distributed import rendezvous

    from hotrec.runtime.ranks import joining

    with joining():
        _held_store, _, _ = next(iter(rendezvous("env://")))
        if environment_rank() == 0:
            _held_store.set(_STORE_KEY, chosen)
        return str(_held_store.get(_STORE_KEY).decode())


def check_network(*, is_standalone: bool) -> None:
    """Check that ranks of this host can reach each other, before any of them waits.

    Args:
        is_standalone: Whether all ranks are on this host, which then use its loopback address.

    Raises:
        ValueError: If a variable does not name an interface, or the address is unreachable.
    """
    present = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in present:
            raise ValueError(
                "environment GLOO_SOCKET_IFNAME: expected network interfaces of this host "
                f"({present}), got {name!r}. Correct it, or unset it."
            )
    if not is_standalone:
        return
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S).close()
    except OSError as error:
        raise ValueError(
            "network: expected the loopback address 127.0.0.1 for the ranks of this host, got "
            f"{error.strerror or error}. Bring the interface up with `ip link set lo up`."
        ) from error


def run_under_torchrun(
    command: str,
    overrides: Sequence[str],
    *,
    num_ranks: int,
    run_dir: str,
    environment: Mapping[str, str],
    host: Host = Host(),  # noqa: B008 (immutable)
) -> int:
    """Run the command as ``num_ranks`` processes on this host and wait for them.

    Args:
        host: This host among several, each of which calls this with the same number.
        overrides: The overrides of this job, without those of the sweep.
        environment: The environment of the child, which also gets HOTREC_RUN_DIR.

    Returns:
        The exit code; 128 + n after signal n.

    Raises:
        SystemExit: If this process received a signal, so that a sweep stops.
    """
    check_network(is_standalone=host.num_hosts == 1)
    launcher = [sys.executable, "-m", "hotrec.cli.ranks", "--nproc-per-node", str(num_ranks)]
    launcher += ["--shutdown-timeout", str(_SHUTDOWN_S)]
    if host.num_hosts == 1:
        # By default ranks connect to this host's name, and wait for minutes if it has no address.
        launcher += ["--standalone", "--local-addr", "localhost"]
    else:
        launcher += ["--nnodes", str(host.num_hosts), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", host.endpoint, "--rdzv-id", host.job]
        launcher += ["--rdzv-conf", f"is_host={str(host.number == 0).lower()}"]
    # The command line is complete. Variables of Kubeflow would be torchrun's defaults.
    variables = {name: v for name, v in environment.items() if not name.startswith("PET_")}
    variables |= {RUN_DIR: run_dir, "TMPDIR": tempfile.gettempdir()}
    variables[PARENT] = str(os.getpid())
    # The ranks share the host's cores; torchrun would set 1, with a warning.
    variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    return wait_for_child([*launcher, "-m", "hotrec", command, *overrides], variables)


def wait_for_child(
    words: Sequence[str], environment: Mapping[str, str], stdout: IO[str] | None = None
) -> int:
    """Run a program, forward this process's signals to it, and wait for its end.

    Returns:
        The exit code; 128 + n after signal n.

    Raises:
        SystemExit: If this process received a signal; never with 0, even if the program finished
            before the signal reached it: later steps must not start.
    """
    # In its own session it gets the terminal's Ctrl-C once, forwarded by this process.
    variables = {**environment, TOLD: "1"}
    child = subprocess.Popen(words, env=variables, stdout=stdout, start_new_session=True)
    with _forward_signals(child) as received:
        exit_code = child.wait()
    exit_code = exit_code if exit_code >= 0 else 128 - exit_code
    if received:
        # A library that is interrupted by a signal, such as during import, may abort.
        is_of_program = exit_code not in (0, 128 + signal.SIGABRT)
        raise SystemExit(exit_code if is_of_program else 128 + received[0])
    return exit_code


def end_with_parent() -> None:
    """Get SIGTERM when the process that started this one ends, even by SIGKILL; Linux only.

    Without it the ranks of a killed launcher would keep training.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # It may have exited already, while the interpreter started.
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
            raise SystemExit(128 + signal.SIGTERM)
        os.environ[PARENT] = str(os.getpid())


@contextmanager
def private_temporary_directory() -> Iterator[None]:
    """A temporary directory for this process and those that it starts, removed at the end.

    torchrun and multiprocessing leave theirs behind when they are killed. Directories of exited
    hotrec processes are removed as well.
    """
    chosen = os.environ.get("TMPDIR")
    if chosen and not os.path.isdir(chosen):  # Python would silently use another one
        raise ValueError(f"environment TMPDIR: expected a directory, got {chosen}. Make it.")
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > _MAX_TMP_PATH:
        parent = Path("/tmp")
    for left in parent.glob(f"{_TMP_PREFIX}*-*"):
        pid = left.name.removeprefix(_TMP_PREFIX).partition("-")[0]
        with suppress(FileNotFoundError):  # its process has just exited
            is_own = left.stat().st_uid == os.getuid()
            if pid.isdigit() and is_own and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(left, ignore_errors=True)
    previous = os.environ.get("TMPDIR")
    made = tempfile.mkdtemp(prefix=f"{_TMP_PREFIX}{os.getpid()}-", dir=parent)
    os.environ["TMPDIR"] = tempfile.tempdir = made
    try:
        yield
    finally:
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if previous is not None:
            os.environ["TMPDIR"] = previous
        # After multiprocessing has removed its own directory in it, with priority -100.
        Finalize(None, shutil.rmtree, args=(made, True), exitpriority=-200)


def use_default_start_method() -> None:
    """Start processes by the platform's own method, in which loaders start their workers.

    joblib sets its own method as the default in its processes, which cannot start loader workers.
    """
    multiprocessing.set_start_method(None, force=True)


def end_workers() -> None:
    """Stop the loader workers that remain after an error, in order.

    The error's frames keep them alive until the interpreter exits, and by then the directory of
    their sockets is gone: each would print traces.
    """
    # Torch raises anywhere when it detects that a worker did not exit with code 0.
    with suppress(RuntimeError):
        workers = [child for child in multiprocessing.active_children() if child.daemon]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join(_WORKER_END_S)


@contextmanager
def _forward_signals(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward this process's signals to the child; yields the received ones."""
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if child.poll() is None:
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
