"""Whether TorchRec's pipelines can read a model's features ahead, according to torch.fx."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch.fx
from torch import nn
from torchrec.distributed.train_pipeline.tracing import Tracer


@contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo changes of a traced forward to the attributes of its modules."""
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


# Operations from the batch to its features: attributes and items.
Path = tuple[tuple[Callable[[Any, Any], Any], Any], ...]


def features_read(model: nn.Module, is_lookup: Callable[[nn.Module], bool]) -> dict[str, Path]:
    """The path of each embedding module's features in the batch, by the module's name.

    Args:
        model: The model, sharded or not.
        is_lookup: Whether a module is one of its embedding modules.

    Raises:
        ValueError: If the features cannot be read before forward: torch.fx cannot trace the model
            down to its embedding modules, or one is called more than once, or with features that
            are not attributes or items of the batch.
    """
    names = dict(model.named_modules())
    leaves = [
        name
        for name, module in names.items()
        if is_lookup(module) or not any(map(is_lookup, module.modules()))
    ]
    try:
        with attributes_kept(names.values()):
            graph = Tracer(leaf_modules=leaves).trace(model)
    except Exception as error:  # also the model's own: its values are not tensors here
        raise ValueError(first_line(error)) from error
    paths: dict[str, Path] = {}
    for node in graph.nodes:
        if node.op != "call_module" or not is_lookup(names[node.target]):
            continue
        if node.target in paths:
            raise ValueError(f"{node.target} is called more than once")
        found = [_path_to(value) for value in (*node.args, *node.kwargs.values())]
        if len(found) != 1 or found[0] is None:
            raise ValueError(f"{node.target} is called with features that forward computes")
        paths[node.target] = found[0]
    return paths


def follow(path: Path, batch: Any) -> Any:
    """The features at the end of a path."""
    return reduce(lambda value, step: step[0](value, step[1]), path, batch)


def first_line(error: BaseException) -> str:
    """An exception's kind and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"


def _path_to(value: object) -> Path | None:
    steps: list[Any] = []
    while (
        isinstance(value, torch.fx.Node)
        and value.op == "call_function"
        and value.target in (getattr, operator.getitem)
    ):
        steps.append((value.target, value.args[1]))
        value = value.args[0]
    is_batch = isinstance(value, torch.fx.Node) and value.op == "placeholder"
    return tuple(steps[::-1]) if is_batch else None
