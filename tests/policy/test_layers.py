"""Who may import whom: one ordered list, and the walls around third-party packages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter

import pytest

from tests.policy.source import REPOSITORY, Import, imports, modules

# From the bottom to the top: a part imports itself and what stands before it.
ORDER = (
    "types",
    "lock",
    "artifact",
    "config",
    "runtime",
    "data",
    "routing",
    "cost_model",
    "planner",
    "models",
    "embedding",
    "train",
    "assemble",
    "program",
    "report",
    "runs",
    "bench",
    "calibrate",
    "doctor",
    "cli",
    "__main__",
)

# Third-party package -> the only parts of hotrec that may import it.
WALLS = {
    "hydra": {"hotrec.cli"},
    "omegaconf": {"hotrec.cli"},
    "torchx": set(),
    "fbgemm_gpu": {"hotrec.calibrate", "hotrec.embedding"},
    "safetensors": {"hotrec.models.plain", "hotrec.runs.export", "hotrec.train"},
    "tensorboard": {"hotrec.train"},
    "wandb": {"hotrec.train"},
    "mlflow": {"hotrec.train"},
    "prometheus_client": {"hotrec.train"},
    "submitit": {"hotrec.cli"},
    "upath": {"hotrec.data.files"},
    "matplotlib": {"hotrec.report"},
    "jinja2": {"hotrec.report"},
    "xxhash": {"hotrec.artifact"},
    "scipy": {"hotrec.cost_model", "hotrec.planner"},
}

# Start in a tenth of a second and are tested without torch; ".*" is the package with all it holds.
WITHOUT_TORCH = [
    "hotrec",
    "hotrec.types",
    "hotrec.artifact",
    "hotrec.runtime.figures",
    "hotrec.doctor",
    "hotrec.cli",
    "hotrec.planner.*",
    "hotrec.report.*",
    "hotrec.data.chunks",
    "hotrec.data.readers",
    "hotrec.config.data",
    "hotrec.data.synthetic",
]
# Where a configuration is read: the commands, and what they call first.
DOOR = {"hotrec.cli", "hotrec.config", "hotrec.assemble", "hotrec.bench.job", "hotrec.runs"}
# What reads no more of it than the names of choices.
OF_ENUMERATIONS = {"hotrec.report.read", "hotrec.train.schedule"}
# What the planner may import of the project.
OF_THE_PLANNER = {"types", "artifact", "lock", "cost_model", "planner"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_within(module: str, parents: set[str]) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def root_of(found: Import) -> str:
    return found.imported.split(".")[0]


def points_up(found: Import) -> bool:
    parts = [part_of(found.importer), part_of(found.imported)]
    if root_of(found) != "hotrec" or not all(parts):
        return False
    importer, imported = map(ORDER.index, parts)
    return imported > importer


def is_foreign(found: Import) -> bool:
    """Values need numpy alone, and for a hash one package more."""
    known = {"hotrec", "numpy", "xxhash", *sys.stdlib_module_names}
    return part_of(found.importer) in {"types", "lock", "artifact"} and root_of(found) not in known


def leaves_the_planner(found: Import) -> bool:
    """It is called by the commands and by programs alike."""
    is_own = part_of(found.importer) == "planner" and root_of(found) == "hotrec"
    return is_own and part_of(found.imported) not in OF_THE_PLANNER


def passes_the_door(found: Import) -> bool:
    """Below it functions take values; a specification of a log or of its outline is one."""
    is_configuration = found.imported in ("hotrec.config.groups", "hotrec.config.roots")
    return is_configuration and not is_within(found.importer, DOOR | OF_ENUMERATIONS)


def climbs_a_wall(found: Import) -> bool:
    package = root_of(found)
    return package in WALLS and not is_within(found.importer, WALLS[package])


def test_every_part_has_a_place() -> None:
    assert {part_of(module) for module in modules()} == {"", *ORDER}


@pytest.mark.parametrize(
    "is_wrong", [points_up, is_foreign, leaves_the_planner, passes_the_door, climbs_a_wall]
)
def test_imports(is_wrong: Callable[[Import], bool]) -> None:
    wrong = [f"{modules()[i.importer]}:{i.line}: {i.imported}" for i in imports() if is_wrong(i)]
    assert wrong == []


def test_no_module_imports_itself_by_a_detour() -> None:
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.imported in edges and found.imported != found.importer:
            edges[found.importer].add(found.imported)
    order = TopologicalSorter(edges)
    order.prepare()  # raises CycleError, which names the cycle


# Imports packages one after the other, and says which has loaded what.
PROGRAM = """
import importlib, json, sys
names = json.loads(sys.argv[1])
for listed, modules in names.items():
    for module in modules:
        importlib.import_module(module)
    for heavy in {"torch", "torchrec", "fbgemm_gpu", "tensordict"} & set(sys.modules):
        sys.exit(f"{listed} loads {heavy}")
"""


def test_they_start_without_torch() -> None:
    names = {}
    for listed in WITHOUT_TORCH:
        package = listed.removesuffix(".*")
        within = [name for name in modules() if is_within(name, {package})]
        names[listed] = within if listed.endswith(".*") else [package]
    words = [sys.executable, "-c", PROGRAM, json.dumps(names)]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
