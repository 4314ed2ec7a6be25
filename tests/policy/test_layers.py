"""Who may import whom: one ordered list, and the walls around third-party packages."""

from __future__ import annotations

import sys
from graphlib import TopologicalSorter

import pytest

from tests.policy.source import Import, imports, loaded_by, modules

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
# Plan from values, whoever asks. The outline of data that is to come is a specification.
WITHOUT_CONFIG = {"hotrec.cost_model", "hotrec.planner"}
READS_A_SPECIFICATION = "hotrec.cost_model.outline"
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


@pytest.mark.parametrize("listed", WITHOUT_TORCH)
def test_starts_without_torch(listed: str) -> None:
    package = listed.removesuffix(".*")
    starts = [name for name in modules() if is_within(name, {package})]
    starts = starts if listed.endswith(".*") else [package]
    assert package in modules(), f"{package} is gone; mend the list"
    for start in starts:
        loaded = loaded_by(start)
        heavy = {name: via for name, via in loaded.items() if name.split(".")[0] in HEAVY}
        assert heavy == {}, f"importing {start} loads {heavy}"


def test_the_planner_knows_no_configuration() -> None:
    """Nor does what it imports; it is called by the commands and by programs alike."""
    readers = {
        start: via
        for start in modules()
        if is_within(start, WITHOUT_CONFIG)
        for loaded, via in loaded_by(start).items()
        if is_within(loaded, {"hotrec.config"})
    }
    assert set(readers) == {READS_A_SPECIFICATION}, readers
    wrong = [
        describe(i)
        for i in imports()
        if part_of(i.importer) == "planner"
        and i.imported.split(".")[0] == "hotrec"
        and part_of(i.imported) not in OF_THE_PLANNER
    ]
    assert wrong == []


def test_measurements_know_no_configuration() -> None:
    """What is measured is values; ``hotrec.bench.job`` makes them of a configuration."""
    readers = {
        i.importer
        for i in imports()
        if part_of(i.importer) in {"bench", "calibrate"} and part_of(i.imported) == "config"
    }
    assert readers == {"hotrec.bench.job"}
