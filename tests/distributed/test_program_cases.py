"""What a program may do to the model that ``parallelize`` returned: right, or refused in a line.

Each case runs under every choice that ``auto`` can make, on one to three ranks: it ends with the
losses and weights of the unsplit model on the concatenated batches, or with an error on every rank.
Add a case to ``CASES``.

``make test`` runs each case under each choice on two or on three ranks, and a quarter of them on
one; ``make test-all`` runs all of them on one, two and three.
"""

from __future__ import annotations

import copy
import gc
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec
from hotrec.runtime.ranks import RankError, broadcast_object
from hotrec.types import Partition, PipelineKind, Placement, Tier, TorchrecPlan
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks
from tests.unit.planner.situations import torchrec_plan

GLOBAL_BATCH, NUM_STEPS, DIM = 24, 5, 8
ROWS = {"user": 90, "item": 40}
# Adagrad would hide a gradient of the wrong size.
RULE = partial(torch.optim.SGD, lr=0.8)
CPU = torch.device("cpu")


@dataclass
class Rows(Pipelineable):
    """A batch of the caller's; ``other`` is for what a model reads besides."""

    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor
    other: KeyedJaggedTensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Rows:
        parts = (self.dense, self.ids, self.labels, self.other)
        return Rows(*(None if p is None else p.to(device) for p in parts))  # type: ignore[arg-type]

    def record_stream(self, stream: torch.Stream) -> None:
        raise NotImplementedError


class Model(nn.Module):
    """(batch) -> (loss, (loss, logits))."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name],
                pooling=PoolingType.MEAN if name == "item" else PoolingType.SUM,
            )
            for name, rows in ROWS.items()
        ]
        self.bags = EmbeddingBagCollection(tables)
        self.hidden = nn.Linear(2 + len(ROWS) * DIM, 8)
        self.out = nn.Linear(8, 1)

    def look_up(self, batch: Rows) -> torch.Tensor:
        return self.bags(batch.ids).values()  # type: ignore[no-any-return]

    def logits(self, batch: Rows) -> torch.Tensor:
        inputs = torch.cat([batch.dense, self.look_up(batch)], dim=1)
        return self.out(torch.tanh(self.hidden(inputs))).squeeze(-1)  # type: ignore[no-any-return]

    def forward(self, batch: Rows) -> tuple[torch.Tensor, Any]:
        logits = self.logits(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


class Output(NamedTuple):
    loss: torch.Tensor
    parts: tuple[torch.Tensor, torch.Tensor]


class Named(Model):
    def forward(self, batch: Rows) -> tuple[torch.Tensor, Any]:
        return Output(*super().forward(batch))


class Apart(Model):
    """Reads items in features of their own: several bags of each sample, or one bag of a batch."""

    def __init__(self, num_bags: int | None) -> None:
        super().__init__()
        user, item = self.bags.embedding_bag_configs()
        self.items, self.bags = EmbeddingBagCollection([item]), EmbeddingBagCollection([user])
        self.num_bags = num_bags

    def look_up(self, batch: Rows) -> torch.Tensor:
        items = self.items(batch.other).values()
        if self.num_bags is not None:
            items = items.view(-1, self.num_bags, DIM).sum(1)
        items = items * torch.ones_like(batch.dense[:, :1])
        return torch.cat([self.bags(batch.ids).values(), items], dim=1)

    def features(self, batch: Rows) -> Rows:
        """Items that depend on the sample, or on none."""
        num = self.num_bags
        ids = torch.arange(40)[3:4]
        if num is not None:
            drawn = (batch.dense[:, :1] * 100).long()
            ids = ((drawn + 7 * torch.arange(num)) % 40).flatten()
        other = KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
        return replace(batch, ids=batch.ids.permute([0]), other=other)


class Guarded(Model):
    """Control flow by values, which torch.fx cannot trace."""

    def logits(self, batch: Rows) -> torch.Tensor:
        logits = super().logits(batch)
        if not torch.isfinite(logits).all():
            raise FloatingPointError("logits")
        return logits


class Counting(Model):
    """Control flow by the number of samples, likewise, before the lookup."""

    def look_up(self, batch: Rows) -> torch.Tensor:
        for _ in range(min(1, batch.dense.shape[0])):
            pass
        return super().look_up(batch)


class Computing(Model):
    """Computes the features that it looks up."""

    def look_up(self, batch: Rows) -> torch.Tensor:
        raw = batch.ids
        ids = KeyedJaggedTensor(raw.keys(), raw.values() % 40, lengths=raw.lengths())
        return self.bags(ids).values()  # type: ignore[no-any-return]


class Sometimes(Model):
    """Uses its last layer in some steps."""

    is_used = True

    def logits(self, batch: Rows) -> torch.Tensor:
        hidden = torch.tanh(self.hidden(torch.cat([batch.dense, self.look_up(batch)], dim=1)))
        return self.out(hidden).squeeze(-1) if Sometimes.is_used else hidden.sum(1)


class Twice(Model):
    """Calls its collection a second time."""

    def look_up(self, batch: Rows) -> torch.Tensor:
        return super().look_up(batch) + self.bags(batch.ids).values()  # type: ignore[no-any-return]


class Switching(Model):
    """Reads other features in evaluation than in training."""

    def look_up(self, batch: Rows) -> torch.Tensor:
        ids = batch.ids if self.training else batch.other
        return self.bags(ids).values()  # type: ignore[no-any-return]


Parts = tuple[dict[str, list[np.ndarray]], np.ndarray, np.ndarray]


def drawn(step: int, size: int = GLOBAL_BATCH) -> Parts:
    """Bags, dense values and labels of a step's global batch."""
    rng = np.random.default_rng((11, step))
    bags = {
        name: [(rng.random(n) ** 3 * rows).astype(np.int64) for n in rng.integers(0, 4, size)]
        for name, rows in ROWS.items()
    }
    dense = rng.standard_normal((size, 2)).astype(np.float32)
    return bags, dense, (rng.random(size) < 0.4).astype(np.float32)


