"""Who may import whom: one ordered list, and the walls around third-party packages."""

from __future__ import annotations

import subprocess
import sys
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
    "safetensors": {"hotrec.models.plain", "hotrec.runs.exported", "hotrec.train"},
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
HEAVY = {"torch", "torchrec", "fbgemm_gpu", "tensordict"}
# Where a configuration is read: the commands, and what they call first.
DOOR = {"hotrec.cli", "hotrec.config", "hotrec.assemble", "hotrec.bench.job", "hotrec.runs"}
# What the planner may import of the project.
OF_THE_PLANNER = {"types", "artifact", "lock", "cost_model", "planner"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def is_within(module: str, parents: set[str]) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def describe(found: Import) -> str:
    return f"{modules()[found.importer]}:{found.line}: {found.importer} imports {found.imported}"


def test_every_part_has_a_place() -> None:
    assert {part_of(module) for module in modules()} == {"", *ORDER}


def test_imports_point_down() -> None:
    own = [i for i in imports() if i.imported.split(".")[0] == "hotrec" and part_of(i.importer)]
    assert own, "the reader of imports found none"
    wrong = [
        describe(i)
        for i in own
        if part_of(i.imported)
        and ORDER.index(part_of(i.imported)) > ORDER.index(part_of(i.importer))
    ]
    assert wrong == []


def test_no_module_imports_itself_by_a_detour() -> None:
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for found in imports():
        if found.imported in edges and found.imported != found.importer:
            edges[found.importer].add(found.imported)
    order = TopologicalSorter(edges)
    order.prepare()  # raises CycleError, which names the cycle


def test_values_need_few_packages() -> None:
    foreign = {
        i.imported.split(".")[0]: describe(i)
        for i in imports()
        if part_of(i.importer) in {"types", "lock", "artifact"}
        and i.imported.split(".")[0] not in {"hotrec", "numpy", "xxhash", *sys.stdlib_module_names}
    }
    assert foreign == {}


@pytest.mark.parametrize("package", sorted(WALLS))
def test_walls(package: str) -> None:
    wrong = [
        describe(i)
        for i in imports()
        if i.imported.split(".")[0] == package and not is_within(i.importer, WALLS[package])
    ]
    assert wrong == []


def loaded_by(listed: str) -> set[str]:
    """The modules that are there when those of a package, or one, have been imported."""
    package = listed.removesuffix(".*")
    starts = [name for name in modules() if is_within(name, {package})]
    names = starts if listed.endswith(".*") else [package]
    program = (
        f"import importlib, sys\n[*map(importlib.import_module, {names})]\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("listed", WITHOUT_TORCH)
def test_starts_without_torch(listed: str) -> None:
    assert HEAVY & loaded_by(listed) == set()


def test_the_planner_knows_no_configuration() -> None:
    """It is called by the commands and by programs alike."""
    assert not any(is_within(name, {"hotrec.config"}) for name in loaded_by("hotrec.planner.*"))
    wrong = [
        describe(i)
        for i in imports()
        if part_of(i.importer) == "planner"
        and i.imported.split(".")[0] == "hotrec"
        and part_of(i.imported) not in OF_THE_PLANNER
    ]
    assert wrong == []


def test_configuration_ends_at_the_door() -> None:
    """Below it functions take values; a specification of a log or of its outline is one."""
    below = {
        i.importer
        for i in imports()
        if i.imported in ("hotrec.config.groups", "hotrec.config.roots")
        and not is_within(i.importer, DOOR)
    }
    of_enumerations = {"hotrec.report.read", "hotrec.train.schedule"}
    assert below <= of_enumerations
