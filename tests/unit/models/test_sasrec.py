"""SASRec against its formula, torch's attention, and itself in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hotrec.models.sasrec import Sasrec, SasrecBlock
from hotrec.models.sequence import SequenceColumns, attention_mask
from tests.unit.models.sequences import (
    COLUMNS,
    DIM,
    NUM_LABELS,
    candidate,
    encode,
    gradients,
    linear,
    make_batch,
    make_sasrec,
    norm,
    samples_of,
    score,
    tokens_of,
)

# The paper's: items with positions alone.
PAPER = SequenceColumns(history={"watched": "video"})


def block(layer: SasrecBlock, tokens: list[torch.Tensor], num_context: int) -> list[torch.Tensor]:
    """A block by its formula, by loops over tokens and heads."""
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


def by_loops(model: Sasrec, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, and the vectors of users and items."""
    columns = model.tokens.columns

    def item_of(x: torch.Tensor) -> torch.Tensor:
        return encode(model.tokens.item, x) if len(columns.history) > 1 else x

    logits, users, items = [], [], []
    for sample in samples_of(batch):
        tokens = tokens_of(model.tokens, item_of, sample[1])
        for layer in model.layers:
            tokens = block(layer, tokens, len(columns.context))
        users.append(norm(model.user_norm, tokens[-1]))
        items.append(item_of(candidate(columns, sample[1])))
        product = (users[-1] * items[-1]).sum()
        logits.append(product + score(model.score, users[-1], items[-1], sample))
    return torch.stack(logits), torch.stack(users), torch.stack(items)


@pytest.mark.parametrize("columns", [COLUMNS, PAPER], ids=["all", "paper"])
@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (2, 3)])
def test_values_are_those_of_the_formula(
    columns: SequenceColumns, num_layers: int, num_heads: int
) -> None:
    model = make_sasrec(columns, num_layers=num_layers, num_heads=num_heads).double()
    batch = make_batch(columns=columns)
    logits, users, items = by_loops(model, batch)
    torch.testing.assert_close(model(*batch), logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(model.user_vectors(*batch), users, rtol=0, atol=1e-12)
    of_items = {name: batch[1][name] for name in columns.history.values()}
    torch.testing.assert_close(model.item_vectors(of_items), items, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    model, batch = make_sasrec(seed=1).double(), make_batch()
    inputs = [*model.parameters(), *(rows for rows, _ in batch[1].values())]
    found = torch.autograd.grad(model(*batch).square().sum(), inputs)
    expected = torch.autograd.grad(by_loops(model, batch)[0].square().sum(), inputs)
    assert all(grads.abs().max() > 0 for grads in found)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_with_no_layers_over_them_the_score_is_the_product_as_in_the_paper() -> None:
    model, batch = make_sasrec(PAPER).double(), make_batch(columns=PAPER)
    torch.nn.init.zeros_(model.score.last.weight)
    torch.nn.init.zeros_(model.score.last.bias)
    products = (model.user_vectors(*batch) * batch[1]["video"][0]).sum(1)
    torch.testing.assert_close(model(*batch), products.unsqueeze(1).expand(-1, NUM_LABELS))


def test_attention_is_torchs() -> None:
    model = make_sasrec().double()
    layer = model.layers[0]
    tokens, is_token = model.tokens(make_batch()[1])
    sees = attention_mask(is_token, 2)
    normed = layer.attention_norm(tokens)
    q, k, v = (
        of(normed).unflatten(2, (2, -1)).transpose(1, 2)
        for of in (layer.query, layer.key, layer.value)
    )
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees.unsqueeze(1))
    x = tokens + attended.transpose(1, 2).flatten(2)
    expected = x + layer.token_layers(layer.token_norm(x))
    found = layer(tokens, sees, tokens.size(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("columns", [COLUMNS, PAPER], ids=["all", "paper"])
def test_batches_without_samples_or_ids(lengths: tuple[int, ...], columns: SequenceColumns) -> None:
    model, batch = make_sasrec(columns).double(), make_batch(lengths, columns)
    logits = model(*batch)
    assert logits.shape == (len(lengths), NUM_LABELS)
    assert all(values.isfinite().all() for values in gradients(model, batch))
    if lengths:
        torch.testing.assert_close(logits, by_loops(model, batch)[0], rtol=0, atol=1e-12)


def test_heads_divide_the_dimension() -> None:
    with pytest.raises(ValueError, match=f"num_heads: expected a divisor of .* {DIM}, got 4"):
        make_sasrec(num_heads=4)
