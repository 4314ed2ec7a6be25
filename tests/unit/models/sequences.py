"""Batches of sequences, and the formulas of models over them, sample by sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hotrec.models.hstu import Hstu
from hotrec.models.sasrec import Sasrec
from hotrec.models.sequence import JaggedRows, SequenceColumns

DIM, NUM_DENSE, NUM_LABELS, MAX_LENGTH = 6, 2, 3, 5
# Empty, short, full and cut histories.
LENGTHS = (2, 0, 5, 8, 1)
COLUMNS = SequenceColumns(
    history={"watched": "video", "watched_author": "author"},
    side=("action", "hour"),
    context=("user", "interests"),
    others=("tags",),
)
Batch = tuple[torch.Tensor, dict[str, JaggedRows]]


def common(columns: SequenceColumns = COLUMNS, **changed: Any) -> dict[str, Any]:
    """The arguments that both models have."""
    common = {
        "columns": columns,
        "embedding_dim": DIM,
        "num_dense": NUM_DENSE,
        "num_labels": NUM_LABELS,
        "num_layers": 2,
        "num_heads": 2,
        "max_length": MAX_LENGTH,
        "dropout": 0.0,
        "over_layer_sizes": [7, 4, 1],
    }
    return common | changed


def make_hstu(columns: SequenceColumns = COLUMNS, seed: int = 0, **changed: Any) -> Hstu:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        arguments = {"attention_dim": 3, "linear_dim": 4} | common(columns, **changed)
        return randomized(Hstu(**arguments))


def make_sasrec(columns: SequenceColumns = COLUMNS, seed: int = 0, **changed: Any) -> Sasrec:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return randomized(Sasrec(**common(columns, **changed)))


def randomized(layers: Any) -> Any:
    """The layers with every weight drawn, so that none is a one or zero of its initial value."""
    with torch.no_grad():
        for weight in layers.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return layers


def make_batch(
    lengths: Sequence[int] = LENGTHS, columns: SequenceColumns = COLUMNS, seed: int = 1
) -> Batch:
    """Dense columns and rows in float64: several ids of interests, any number of tags."""
    generator = torch.Generator().manual_seed(seed)
    num_samples = len(lengths)
    numbers = {name: [1] * num_samples for name in (*columns.context, *columns.history.values())}
    numbers |= {name: list(lengths) for name in (*columns.history, *columns.side)}
    numbers |= {name: [number % 3 for number in range(num_samples)] for name in columns.others}
    if "interests" in numbers:
        numbers["interests"] = [2 + number % 2 for number in range(num_samples)]
    rows = {}
    for name, number in numbers.items():
        rows_KD = torch.randn(sum(number), DIM, generator=generator, dtype=torch.float64)
        rows[name] = rows_KD.requires_grad_(), torch.tensor(number, dtype=torch.int64)
    dense = torch.randn(num_samples, NUM_DENSE, generator=generator, dtype=torch.float64)
    return dense, rows


def choose(batch: Batch, samples: Sequence[int]) -> Batch:
    """These samples of a batch, in this order."""
    dense, columns = batch
    chosen: dict[str, JaggedRows] = {}
    for name, (rows_KD, lengths_B) in columns.items():
        parts = rows_KD.split(lengths_B.tolist())
        rows = torch.cat([rows_KD[:0], *(parts[sample] for sample in samples)])
        chosen[name] = rows, lengths_B[list(samples)]
    return dense[list(samples)], chosen


def to(batch: Batch, of: Any) -> Batch:
    """The batch on another device or of another type."""
    dense, columns = batch
    moved: dict[str, JaggedRows] = {}
    for name, (rows_KD, lengths_B) in columns.items():
        lengths = lengths_B.to(of) if isinstance(of, torch.device) else lengths_B
        moved[name] = rows_KD.detach().to(of).requires_grad_(), lengths
    return dense.to(of), moved


def gradients(layers: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Of the sum of squared logits: of the weights, and of the rows by their names."""
    dense, columns = batch
    inputs = [*layers.parameters(), *(columns[name][0] for name in sorted(columns))]
    loss = layers(dense, columns).square().sum()
    return list(torch.autograd.grad(loss, inputs))


# The same sample by sample, without padding: tokens are (T, D).


