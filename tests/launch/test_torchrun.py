"""launch/torchrun.sh, run for real with a stand-in for hotrec."""

from __future__ import annotations

import re
import signal

import pytest

from tests.launch.conftest import Place

AWKWARD = ["experiment=quickstart", "names=[a, b]", 'text="$HOME"', "empty=", "--multirun"]


def test_one_host(place: Place) -> None:
    done = place.run(place.torchrun("--nproc-per-node", "2", "train", *AWKWARD))
    assert done.returncode == 0, done.stderr
    assert [facts["arguments"] for facts in place.seen()] == [["train", *AWKWARD]] * 2
    assert place.seen_variable("RANK") == ["0", "1"]
    assert place.seen_variable("WORLD_SIZE") == ["2", "2"]
    # The ranks name it by the run's id.
    assert place.seen_variable("HOTREC_RUN_DIR") == [None, None]
    first, second = place.seen_variable("TORCHELASTIC_RUN_ID")
    assert first == second != "none"
    # Not the host's own name, which need not have an address.
    assert place.seen_variable("MASTER_ADDR") == ["localhost", "localhost"]
    # Set, so that torchrun does not warn and ranks do not fight for cores.
    assert None not in place.seen_variable("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in done.stderr


def test_the_option_wins_over_the_directory_of_the_environment(place: Place) -> None:
    done = place.run(place.torchrun("--run-dir=runs/option", "train"), HOTREC_RUN_DIR="runs/mine")
    assert done.returncode == 0, done.stderr
    assert place.seen_variable("HOTREC_RUN_DIR") == ["runs/option"]


def test_two_hosts(place: Place, free_port: int) -> None:
    options = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port}"]
    # Both hosts are this one, whose name torchrun cannot match to one of them.
    options += ["--local-addr", "localhost", "--rdzv-id", "first-try"]
    hosts = [
        place.start(place.torchrun(*options, "--node-rank", str(host), "train", "a=1"))
        for host in range(2)
    ]
    errors = [host.communicate(timeout=90)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert place.seen_variable("RANK") == ["0", "1"]
    assert place.seen_variable("WORLD_SIZE") == ["2", "2"]
    assert place.seen_variable("LOCAL_WORLD_SIZE") == ["1", "1"]
    assert place.seen_variable("TORCHELASTIC_RUN_ID") == ["first-try", "first-try"]


def test_host_0_holds_the_rendezvous(place: Place) -> None:
    """Which two hosts that are one do not tell."""
    python = place.path / "show-words"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    words = [str(place.path / "launch" / "torchrun.sh"), "--python", str(python), "--nnodes", "2"]
    words += ["--rdzv-endpoint", "a:1", "--rdzv-id", "b", "--node-rank"]
    shown = [place.run([*words, host, "train"]).stdout for host in ("0", "1")]
    assert ["is_host=true" in line for line in shown] == [True, False]
    assert ["is_host=false" in line for line in shown] == [False, True]


def test_sigterm_reaches_the_ranks(place: Place) -> None:
    launcher = place.start(place.torchrun("--nproc-per-node", "2", "wait"))
    place.wait_for("0.ready", "1.ready")
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert errors == ""  # nothing of torchrun's own
    assert {file.name for file in (place.path / "seen").glob("*.saved")} == {"0.saved", "1.saved"}


def test_a_failing_rank_is_a_failing_launcher(place: Place) -> None:
    done = place.run(place.torchrun("--nproc-per-node", "2", "fail", "3"))
    assert done.returncode == 3
    assert re.search(r"^error: rank [01] ended first, with exit code 3", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "key", "got"),
    [
        ([], "COMMAND", "nothing"),
        (["--nnodes"], "--nnodes", "nothing"),
        (["--nproc", "2", "train"], "option", "'--nproc'"),
        (["--nproc-per-node=0", "train"], "--nproc-per-node", "'0'"),
        (["--nnodes", "2", "train"], "--rdzv-endpoint", "nothing"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:1", "train"], "--rdzv-id", "nothing"),
        (
            ["--nnodes=2", "--rdzv-endpoint=a:1", "--rdzv-id=b", "--node-rank=2", "train"],
            *("--node-rank", "2"),
        ),
        (["--python", "no-such-python", "train"], "--python", "'no-such-python'"),
    ],
)
def test_bad_options(place: Place, arguments: list[str], key: str, got: str) -> None:
    done = place.run([str(place.path / "launch" / "torchrun.sh"), *arguments])
    assert done.returncode == 2
    assert re.fullmatch(
        rf"launch/torchrun\.sh: {key}: expected .*, got {got}\..*\n", done.stderr
    ), done.stderr
    assert place.seen() == []