def batch_of(parts: Parts, begin: int, end: int) -> Rows:
    bags, dense, labels = parts
    chosen = [bag for of_feature in bags.values() for bag in of_feature[begin:end]]
    ids = KeyedJaggedTensor(
        list(bags),
        torch.from_numpy(np.concatenate([*chosen, np.empty(0, np.int64)])),
        lengths=torch.tensor([bag.size for bag in chosen], dtype=torch.int64),
        stride=end - begin,
    )
    return Rows(torch.from_numpy(dense[begin:end]), ids, torch.from_numpy(labels[begin:end]))


def equal_sizes(world_size: int) -> list[int]:
    return [GLOBAL_BATCH // world_size] * world_size


def rising(world_size: int) -> list[int]:
    return [4 + 5 * rank for rank in range(world_size)]


def batches(
    num: int = NUM_STEPS, first: int = 0, sizes: Callable[[int], list[int]] = equal_sizes
) -> list[Rows]:
    """This rank's slices of the global batches."""
    rank, of_rank = dist.get_rank(), sizes(dist.get_world_size())
    begin = sum(of_rank[:rank])
    return [
        batch_of(drawn(step, sum(of_rank)), begin, begin + of_rank[rank])
        for step in range(first, first + num)
    ]


def whole(num: int = NUM_STEPS, first: int = 0, size: int = GLOBAL_BATCH) -> list[Rows]:
    return [batch_of(drawn(step, size), 0, size) for step in range(first, first + num)]


@dataclass(frozen=True)
class Choice:
    """One that ``auto`` can make, or "off"."""

    name: str
    kind: PipelineKind
    hot: Any
    given: dict[str, Any]

    @property
    def is_ahead(self) -> bool:
        return self.kind is PipelineKind.look_ahead

    @property
    def is_plain(self) -> bool:
        return bool(self.hot == "off")

    @property
    def is_traced(self) -> bool:
        return self.kind is PipelineKind.sparse_dist


def some_hot() -> Partition:
    return Partition(ROWS, {"user": np.arange(9), "item": np.arange(4)})


def choices() -> list[Choice]:
    some = some_hot()
    kinds = (PipelineKind.look_ahead, PipelineKind.sparse_dist, PipelineKind.base)
    ahead, sparse_dist, base = [
        Choice(kind.value, kind, some, {"pipeline": kind}) for kind in kinds
    ]
    off, off_base = [Choice(f"off {k.value}", k, "off", {"pipeline": k}) for k in kinds[1:]]

    def of_torchrec(plan: TorchrecPlan, kind: PipelineKind) -> Choice:
        chosen = hotrec.Choice(torchrec_plan(plan, kind), "asked")
        return Choice(f"{plan.name} {kind.value}", kind, chosen, {})

    plans = (TorchrecPlan.planner, TorchrecPlan.hand_tuned, TorchrecPlan.table_wise)
    of_plans = [of_torchrec(plan, PipelineKind.sparse_dist) for plan in plans]
    table_wise = of_torchrec(TorchrecPlan.table_wise, PipelineKind.base)
    return [ahead, sparse_dist, base, table_wise, off, off_base, *of_plans]


class Program:
    """A program of two calls, and the unsplit model that it must equal."""

    def __init__(self, choice: Choice, make: Callable[[], Model] = Model) -> None:
        self.choice = choice
        self.model, self.optimizer = hotrec.parallelize(
            make(),
            choice.hot,
            embedding_optimizer=RULE,
            dense_optimizer=RULE,
            **choice.given,
        )
        self.unsplit = make()
        tables = hotrec.gather_tables(self.model)
        with torch.no_grad():
            for name, bag in self.unsplit.bags.embedding_bags.items():
                bag.weight.copy_(tables[name])  # type: ignore[union-attr, operator]
        self._rule = RULE(self.unsplit.parameters())

    def pipeline(self) -> hotrec.Pipeline:
        return hotrec.Pipeline(self.model, self.optimizer, CPU)

    def expect(
        self, of: Sequence[Rows], change: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Train the unsplit model; its losses."""
        losses = []
        for batch in of:
            self._rule.zero_grad()
            loss, _ = self.unsplit(batch)
            loss.backward()
            change()
            self._rule.step()
            losses.append(float(loss.detach()))
        return losses

    @torch.no_grad()
    def expect_evaluated(self, of: Sequence[Rows]) -> list[float]:
        self.unsplit.eval()
        losses = [float(self.unsplit(batch)[0]) for batch in of]
        self.unsplit.train()
        return losses

    def check(self, losses: Sequence[float], expected: Sequence[float]) -> None:
        """The losses are these, and the weights those of the unsplit model."""
        np.testing.assert_allclose(losses, expected, rtol=1e-5, equal_nan=True)
        tables = hotrec.gather_tables(self.model)
        for name, bag in self.unsplit.bags.embedding_bags.items():
            weight: Any = bag.weight
            torch.testing.assert_close(
                tables[name], weight.detach(), rtol=1e-5, atol=1e-5, equal_nan=True, msg=name
            )
        layers = {
            name: p for name, p in self.model.named_parameters() if not name.startswith("bags.")
        }
        assert len(layers) == 4
        for name, layer in layers.items():
            weight = self.unsplit.get_parameter(name)
            torch.testing.assert_close(
                layer.detach(), weight.detach(), rtol=1e-5, atol=1e-5, equal_nan=True, msg=name
            )


def mean_over_ranks(value: torch.Tensor, size: int | None = None) -> float:
    """The mean of the ranks' values, weighted by the samples of this one if they are given."""
    weight = 1.0 if size is None else float(size)
    total = torch.tensor([float(value) * weight if weight else 0.0, weight])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def progress_all(
    pipeline: hotrec.Pipeline, data: Iterator[Any], losses: list[float] | None = None
) -> list[float]:
    losses = [] if losses is None else losses
    while True:
        try:
            _, logits = out = pipeline.progress(data)
        except StopIteration:
            return losses
        losses.append(mean_over_ranks(out[0], logits.numel()))


def evaluate(program: Program, pipeline: hotrec.Pipeline, data: Iterator[Any]) -> list[float]:
    program.model.eval()
    with torch.no_grad():
        losses = progress_all(pipeline, data)
    program.model.train()
    return losses


@contextmanager
def refused(text: str) -> Iterator[None]:
    """The same error on every rank, in one line."""
    with pytest.raises((RuntimeError, ValueError, TypeError, OSError), match=text) as caught:
        yield
    assert "\n" not in str(caught.value)
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, re.sub(r"^\[rank \d\] (\w+: )?", "", str(caught.value)))
    assert len(set(words)) == 1, words


OUTSIDE = r"expected hotrec\.Pipeline to train .* outside of its progress"
UNTRACED = r'pipeline sparse_dist: expected a forward that torch\.fx can trace.*pipeline="base"'


def step_by_hand(
    program: Program,
    batch: Rows,
    change: Callable[[], object] = lambda: None,
    *,
    is_whole: bool = True,
) -> float:
    program.optimizer.zero_grad()
    loss, _ = program.model(batch)
    loss.backward()
    change()
    if is_whole:
        program.optimizer.step()
    return mean_over_ranks(loss)


def trains_in_the_pipeline(choice: Choice) -> None:
    program = Program(choice)
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(batches()))
    program.check(losses, program.expect(whole()))
    with refused("expected an open .*closed"):
        pipeline.progress(iter(batches()))


