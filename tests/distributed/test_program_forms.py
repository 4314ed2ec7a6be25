"""Models and batches of unusual form: every choice trains them as the unsplit model, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import hotrec
from hotrec.embedding.packed import PackedJaggedTensor
from tests.distributed import programs
from tests.distributed.programs import ROWS, Batch, Choice, Model, Program, make_batch, mine, table
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import is_whole


def shared_bags(step: int, part: slice, size: int, *, is_variable: bool) -> Batch:
    """The last feature, or both, have bags for half of the samples, which two samples share."""
    batch = make_batch(step, part, size)
    num = len(batch.labels)
    strides = [num if is_variable else num // 2, num // 2]
    kept = [batch.ids[name].lengths()[:of] for name, of in zip(ROWS, strides, strict=True)]
    ids = [batch.ids[name].values()[: of.sum()] for name, of in zip(ROWS, kept, strict=True)]
    inverse = torch.stack([torch.arange(num) % of for of in strides])
    features = KeyedJaggedTensor(
        list(ROWS),
        torch.cat(ids),
        lengths=torch.cat(kept),
        stride_per_key_per_rank=[[of] for of in strides] if is_variable else None,
        inverse_indices=(list(ROWS), inverse),
    )
    return replace(batch, ids=features)


def other_keys(step: int, part: slice, size: int) -> Batch:
    """In another order in each step and on each rank; one that no table reads is in some."""
    batch = make_batch(step, part, size, features={"zoo": 5, "item": 40, "user": 90})
    order = [[1, 2], [0, 1, 2], [2, 1], [2, 0, 1]][(step + part.start) % 4]
    return replace(batch, ids=batch.ids.permute(order))


class Slotted:
    """A batch of no base class, found by its slots, whose ``to`` has its own names."""

    __slots__ = ("dense", "ids", "labels")

    def __init__(self, *parts: Any) -> None:
        self.dense, self.ids, self.labels = parts

    def to(self, target: torch.device, non_blocking: bool = False) -> Slotted:
        return Slotted(*(part.to(target) for part in (self.dense, self.ids, self.labels)))

    def record_stream(self, _: torch.Stream) -> None:
        raise NotImplementedError


MANY_ROWS = {"few": 5, "many": 90, "only": 1, "less": 7, "more": 40}


def slotted(step: int, part: slice, size: int) -> Slotted:
    """Ids are in int32 on the first rank."""
    dtype = torch.int32 if part.start == 0 and part.stop < size else torch.int64
    found = make_batch(step, part, size, features=MANY_ROWS, is_weighted=True, dtype=dtype)
    return Slotted(found.dense, found.ids, found.labels)


class Guarded(Model):
    """Control flow by values, which torch.fx cannot trace."""

    def logits(self, batch: Batch) -> torch.Tensor:
        logits = super().logits(batch)
        if not torch.isfinite(logits).all():
            raise FloatingPointError("logits")
        return logits


class Computing(Model):
    """Computes the features that it looks up."""

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        raw = batch.ids
        ids = KeyedJaggedTensor(raw.keys(), raw.values() % 40, lengths=raw.lengths())
        return [self.bags(ids).values()]


class Twice(Model):
    """Calls its collection a second time."""

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        return [self.bags(batch.ids).values() + self.bags(batch.ids).values()]


class NoLayers(Model):
    def __init__(self) -> None:
        super().__init__()
        del self.hidden, self.out

    def head(self, values: torch.Tensor) -> torch.Tensor:
        return (values[:, 2:10] * values[:, 10:]).sum(1)


class HeldTwice(Model):
    """The collection is at three places of the tree, and called at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleDict({"again": nn.ModuleList([self.bags])})

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        found = self.others["again"][0](batch.ids)  # type: ignore[index]
        return [found[name] for name in self.keys]


