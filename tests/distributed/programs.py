"""A user's program of two calls, beside the unsplit model that it must equal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec
from hotrec.runtime.ranks import broadcast_object
from hotrec.types import Partition, PipelineKind, TorchrecPlan
from tests.distributed.setups import gather
from tests.helpers.checks import run_checks
from tests.helpers.ranks import run_ranks
from tests.unit.planner.situations import torchrec_plan

GLOBAL_BATCH, DIM = 24, 8
CPU = torch.device("cpu")
ROWS = {"user": 90, "item": 40}
# Adagrad would hide a gradient of the wrong size.
SGD: Any = partial(torch.optim.SGD, lr=0.8)
EMBEDDING: Any = partial(RowWiseAdagrad, lr=0.2, eps=1e-8)
DENSE: Any = partial(torch.optim.Adagrad, lr=0.05)
RULES = {"embedding_optimizer": EMBEDDING, "dense_optimizer": DENSE}
LOOK_AHEAD, SPARSE_DIST, BASE = (
    PipelineKind.look_ahead,
    PipelineKind.sparse_dist,
    PipelineKind.base,
)


@dataclass
class Batch(Pipelineable):
    """One of the caller's; ``other`` is for what a model reads besides."""

    dense: torch.Tensor
    ids: KeyedJaggedTensor
    labels: torch.Tensor
    other: KeyedJaggedTensor | None = None

    def parts(self) -> dict[str, Any]:
        return {name: part for name, part in vars(self).items() if part is not None}

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        moved = {n: p.to(device, non_blocking=non_blocking) for n, p in self.parts().items()}
        return type(self)(**moved)

    def record_stream(self, stream: torch.Stream) -> None:
        for part in self.parts().values():
            part.record_stream(stream)


def make_batch(
    step: int,
    part: slice = slice(None),
    size: int = GLOBAL_BATCH,
    *,
    features: Mapping[str, int] = ROWS,
    is_weighted: bool = False,
    most: int = 3,
    dtype: torch.dtype = torch.int64,
) -> Batch:
    """Some samples of a step's global batch, in which low rows are read often."""
    rng = np.random.default_rng((7, step))
    dense = rng.standard_normal((size, 2)).astype(np.float32)[part]
    labels = (rng.random(size) < 0.4).astype(np.float32)[part]
    lengths, ids, weights = [], [np.empty(0)], [np.empty(0)]
    for limit in features.values():
        counts = rng.integers(0, most + 1, size)
        bags = [[rng.random(num) ** 3 * limit, rng.random(num) + 0.5] for num in counts][part]
        lengths.append(counts[part])
        ids += [bag for bag, _ in bags]
        weights += [of_bag for _, of_bag in bags]
    found = KeyedJaggedTensor(
        list(features),
        torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(dtype),
        torch.from_numpy(np.concatenate(weights)).float() if is_weighted else None,
        lengths=torch.from_numpy(np.concatenate(lengths)),
        stride=len(labels),
    )
    return Batch(torch.from_numpy(dense), found, torch.from_numpy(labels))


def equal(_: int) -> list[int]:
    return [GLOBAL_BATCH // dist.get_world_size()] * dist.get_world_size()


def rising(_: int) -> list[int]:
    return [4 + 5 * rank for rank in range(dist.get_world_size())]


def one_empty(step: int) -> list[int]:
    size = dist.get_world_size()
    return [7 if rank != step % size or size == 1 else 0 for rank in range(size)]


Make = Callable[..., Any]
Steps = int | Iterable[int]
Sizes = Callable[[int], list[int]]


def _steps(steps: Steps) -> Iterable[int]:
    return range(steps) if isinstance(steps, int) else steps


def mine(steps: Steps, make: Make = make_batch, sizes: Sizes = equal) -> list[Any]:
    """This rank's slices of the global batches, of which ``whole`` has all samples."""
    rank, found = dist.get_rank(), []
    for step in _steps(steps):
        *before, end = np.cumsum([0, *sizes(step)[: rank + 1]]).tolist()
        found.append(make(step, slice(before[-1], end), sum(sizes(step))))
    return found


def whole(steps: Steps, make: Make = make_batch, sizes: Sizes = equal) -> list[Any]:
    return [make(step, slice(0, sum(sizes(step))), sum(sizes(step))) for step in _steps(steps)]


def table(name: str, features: Sequence[str] = (), **given: Any) -> EmbeddingBagConfig:
    given = {"num_embeddings": ROWS.get(name), "embedding_dim": DIM} | given
    return EmbeddingBagConfig(name=name, feature_names=list(features) or [name], **given)


class Model(nn.Module):
    """(batch) -> (loss, (loss, logits)); cases change a part of it."""

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig] = (),
        keys: Sequence[str] = tuple(ROWS),
        *,
        is_weighted: bool = False,
        device: str = "cpu",
        width: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        mean = PoolingType.SUM if is_weighted else PoolingType.MEAN
        chosen = list(tables) or [table("user"), table("item", pooling=mean)]
        self.keys, on = list(keys), torch.device(device)
        self.bags = EmbeddingBagCollection(chosen, is_weighted=is_weighted, device=on)
        self.hidden = nn.Linear(width or 2 + DIM * len(keys), 8)
        self.out = nn.Linear(8, 1)

    def pooled(self, batch: Any) -> list[torch.Tensor]:
        found = self.bags(batch.ids)
        return [found[name] for name in self.keys]

    def head(self, values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(torch.tanh(self.hidden(values)))
        return logits.squeeze(-1)

    def logits(self, batch: Any) -> torch.Tensor:
        return self.head(torch.cat([batch.dense, *self.pooled(batch)], dim=1))

    def forward(self, batch: Any) -> Any:
        logits = self.logits(batch)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach())