def trains_in_a_loop_of_its_own(choice: Choice) -> None:
    """Before, between and after the steps of a pipeline, which holds batches meanwhile."""
    program, plain = Program(choice), choice.is_plain
    if choice.is_ahead:
        return
    found: list[weakref.ref[torch.Tensor]] = []
    program.model.register_forward_hook(lambda *of: found.append(weakref.ref(of[-1][0])))
    losses = [step_by_hand(program, batch) for batch in batches(1)]
    for batch in batches(1, first=1):  # in another order of keys
        losses.append(step_by_hand(program, replace(batch, ids=batch.ids.permute([1, 0]))))
    pipeline, data = program.pipeline(), iter(batches(3, first=2))
    losses += [mean_over_ranks(pipeline.progress(data)[0])]
    losses += [step_by_hand(program, batch) for batch in batches(2, first=9)]
    losses += progress_all(pipeline, data)
    pipeline.close()
    [batch] = batches(1, first=8)
    losses.append(program.optimizer.step(lambda: step_by_hand(program, batch, is_whole=False)))
    gc.collect()
    assert len(found) == len(losses)
    assert not any(loss() is not None for loss in found)  # with their graphs
    of = [*whole(3), *whole(2, first=9), *whole(2, first=3), *whole(1, first=8)]
    program.check(losses, program.expect(of))
    with refused("expected an iterator, got list") if not plain else nullcontext():
        if not plain:
            program.pipeline().progress(batches())  # type: ignore[arg-type]


def is_not_trained_outside(choice: Choice) -> None:
    """Under look-ahead: without a pipeline, beside one, and after one."""
    program = Program(choice)
    if not choice.is_ahead:
        return
    model, optimizer, batch = program.model, program.optimizer, batches(1)[0]

    def evaluated() -> torch.Tensor:
        model.eval()
        loss: torch.Tensor = model(batch)[0]
        model.train()
        return loss

    ways: list[Callable[[], Any]] = [
        lambda: model(batch),
        lambda: model.module(batch),
        lambda: model.module.bags(batch.ids),
        lambda: evaluated().backward(),
        lambda: model.module.out(torch.ones(1, 8)).sum().backward(),
        optimizer.step,
        lambda: TrainPipelineSparseDist(model, optimizer, CPU).progress(iter(batches())),
        lambda: TrainPipelineBase(model, optimizer, CPU).progress(iter(batches())),
        lambda: nn.Sequential(model)(batch),
    ]

    def check_all() -> None:
        for way in ways:
            with refused(OUTSIDE):
                way()
        with torch.no_grad():  # trains nothing
            model(batch)

    check_all()
    pipeline, data = program.pipeline(), iter(batches())
    losses = [mean_over_ranks(pipeline.progress(data)[0])]
    with refused("expected one at a time"):
        program.pipeline()
    for way in ways[:6] + ways[-1:]:
        with refused(OUTSIDE):
            way()
    losses += progress_all(pipeline, data)
    pipeline.close()
    program.check(losses, program.expect(whole()))
    check_all()
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(batches(2)))
    program.check(losses, program.expect(whole(2)))


def trains_the_whole_model(choice: Choice) -> None:
    """A part of it has no DDP around it."""
    if choice.is_ahead or choice.is_plain:
        return
    program, [batch] = Program(choice), batches(1)
    inner = program.model.module
    for loss in (inner(batch)[0], inner.out(torch.ones(1, 8)).sum()):
        with refused(r"parameter .*: expected a gradient of the model .* not model\.module"):
            loss.backward()


def makes_one_backward_pass_per_step(choice: Choice) -> None:
    program = Program(choice)
    if choice.is_ahead or choice.is_plain:
        return
    first, second = batches(2)
    program.model(first)[0].backward()
    with refused(r"parameter .*: expected one backward pass per step, got a second"):
        program.model(second)[0].backward()
    program = Program(choice)
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(batches(1)))
        with refused(r"optimizer\.step\(\): expected a backward pass before it"):
            program.optimizer.step()
        losses += progress_all(pipeline, iter(batches(1, first=1)))
    program.check(losses, program.expect(whole(2)))


