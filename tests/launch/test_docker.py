"""The images, the compose file and its trial: from the locks, non-root, two hosts that agree."""

from __future__ import annotations

import subprocess

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
