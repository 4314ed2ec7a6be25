"""launch/kubernetes: jobs whose pods find each other, save before they are killed, and go on."""

from __future__ import annotations

import re
from typing import Any

import yaml

from hotrec.cli.store import build_config, compose_config
from tests.launch.conftest import Place
from tests.policy.source import REPOSITORY

KUBERNETES = REPOSITORY / "launch" / "kubernetes"


def objects(kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kustomization without patches, volumes by name and the others by kind."""
    found = {}
    folder = KUBERNETES / kind
    for name in yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]:
        if (folder / name).is_dir():
            found |= objects(name.removeprefix("../"))
            continue
        for document in yaml.safe_load_all((folder / name).read_text()):
            is_volume = document["kind"] == "PersistentVolumeClaim"
            found[document["metadata"]["name"] if is_volume else document["kind"]] = document
    return found


def settings() -> dict[str, str]:
    base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    [generated] = base["configMapGenerator"]
    return dict(literal.split("=") for literal in generated["literals"])


def job_of(found: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification of the JobSet, a runtime's or its own, and of its only job."""
    document = found["JobSet"]
    [replicated] = document["spec"]["replicatedJobs"]
    return document["spec"], replicated["template"]["spec"]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


def arguments(found: dict[str, dict[str, Any]], node: int, endpoint: str) -> list[str]:
    """The arguments of a pod as the kubelet expands them, with another address of the first."""
    variables = {"JOB_COMPLETION_INDEX": str(node), **settings()}
    [trainer] = pod_of(job_of(found)[1])["containers"]
    assert trainer["command"] == ["/srv/hotrec/launch/torchrun.sh"]
    words = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in trainer["args"]]
    return [word.replace("hotrec-node-0-0.hotrec:29500", endpoint) for word in words]


def test_the_pods_find_each_other(place: Place, free_port: int) -> None:
    """The very command lines, with this host in the place of both pods."""
    pods = [
        place.start(
            place.torchrun(
                "--local-addr",
                "localhost",
                *arguments(objects("jobset"), node, f"localhost:{free_port}"),
            ),
            HOTREC_RUN_DIR=settings()["HOTREC_RUN_DIR"],
        )
        for node in range(2)
    ]
    errors = [pod.communicate(timeout=90)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], errors
    assert place.seen_variable("RANK") == ["0", "1", "2", "3"]
    [words] = {tuple(facts["arguments"]) for facts in place.seen()}
    assert words[:2] == ("train", "experiment=quickstart")
    config = build_config(compose_config("config", list(words[1:])))
    assert config.trainer.resume == "latest"
    assert config.trainer.save_every_steps > 0


def test_a_pod_may_save_before_it_is_killed() -> None:
    found = objects("jobset")
    [timeout] = [word for word in arguments(found, 0, "a:1") if word.startswith("--shutdown")]
    grace_s = pod_of(job_of(found)[1])["terminationGracePeriodSeconds"]
    assert grace_s > int(timeout.split("=")[1])