def changes_gradients_before_its_step(choice: Choice) -> None:
    """Rows that are not replicated are updated in backward, by what it computed."""
    if choice.is_ahead or choice.is_plain:
        return
    program = Program(choice)
    parts = dict(program.optimizer.optimizers)
    has_both = bool(parts["fused"].params) and not parts.keys().isdisjoint(("hot", "tables"))
    layers = [p for name, p in program.model.named_parameters() if "bags" not in name]
    kept = [p for name, p in program.unsplit.named_parameters() if "bags" not in name]
    losses = [step_by_hand(program, batch, lambda: clip(layers)) for batch in batches(2)]
    program.check(losses, program.expect(whole(2), lambda: clip(kept)))
    with refused(r"optimizer\.step\(\): expected the gradients") if has_both else nullcontext():
        step_by_hand(program, batches(1)[0], lambda: clip(program.model.parameters()))
    other = Program(choice)
    with refused(r"optimizer\.step\(\): expected the gradients .* got none"):
        step_by_hand(other, batches(1)[0], lambda: other.optimizer.zero_grad())
    program = Program(choice)
    program.model(batches(1)[0])[0].backward()
    program.optimizer.step()
    with refused("parameter out.bias: expected no gradient before backward"):
        program.model(batches(1)[0])[0].backward()


def clip(parameters: Iterable[torch.Tensor]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.01)


def has_ranks_with_other_numbers_of_batches(choice: Choice) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if last == 0:
        return
    for fewer in (0, 1, 3):
        program = Program(choice)
        with program.pipeline() as pipeline:
            data, losses = iter(batches(fewer if rank == last else 5)), []
            with refused(f"batches: expected .* got {fewer} on rank {last} and more than {fewer}"):
                while True:
                    losses.append(mean_over_ranks(pipeline.progress(data)[0]))
            losses += progress_all(pipeline, iter(batches(2, first=7)))
            with refused(f"batches: expected .* got 1 on rank {last} and more than 1 on rank 0"):
                evaluate(program, pipeline, iter(batches(1 if rank == last else 3)))
        program.check(losses, program.expect([*whole(fewer), *whole(2, first=7)]))


def has_batches_of_other_sizes(choice: Choice) -> None:
    """In every step, in some, and with nothing on a rank; beside features that no table reads."""
    world_size = dist.get_world_size()

    def one_empty(world_size: int) -> list[int]:
        return [0 if rank == world_size - 1 else 7 for rank in range(world_size)]

    found: list[Rows] = []
    expected: list[Rows] = []
    for first, sizes in enumerate((equal_sizes, rising, one_empty, rising)):
        if world_size == 1 and sizes is one_empty:
            continue
        for batch in batches(1, first, sizes):
            num = 3 * batch.labels.numel() + 1
            other = KeyedJaggedTensor(["unread"], torch.arange(num), lengths=torch.ones(num).long())
            found.append(replace(batch, other=other))
        expected += whole(1, first, sum(sizes(world_size)))
    program = Program(choice, Named)
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(found))
        with refused(r"batch 1: expected a sample on some rank, got none"):
            progress_all(pipeline, iter([batches(1)[0], *batches(2, sizes=lambda num: [0] * num)]))
    wanted = program.expect(expected)
    program.expect(whole(1))  # the batch before it
    program.check(losses, wanted)
    if choice.is_ahead:
        return
    program = Program(choice, Named)
    losses = [step_by_hand(program, batch) for batch in found[:2]]
    program.check(losses, program.expect(expected[:2]))
    assert program.model(found[1]).loss.requires_grad
    if world_size > 1:
        program.model.module.forward = lambda batch: program.model.module.logits(batch)  # type: ignore[method-assign]
        with refused(
            "batches: expected the same number of samples on every rank, got 4 on rank 0 and 9 on"
        ):
            program.model(found[1])


def has_collections_of_other_bags(choice: Choice) -> None:
    """As many for each sample everywhere, or one for all of a batch."""
    mine, everything = batches(3, sizes=rising), whole(3, size=sum(rising(dist.get_world_size())))
    for num in (3, None):
        make = partial(Apart, num)
        program, features = Program(choice, make), make().features
        with program.pipeline() as pipeline:
            if num is None and dist.get_world_size() > 1:
                with refused(r"batch 0, .*features: expected as many .* \[1, 1.* \[4, 9"):
                    pipeline.progress(iter(map(features, mine)))
                if not choice.is_ahead:
                    with refused(r"features: expected as many .* \[1, 1.* \[4, 9"):
                        step_by_hand(program, features(mine[0]))
                continue
            losses = progress_all(pipeline, iter(map(features, mine[:2])))
            if not choice.is_ahead:
                losses.append(step_by_hand(program, features(mine[2])))
        expected = program.expect([*map(features, everything)])
        np.testing.assert_allclose(losses, expected[: len(losses)], rtol=1e-5)


def evaluates_midway(choice: Choice) -> None:
    """With training batches under way: by the pipeline, and by hand."""
    program = Program(choice)
    with program.pipeline() as pipeline:
        data = iter(batches())
        losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
        expected = program.expect(whole(2))
        held_out = program.expect_evaluated(whole(3, first=50))
        found = evaluate(program, pipeline, iter(batches(3, first=50)))
        np.testing.assert_allclose(found, held_out, rtol=1e-5)
        program.model.eval()
        with torch.no_grad():
            for wanted, batch in zip(held_out, batches(3, first=50), strict=True):
                assert mean_over_ranks(program.model(batch)[0]) == pytest.approx(wanted, rel=1e-5)
        program.model.train()
        other = iter(batches(9, first=50))
        program.model.eval()
        with torch.no_grad():
            pipeline.progress(other)  # left in the middle
        program.model.train()
        losses += progress_all(pipeline, data)
        expected += program.expect(whole(3, first=2))
        found = evaluate(program, pipeline, iter(batches(2, first=60)))
        np.testing.assert_allclose(found, program.expect_evaluated(whole(2, first=60)), rtol=1e-5)
        losses += progress_all(pipeline, iter(batches(2, first=5)))
        expected += program.expect(whole(2, first=5))
    program.check(losses, expected)