def samples_of(batch: Batch) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Each sample's dense columns, and its rows by feature."""
    dense, columns = batch
    parts = {name: rows.split(lengths.tolist()) for name, (rows, lengths) in columns.items()}
    for sample in range(len(dense)):
        yield dense[sample], {name: of[sample] for name, of in parts.items()}


def tokens_of(tokens: Any, item: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tokens of context and history, the oldest first; item maps concatenated columns."""
    columns = tokens.columns
    pairs = zip(columns.context, tokens.context, strict=True)
    context = [layer(rows[name].sum(0, keepdim=True)) for name, layer in pairs]
    length = len(rows[next(iter(columns.history))])
    if not length:
        return torch.cat([*context, tokens.positions[-1:]])
    made = item(torch.cat([rows[name] for name in columns.history], dim=1))
    if columns.side:
        made = made + tokens.side(torch.cat([rows[name] for name in columns.side], dim=1))
    return torch.cat([*context, made[-MAX_LENGTH:] + tokens.positions[-min(length, MAX_LENGTH) :]])


def score(layers: Any, user: torch.Tensor, item: torch.Tensor, sample: Any) -> torch.Tensor:
    dense, rows = sample
    x = torch.cat([user * item, *(rows[name].sum(0) for name in layers.others), dense])
    for layer in layers.hidden:
        x = layer(x).relu()
    return layers.last(x)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, num_context: int, weigh: Any
) -> torch.Tensor:
    """Every token sees itself, those before it and the context."""
    num = len(q)
    is_seen = torch.ones(num, num, dtype=torch.bool).tril()
    is_seen[:, :num_context] = True
    sums = []
    for of_q, of_k, of_v in zip(*(x.chunk(heads, dim=1) for x in (q, k, v)), strict=True):
        weights = weigh(of_q @ of_k.t() / of_q.shape[1] ** 0.5, is_seen)
        sums.append(weights @ of_v)
    return torch.cat(sums, dim=1)


def stu(layer: Any, tokens: torch.Tensor, num_context: int) -> torch.Tensor:
    """HSTU's layer by its formula."""
    normed = layer.norm(tokens)
    (u, q), (v, k) = (F.silu(of(normed)).split(layer.dims, dim=1) for of in (layer.uq, layer.vk))

    def weigh(products: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        return F.silu(products) * is_seen / (num_context + MAX_LENGTH + 1)

    a = attend(q, k, v, layer.num_heads, num_context, weigh)
    return tokens + layer.output(torch.cat((u, a, layer.attention_norm(a) * u), dim=1))


def block(layer: Any, tokens: torch.Tensor, num_context: int) -> torch.Tensor:
    """SASRec's block by its formula."""
    normed = layer.attention_norm(tokens)
    q, k, v = (of(normed) for of in (layer.query, layer.key, layer.value))

    def weigh(products: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        return products.masked_fill(~is_seen, -torch.inf).softmax(1)

    x = tokens + attend(q, k, v, layer.num_heads, num_context, weigh)
    first, _, second = layer.token_layers
    return x + second(first(layer.token_norm(x)).relu())


def by_samples(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and for retrieval the vectors of users, without their candidates, and items."""
    columns, is_hstu = model.tokens.columns, hasattr(model, "candidate")
    apply = stu if is_hstu else block
    item_of = model.tokens.item if is_hstu or len(columns.history) > 1 else lambda x: x

    def user_of(tokens: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            tokens = apply(layer, tokens, len(columns.context))
        return model.user_norm(tokens[-1])

    logits, users, items = [], [], []
    for sample in samples_of(batch):
        rows = sample[1]
        tokens = tokens_of(model.tokens, item_of, rows)
        of_item = torch.cat([rows[name].sum(0) for name in columns.history.values()])
        users.append(user_of(tokens))
        items.append(model.item_tower(of_item) if is_hstu else item_of(of_item))
        if is_hstu:  # the candidate is the last token
            history = tokens if len(rows[next(iter(columns.history))]) else tokens[:-1]
            user = user_of(torch.cat((history, (item_of(of_item) + model.candidate).view(1, -1))))
            logits.append(score(model.score, user, items[-1], sample))
        else:
            product = (users[-1] * items[-1]).sum()
            logits.append(product + score(model.score, users[-1], items[-1], sample))
    return torch.stack(logits), torch.stack(users), torch.stack(items)
