"""The images, the compose file and its trial: from the locks, non-root, two hosts that agree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.conftest import Place
from tests.policy.source import REPOSITORY

DOCKER = REPOSITORY / "docker"


def instructions(device: str) -> list[tuple[str, str]]:
    """Instruction and arguments, lines joined, comments dropped."""
    text = (DOCKER / f"{device}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(first, rest) for first, rest in pairs]


def final_stage(device: str) -> list[tuple[str, str]]:
    found = instructions(device)
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_image_is_made_from_the_lock_and_is_not_roots(device: str) -> None:
    found = instructions(device)
    runs = [rest for name, rest in found if name == "RUN"]
    assert any(f"requirements/make_venv.sh /opt/venv {device} pins" in run for run in runs)
    # Nothing else may bring packages that no lock names.
    (install,) = (run for run in runs if "pip install" in run)
    assert install.endswith("--no-deps .")
    last = max(index for index, (name, _) in enumerate(found) if name == "FROM")
    names = [name for name, _ in found[last:]]
    assert ("USER", "hotrec") in found[last:]
    assert names.index("USER") < names.index("ENTRYPOINT")
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    copied = [rest.split()[:-1] for name, rest in found if name == "COPY" and "--from" not in rest]
    for source in (source for of in copied for source in of):
        assert (REPOSITORY / source).exists(), source
        assert f"!{source}" in ignored, source


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


def test_the_trainers_commands_find_each_other(place: Place, free_port: int) -> None:
    """The very command lines, with this host in the place of both."""
    hosts: list[subprocess.Popen[str]] = []
    for service in ("trainer-0", "trainer-1"):
        words = compose()["services"][service]["command"]
        words = [word.replace("trainer-0:29500", f"localhost:{free_port}") for word in words]
        command = place.torchrun("--local-addr", "localhost", *words)
        hosts.append(place.start(command, HOTREC_RUN_DIR="runs/compose/first"))
    errors = [host.communicate(timeout=90)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert place.seen_variable("RANK") == ["0", "1", "2", "3"]
    assert place.seen_variable("LOCAL_RANK") == ["0", "1", "0", "1"]
    assert [facts["arguments"] for facts in place.seen()] == [
        ["train", "experiment=quickstart"]
    ] * 4


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


@dataclass(frozen=True)
class Trial:
    """docker/try.sh of a checkout in which docker is the stand-in."""

    path: Path

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        defaults = {"ENGINE_VERSION": "20.10", "STATES": TRAINED, "COMPOSE": "docker compose"}
        path = f"{self.path / 'bin'}:{os.environ['PATH']}"
        return subprocess.Popen(
            [str(self.path / "docker" / "try.sh"), *arguments],
            env={"PATH": path, **defaults, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def calls(self) -> list[str]:
        """What compose was asked, without the options that are the same for all."""
        lines = (self.path / "calls").read_text().splitlines()
        common = "compose -p hotrec-try -f docker/compose.yaml "
        return [line.removeprefix(common).split()[0] for line in lines if line.startswith(common)]


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "try.sh").symlink_to(DOCKER / "try.sh")
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "docker"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    return Trial(tmp_path)


def test_trial_passes_and_removes_what_it_made(trial: Trial) -> None:
    code, output, errors = trial.run()
    assert code == 0, errors
    assert re.fullmatch(r"passed: 2 hosts with 4 ranks in all, in \d+ s .*\n", output)
    assert trial.calls() == ["build", "down", "up", "logs", "run", "down"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"STATES": r"trainer-0 running 0\ntrainer-1 exited 137\n"},
            "got trainer-0 running 0 tr",
        ),
        ({"STATES": r"trainer-0 created 128\n", "UP": "1"}, "network is gone"),
        ({"SUMMARY": "1"}, "4 ranks and an AUC"),
        ({"STATES": r"plan running 0\n", "LIMIT_S": "1"}, "within 1 s, got plan running 0"),
    ],
    ids=["exit code", "start", "summary", "limit"],
)
def test_trial_says_what_failed(
    trial: Trial, environment: Mapping[str, str], expected: str
) -> None:
    code, output, _ = trial.run(**environment)
    assert code == 1
    assert output.startswith("failed: expected ")
    assert expected in output
    assert trial.calls()[-1] == "down"


def test_trial_that_is_stopped_removes_what_it_made(trial: Trial) -> None:
    process = trial.start(STATES=r"trainer-0 running 0\n")
    end_s = time.monotonic() + 30
    while not (trial.path / "up").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert trial.calls()[-1] == "down"


def test_trial_leaves_another_alone(trial: Trial) -> None:
    (trial.path / "up").touch()
    code, _, errors = trial.run(STATES=r"trainer-0 running 0\n")
    assert code == 1
    assert "got trainer-0 running 0." in errors
    assert trial.calls() == ["build"]


@pytest.mark.parametrize("environment", [{"ENGINE_VERSION": ""}, {"COMPOSE": "no-such-compose"}])
def test_trial_says_what_is_missing(trial: Trial, environment: Mapping[str, str]) -> None:
    code, output, errors = trial.run(**environment)
    assert (code, output) == (77, "")
    assert re.fullmatch(r"docker/try\.sh: .*: expected .*, got .*\n", errors)
