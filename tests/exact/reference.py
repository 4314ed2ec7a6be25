"""The oracle: an unsplit model in one process, in plain torch, without hotrec's code.

Hotrec's are the layers of a case that names a model, over the oracle's embeddings.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hotrec.models.zoo import build_architecture
from hotrec.types import ModelKind
from tests.exact.case import NUM_DENSE, Case, PlainTable, Samples, draw_samples
from tests.helpers.dense import shape_of

# The rows int64 (R,) of a table that were at these, -1 where there was none.
FindRows = Callable[[str, torch.Tensor], torch.Tensor]
SEED, LATE = 5, 4
# Where a gradient is near 0 a first step of Adagrad or Adam multiplies its rounding (1e-8) by
# RATE / EPS, and ten steps of training multiply what came of it: with 0.3 and 1e-2 one case in 200
# differed by more than 1e-5 from the unsplit model for that alone.
RATE, EPS, BETAS, DENSE_RATE, DENSE_ADAM_RATE = 0.1, 3e-2, (0.9, 0.999), 0.1, 0.02


def column_names(tables: Sequence[PlainTable]) -> list[str]:
    """The keys of an output: table by table, with the table where several read a feature."""
    read = [name for table in tables for name in table.features]
    return [
        f"{name}@{table.name}" if read.count(name) > 1 else name
        for table in tables
        for name in table.features
    ]


class Reader(nn.Module):
    """Reads an output by its keys and once more by its values, in the order in which they come.

    A leaf for the tracer of TorchRec's pipelines. Rows of sequences are weighted by their places,
    so that their order matters.
    """

    def __init__(self, tables: Sequence[PlainTable], output: str, late: nn.Linear | None) -> None:
        super().__init__()
        self.names = column_names(tables)[::-1]
        self.dims = [table.dim for table in tables for _ in table.features]
        self.first = [n for n in column_names(tables) if n.partition("@")[0].endswith("_0")]
        self.is_sequence, self.layers = output != "bags", nn.ModuleDict()
        if late is not None:
            self.layers["late"] = late

    def forward(self, found: Any) -> torch.Tensor:
        if not self.is_sequence:
            by_key = [found[name] for name in self.names]
            return torch.cat([*by_key, found.values().flip(1)], dim=1)
        parts = [_by_place(found[name]) for name in self.names]
        parts += [_by_place(one) / (2 + at) for at, one in enumerate(found.values())]
        if "late" in self.layers:
            of_ids = torch.tanh(self.layers["late"]([found[name] for name in self.first]))
            parts.append(_sum_by_place(of_ids, found[self.first[0]].lengths()))
        return torch.cat(parts, dim=1)


def _by_place(found: Any) -> torch.Tensor:
    if hasattr(found, "materialize"):
        found = found.materialize()
    return _sum_by_place(found.values(), found.lengths())


def _sum_by_place(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.long()
    begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    weights = 1 / (1.0 + torch.arange(rows.shape[0], device=rows.device) - begins)
    return torch.segment_reduce(rows * weights[:, None], "sum", lengths=lengths, initial=0.0)


class Model(nn.Module):
    """Dense features and rows -> logits, over any collection of embeddings."""

    def __init__(self, embeddings: nn.Module, reader: Reader, labels: int = 1) -> None:
        super().__init__()
        self.embeddings, self.reader = embeddings, reader
        width = NUM_DENSE + 2 * sum(reader.dims) + LATE * len(reader.layers)
        self.layers = nn.ModuleDict({"hidden": nn.Linear(width, 8), "out": nn.Linear(8, labels)})
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in [*reader.parameters(), *self.layers.parameters()]:
                parameter.uniform_(-0.5, 0.5, generator=generator)

    @property
    def dense_parts(self) -> list[nn.Module]:
        return list(self.layers.values())

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        read = self.reader(self.embeddings(sparse))
        hidden = torch.tanh(self.layers["hidden"](torch.cat([dense, read], dim=1)))
        logits: torch.Tensor = self.layers["out"](hidden)
        return logits


def model_of(case: Case, embeddings: nn.Module, late: nn.Linear | None) -> Any:
    """The case's layers over a collection of embeddings."""
    tables = case.tables()
    if not case.model:
        return Model(embeddings, Reader(tables, case.output, late), case.labels)
    sizes: Any = {"dense_layer_sizes": [6, tables[0].dim], "over_layer_sizes": [6, 1]}
    labels = list(case.label_weights or {"label": 1.0})
    features = [(name, table.name) for table in tables for name in table.features]
    shape = shape_of(
        ModelKind[case.model], NUM_DENSE, features, tables[0].dim, labels=labels, **sizes
    )
    return build_architecture(shape, embeddings, SEED, torch.device("cpu"))


