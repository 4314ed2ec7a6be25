"""launch/slurm.sbatch with stand-ins for srun and scontrol that run the tasks on this host."""

from __future__ import annotations

import shutil

from tests.launch.conftest import Place

SRUN = """#!/usr/bin/env bash
set -euo pipefail
while [[ $1 == --* ]]; do
    echo "$1" >> srun_options
    case $1 in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
for ((task = 0; task < tasks; task++)); do
    SLURM_NODEID=$task SLURM_PROCID=$task "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'localhost\\nnode2\\n'
"""


def cluster(place: Place, job: int) -> dict[str, str]:
    """The environment of a batch job on two nodes."""
    programs = place.path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{place.environment()['PATH']}",
        "SLURM_SUBMIT_DIR": str(place.path),
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }


def spooled(place: Place) -> str:
    """sbatch runs a copy of the script from elsewhere."""
    copy = place.path / "spool" / "slurm_script"
    copy.parent.mkdir()
    shutil.copy(place.path / "launch" / "slurm.sbatch", copy)
    return str(copy)


def test_two_nodes(place: Place, free_port: int) -> None:
    # The script's port is 20000 + job % 10000.
    job = 70000 + free_port % 10000
    environment = cluster(place, job)
    done = place.run(["bash", spooled(place), "train", "names=[a, b]"], **environment)
    assert done.returncode == 0, done.stderr
    assert [facts["arguments"] for facts in place.seen()] == [["train", "names=[a, b]"]] * 2
    assert place.seen_variable("WORLD_SIZE") == ["2", "2"]
    assert place.seen_variable("LOCAL_WORLD_SIZE") == ["1", "1"]
    assert place.seen_variable("HOTREC_RUN_DIR") == [f"runs/slurm/{job}"] * 2
    assert f"rendezvous localhost:{20000 + job % 10000}, directory runs/slurm/{job}" in done.stdout


def test_ranks_per_node_are_its_gpus_and_an_image_has_its_options(
    place: Place, free_port: int
) -> None:
    """Data and runs of the image are the checkout's, with what else is mounted."""
    environment = cluster(place, 80000 + free_port % 10000)
    environment |= {"SLURM_GPUS_ON_NODE": "2", "HOTREC_RUN_DIR": "runs/resumed"}
    options = ["--cpu-bind=none", "--container-image=hotrec.sqsh", "--container-mounts=/logs:/logs"]
    done = place.run(["bash", spooled(place), *options, "train", "a=1"], **environment)
    assert done.returncode == 0, done.stderr
    assert [facts["arguments"] for facts in place.seen()] == [["train", "a=1"]] * 4
    assert place.seen_variable("LOCAL_RANK") == ["0", "1", "0", "1"]
    assert place.seen_variable("HOTREC_RUN_DIR") == ["runs/resumed"] * 4
    given = (place.path / "srun_options").read_text().splitlines()
    assert {"--cpu-bind=none", "--container-image=hotrec.sqsh"} <= set(given)
    mounts = f"{place.path}/data:/srv/hotrec/data,{place.path}/runs:/srv/hotrec/runs,/logs:/logs"
    assert f"--container-mounts={mounts}" in given
    assert "--container-workdir=/srv/hotrec" in given
    assert all((place.path / name).is_dir() for name in ("data", "runs"))
