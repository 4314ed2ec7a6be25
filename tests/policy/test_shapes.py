"""What keeps functions small, names single and configuration at the door."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.policy.source import modules, parsed

MAX_PARAMETERS = 8

# Function -> its number of parameters. May only shrink: a number that is too large fails too.
MORE_PARAMETERS = {
    "hotrec.cli.fit.fit": 9,  # what a notebook sets, each with a default
    "hotrec.cost_model.demand.build_demand": 10,
    "hotrec.data.loader.make_loader": 16,
    "hotrec.data.prepare._count_samples": 9,
    "hotrec.program.parallel.parallelize": 14,  # the library's one call, each with a default
}

# Names of several classes, and of how many. May only shrink.
SEVERAL_CLASSES = {
    "Block": 3,  # of lookups, of samples, of timed steps
    "Choice": 2,  # hotrec.Choice, and what the search chose
    "Column": 2,  # a feature to route, and a column to guess the meaning of
    "Pipeline": 2,  # hotrec.Pipeline, and what trains in the loop
    "Run": 2,  # hotrec.Run, and a run that is reported
    "Table": 2,  # of rows, and on a page
}

# Where a configuration is read: the commands, and what they call first.
DOOR = ("hotrec.cli", "hotrec.config", "hotrec.assemble.job", "hotrec.bench.job", "hotrec.runs")

# Module -> the sections that it reads below the door. May only shrink.
BELOW_THE_DOOR: dict[str, set[str]] = {}

# The modules of sections; the specification of a log, in hotrec.config.data, is a value that the
# readers of logs take.
SECTIONS = ("hotrec.config.groups", "hotrec.config.roots")


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted name of every function, and its number of parameters without self."""
    for node in ast.iter_child_nodes(tree):
        name = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            names += [arg.arg for arg in (given.vararg, given.kwarg) if arg is not None]
            yield name, len(names) - (names[:1] in (["self"], ["cls"]))
        yield from functions(node, name)


@cache
def sections() -> set[str]:
    """The names of the dataclasses of the configuration."""
    return {
        node.name
        for module in SECTIONS
        for node in ast.walk(parsed(modules()[module]))
        if isinstance(node, ast.ClassDef)
    }


def sections_read(path: Path) -> set[str]:
    """The dataclasses of the configuration that a file imports, or their modules."""
    read: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Import(names=aliases):
                read |= {alias.name for alias in aliases} & set(SECTIONS)
            case ast.ImportFrom(module=module, names=aliases) if module in SECTIONS:
                read |= {alias.name for alias in aliases} & sections()
            case ast.ImportFrom(module="hotrec.config", names=aliases):
                read |= {f"hotrec.config.{alias.name}" for alias in aliases} & set(SECTIONS)
    return read


def is_at_the_door(module: str) -> bool:
    return any(module == part or module.startswith(f"{part}.") for part in DOOR)


def test_functions_have_few_parameters() -> None:
    found = {
        name: number
        for module, path in modules().items()
        for name, number in functions(parsed(path), module)
        if number > MAX_PARAMETERS
    }
    assert found == MORE_PARAMETERS, "group what belongs together, or lower the number in the table"


def test_no_two_classes_have_a_name() -> None:
    where: defaultdict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{module}:{node.lineno}")
    several = {name: places for name, places in where.items() if len(places) > 1}
    found = {name: len(places) for name, places in several.items()}
    assert found == SEVERAL_CLASSES, f"name each class by what it is: {several}"


def test_configuration_ends_at_the_door() -> None:
    found = {
        module: read
        for module, path in modules().items()
        if not is_at_the_door(module) and (read := sections_read(path))
    }
    assert found == BELOW_THE_DOOR, "take values, which hotrec.assemble.job makes of configuration"


def test_sections_are_classes_and_enumerations_are_values() -> None:
    assert {"Config", "TrainerConfig", "TimeOrder", "CostPlacement"} <= sections()
    assert "OrderAssign" not in sections()
