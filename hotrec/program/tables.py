"""The embedding tables of a TorchRec model: their requirements and initial weights."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
)

from hotrec.embedding.fused import optimizer_of, rule_of
from hotrec.embedding.initialize import Bounds, initialize_embeddings, set_unsplit
from hotrec.embedding.torchrec import (
    apply_in_backward,
    children_of,
    parameters_of,
    rules_in_backward,
    tensors_of,
)
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import all_gather_object, rank, world_size

# FBGEMM's kernels read a row in pieces of this many values.
DIM_MULTIPLE = 4
# Number of values of a table by which ranks compare their weights, and bytes sent at once if they
# differ.
_NUM_COMPARED, _PIECE_BYTES = 4096, 1 << 26
# An update rule as ``functools.partial(RowWiseAdagrad, lr=0.1)``, or as hotrec's own object.
EmbeddingOptimizer = partial[torch.optim.Optimizer] | OptimizerSpec
# A collection of TorchRec's whose tables may be split.
SplitCollection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection


def default_sharders() -> list[ModuleSharder[nn.Module]]:
    """TorchRec's sharders, for the unchanged modules."""
    sharders: list[ModuleSharder[nn.Module]] = get_default_sharders()
    return sharders


def embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Every outermost module that TorchRec would shard, once."""
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


def split_collections(
    model: nn.Module, tables: Collection[str] | None = None, *, at_least: int = 1
) -> list[SplitCollection]:
    """The collections whose tables may be split.

    Args:
        model: The unsharded model.
        tables: Names of the tables that are known; an ``EmbeddingCollection`` without any is left
            to TorchRec. None for all.
        at_least: The number of collections that is required.

    Raises:
        ValueError: If there are fewer, or two tables have one name.
    """
    found: list[SplitCollection] = []
    for module in embedding_modules(model):
        is_known = tables is None or any(table.name in tables for table in configs_of(module))
        if type(module) is EmbeddingBagCollection or (
            type(module) is EmbeddingCollection and is_known
        ):
            found.append(module)
    if len(found) < at_least:
        raise ValueError(
            f"model {type(model).__name__}: expected an EmbeddingBagCollection or an "
            "EmbeddingCollection in it, got none. Pass the unsharded model, or train it with "
            'hot="off".'
        )
    names = [table.name for table in tables_of(found)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"tables {twice}: expected each name once in the model, got it in several "
            "collections. Rename one of them."
        )
    return found


def check_tables(model: nn.Module) -> None:
    """Check that every choice trains the tables of a model like the unsplit model.

    Raises:
        ValueError: If one does not; the message names the table or the module.
    """
    names = {module: name for name, module in model.named_modules()}
    kinds = {sharder.module_type for sharder in default_sharders()}
    for module in embedding_modules(model):
        kind = type(module).__name__
        if type(module) not in kinds:
            raise ValueError(
                f"module {names[module]}: expected one of the classes that TorchRec shards, got "
                f"their subclass {kind}, which it does not shard. Wrap that class in a module "
                "instead of deriving from it."
            )
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                raise ValueError(
                    f"table {_table_of(name)}: expected a trained table, got a frozen one "
                    "(requires_grad=False), which TorchRec's kernels would train. Use an "
                    "nn.EmbeddingBag, which is a dense layer and may be frozen."
                )
            if parameter.dtype != torch.float32:
                # Configurations keep the type that tables were created with.
                raise ValueError(
                    f"table {_table_of(name)} weight: expected torch.float32, got "
                    f"{parameter.dtype}, whose updates are rounded. Create the table in FP32, or "
                    "convert the model with .float() first."
                )
        for config in configs_of(module):
            _check_config(config, is_weighted=_is_weighted(module))
    _check_shared(model)


def _table_of(name: str) -> str:
    """The table of a parameter's name, such as embedding_bags.user.weight."""
    return name.split(".")[-2] if "." in name else name