class OfRank(Model):
    """Another model on each rank, as without a seed; the first rank's counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8 + dist.get_rank())
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3)


def unpooled(name: str, feature: str, num_rows: int, dim: int = 8) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=[feature]
    )


@torch.fx.wrap
def sum_rows(found: JaggedTensor) -> torch.Tensor:
    """Later rows of a sequence have less weight, so that their order matters."""
    if isinstance(found, PackedJaggedTensor):
        found = found.materialize()
    rows, lengths = found.values(), found.lengths().long()
    num, sample = len(lengths), torch.repeat_interleave(lengths)
    place = torch.arange(len(sample), device=rows.device) - (lengths.cumsum(0) - lengths)[sample]
    weighted = torch.tanh(rows) / (1.0 + place)[:, None]
    return rows.new_zeros(num, rows.shape[1]).index_add(0, sample, weighted)


@torch.fx.wrap
def read_all(bags: Any, *sequences: Any) -> torch.Tensor:
    """Everything in the order of the outputs, and by key."""
    sums = [sum_rows(rows) for found in sequences for rows in found.values()]
    by_key = [bags[name] for name in reversed(list(bags.keys()))]
    by_key += [sum_rows(found[name]) for found in sequences for name in sorted(found.keys())]
    return torch.cat([bags.values(), *sums, *by_key], dim=1)


class ReadsAll(Model):
    """Reads every output in its order: ``values()`` of bags, the dictionary of sequences."""

    def __init__(self, *, is_weighted: bool) -> None:
        pooling = PoolingType.SUM if is_weighted else PoolingType.MEAN
        few = table("few", num_embeddings=5, embedding_dim=4, pooling=pooling)
        many = table("many", ["many", "few"], num_embeddings=90)
        super().__init__([few, many], is_weighted=is_weighted, width=2 + 2 * (20 + 12))
        only, less, more = [unpooled(n, n, MANY_ROWS[n], 4) for n in ("only", "less", "more")]
        self.first, self.second = EmbeddingCollection([only]), EmbeddingCollection([less, more])
        if is_weighted:
            hotrec.use_packed_jagged_tensor(self.second)

    def pooled(self, batch: Any) -> list[torch.Tensor]:
        return [read_all(self.bags(batch.ids), self.first(batch.ids), self.second(batch.ids))]


class Returns(Model):
    """Returns something else than (loss, anything)."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, batch: Batch) -> Any:
        loss = super().forward(batch)[0]
        match self.what:
            case "loss":
                return loss
            case "tuple":
                return (loss.reshape(1),)
            case "names":
                return {"loss": loss}
            case "three":
                return loss, 1, None
            case "detached":
                return loss.detach()
        return loss.expand(2, 2)


def frozen(*paths: str) -> Model:
    model = Model()
    for path in paths:
        model.get_submodule(path).requires_grad_(False)
    return model


@dataclass(frozen=True)
class Form:
    """A model, its batches, and the key of the error and what it got, by pipeline, or for "off"."""

    make: Callable[[], nn.Module] = Model
    batch: Callable[..., Any] = make_batch
    refused: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=lambda: ROWS)
    sizes: programs.Sizes = programs.equal
    rules: tuple[Any, Any] = (programs.EMBEDDING, programs.DENSE)


def everywhere(key: str, got: str = "") -> dict[str, tuple[str, str]]:
    return dict.fromkeys(("look_ahead", "sparse_dist", "base"), (key, got))


NO_LAYERS = {"look_ahead": ("pipeline look_ahead", "got none")}
OWN_BAGS = everywhere("features", "got bags")
UNTRACED = {"sparse_dist": ("pipeline sparse_dist", 'pipeline="base"')}
SECOND_CALL = dict.fromkeys(("sparse_dist", "base"), ("embedding module bags", "a second"))
COMPUTED = {
    "look_ahead": ("pipeline look_ahead.*", 'pipeline="base"'),
    "sparse_dist": ("pipeline sparse_dist", "bags"),
    "off": None,  # TorchRec's own pipeline reads those in line
}
ORDER = {"rows": MANY_ROWS, "sizes": programs.one_empty, "rules": (programs.SGD, programs.SGD)}
FORMS = {
    "control flow by values": Form(Guarded, refused=UNTRACED),
    "computed features": Form(Computing, refused=COMPUTED),
    "called twice": Form(Twice, refused=SECOND_CALL),
    "frozen layer": Form(partial(frozen, "hidden")),
    "frozen layers": Form(partial(frozen, "hidden", "out"), refused=NO_LAYERS),
    "no layers": Form(NoLayers, refused=NO_LAYERS),
    "weights undeclared": Form(Model, partial(make_batch, is_weighted=True)),
    "no weights": Form(
        partial(Model, is_weighted=True), refused=everywhere("features weights", "got none")
    ),
    "other keys": Form(Model, other_keys),
    "own initial weights": Form(
        lambda: Model([table("user", init_fn=nn.init.ones_), table("item")])
    ),
    "one feature, two tables": Form(
        lambda: Model([table("user", ["user", "item"]), table("item")], ("item@user", "item@item"))
    ),
    "output unused": Form(lambda: Model(keys=("user",))),
    "held twice": Form(HeldTwice),
    "unseeded": Form(OfRank),
    "variable batch size": Form(Model, partial(shared_bags, is_variable=True), OWN_BAGS),
    "shared bags": Form(Model, partial(shared_bags, is_variable=False), OWN_BAGS),
    "outputs in order": Form(partial(ReadsAll, is_weighted=False), slotted, **ORDER),  # type: ignore[arg-type]
    "packed outputs in order": Form(partial(ReadsAll, is_weighted=True), slotted, **ORDER),  # type: ignore[arg-type]
    "loss alone": Form(partial(Returns, "loss")),
    "loss in a tuple": Form(partial(Returns, "tuple")),
    "loss by name": Form(partial(Returns, "names"), refused=everywhere("model", "got dict")),
    "three values": Form(
        partial(Returns, "three"), refused=everywhere("model", "Tensor, int, NoneType")
    ),
    "detached": Form(
        partial(Returns, "detached"), refused=everywhere("model", "got one without")
    ),
    "of samples": Form(partial(Returns, "samples"), refused=everywhere("model", "(2, 2)")),
}  # fmt: skip


