"""The images, the compose file and its trial: from the locks, non-root, two hosts that agree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.conftest import Place
from tests.policy.source import REPOSITORY

DOCKER = REPOSITORY / "docker"


def test_the_trainers_commands_find_each_other(place: Place, free_port: int) -> None:
    """The very command lines, with this host in the place of both."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    hosts: list[subprocess.Popen[str]] = []
    for service in ("trainer-0", "trainer-1"):
        words = services[service]["command"]
        words = [word.replace("trainer-0:29500", f"localhost:{free_port}") for word in words]
        command = place.torchrun("--local-addr", "localhost", *words)
        hosts.append(place.start(command, HOTREC_RUN_DIR="runs/compose/first"))
    errors = [host.communicate(timeout=90)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert place.seen_variable("RANK") == ["0", "1", "2", "3"]
    words = ["train", "experiment=quickstart"]
    assert [facts["arguments"] for facts in place.seen()] == [words] * 4


# A stand-in for docker and its compose: it notes what it is asked, and its containers are in the
# states that the test names once they are up.
ENGINE = """#!/usr/bin/env bash
echo "$*" >> calls
case "$*" in
    "version "*) echo "${ENGINE_VERSION:?no engine answers}" ;;
    "compose version"*) echo 2.26.1 ;;
    *" up "*) touch up; echo 'network is gone' >&2; exit "${UP:-0}" ;;
    *" run "*) echo '2 hosts with 4 ranks in all'; exit "${SUMMARY:-0}" ;;
    *" down "*) rm -f up ;;
    "ps "*) [ ! -e up ] || echo id ;;
    "inspect "*) printf '%b' "$STATES" ;;
esac
"""
TRAINED = r"plan exited 0\ntrainer-0 exited 0\ntrainer-1 exited 0\n"


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts docker/try.sh of a checkout in which docker is the stand-in."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "try.sh").symlink_to(DOCKER / "try.sh")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(ENGINE)
    (tmp_path / "bin" / "docker").chmod(0o755)
    defaults = {"ENGINE_VERSION": "20.10", "STATES": TRAINED, "COMPOSE": "docker compose"}
    defaults["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def start(**environment: str) -> subprocess.Popen[str]:
        script, pipe = str(tmp_path / "docker" / "try.sh"), subprocess.PIPE
        variables = {**defaults, **environment}
        return subprocess.Popen([script], env=variables, stdout=pipe, stderr=pipe, text=True)

    return start


def calls(folder: Path) -> list[str]:
    """What compose was asked, without the options that are the same for all."""
    common = "compose -p hotrec-try -f docker/compose.yaml "
    lines = (folder / "calls").read_text().splitlines()
    return [line.removeprefix(common).split()[0] for line in lines if line.startswith(common)]


@pytest.mark.parametrize(
    ("environment", "code", "said"),
    [
        ({}, 0, r"passed: 2 hosts with 4 ranks in all, in \d+ s"),
        ({"STATES": r"trainer-0 running 0\ntrainer-1 exited 137\n"}, 1, "got trainer-0 running"),
        ({"STATES": r"trainer-0 created 128\n", "UP": "1"}, 1, "network is gone"),
        ({"SUMMARY": "1"}, 1, "4 ranks and an AUC"),
        ({"STATES": r"plan running 0\n", "LIMIT_S": "1"}, 1, "within 1 s, got plan running 0"),
    ],
)
def test_trial_says_what_came_of_it_and_removes_what_it_made(
    trial: Any, tmp_path: Path, environment: Mapping[str, str], code: int, said: str
) -> None:
    process = trial(**environment)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert re.search(said, output)
    assert calls(tmp_path)[-1] == "down"


def test_trial_that_is_stopped_removes_what_it_made(trial: Any, tmp_path: Path) -> None:
    process = trial(STATES=r"trainer-0 running 0\n")
    end_s = time.monotonic() + 30
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert calls(tmp_path)[-1] == "down"
