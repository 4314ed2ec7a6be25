"""The images, the compose file and its trial: from the locks, non-root, two hosts that agree."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import tomllib
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
def test_image_is_made_from_the_lock(device: str) -> None:
    runs = [rest for name, rest in instructions(device) if name == "RUN"]
    assert any(f"requirements/make_venv.sh /opt/venv {device} pins" in run for run in runs)
    # Nothing else may bring packages that no lock names.
    installs = [run for run in runs if "pip install" in run]
    assert len(installs) == 1
    assert installs[0].endswith("--no-deps .")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_image_is_not_roots_and_is_checked(device: str) -> None:
    stage = final_stage(device)
    users = [rest for name, rest in stage if name == "USER"]
    assert users == ["hotrec"]
    names = [name for name, _ in stage]
    assert names.index("USER") < names.index("ENTRYPOINT")
    [health] = [rest for name, rest in stage if name == "HEALTHCHECK"]
    assert "import torchrec" in health
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert ("ARG", f"VERSION={version}") in stage


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_copied_is_there_and_not_ignored(device: str) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sources = {
        source
        for name, rest in instructions(device)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    assert sources >= {"requirements", "hotrec", "conf", "launch"}
    for source in sources:
        assert (REPOSITORY / source).exists(), source
        assert f"!{source}" in ignored, source


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return document


def test_compose_file_is_for_compose_1_and_2() -> None:
    """Each of these stopped a real start, with Compose 1 or under a daemon of low limits."""
    document = compose()
    # Compose 1 takes no other key, "name" among them.
    extra = {key for key in document if not key.startswith("x-")} - {"services", "volumes"}
    assert extra == set()
    assert (DOCKER / ".env").read_text() == "COMPOSE_PROJECT_NAME=hotrec\n"
    for name, service in document["services"].items():
        # A container cannot have more than its daemon, and 1,024 open files are enough.
        assert "ulimits" not in service, name
        # Compose 1 passes a variable that is not set on as an empty text, as a base too.
        for value in [service["image"], *service["build"]["args"].values()]:
            assert ":-" in value, f"{name}: {value}"
    [base] = [rest for name, rest in instructions("cpu") if rest.startswith("BASE_IMAGE=")]
    default = document["services"]["prepare"]["build"]["args"]["BASE_IMAGE"]
    assert default == f"${{BASE_IMAGE:-{base.removeprefix('BASE_IMAGE=')}}}"


@pytest.mark.parametrize("command", ["docker-compose", "docker compose"])
def test_compose_takes_the_file(command: str) -> None:
    """Whichever is installed; this needs no engine."""
    try:
        subprocess.run([*command.split(), "version"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{command} does not run here: {error}")
    variables = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    config = subprocess.run(
        [*command.split(), "-f", str(DOCKER / "compose.yaml"), "config"],
        capture_output=True,
        text=True,
        env={**kept, "RUN": "second"},
    )
    assert config.returncode == 0, config.stderr
    services = yaml.safe_load(config.stdout)["services"]
    assert services.keys() == compose()["services"].keys()
    trainer = services["trainer-1"]
    assert trainer["image"] == "hotrec:cpu"
    assert trainer["build"]["args"]["BASE_IMAGE"] == "python:3.12-slim"
    assert trainer["environment"]["HOTREC_RUN_DIR"] == "runs/compose/second"
    assert trainer["depends_on"]["plan"]["condition"] == "service_completed_successfully"


def test_trainers_share_data_runs_and_directory() -> None:
    services = compose()["services"]
    first, second = services["trainer-0"], services["trainer-1"]
    for shared in ("image", "build", "volumes", "environment", "entrypoint"):
        assert first[shared] == second[shared]
    assert "HOTREC_RUN_DIR" in first["environment"]
    assert {volume.split(":")[0] for volume in first["volumes"]} == set(compose()["volumes"])
    differing = set(first["command"]) ^ set(second["command"])
    assert differing == {"--node-rank=0", "--node-rank=1"}
    assert first["hostname"] == "trainer-0"
    assert "--rdzv-endpoint=trainer-0:29500" in second["command"]


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


def test_trial_names_what_is_missing(trial: Trial) -> None:
    for environment, missing in (
        ({"ENGINE_VERSION": ""}, "Docker engine: expected an answer, got '"),
        (
            {"COMPOSE": "no-such-compose"},
            "Compose: expected a version, got none from 'no-such",
        ),
    ):
        code, output, errors = trial.run(**environment)
        assert (code, output) == (77, "")
        assert errors.count("\n") == 1
        assert errors.startswith(f"docker/try.sh: {missing}")


def test_trial_refuses_other_words(trial: Trial) -> None:
    assert trial.run("--keep")[0] == 2
    assert trial.run(LIMIT_S="soon")[0] == 2
    assert "--debootstrap" in trial.run("--help")[1]