def some_hot(rows: Mapping[str, int] = ROWS, num: int = 9) -> Partition:
    return Partition(rows, {name: np.arange(min(num, of)) for name, of in rows.items()})


@dataclass(frozen=True)
class Choice:
    """One that ``auto`` can make, or "off"."""

    name: str
    kind: PipelineKind
    hot: Any = some_hot  # or what is passed, whatever the rows of the tables are

    @property
    def is_ahead(self) -> bool:
        return self.kind is LOOK_AHEAD

    @property
    def is_plain(self) -> bool:
        return bool(self.hot == "off")

    @property
    def is_traced(self) -> bool:
        return self.kind is SPARSE_DIST

    @property
    def given(self) -> dict[str, Any]:
        """A choice has its pipeline."""
        return {} if isinstance(self.hot, hotrec.Choice) else {"pipeline": self.kind}


def of_plan(plan: TorchrecPlan, kind: PipelineKind = SPARSE_DIST) -> Choice:
    choice = hotrec.Choice(torchrec_plan(plan, kind), "asked")
    return Choice(f"{plan.name} {kind.name}", kind, choice)


CHOICES = {
    **{kind.name: [Choice(kind.name, kind)] for kind in (LOOK_AHEAD, SPARSE_DIST, BASE)},
    "plan": [*map(of_plan, TorchrecPlan), of_plan(TorchrecPlan.table_wise, BASE)],
    "off": [Choice(f"off {kind.name}", kind, "off") for kind in (SPARSE_DIST, BASE)],
}