def trains_or_refuses(name: str, choice: Choice) -> None:
    form = FORMS[name]
    is_off = choice.is_plain and "off" in form.refused
    error = form.refused.get("off" if is_off else choice.kind.name)
    with programs.refused(*error) if error else nullcontext():
        program = Program(choice, form.make, form.rules, form.rows)
        with program.pipeline():
            program.go(iter(mine(4, form.batch, form.sizes)))
    if not error:
        program.check(programs.whole(4, form.batch, form.sizes))


@pytest.mark.parametrize("kind", programs.CHOICES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_choice_trains_every_form_or_says_why_not(world_size: int, kind: str) -> None:
    checks = programs.spread([partial(trains_or_refuses, name) for name in FORMS], kind)
    first = [*programs.CHOICES].index(kind) + world_size // 2  # on one rank or on three
    programs.run_all(checks if is_whole() else checks[first % 2 :: 2], world_size)


class Drops(Model):
    """Draws what it drops, and new layers if they are on the device meta."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(18, 8, device=device)
        torch.manual_seed(77)

    def head(self, values: torch.Tensor) -> torch.Tensor:
        return super().head(self.drop(values))


def train_at_random() -> None:
    for device in ("cpu", "meta"):
        found = []
        for [choice, *_] in programs.CHOICES.values():
            torch.manual_seed(5)
            program = Program(choice, partial(Drops, device))
            with program.pipeline():
                program.go(iter(mine(4)))
            found.append(program.losses)
        for losses in found[1:]:
            np.testing.assert_allclose(losses, found[0], rtol=1e-5)


def test_what_a_model_draws_does_not_depend_on_the_choice() -> None:
    run_ranks(train_at_random, 2)


def own_rules() -> None:
    """Tables that TorchRec's plan replicates follow their own rule under "off"."""
    program = Program(programs.CHOICES["off"][0], rules=(programs.EMBEDDING, programs.DENSE))
    sharding = program.model.plan.plan["bags"]
    assert "data_parallel" in {sharding[name].sharding_type for name in ROWS}
    with program.pipeline():
        program.go(iter(mine(4)))
    program.check(programs.whole(4))


def test_off_trains_replicated_tables_by_their_rule() -> None:
    run_ranks(own_rules, 2)


def other_tables() -> None:
    model = Model([table("user"), table("item", num_embeddings=40 + dist.get_rank())])
    with programs.refused("table item"):
        hotrec.parallelize(model, "off", **programs.RULES)


def test_all_ranks_hear_of_tables_that_differ() -> None:
    run_ranks(other_tables, 2)


def test_a_table_of_bags_and_of_sequences_is_refused(one_rank: Any) -> None:
    class TwoKinds(Model):
        def __init__(self) -> None:
            super().__init__()
            self.sequences = EmbeddingCollection([unpooled("item", "item", 40)])

    with pytest.raises(ValueError, match=r"^tables \['item'\]: expected "):
        hotrec.parallelize(TwoKinds(), programs.some_hot(), **programs.RULES)


def test_replicated_sequences_are_refused_on_a_cpu(one_rank: Any) -> None:
    """TorchRec returns wrong rows of them there."""
    model = nn.Sequential(EmbeddingCollection([unpooled("seen", "item", 40)]))
    sharding = ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )
    topology = Topology(world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"seen": sharding})
    plan = planner.plan(model, [EmbeddingCollectionSharder()])
    with pytest.raises(ValueError, match=r"^table seen plan: .* got data_parallel"):
        hotrec.parallelize(model, "off", plan=plan, **programs.RULES)