def layers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of the dense layers."""
    return {
        name.partition("layers.")[2]: parameter.detach().cpu()
        for name, parameter in model.named_parameters()
        if "layers." in name
    }


def first_rows(table: PlainTable) -> torch.Tensor:
    """Uniform in +-1 / sqrt(rows): a hash (C. Wellons' lowbias32) of seed, table, row, column."""

    def mix(x: Any) -> Any:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(16))

    key = np.full(table.num_rows, zlib.crc32(f"{SEED}/{table.name}".encode()), np.uint32)
    of_row = mix(mix(key) ^ np.arange(table.num_rows, dtype=np.uint32))
    columns = np.arange(table.dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = mix(of_row[:, None] + columns)
    bound = table.num_rows**-0.5
    parts = torch.from_numpy((bits >> np.uint32(8)).astype(np.float32))
    return parts * (2 * bound / (1 << 24)) - bound


class _Columns(dict[str, torch.Tensor]):
    """Pooled vectors by key, as a ``KeyedTensor`` is read."""

    def values(self) -> torch.Tensor:  # type: ignore[override]
        return torch.cat([*super().values()], dim=1)

    def to_dict(self) -> _Columns:
        return self


class _Rows:
    """The rows of a feature, as a ``JaggedTensor`` is read."""

    def __init__(self, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        self._rows, self._lengths = rows, lengths

    def values(self) -> torch.Tensor:
        return self._rows

    def lengths(self) -> torch.Tensor:
        return self._lengths


class _Late(nn.Linear):
    """A layer of the rows of several features, one after the other."""

    def forward(self, features: Sequence[_Rows]) -> torch.Tensor:
        return super().forward(torch.cat([found.values() for found in features], dim=1))


class _Embeddings(nn.Module):
    """Looks each bag up in the whole tables, and pools it with its weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.tables = case, case.tables()
        self.rows = nn.ParameterDict({table.name: first_rows(table) for table in self.tables})

    def forward(self, samples: Samples) -> Any:
        names = iter(column_names(self.tables))
        found: Any = {} if self.case.output != "bags" else _Columns()
        for table in self.tables:
            for feature in table.features:
                bags = samples.ids[feature]
                lengths = torch.tensor([len(bag) for bag in bags])
                rows = F.embedding(torch.from_numpy(np.concatenate(bags)), self.rows[table.name])
                if self.case.output != "bags":
                    found[next(names)] = _Rows(rows, lengths)
                    continue
                if samples.weights is not None:
                    weights = torch.from_numpy(np.concatenate(samples.weights[feature]))
                    rows = rows * weights[:, None]
                sums = torch.segment_reduce(rows, "sum", lengths=lengths, initial=0.0)
                found[next(names)] = sums / lengths.clamp(min=1)[:, None] if table.is_mean else sums
        return found


def update_rows(
    kind: str,
    weight: torch.Tensor,
    state: dict[str, torch.Tensor],
    rows: torch.Tensor,
    number: int,
    rate: float,
) -> None:
    """One update of the rows that a batch read; ``number`` is that of the update."""
    assert weight.grad is not None
    grad = weight.grad[rows]
    change = grad
    if kind in ("adagrad", "rowwise_adagrad"):
        sums = state.setdefault("sum", torch.zeros_like(weight))
        square = grad**2
        sums[rows] += square.mean(1, keepdim=True) if kind == "rowwise_adagrad" else square
        change = grad / (sums[rows].sqrt() + EPS)
    if kind == "adam":
        first, second = (state.setdefault(name, torch.zeros_like(weight)) for name in "mv")
        first[rows] = BETAS[0] * first[rows] + (1 - BETAS[0]) * grad
        second[rows] = BETAS[1] * second[rows] + (1 - BETAS[1]) * grad**2
        mean, square = first[rows] / (1 - BETAS[0] ** number), second[rows]
        change = mean / ((square / (1 - BETAS[1] ** number)).sqrt() + EPS)
    weight[rows] -= rate * change


class Unsplit:
    """The unsplit model, which is trained step by step on global batches."""

    def __init__(self, case: Case) -> None:
        tables = case.tables()
        dims = [t.dim for t in tables for name in t.features if name.endswith("_0")]
        late = _Late(sum(dims), LATE) if case.output == "packed" else None
        self._embeddings = _Embeddings(case)
        self._model = model_of(case, self._embeddings, late)
        self._reset(case)

    def _reset(self, case: Case) -> None:
        """Begin with a new optimizer."""
        self._number = 0
        self._states: dict[str, dict[str, torch.Tensor]] = {t.name: {} for t in case.tables()}
        self._layers = [p for name, p in self._model.named_parameters() if "layers." in name]
        self._dense = (
            torch.optim.Adam(self._layers, lr=DENSE_ADAM_RATE, eps=EPS)
            if case.dense == "adam"
            else torch.optim.SGD(self._layers, lr=DENSE_RATE)
        )

    def weights(self) -> dict[str, torch.Tensor]:
        tables = {name: rows.detach().clone() for name, rows in self._embeddings.rows.items()}
        return tables | {name: value.clone() for name, value in layers_of(self._model).items()}

    def move(self, case: Case, find_rows: FindRows, *, keeps_state: bool) -> None:
        """Go on with a case whose rows were others before, or are new and begin as at first."""
        for table in case.tables():
            rows = find_rows(table.name, torch.arange(table.num_rows))
            is_new = rows < 0
            old = self._embeddings.rows[table.name].detach()
            weight = torch.where(is_new[:, None], first_rows(table), old[rows])
            self._embeddings.rows[table.name] = nn.Parameter(weight)
            for name, value in self._states[table.name].items():
                self._states[table.name][name] = value[rows].masked_fill(is_new[:, None], 0)
        self._embeddings.tables = case.tables()
        if not keeps_state:
            self._reset(case)

    def _loss_of(self, case: Case, step: int) -> tuple[torch.Tensor, Samples]:
        samples, _ = draw_samples(case, step)
        logits = self._model(samples.dense, samples)
        labels = samples.labels.view(-1, case.labels)
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        each = each @ torch.tensor(list((case.label_weights or {"": 1.0}).values()))
        return (each * samples.of_samples).mean(), samples

    def train(self, case: Case) -> list[float]:
        """The losses of a case's steps, and of what it evaluates between them."""
        losses = []
        for segment in case.segments():
            for step in segment:
                self._model.zero_grad()
                loss, samples = self._loss_of(case, step)
                loss.backward()
                losses.append(float(loss.detach()))
                if not (case.skip and step == 2):
                    self._update(case, step, samples)
            if case.evaluate:
                losses += [
                    float(self._loss_of(case, 1000 + step)[0].detach())
                    for step in (segment[0], segment[-1])
                ]
        return losses

    @torch.no_grad()
    def _update(self, case: Case, step: int, samples: Samples) -> None:
        self._number += 1
        for table in case.tables():
            read = [bag for name in table.features for bag in samples.ids[name]]
            rows = torch.from_numpy(np.unique(np.concatenate(read)))
            weight, state = self._embeddings.rows[table.name], self._states[table.name]
            rate = RATE * case.rate_factor(step)
            update_rows(case.optimizer, weight, state, rows, self._number, rate)
        if case.clip:
            nn.utils.clip_grad_norm_(self._layers, case.clip)
        rate = DENSE_ADAM_RATE if case.dense == "adam" else DENSE_RATE
        self._dense.param_groups[0]["lr"] = rate * case.rate_factor(step)
        self._dense.step()


def train(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of the unsplit model on the global batches."""
    unsplit = Unsplit(case)
    return unsplit.train(case), unsplit.weights()