def changes_iterators(choice: Choice) -> None:
    """One left halfway, whose batches under way come first; one used in both modes."""
    program = Program(choice)
    with program.pipeline() as pipeline:
        first, source = iter(batches(9)), []

        def noted() -> Iterator[Rows]:
            for number, batch in enumerate(first):
                source.append(number)
                yield batch

        data = noted()
        losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
        taken = len(source)
        losses += progress_all(pipeline, iter(batches(2, first=20)))
        expected = program.expect([*whole(taken), *whole(2, first=20)])
        data = iter(batches(4, first=30))
        evaluated = evaluate(program, pipeline, itertools.islice(data, 1))
        assert evaluated == pytest.approx(program.expect_evaluated(whole(1, first=30)), rel=1e-5)
        program.model.eval()
        with torch.no_grad():
            evaluated = [mean_over_ranks(pipeline.progress(data)[0])]
        program.model.train()
        assert evaluated == pytest.approx(program.expect_evaluated(whole(1, first=31)), rel=1e-5)
        losses += progress_all(pipeline, data)
        expected += program.expect(whole(2, first=32))
    program.check(losses, expected)


def evaluates_what_it_read_ahead(choice: Choice) -> None:
    """The next batch of the iterator that is trained on, as if nothing was read ahead."""
    program = Program(choice)
    with program.pipeline() as pipeline:
        data = iter(batches())
        losses = [mean_over_ranks(pipeline.progress(data)[0])]
        program.model.eval()
        is_wrong = refused("between training and evaluation") if choice.is_ahead else nullcontext()
        with is_wrong, torch.no_grad():
            found = mean_over_ranks(pipeline.progress(data)[0])
        program.model.train()
        losses += progress_all(pipeline, data)
    expected = program.expect(whole(1))
    if choice.is_ahead:
        expected += program.expect(whole(4, first=1))
    else:
        assert found == pytest.approx(program.expect_evaluated(whole(1, first=1))[0], rel=1e-5)
        expected += program.expect(whole(3, first=2))
    program.check(losses, expected)


def trains_or_refuses(choice: Choice, make: Callable[[], Model], error: str | None) -> None:
    program = Program(choice, make)
    pipeline = program.pipeline()
    if error is not None:
        with refused(error):
            pipeline.progress(iter(batches()))
        return
    losses = progress_all(pipeline, iter(batches()))
    pipeline.close()
    program.check(losses, program.expect(whole()))


def has_control_flow_by_values(choice: Choice) -> None:
    for make in (Guarded, Counting):
        trains_or_refuses(choice, make, UNTRACED if choice.is_traced else None)


def computes_its_features(choice: Choice) -> None:
    """TorchRec's own pipeline reads those in line."""
    error = r'not pipelined.*pipeline="base"' if choice.is_traced else None
    if choice.is_ahead:
        error = r'expected the features of the batch, got others.*pipeline="base"'
    trains_or_refuses(choice, Computing, None if choice.is_plain else error)


def uses_a_layer_in_some_steps(choice: Choice) -> None:
    """A layer may be used never, too; otherwise DDP would stop, or leave it apart in the end."""
    for is_used in (True, False):
        program, data = Program(choice, Sometimes), iter(batches(3))
        error = rf"parameter out\.\w+: expected {'a' if is_used else 'no'} gradient"
        Sometimes.is_used = is_used
        with program.pipeline() as pipeline:
            losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
            pipeline.drain()
            program.check(losses, program.expect(whole(2)))
            Sometimes.is_used = not is_used
            with refused(error):
                pipeline.progress(data)
        if not choice.is_ahead:
            program, data = Program(choice, Sometimes), iter(batches(2))
            Sometimes.is_used = is_used
            step_by_hand(program, next(data))
            Sometimes.is_used = not is_used
            with refused(error):
                step_by_hand(program, next(data))
    Sometimes.is_used = True


def looks_up_twice(choice: Choice) -> None:
    """Look-ahead alone adds the gradients up before it updates rows."""
    error = "expected one call in a forward of the model, got a second"
    trains_or_refuses(choice, Twice, None if choice.is_ahead else error)


def broken(name: str, batch: Rows) -> Any:
    """A batch with something wrong in its features."""
    ids = batch.ids
    keys, values, lengths = list(ids.keys()), ids.values().clone(), ids.lengths()
    match name:
        case "a key is missing":
            ids = KeyedJaggedTensor(["user", "other"], values, lengths=lengths)
        case "an id is too large":
            values[-1] = ROWS["item"]
            ids = KeyedJaggedTensor(keys, values, lengths=lengths)
        case "an id is negative":
            values[0] = -1
            ids = KeyedJaggedTensor(keys, values, lengths=lengths)
        case "lengths do not add up":
            ids = KeyedJaggedTensor(keys, values[:-1], lengths=lengths)
        case "a feature has other bags":
            num = batch.dense.shape[0]
            of_each = [[num], [num - 2]]
            kept = lengths[: 2 * num - 2]
            values = values[: int(kept.sum())]
            ids = KeyedJaggedTensor(keys, values, lengths=kept, stride_per_key_per_rank=of_each)
        case "ids are no integers":
            ids = KeyedJaggedTensor(keys, values + 0.75, lengths=lengths)
        case "it cannot be moved":
            return SimpleNamespace(**vars(batch))
        case "it is None":
            return None
    return replace(batch, ids=ids)


BROKEN = {
    "a key is missing": "features: expected 'item' among the batch's features, got ",
    "an id is too large": r"table item feature item: expected rows in 0\.\.39, got 40\.",
    "an id is negative": r"table user feature user: expected rows in 0\.\.89, got -1\.",
    "lengths do not add up": "features lengths: expected .* that add up to",
    "a feature has other bags": r"features: expected a bag of each feature .*{'user': ",
    "ids are no integers": r"features \['user', 'item'\] ids: expected int64 or int32, got float32",
    "it cannot be moved": r"batch SimpleNamespace: expected to\(device, .* got no to\(\)",
    "it is None": r"batch [02], which no rank computes: batch NoneType: expected to\(device",
}


