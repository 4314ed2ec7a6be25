"""The embedding bags of a TorchRec model that can be split into hot and cold rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.fused import optimizer_of, rule_of
from hotrec.embedding.initialize import Bounds
from hotrec.embedding.update_rules import OptimizerSpec

# An update rule as ``functools.partial(RowWiseAdagrad, lr=0.1)``, or as hotrec's own object.
EmbeddingOptimizer = partial[torch.optim.Optimizer] | OptimizerSpec


def default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's sharders, for the modules that stay as they are."""
    sharders: list[ModuleSharder[nn.Module]] = get_default_sharders()
    return sharders


def embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every module that TorchRec would shard, once; those inside another one are its own affair."""
    kinds = tuple(sharder.module_type for sharder in default_sharders())
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if module in seen:
            return
        seen.add(module)
        if isinstance(module, kinds):
            yield module
            return
        for child in module.children():
            yield from walk(child)

    yield from walk(model)


def embedding_bags(model: nn.Module) -> list[EmbeddingBagCollection]:
    """The collections whose tables may be split.

    Raises:
        ValueError: If there is none, or two tables have one name.
    """
    bags = [m for m in embedding_modules(model) if type(m) is EmbeddingBagCollection]
    if not bags:
        raise ValueError(
            f"model {type(model).__name__}: expected an EmbeddingBagCollection in it, got none. "
            'Pass the model before it is sharded, or train it with hot="off".'
        )
    names = [table.name for table in tables_of(bags)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"tables {twice}: expected each name once in the model, got it in several "
            "collections. Rename one of them."
        )
    return bags


def tables_of(bags: list[EmbeddingBagCollection]) -> list[EmbeddingBagConfig]:
    """The tables of all collections, in their order."""
    return [table for bag in bags for table in bag.embedding_bag_configs()]


def apply_rule(model: nn.Module, rule: EmbeddingOptimizer | None) -> None:
    """Give every table that rule, or see that each has one by ``apply_optimizer_in_backward``.

    Raises:
        ValueError: If a table has no rule, or one beside the one that is given.
    """
    named = {
        name: parameter
        for module in embedding_modules(model)
        for name, parameter in module.named_parameters()
    }
    has_rule = {name: hasattr(p, "_optimizer_classes") for name, p in named.items()}
    wrong = sorted(name for name, has in has_rule.items() if has is (rule is not None))
    if wrong:
        expected, found = "one rule", "embedding_optimizer and apply_optimizer_in_backward"
        if rule is None:
            found = "neither of embedding_optimizer and apply_optimizer_in_backward"
        raise ValueError(
            f"embedding optimizer of {wrong[:3]}: expected {expected}, got {found}. Give one of "
            "the two, such as embedding_optimizer=functools.partial(RowWiseAdagrad, lr=0.1)."
        )
    if rule is None:
        return
    if isinstance(rule, OptimizerSpec):
        kind, kwargs = optimizer_of(rule)
    elif isinstance(rule, partial) and isinstance(rule.func, type) and not rule.args:
        kind, kwargs = rule.func, dict(rule.keywords)
        rule_of(kind, kwargs)
    else:
        raise ValueError(
            "embedding_optimizer: expected functools.partial of an optimizer's class with its "
            f"arguments by name, or an OptimizerSpec, got {rule!r}. Write for instance "
            "functools.partial(RowWiseAdagrad, lr=0.1)."
        )
    for parameter in named.values():
        # A dictionary each, since TorchRec writes into it.
        _apply_optimizer_in_backward(kind, [parameter], dict(kwargs))


def shared_rule(bags: list[EmbeddingBagCollection]) -> OptimizerSpec:
    """The update rule that the tables have by ``apply_optimizer_in_backward``.

    Raises:
        ValueError: If they have different ones.
    """
    rules: dict[OptimizerSpec, str] = {}
    for bag in bags:
        for name, table in bag.embedding_bags.items():
            weight: Any = table.weight
            kinds, kwargs = weight._optimizer_classes, weight._optimizer_kwargs
            if len(kinds) != 1:
                raise ValueError(
                    f"table {name}: expected one optimizer in backward, got {len(kinds)}. Apply "
                    "one."
                )
            rules.setdefault(rule_of(kinds[0], kwargs[0]), name)
    if len(rules) != 1:
        raise ValueError(
            f"embedding optimizer: expected one rule for all tables, got {len(rules)}, for "
            f'instance of {sorted(rules.values())[:3]}. Use one, or hot="off".'
        )
    [rule] = rules
    return rule


def initial_bounds(bags: list[EmbeddingBagCollection]) -> dict[str, Bounds]:
    """The bounds of the initial weights of each table that has no weights yet (device meta).

    Raises:
        ValueError: If such a table has an ``init_fn`` of its own.
    """
    bounds: dict[str, Bounds] = {}
    for bag in bags:
        for table in bag.embedding_bag_configs():
            if not bag.embedding_bags[table.name].weight.is_meta:
                continue
            init: Any = table.init_fn
            if not isinstance(init, partial) or init.func is not nn.init.uniform_:
                raise ValueError(
                    f"table {table.name} init_fn: expected TorchRec's default on the device meta, "
                    f"got {init!r}. Make the collection on the CPU, so that it has its weights."
                )
            bounds[table.name] = (init.keywords["a"], init.keywords["b"])
    return bounds
