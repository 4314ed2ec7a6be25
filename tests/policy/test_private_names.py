"""Private names of other packages are used in one file, and where the table says why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.policy.source import modules, parsed

# The one file for TorchRec, FBGEMM and DDP.
ADAPTER = "hotrec.embedding.torchrec"

# Documented by Python, whatever their names say.
DOCUMENTED = {"_asdict", "_current_frames", "_exit"}

# Module -> what it reaches, and why no public name does. May only shrink: an entry that is not used
# any more fails.
ALLOWED = {
    "hotrec.__main__": {"_run_exitfuncs": "a rank leaves without the destructors of C++"},
    "hotrec.assemble.job": {"_target_": "hydra's key for the name of a class"},
    "hotrec.cli.app": {"_internal": "hydra's parser, whose options are hotrec's too"},
    "hotrec.data.loader": {
        "_on_queue_feeder_error": "a worker ends where it cannot send",
        "_config": "a worker makes no directory of its own",
    },
    "hotrec.data.packing": {"_new_shared": "shared memory without a copy"},
    "hotrec.embedding.prefetch.classes": {"_foreach_add_": "one kernel for all tables"},
    "hotrec.models.sequence": {"_assert_async": "a check that does not wait for the device"},
    "hotrec.routing.group": {
        "_foreach_add_": "one kernel for all tables",
        "_foreach_max": "one kernel for all tables",
    },
    "hotrec.runtime.postmortem": {
        "_distributed_c10d": "torch's flight recorder",
        "_dump_fr_trace": "torch's flight recorder",
        "_dump_nccl_trace": "torch's flight recorder",
        "_dump_snapshot": "torch's history of allocations, which its manual describes",
        "_record_memory_history": "torch's history of allocations, which its manual describes",
    },
    "hotrec.runtime.ranks": {
        "_abort_process_group": "ends what is pending in NCCL",
        "_get_default_store": "messages beside the collectives",
        "_get_backend": "the timeout of the default group",
        "_device_types": "the timeout of the default group",
        "_timeout": "the timeout of the default group",
    },
    "hotrec.runtime.stages": {"_is_profiler_enabled": "a named range costs time"},
    "hotrec.runtime.traffic": {"_python_dispatch": "shows collectives as operators"},
    "hotrec.train.trace": {"_ExperimentalConfig": "a trace of all threads"},
}


def is_private(name: str) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and not is_special and name != "_" and name not in DOCUMENTED


def last_private(dotted: str) -> str:
    return next(filter(is_private, reversed(dotted.split("."))), "")


def members(tree: ast.Module) -> set[str]:
    """The names that the classes of a file define: in their bodies, or on self or cls."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.add(part.name)
                targets = part.targets if isinstance(part, ast.Assign) else []
                targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
                found.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.update({node.attr} if ast.unparse(node.value) in ("self", "cls") else ())
    return found


@cache
def all_reaches() -> tuple[tuple[str, int, str, str], ...]:
    """Module, line, name and text of the uses in the package."""
    return tuple((module, *use) for module, path in modules().items() for use in reaches(path))


def reaches(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, name and text of every use of a private name that the file does not define itself."""
    tree = parsed(path)
    own = members(tree)
    for node in ast.walk(tree):
        names: list[str] = []
        match node:
            case ast.Attribute(attr=name) if name not in own:
                names = [name]
            case ast.Import(names=aliases):
                names = [last_private(alias.name) for alias in aliases]
            case ast.ImportFrom(module=module, names=aliases):
                names = [last_private(f"{module}.{alias.name}") for alias in aliases]
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                names = [name]
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))
            ):
                names = [name]
        for name in filter(is_private, names):
            assert isinstance(node, ast.stmt | ast.expr)
            yield node.lineno, name, ast.unparse(node)


def test_private_names_of_others_are_in_one_file() -> None:
    wrong = [
        f"{module}:{line}: {text}"
        for module, line, name, text in all_reaches()
        if module != ADAPTER and name not in ALLOWED.get(module, {})
    ]
    assert wrong == [], f"use a public name, or give {ADAPTER} a function for it"


def test_what_is_allowed_is_used() -> None:
    used = {(module, name) for module, _, name, _ in all_reaches()}
    unused = {(module, name) for module, names in ALLOWED.items() for name in names} - used
    assert unused == set(), "take it out of ALLOWED"