def has_features_that_cannot_be_looked_up(choice: Choice) -> None:
    """On one rank, in the third batch."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for name, text in BROKEN.items():
        program = Program(choice)
        data = batches()
        if rank == last:
            data[2] = broken(name, data[2])
        with program.pipeline() as pipeline:
            with refused(text):
                progress_all(pipeline, iter(data))
            with refused(text):
                evaluate(program, pipeline, iter(data[2:3]))


class Loader:
    """As torch's ``DataLoader`` with persistent workers: its own iterator, started anew by iter."""

    def __init__(self, of: Sequence[Rows], fails: Callable[[int], None] = lambda at: None) -> None:
        self.of, self.fails, self.at = of, fails, 0

    def __iter__(self) -> Loader:
        self.at = 0
        return self

    def __next__(self) -> Rows:
        if self.at == len(self.of):
            raise StopIteration
        self.fails(self.at)
        self.at += 1
        return self.of[self.at - 1]


def once(error: BaseException, ranks: Sequence[int], step: int = 0) -> Callable[[int], None]:
    """Raises an error at a step of these ranks, once."""
    errors = [error] if dist.get_rank() in ranks else []

    def fail(at: int) -> None:
        if errors and at == step:
            raise errors.pop()

    return fail


def has_one_iterator_for_all_epochs(choice: Choice) -> None:
    """In training and in evaluation, in which a pass is left midway."""
    program, expected = Program(choice), []
    data, held_out = Loader(batches(3)), Loader(batches(3, first=50))
    with program.pipeline() as pipeline:
        losses = []
        for num in (2, 3):
            losses += progress_all(pipeline, iter(data))
            expected += program.expect(whole(3))
            program.model.eval()
            with torch.no_grad():
                of = iter(held_out)
                found = [mean_over_ranks(pipeline.progress(of)[0]) for _ in range(num)]
            program.model.train()
            wanted = program.expect_evaluated(whole(num, first=50))
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    program.check(losses, expected)


def has_a_loader_that_fails_once(choice: Choice) -> None:
    """The batches before come first, those after it next; also if only one rank has an error."""
    last = dist.get_world_size() - 1
    ways: Any = [(OSError("gone"), [last], 2), (KeyboardInterrupt("gone"), [0, last], 0)]
    for error, ranks, step in ways:
        program = Program(choice)
        data = iter(Loader(batches(4), once(error, ranks, step)))
        with program.pipeline() as pipeline:
            losses: list[float] = []
            with pytest.raises((type(error), RankError), match="gone"):
                progress_all(pipeline, data, losses)
            assert len(losses) == step
            losses += progress_all(pipeline, data)
        program.check(losses, program.expect(whole(4)))


def turns_to_other_iterators(choice: Choice) -> None:
    """Before their ends, and at errors: what was taken comes first, and nothing is lost."""
    program, firsts = Program(choice), (0, 10, 20, 30)
    with program.pipeline() as pipeline:
        losses = []
        for first, num in zip(firsts, (1, 2, 1, 3), strict=True):
            data = iter(batches(num, first=first))
            losses.append(mean_over_ranks(pipeline.progress(data)[0]))
        losses += progress_all(pipeline, data)
    steps = [0, 10, 11, 20, 30, 31, 32]
    program.check(losses, program.expect([one for at in steps for one in whole(1, at)]))
    last = dist.get_world_size() - 1
    for step in (1, 2):
        program, errors = Program(choice), 0
        data = iter(Loader(batches(5), once(OSError("gone"), [last], step)))
        with program.pipeline() as pipeline:
            losses = [mean_over_ranks(pipeline.progress(data)[0])]
            for source in (iter(batches(2, first=20)), data):
                while True:
                    try:
                        progress_all(pipeline, source, losses)
                        break
                    except (OSError, RankError):
                        errors += 1
        assert errors == 1
        steps = [*range(step), 20, 21, *range(step, 5)]
        program.check(losses, program.expect([one for at in steps for one in whole(1, at)]))


def closes_midway(choice: Choice) -> None:
    """A new pipeline computes what the one before had taken; closed ones keep no loader."""
    program, data = Program(choice), (batch for batch in batches(8))
    losses, is_held, pipelines = [], weakref.ref(data), []
    for _ in range(2):
        with program.pipeline() as pipeline:
            losses += [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
        pipelines.append(pipeline)
    with program.pipeline() as pipeline:
        losses += progress_all(pipeline, iter(batches(1, first=20)))
    del data
    gc.collect()
    assert is_held() is None, pipelines
    steps = [*range(4), 20]
    program.check(losses, program.expect([one for at in steps for one in whole(1, at)]))
    # An error that was taken, too, since a generator ends with it.
    program, fail = Program(choice), once(OSError("gone"), [dist.get_world_size() - 1], 3)
    data = (batch for at, batch in enumerate(batches(5)) if fail(at) is None)
    with program.pipeline() as pipeline:
        losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
    with program.pipeline() as pipeline, pytest.raises((OSError, RankError), match="gone"):
        progress_all(pipeline, data, losses)
    program.check(losses, program.expect(whole(3)))


def fails_inside_a_step(choice: Choice) -> None:
    """What goes on with the model is refused, in any loop; what was trained before is kept."""
    errors: list[BaseException] = [ArithmeticError("halt"), KeyboardInterrupt("halt")]
    for error in errors:
        program, data = Program(choice), iter(batches())
        pipeline = program.pipeline()
        losses = [mean_over_ranks(pipeline.progress(data)[0])]
        [out] = [
            m for m in program.model.modules() if isinstance(m, nn.Linear) and m.out_features == 1
        ]
        fail = once(error, range(dist.get_world_size()))
        out.register_forward_hook(lambda *_, fail=fail: fail(0))  # type: ignore[misc]
        with pytest.raises(type(error), match="halt"):
            pipeline.progress(data)
        for source in (data, iter(batches())):
            with pytest.raises(RuntimeError, match=r"expected an open .*halt.* batches \[1, 2"):
                pipeline.progress(source)
        pipeline.close()
        model, optimizer = program.model, program.optimizer
        with TemporaryDirectory() as folder:
            ways: list[Callable[[], Any]] = [
                program.pipeline,
                lambda model=model: model(batches(1)[0]),  # type: ignore[misc]
                partial(hotrec.save_checkpoint, folder, model, optimizer, 1),
                partial(hotrec.load_checkpoint, folder, model, optimizer),
            ]
            for way in ways:
                with pytest.raises(RuntimeError, match=r"expected .* failed: .*halt.* checkpoint"):
                    way()
            assert not list(Path(folder).iterdir())
        program.check(losses, program.expect(whole(1)))


def fails_in_evaluation(choice: Choice) -> None:
    """Nothing was updated, so that a new pipeline goes on; several ranks may be apart."""
    program, fail = Program(choice), once(ArithmeticError("halt"), range(dist.get_world_size()))
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(batches(2)))
        hook = program.model.module.hidden.register_forward_hook(lambda *_: fail(0))
        with pytest.raises(ArithmeticError):
            evaluate(program, pipeline, iter(batches(1)))
        hook.remove()
        program.model.train()
        done = "Nothing was" if dist.get_world_size() == 1 else "Ranks may be apart"
        with pytest.raises(RuntimeError, match=rf"halt.* {done}"):
            pipeline.progress(iter(batches()))
    if dist.get_world_size() > 1:
        with pytest.raises(RuntimeError, match=r"halt.* Ranks may be apart"):
            program.pipeline()
        return
    with program.pipeline() as pipeline:
        losses += progress_all(pipeline, iter(batches(3, first=2)))
    program.check(losses, program.expect(whole()))