def configs_of(module: Any) -> list[BaseEmbeddingConfig]:
    """The tables of an embedding module."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        if hasattr(module, name):
            return list(getattr(module, name)())
    return []


def _is_weighted(module: Any) -> bool:
    return isinstance(module, EmbeddingBagCollectionInterface) and module.is_weighted()


def _check_config(config: BaseEmbeddingConfig, *, is_weighted: bool) -> None:
    if config.embedding_dim % DIM_MULTIPLE:
        raise ValueError(
            f"table {config.name} embedding_dim: expected a multiple of {DIM_MULTIPLE}, as "
            f"FBGEMM's kernels require, got {config.embedding_dim}. Choose another."
        )
    if is_weighted and getattr(config, "pooling", None) == PoolingType.MEAN:
        raise ValueError(
            f"table {config.name} pooling: expected SUM in a weighted collection, as torch does, "
            "got MEAN. Divide the weights by their number, or omit them."
        )


def _check_shared(model: nn.Module) -> None:
    """Raise ValueError if a table's weights are those of another table, or of a dense layer."""
    tables = {p for module in embedding_modules(model) for p in module.parameters()}
    holder: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for name, parameter in parameters_of(module).items():
            if parameter not in tables:
                continue
            full = f"{path}.{name}" if path else name
            if parameter in holder:
                raise ValueError(
                    f"table {_table_of(holder[parameter])}: expected separate weights, got those "
                    f"of {full}, which sharding would copy. Use one table for several features: "
                    "EmbeddingBagConfig(feature_names=[...])."
                )
            holder[parameter] = full


def make_layers(model: nn.Module, device: torch.device) -> None:
    """Initialize dense layers on the device meta, as sharding would do later.

    Raises:
        ValueError: If a layer has no ``reset_parameters``.
    """
    inside = {inner for module in embedding_modules(model) for inner in module.modules()}
    for name, module in model.named_modules():
        is_meta = any(tensor.is_meta for tensor in tensors_of(module).values())
        if module in inside or not is_meta:
            continue
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"dense layer {name}: expected reset_parameters() or weights, got "
                f"{type(module).__name__} on the device meta without. Create it on the CPU."
            )
        module.to_empty(device=device, recurse=False)
        reset()


@contextmanager
def once_in_tree(model: nn.Module) -> Iterator[None]:
    """Keep each embedding module at only one place of the model inside the block.

    TorchRec only replaces a module at its first place; at other places it would stay unsharded,
    with separate weights.
    """
    first: dict[nn.Module, tuple[nn.Module, str]] = {}
    others: list[tuple[nn.Module, str, nn.Module]] = []
    inside = set(embedding_modules(model))
    for parent in list(model.modules()):
        for name, child in children_of(parent).items():
            if child in inside and child in first:
                others.append((parent, name, child))
            elif child in inside:
                first[child] = (parent, name)
    for parent, name, _ in others:
        parent.register_module(name, None)
    try:
        yield
    finally:
        for parent, name, child in others:
            holder, held = first[child]
            parent.register_module(name, holder.get_submodule(held))


def tables_of(collections: Sequence[SplitCollection]) -> list[BaseEmbeddingConfig]:
    """The tables of all collections, in their order."""
    return [table for collection in collections for table in configs_of(collection)]


def _weights_of(collections: Sequence[SplitCollection]) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights of each table of all collections."""
    for collection in collections:
        is_pooled = isinstance(collection, EmbeddingBagCollection)
        tables = collection.embedding_bags if is_pooled else collection.embeddings
        for name, table in tables.items():
            yield name, table.weight


def apply_rule(model: nn.Module, rule: EmbeddingOptimizer | None) -> None:
    """Set the rule of every table, or check that each has one by ``apply_optimizer_in_backward``.

    Raises:
        ValueError: If a table has no rule, or two.
    """
    named = _table_parameters(model)
    has_rule = {name: bool(rules_in_backward(p)) for name, p in named.items()}
    wrong = sorted(name for name, has in has_rule.items() if has is (rule is not None))
    if wrong:
        expected, found = "one rule", "embedding_optimizer and apply_optimizer_in_backward"
        if rule is None:
            found = "neither of embedding_optimizer and apply_optimizer_in_backward"
        raise ValueError(
            f"embedding optimizer of {wrong[:3]}: expected {expected}, got {found}. Pass one of "
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
    apply_in_backward((kind, kwargs), named.values())


def _table_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the embedding modules, by their name in the model."""
    names = {module: name for name, module in model.named_modules()}
    return {
        f"{names[module]}.{name}" if names[module] else name: parameter
        for module in embedding_modules(model)
        for name, parameter in module.named_parameters()
    }