def mean_over_ranks(value: torch.Tensor, size: int = 1) -> float:
    """The mean of the ranks' values, weighted by their samples."""
    total = torch.tensor([float(value) * size if size else 0.0, float(size)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found.squeeze()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


class Program:
    """A model in two calls, and the unsplit one, with the losses of both."""

    open: hotrec.Pipeline

    def __init__(
        self,
        choice: Choice,
        make: Callable[[], nn.Module] = Model,
        rules: tuple[Any, Any] = (SGD, SGD),
        rows: Mapping[str, int] = ROWS,
        **given: Any,
    ) -> None:
        self.choice, self._rules, self._rows = choice, rules, rows
        self.unsplit: Any = make()
        self.unsplit.load_state_dict(broadcast_object(self.unsplit.state_dict()))
        kinds = (EmbeddingBagCollection, EmbeddingCollection)
        found = [m for m in self.unsplit.modules() if isinstance(m, kinds)]
        tables = {parameter for module in found for parameter in module.parameters()}
        trained = [p for p in self.unsplit.parameters() if p.requires_grad]
        parts = [[p for p in trained if (p in tables) is is_table] for is_table in (True, False)]
        self.unsplit_rules = [rule(part) for rule, part in zip(rules, parts, strict=True) if part]
        self.losses: list[float] = []
        self.expected: list[float] = []
        self.parallelize(make, **given)

    def parallelize(self, make: Callable[[], nn.Module], **given: Any) -> None:
        """Also to go on with a new model."""
        hot = self.choice.hot
        made: Any = hotrec.parallelize(
            make(),
            hot(self._rows) if callable(hot) else hot,
            **({"embedding_optimizer": self._rules[0], "dense_optimizer": self._rules[1]} | given),
            **self.choice.given,
        )
        self.model, self.optimizer = made

    def pipeline(self, **given: Any) -> hotrec.Pipeline:
        self.open = hotrec.Pipeline(self.model, self.optimizer, **given)
        return self.open

    def progress(self, data: Iterator[Any]) -> float:
        """The global loss of a step."""
        output = self.open.progress(data)
        has_logits = isinstance(output, tuple) and len(output) == 2
        return mean_over_ranks(loss_of(output), output[1].numel() if has_logits else 1)

    def go(self, data: Iterator[Any], num: int | None = None) -> None:
        """Train so many steps, or until the iterator ends."""
        for _ in count() if num is None else range(num):
            try:
                self.losses.append(self.progress(data))
            except StopIteration:
                assert num is None
                return

    def by_hand(self, batch: Any, change: Callable[[], object] = lambda: None) -> None:
        """A step of a loop of the user's."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(batch))
        loss.backward()
        change()
        self.optimizer.step()
        self.losses.append(mean_over_ranks(loss))

    def expect(self, of: Iterable[Any], change: Callable[[], object] = lambda: None) -> None:
        """Train the unsplit model."""
        for batch in of:
            loss = loss_of(self.unsplit(batch))
            loss.backward()
            change()
            for rule in self.unsplit_rules:
                rule.step()
                rule.zero_grad()
            self.expected.append(float(loss.detach()))

    def evaluates(self, data: Iterator[Any], of: Sequence[Any], *, is_left: bool = True) -> None:
        """The pipeline's next losses are the unsplit model's, which sees whole batches."""
        with evaluating(self.model), evaluating(self.unsplit):
            found = [self.progress(data) for _ in of]
            expected = [float(loss_of(self.unsplit(batch))) for batch in of]
            if not is_left:
                with pytest.raises(StopIteration):
                    self.open.progress(data)
        np.testing.assert_allclose(found, expected, rtol=1e-5)

    def check(self, of: Iterable[Any] = ()) -> None:
        """All losses and weights are those of the unsplit model, once it has seen these, too."""
        self.expect(of)
        np.testing.assert_allclose(self.losses, self.expected, rtol=1e-5)
        tables, layers = hotrec.gather_tables(self.model), dict(self.model.named_parameters())
        for name, weight in self.unsplit.named_parameters():
            found = tables.get(name.split(".")[-2], layers.get(name))
            torch.testing.assert_close(
                found.detach().cpu(), weight.detach(), rtol=0, atol=1e-5, equal_nan=True, msg=name
            )
        hotrec.check_replicas(self.model)


@contextmanager
def refused(key: str, got: str = "") -> Iterator[None]:
    """An error of a line, "key: expected ..., got ...", the same on every rank."""
    with pytest.raises((RuntimeError, ValueError, TypeError, OSError)) as caught:
        yield
    text = re.sub(r"^\[rank \d\] (\w+: )?", "", str(caught.value))
    assert (found := re.search(rf"{key}: expected (.+)", text)), text
    assert got in found[1], text
    assert "\n" not in text
    assert len(set(gather(text))) == 1, gather(text)


def once(error: BaseException, ranks: Sequence[int], step: int = 0) -> Callable[[int], None]:
    """Raises an error at a step of these ranks, once."""
    errors = [error] if dist.get_rank() in ranks else []

    def fail(at: int) -> None:
        if errors and at == step:
            raise errors.pop()

    return fail


@dataclass(frozen=True)
class Check:
    """A case under a choice."""

    case: Callable[[Choice], None]
    choice: Choice

    @property
    def __name__(self) -> str:
        name = getattr(self.case, "__name__", None) or f"{self.case.args}"  # type: ignore[attr-defined]
        return f"{name} {self.choice.name}"

    def __call__(self) -> None:
        self.case(self.choice)


def run_all(checks: Sequence[Check], world_size: int) -> None:
    """All on the same ranks; each failure is told."""
    verdicts = run_ranks(run_checks, world_size, timeout_s=240, checks=list(checks))[0]
    failed = [f"{name}:\n{text}" for name, text in verdicts.items() if text is not None]
    assert not failed, "\n".join(failed)


def spread(cases: Sequence[Callable[[Choice], None]], kind: str) -> list[Check]:
    """Each under one choice of a kind, which follow one another."""
    choices = CHOICES[kind]
    return [Check(case, choices[at % len(choices)]) for at, case in enumerate(cases)]
