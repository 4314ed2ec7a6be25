"""Batches of sequences, and the pieces of models over them written with loops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
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


# The same by loops over samples and tokens: vectors are (D,).


def linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    sums = [(row * x).sum() for row in layer.weight]
    return torch.stack(sums) + (0 if layer.bias is None else layer.bias)


def norm(layer: Any, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    centred = x - x.sum() / len(x)
    return centred / ((centred**2).sum() / len(x) + eps) ** 0.5 * layer.weight + layer.bias


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def encode(layers: Any, x: torch.Tensor) -> torch.Tensor:
    first, swish, second, last = layers
    hidden = linear(first, x)
    hidden = hidden / (1 + (-norm(swish, hidden)).exp())
    return norm(last, linear(second, hidden))


def samples_of(batch: Batch) -> Iterator[tuple[torch.Tensor, Mapping[str, Sequence[torch.Tensor]]]]:
    """Each sample's dense columns, and its rows by feature."""
    dense, columns = batch
    for sample in range(len(dense)):
        rows = {}
        for name, (rows_KD, lengths_B) in columns.items():
            end = int(lengths_B[: sample + 1].sum())
            rows[name] = list(rows_KD[end - int(lengths_B[sample]) : end])
        yield dense[sample], rows


def total(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return sum(rows, torch.zeros(DIM, dtype=torch.float64))


def tokens_of(
    tokens: Any, item: Any, rows: Mapping[str, Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """The tokens of context and history, the oldest first; item maps concatenated columns."""
    columns = tokens.columns
    made = [
        linear(layer, total(rows[name]))
        for name, layer in zip(columns.context, tokens.context, strict=True)
    ]
    length = len(rows[next(iter(columns.history))])
    for place in range(max(0, length - MAX_LENGTH), length):
        token = item(torch.cat([rows[name][place] for name in columns.history]))
        if columns.side:
            side = torch.cat([rows[name][place] for name in columns.side])
            token = token + encode(tokens.side, side)
        made.append(token + tokens.positions[MAX_LENGTH - length + place])
    if not length:
        made.append(tokens.positions[MAX_LENGTH - 1])
    return made


def score(layers: Any, user: torch.Tensor, item: torch.Tensor, sample: Any) -> torch.Tensor:
    dense, rows = sample
    x = torch.cat([user * item, *(total(rows[name]) for name in layers.others), dense])
    for layer in layers.hidden:
        x = linear(layer, x).clamp(min=0)
    return linear(layers.last, x)


def candidate(columns: SequenceColumns, rows: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
    return torch.cat([total(rows[name]) for name in columns.history.values()])


def stu(layer: Any, tokens: list[torch.Tensor], num_context: int) -> list[torch.Tensor]:
    """HSTU's layer by its formula, by loops over tokens and heads."""
    heads, (num_linear, num_attention) = layer.num_heads, layer.dims
    made = []
    for token in tokens:
        normed = norm(layer.norm, token, 1e-6)
        uq, vk = silu(linear(layer.uq, normed)), silu(linear(layer.vk, normed))
        made.append((uq[:num_linear], uq[num_linear:], vk[:num_linear], vk[num_linear:]))
    outputs = []
    for number, (u, q, _, _) in enumerate(made):
        attended = []
        for head in range(heads):
            of_q = slice(head * num_attention // heads, (head + 1) * num_attention // heads)
            of_v = slice(head * num_linear // heads, (head + 1) * num_linear // heads)
            sums = torch.zeros(num_linear // heads, dtype=torch.float64)
            for other, (_, _, v, k) in enumerate(made):
                if other <= number or other < num_context:
                    product = (q[of_q] * k[of_q]).sum() / (num_attention / heads) ** 0.5
                    sums = sums + silu(product) / (num_context + MAX_LENGTH + 1) * v[of_v]
            attended.append(sums)
        a = torch.cat(attended)
        joined = torch.cat((u, a, norm(layer.attention_norm, a, 1e-6) * u))
        outputs.append(tokens[number] + linear(layer.output, joined))
    return outputs


def block(layer: Any, tokens: list[torch.Tensor], num_context: int) -> list[torch.Tensor]:
    """SASRec's block by its formula."""
    normed = [norm(layer.attention_norm, token) for token in tokens]
    q, k, v = ([linear(of, x) for x in normed] for of in (layer.query, layer.key, layer.value))
    width = DIM // layer.num_heads
    outputs = []
    for number, token in enumerate(tokens):
        attended = []
        seen = [i for i in range(len(tokens)) if i <= number or i < num_context]
        for head in range(layer.num_heads):
            part = slice(head * width, (head + 1) * width)
            weights = [((q[number][part] * k[i][part]).sum() / width**0.5).exp() for i in seen]
            sums = [weight * v[i][part] for weight, i in zip(weights, seen, strict=True)]
            attended.append(torch.stack(sums).sum(0) / torch.stack(weights).sum())
        x = token + torch.cat(attended)
        first, _, second = layer.token_layers
        hidden = linear(first, norm(layer.token_norm, x)).clamp(min=0)
        outputs.append(x + linear(second, hidden))
    return outputs


def by_loops(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and for retrieval the vectors of users, without their candidates, and items."""
    columns, is_hstu = model.tokens.columns, hasattr(model, "candidate")
    apply = stu if is_hstu else block

    def item_of(x: torch.Tensor) -> torch.Tensor:
        return encode(model.tokens.item, x) if is_hstu or len(columns.history) > 1 else x

    def user_of(tokens: list[torch.Tensor]) -> torch.Tensor:
        for layer in model.layers:
            tokens = apply(layer, tokens, len(columns.context))
        return norm(model.user_norm, tokens[-1])

    logits, users, items = [], [], []
    for sample in samples_of(batch):
        rows = sample[1]
        tokens, of_item = tokens_of(model.tokens, item_of, rows), candidate(columns, rows)
        users.append(user_of(tokens))
        items.append(encode(model.item_tower, of_item) if is_hstu else item_of(of_item))
        if is_hstu:  # the candidate is the last token
            history = tokens if rows[next(iter(columns.history))] else tokens[:-1]
            user = user_of([*history, item_of(of_item) + model.candidate])
            logits.append(score(model.score, user, items[-1], sample))
        else:
            product = (users[-1] * items[-1]).sum()
            logits.append(product + score(model.score, users[-1], items[-1], sample))
    return torch.stack(logits), torch.stack(users), torch.stack(items)
