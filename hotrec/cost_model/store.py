"""Costs on disk: an artifact of kind "costs" with ``costs.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotrec.artifact import (
    Artifact,
    Verify,
    commit_artifact,
    read_artifact,
    read_record,
    scratch_directory,
)
from hotrec.cost_model.builtin import BUILTIN, NEAREST_BUILTIN
from hotrec.cost_model.costs import UNKNOWN_INTERVAL, Costs, CostsError, World

KIND, COSTS_JSON = "costs", "costs.json"


def write_costs(costs: Costs, path: Path) -> Artifact:
    """Writes an artifact, replacing an existing one.

    Raises:
        CostsError: If the path is the name of a built-in set, which it would shadow.
        ArtifactError: If the path is something else.
    """
    if str(path) in BUILTIN:
        raise CostsError(
            f"paths.costs: expected a directory to write to, got the built-in set {path}. "
            "Choose another path, for instance data/costs."
        )
    with scratch_directory(path, kind=KIND) as scratch:
        # allow_nan=False rejects invalid numbers here, not when they are read.
        text = json.dumps(costs.to_json(), indent=1, allow_nan=False)
        (scratch / COSTS_JSON).write_text(text + "\n")
        content = {"name": costs.name, "origin": costs.origin, "device": costs.device}
        return commit_artifact(scratch, path, kind=KIND, content=content)


def read_costs(path: Path) -> Costs:
    """Reads the costs written by ``write_costs``.

    Raises:
        ArtifactError: If it is missing, of another kind, incomplete or altered.
        CostsError: If the costs are invalid.
    """
    artifact = read_artifact(path, kind=KIND, verify=Verify.full)
    file = artifact.file(COSTS_JSON)
    try:
        document = json.loads(read_record(file))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CostsError(
            f"{path / COSTS_JSON}: expected costs from `hotrec calibrate`, got {error!r}. "
            "Calibrate again."
        ) from error
    costs = Costs.from_json(document)
    with artifact.parsing():
        if (artifact.content["name"], artifact.content["device"]) != (costs.name, costs.device):
            raise ValueError(f"{artifact.content}, which is not of {COSTS_JSON}")
    return costs


def find_costs(where: str) -> Costs:
    """A built-in set by its name, or costs from a directory.

    Raises:
        ArtifactError: If it is neither; the message names the built-in sets.
    """
    if where in BUILTIN:
        return BUILTIN[where]
    path = Path(where)
    if not path.exists():
        raise CostsError(
            f"paths.costs: expected a directory that `hotrec calibrate` wrote or one of "
            f"{sorted(BUILTIN)}, got {where!r}. Calibrate on the machines that will train."
        )
    return read_costs(path)


def fit_to_world(costs: Costs, world: World, batch_size: int) -> tuple[Costs, list[str]]:
    """Costs for ranks, hosts and a batch that may differ from the measured ones.

    Args:
        costs: Measured or built-in costs.
        world: Ranks and hosts to predict for.
        batch_size: Batch of a rank.

    Returns:
        The costs, with a built-in link between hosts if they lack one for several hosts and the
        interval of unmeasured costs, and warnings about that and about extrapolation.
    """
    notes = []
    if world.num_hosts > 1 and costs.inter is None:
        assumed = BUILTIN[NEAREST_BUILTIN[costs.device]]
        assert assumed.inter is not None, assumed.name
        low, high = zip(costs.ratio_interval, UNKNOWN_INTERVAL, strict=True)
        costs = replace(
            costs,
            inter=replace(assumed.inter, source=f"assumed, of {assumed.name}"),
            ratio_interval=(min(low), max(high)),
        )
        notes.append(
            f"costs {costs.name} are of one host: the link between hosts is assumed to be that of "
            f"{assumed.name}, {assumed.inter.bytes_per_s / 1e6:,.0f} MB/s a host; calibrate under "
            "torchrun on the hosts that will train"
        )
    asked = {
        "num_ranks": world.num_ranks,
        "ranks_per_host": world.ranks_per_host,
        "batch_size": batch_size,
    }
    differences = ", ".join(
        f"{key} {value} from {costs.facts[key]}"
        for key, value in asked.items()
        if costs.facts.get(key, value) != value
    )
    if differences:
        low, high = zip(costs.ratio_interval, UNKNOWN_INTERVAL, strict=True)
        costs = replace(costs, ratio_interval=(min(low), max(high)))
        notes.append(f"extrapolated: {differences}")
    return costs, notes


def check_host(costs: Costs, fingerprint: Mapping[str, Any]) -> str | None:
    """A caveat if costs were not measured on a machine of this ``fingerprint``, else None."""
    if costs.device != fingerprint.get("device", costs.device):
        return (
            f"costs {costs.name} are for the device {costs.device}, this is for "
            f"{fingerprint['device']}: times will be far off"
        )
    if not costs.host:
        return f"costs {costs.name} are {costs.origin}, not measured on this machine"
    differences = "; ".join(
        f"{key} {costs.host.get(key)!r} there, {fingerprint.get(key)!r} here"
        for key in sorted({*costs.host, *fingerprint})
        if costs.host.get(key) != fingerprint.get(key)
    )
    return (
        f"costs {costs.name} were measured on another host: {differences}" if differences else None
    )