def changes_what_was_read_once(choice: Choice) -> None:
    """Refused before the step, which is made once the change is undone."""
    program = Program(choice)
    parameters = [
        p for name, p in program.model.named_parameters() if name.endswith("hidden.weight")
    ]

    def freeze() -> None:
        parameters[0].requires_grad_(not parameters[0].requires_grad)

    parts = dict(program.optimizer.optimizers)

    def slow_down() -> None:
        for group in parts["fused"].param_groups:
            group["lr"] = 0.8 if group["lr"] < 0.1 else 0.01

    ways: list[tuple[Callable[[], None], str]] = [
        (freeze, r"parameter hidden\.weight: expected .*trained.* got .*frozen"),
    ]
    if "hot" in parts:
        ways.append((slow_down, r"learning rates .*(0\.01 and 0\.8|0\.8 and 0\.01)"))
    layers = {p for n, p in program.model.named_parameters() if not n.startswith("bags.")}
    groups = program.optimizer.param_groups
    replicated = [g for g in groups if "momentum" in g and layers.isdisjoint(g["params"])]

    def decay() -> None:
        for group in replicated:
            group["weight_decay"] = 0.5 - group["weight_decay"]

    if replicated:
        ways.append((decay, "options of embedding rows: .*weight_decay.*got .*weight_decay"))
    others = torch.optim.Adagrad(program.model.parameters()), Program(choice).optimizer
    for other in others:
        with refused("optimizer .*: expected the one .* got another"):
            hotrec.Pipeline(program.model, other, CPU)
    data = iter(batches())
    with program.pipeline() as pipeline:
        losses = [mean_over_ranks(pipeline.progress(data)[0])]
        for change, text in ways:
            change()
            with refused(text):
                pipeline.progress(data)
            if not choice.is_ahead and not choice.is_plain:
                with refused(text):
                    program.model(batches(1)[0])
            change()
        for disabled in (torch.no_grad(), torch.inference_mode()):
            with refused("expected gradients"), disabled:
                pipeline.progress(data)
        losses += progress_all(pipeline, data)
        program.check(losses, program.expect(whole()))
        program.model.double()
        with refused("parameter .*: expected .*float32.* got .*float64"):
            pipeline.progress(iter(batches()))


def adds_up_forward_passes(choice: Choice) -> None:
    """In one backward pass; one that is not trained changes nothing."""
    if choice.is_ahead or choice.is_plain:
        return
    program = Program(choice)
    first, second, *_ = batches()
    losses = []
    for batch in batches(2):
        program.model(second)
        losses.append(step_by_hand(program, batch))
    program.check(losses, program.expect(whole(2)))
    for num in (2, 3):
        total = sum(program.model(batch)[0] for batch in [first, second, first][:num])
        with refused("expected one forward pass in a backward pass"):
            total.backward()  # type: ignore[union-attr]
    program.check(losses, losses)  # nothing was updated