def rules_of(model: nn.Module) -> dict[str, OptimizerSpec]:
    """The update rules of the tables by the parameter's name, as far as known to hotrec."""
    rules = {}
    for name, parameter in _table_parameters(model).items():
        with suppress(ValueError):
            rules[name] = rule_of(*rules_in_backward(parameter)[0])
    return rules


def shared_rule(collections: Sequence[SplitCollection]) -> OptimizerSpec:
    """The update rule that the tables have by ``apply_optimizer_in_backward``.

    Raises:
        ValueError: If they have different ones.
    """
    rules: dict[OptimizerSpec, str] = {}
    for name, weight in _weights_of(collections):
        of_table = rules_in_backward(weight)
        if len(of_table) != 1:
            raise ValueError(
                f"table {name}: expected one optimizer in backward, got {len(of_table)}. Apply one."
            )
        rules.setdefault(rule_of(*of_table[0]), name)
    if len(rules) != 1:
        raise ValueError(
            f"embedding optimizer: expected one rule for all tables, got {len(rules)}, for "
            f'instance of {sorted(rules.values())[:3]}. Use one, or hot="off".'
        )
    [rule] = rules
    return rule


@dataclass(frozen=True)
class InitialTables:
    """The initial weights of a model's tables, independent of the choice.

    Args:
        weights: Those of initialized tables, float (R, D).
        bounds: The bounds of the others, on the device meta.
    """

    weights: Mapping[str, torch.Tensor]
    bounds: Mapping[str, Bounds]

    @classmethod
    def of(cls, collections: Sequence[SplitCollection]) -> InitialTables:
        """Store them before the model is sharded.

        Raises:
            ValueError: If a table on the device meta has its own ``init_fn``.
        """
        bounds = _initial_bounds(collections)
        weights = {name: w for name, w in _weights_of(collections) if name not in bounds}
        return cls(weights, bounds)

    @torch.no_grad()
    def take_first(self, device: torch.device) -> None:
        """Broadcast rank 0's weights, as DDP does for dense layers; collective.

        Raises:
            ValueError: If the ranks have different tables.
        """
        if world_size() == 1:
            return
        facts: dict[str, tuple[Any, ...]] = {
            name: _facts(table) for name, table in self.weights.items()
        }
        facts |= {name: (bounds,) for name, bounds in self.bounds.items()}
        of_ranks = all_gather_object(facts)
        differing = dict[str, None]()
        for other, found in enumerate(of_ranks):
            for name in sorted(found.keys() | of_ranks[0].keys()):
                expected, got = of_ranks[0].get(name, ()), found.get(name, ())
                if expected[:1] != got[:1]:
                    raise ValueError(
                        f"table {name}: expected the same on every rank, got {got[:1]} on rank "
                        f"{other} and {expected[:1]} on rank 0. Build the same model on every rank."
                    )
                if expected != got:
                    differing[name] = None
        for name in differing:
            table = self.weights[name]
            num_rows = max(1, _PIECE_BYTES // max(1, 4 * table.shape[1]))
            for part in table.detach().split(num_rows):
                sent = part.to(device, copy=rank() != 0)
                dist.broadcast(sent, src=0)
                part.copy_(sent)

    def set(self, model: nn.Module, seed: int) -> None:
        """Set the tables of the sharded model; collective."""
        initialize_embeddings(model, seed, self.bounds)
        set_unsplit(model, self.weights)


def _facts(table: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """A table's shape and a hash of some of its values."""
    values = table.detach().reshape(-1)
    some = values[:: max(1, values.numel() // _NUM_COMPARED)].contiguous().cpu()
    return tuple(table.shape), zlib.crc32(some.numpy().tobytes())


def _initial_bounds(collections: Sequence[SplitCollection]) -> dict[str, Bounds]:
    """The bounds of the initial weights of each table without weights (device meta).

    Raises:
        ValueError: If such a table has its own ``init_fn``.
    """
    bounds: dict[str, Bounds] = {}
    weights = dict(_weights_of(collections))
    for table in tables_of(collections):
        if not weights[table.name].is_meta:
            continue
        init: Any = table.init_fn
        if not isinstance(init, partial) or init.func is not nn.init.uniform_:
            raise ValueError(
                f"table {table.name} init_fn: expected TorchRec's default on the device meta, "
                f"got {init!r}. Create the collection on the CPU, so that it has its weights."
            )
        bounds[table.name] = (init.keywords["a"], init.keywords["b"])
    return bounds
