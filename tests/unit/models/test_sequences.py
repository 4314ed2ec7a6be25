"""HSTU and SASRec against their formulas, written with loops, and themselves in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hotrec.models.flops import count_sequence_work
from hotrec.models.sequence import SequenceColumns, check_lengths
from tests.unit.models.sequences import (
    COLUMNS,
    DIM,
    LENGTHS,
    MAX_LENGTH,
    NUM_LABELS,
    candidate,
    choose,
    encode,
    gradients,
    linear,
    make_batch,
    make_hstu,
    make_sasrec,
    norm,
    samples_of,
    score,
    silu,
    to,
    tokens_of,
)

MODELS = pytest.mark.parametrize("make", [make_hstu, make_sasrec])
RETRIEVAL: dict[str, Any] = {"over_layer_sizes": [], "num_labels": 1}
PAPER = SequenceColumns(history={"watched": "video"})  # items with positions alone


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


@MODELS
@pytest.mark.parametrize("columns", [COLUMNS, PAPER], ids=["all", "paper"])
@pytest.mark.parametrize("lengths", [LENGTHS, (0,), (0, 0, 0)])
@pytest.mark.parametrize(("num_layers", "num_heads"), [(1, 1), (2, 2)])
def test_values_are_those_of_the_formula(
    make: Any, columns: SequenceColumns, lengths: tuple[int, ...], num_layers: int, num_heads: int
) -> None:
    model = make(columns, num_layers=num_layers, num_heads=num_heads).double()
    batch = make_batch(lengths, columns)
    of_items = {name: batch[1][name] for name in columns.history.values()}
    found = model(*batch), model.user_vectors(*batch), model.item_vectors(of_items)
    for values, expected in zip(found, by_loops(model, batch), strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


@MODELS
def test_gradients_are_those_of_the_formula_and_add_up(make: Any) -> None:
    model, batch = make(seed=1).double(), make_batch()
    inputs = [*model.parameters(), *(batch[1][name][0] for name in sorted(batch[1]))]
    found = gradients(model, batch)
    expected = torch.autograd.grad(by_loops(model, batch)[0].square().sum(), inputs)
    assert all(grads.abs().max() > 0 for grads in found)
    torch.testing.assert_close(found, list(expected), rtol=1e-11, atol=1e-11)
    parts = [gradients(model, choose(batch, part)) for part in ([1], [0, 4], [3, 2])]
    for (whole, *of_parts), _ in zip(
        zip(found, *parts, strict=True), model.parameters(), strict=False
    ):
        torch.testing.assert_close(sum(of_parts), whole, rtol=1e-11, atol=1e-11)


@MODELS
def test_a_sample_does_not_depend_on_its_batch_or_the_run(make: Any) -> None:
    model, batch = make(), to(make_batch((*LENGTHS, 7, 3, 0, 4)), torch.float32)
    logits = model(*batch)
    for samples in ([0], [1], [3, 1], [4, 3, 2, 1, 0], [8, 5]):
        found = model(*choose(batch, samples))
        torch.testing.assert_close(found, logits[samples], rtol=0, atol=1e-6)
    first, second = gradients(model, batch), gradients(model, batch)
    assert all(map(torch.equal, first, second))


@MODELS
def test_batches_without_samples_or_values(make: Any) -> None:
    """A device without values could not give the host any, so nothing waits for it."""
    model, batch = make().double(), make_batch(())
    assert model(*batch).shape == (0, NUM_LABELS)
    assert all(values.isfinite().all() for values in gradients(model, batch))
    meta = torch.device("meta")
    logits = model.to(meta)(*to(make_batch(), meta))
    assert logits.shape == (len(LENGTHS), NUM_LABELS)


@MODELS
def test_dropout_is_of_training(make: Any) -> None:
    model, batch = make(dropout=0.5).double(), make_batch()
    assert not torch.equal(model(*batch), model(*batch))
    assert torch.equal(model.eval()(*batch), make().double()(*batch))


@MODELS
def test_work_by_length(make: Any) -> None:
    model = make(max_length=40)
    work = count_sequence_work(model)
    for length in (1, 17, 40):
        batch = to(make_batch((length,)), torch.float32)
        with FlopCounterMode(display=False) as counter:
            model(*batch).sum().backward()
        assert work.flops(length) == counter.get_total_flops()
    of_vectors = count_sequence_work(make(max_length=40, **RETRIEVAL))
    assert 0 < of_vectors.flops(17) < work.flops(17)


@MODELS
def test_without_layers_over_them_the_vectors_are_multiplied(make: Any) -> None:
    model, batch = make(**RETRIEVAL).double(), make_batch()
    users, items = model.user_vectors(*batch), model.item_vectors(batch[1])
    torch.testing.assert_close(model(*batch), (users * items).sum(1, keepdim=True), rtol=0, atol=0)
    model.gives_vectors = True
    vectors = model(*batch)
    assert torch.equal(vectors, torch.stack((users, items), dim=1))
    # A user's vector does not know the candidate.
    inputs = [rows for rows, _ in batch[1].values()]
    grads = torch.autograd.grad(vectors[:, 0].square().sum(), inputs, allow_unused=True)
    found = {name for name, of in zip(batch[1], grads, strict=True) if of is not None and of.any()}
    assert found == {*COLUMNS.history, *COLUMNS.side, *COLUMNS.context}


def test_what_does_not_fit_is_refused() -> None:
    rows = torch.zeros(4, 2)
    columns = {"watched": (rows, torch.tensor([1, 3])), "hour": (rows, torch.tensor([1, 2]))}
    with pytest.raises(ValueError, match="^hour, sample 1: expected 3 ids, .* got 2"):
        check_lengths(columns)
    for columns_, rows_of in columns.items():
        columns[columns_] = rows_of[0].to("meta")[: int(rows_of[1].sum())], rows_of[1].to("meta")
    with pytest.raises(ValueError, match="^hour: expected 4 ids, .* got 3"):
        check_lengths(columns)
    with pytest.raises(ValueError, match=r"^columns: .* got \{\}"):
        SequenceColumns(history={})
    with pytest.raises(ValueError, match=f"num_heads: expected a divisor of .* {DIM}, got 4"):
        make_sasrec(num_heads=4)
    with pytest.raises(ValueError, match=r"^model\.loss: expected .* 3 labels, got"):
        make_hstu(over_layer_sizes=[])
    with pytest.raises(ValueError, match="max_length: expected at least 3 .* got 2"):
        count_sequence_work(make_hstu(max_length=2))