def loads_weights_midway(choice: Choice) -> None:
    """With batches prefetched, which then read the loaded rows; with rows in slots, too."""
    cached = replace(choice, hot=Placement.alike(some_hot(), Tier.CACHED, 0.9))
    for of in [choice, cached] if choice.is_ahead else [choice]:
        program, data = Program(of), iter(batches(7))
        with program.pipeline() as pipeline, TemporaryDirectory() as own:
            folder = broadcast_object(own)
            losses = [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
            expected = program.expect(whole(2))
            hotrec.save_checkpoint(folder, program.model, program.optimizer, 2)
            weights = copy.deepcopy(program.unsplit.state_dict())
            losses += [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
            expected += program.expect(whole(2, first=2))
            hotrec.load_checkpoint(folder, program.model, program.optimizer)
            program.unsplit.load_state_dict(weights)
            found = evaluate(program, pipeline, iter(batches(1, first=50)))
            np.testing.assert_allclose(
                found, program.expect_evaluated(whole(1, first=50)), rtol=1e-5
            )
            losses += progress_all(pipeline, data)
            expected += program.expect(whole(3, first=4))
        found = evaluate(program, program.pipeline(), iter(batches(1, first=50)))
        np.testing.assert_allclose(found, program.expect_evaluated(whole(1, first=50)), rtol=1e-5)
        program.check(losses, expected)


def writes_tables_in_place(choice: Choice) -> None:
    """Between steps, with batches prefetched, also in ways that torch does not count."""
    cached = replace(choice, hot=Placement.alike(some_hot(), Tier.CACHED, 0.9))
    for of in [choice, cached] if choice.is_ahead else [choice]:
        program, data = Program(of), iter(batches(8))

        def parameters(program: Program = program) -> list[torch.Tensor]:
            return [p for name, p in program.model.named_parameters() if "bags" in name]

        def uncounted(program: Program = program) -> list[torch.Tensor]:
            return [p.data for name, p in program.model.named_parameters() if "bags" in name]

        def of_state(program: Program = program) -> list[torch.Tensor]:
            values = [v for name, v in program.model.state_dict().items() if "bags" in name]
            shards = [v.local_shards() if hasattr(v, "local_shards") else None for v in values]
            pairs = zip(values, shards, strict=True)
            return [t for v, of in pairs for t in ([v] if of is None else [s.tensor for s in of])]

        ways: list[Callable[[], list[torch.Tensor]]] = [
            parameters,
            of_state,
            uncounted,
        ]
        losses, expected = [], []
        with program.pipeline() as pipeline:
            for step, tensors in enumerate(ways):
                losses += [mean_over_ranks(pipeline.progress(data)[0]) for _ in range(2)]
                expected += program.expect(whole(2, first=2 * step))
                pipeline.drain()
                with torch.no_grad():
                    for tensor in tensors():
                        tensor.mul_(-1.5)
                    for bag in program.unsplit.bags.parameters():
                        bag.mul_(-1.5)
                held_out = whole(1, first=50 + step)
                found = evaluate(program, pipeline, iter(batches(1, first=50 + step)))
                np.testing.assert_allclose(found, program.expect_evaluated(held_out), rtol=1e-5)
            losses += progress_all(pipeline, data)
            expected += program.expect(whole(2, first=6))
        program.check(losses, expected)


def has_a_label_that_is_no_number(choice: Choice) -> None:
    """What is not a number spreads as in the unsplit model, and no further."""
    program = Program(choice)
    mine, all_ranks = batches(), whole()
    all_ranks[2].labels[0] = float("nan")
    if dist.get_rank() == 0:
        mine[2].labels[0] = float("nan")
    with program.pipeline() as pipeline:
        losses = progress_all(pipeline, iter(mine))
    program.check(losses, program.expect(all_ranks))


def reads_other_features_in_evaluation(choice: Choice) -> None:
    """Whatever features the first step reads, which TorchRec's pipeline goes on to read."""
    program = Program(choice, Switching)
    mine, everything = batches(3), whole(3)
    for batch in (*mine, *everything):
        batch.other = batch.ids
        batch.ids = KeyedJaggedTensor(
            batch.ids.keys(), batch.ids.values() % 7, lengths=batch.ids.lengths()
        )
    with program.pipeline() as pipeline:
        data = iter(mine)
        if choice.is_ahead:
            with refused(r'got them in 2 of 2.*pipeline="base"'):
                pipeline.progress(data)
            return
        losses = [mean_over_ranks(pipeline.progress(data)[0])]
        found = evaluate(program, pipeline, iter(mine))
        expected = program.expect(everything[:1])
        np.testing.assert_allclose(found, program.expect_evaluated(everything), rtol=1e-5)
        if choice.is_traced:
            program.model.eval()
            with (
                refused("expected the traced features of the batch, got different ones"),
                torch.no_grad(),
            ):
                pipeline.progress(data)
            return
        losses += progress_all(pipeline, data)
    program.check(losses, expected + program.expect(everything[1:]))


CASES: list[Callable[[Choice], None]] = [
    trains_in_the_pipeline,
    trains_in_a_loop_of_its_own,
    is_not_trained_outside,
    trains_the_whole_model,
    makes_one_backward_pass_per_step,
    changes_gradients_before_its_step,
    has_ranks_with_other_numbers_of_batches,
    has_batches_of_other_sizes,
    has_collections_of_other_bags,
    evaluates_midway,
    changes_iterators,
    evaluates_what_it_read_ahead,
    has_control_flow_by_values,
    computes_its_features,
    uses_a_layer_in_some_steps,
    looks_up_twice,
    has_features_that_cannot_be_looked_up,
    has_one_iterator_for_all_epochs,
    has_a_loader_that_fails_once,
    turns_to_other_iterators,
    closes_midway,
    fails_inside_a_step,
    fails_in_evaluation,
    changes_what_was_read_once,
    adds_up_forward_passes,
    loads_weights_midway,
    writes_tables_in_place,
    has_a_label_that_is_no_number,
    reads_other_features_in_evaluation,
]


@dataclass(frozen=True)
class Check:
    """A case under a choice."""

    case: Callable[[Choice], None]
    choice: Choice

    @property
    def __name__(self) -> str:
        return f"{self.case.__name__} {self.choice.name}"

    def __call__(self) -> None:
        self.case(self.choice)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_case_under_every_choice(world_size: int) -> None:
    # The number of choices is odd: one is on two ranks in one case, and on three in the next.
    assert len(choices()) % 2 == 1
    checks = on_ranks([Check(case, choice) for case in CASES for choice in choices()], world_size)
    verdicts = run_ranks(run_checks, world_size, timeout_s=580, checks=checks)[0]
    failed = {name: text for name, text in verdicts.items() if text is not None}
    assert not failed, "\n".join(f"{name}:\n{text}" for name, text in failed.items())


def stops_alone(choice: Choice, failing: int) -> str:
    """What a rank hears of an error on one of them, which then ends."""
    program, data = Program(choice), iter(batches())
    pipeline = program.pipeline()
    fail = once(ArithmeticError("halt"), [failing])
    pipeline.progress(data)
    program.model.module.hidden.register_forward_hook(lambda *_: fail(0))
    with pytest.raises((ArithmeticError, RankError)) as caught:
        progress_all(pipeline, data)
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("at", range(3))
def test_an_error_of_one_rank_is_named_on_the_other(at: int) -> None:
    found = run_ranks(stops_alone, 2, timeout_s=60, choice=choices()[at], failing=at % 2)
    assert found[at % 2] == "ArithmeticError halt"
    assert found[1 - at % 2] == f"RankError [rank {at % 2}] ArithmeticError: halt"
