"""HSTU against its formula, a public layer, and itself in other batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotrec.models.flops import count_sequence_work
from hotrec.models.hstu import Hstu, StuLayer
from hotrec.models.sequence import SequenceColumns, attention_mask
from tests.unit.models import rechub
from tests.unit.models.sequences import (
    COLUMNS,
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
    norm,
    samples_of,
    score,
    silu,
    to,
    tokens_of,
)

PLAIN = SequenceColumns(history={"watched": "video"})


def stu(layer: Any, tokens: list[torch.Tensor], num_context: int) -> list[torch.Tensor]:
    """A layer by its formula, by loops over tokens and heads."""
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


def by_loops(model: Hstu, batch: Any, *, has_candidate: bool = True) -> torch.Tensor:
    """Logits, or without the candidates users' vectors."""
    outputs = []
    columns = model.tokens.columns
    for sample in samples_of(batch):
        rows = sample[1]
        tokens = tokens_of(model.tokens, lambda x: encode(model.tokens.item, x), rows)
        if has_candidate:
            if not rows[next(iter(columns.history))]:
                del tokens[-1]
            item = encode(model.tokens.item, candidate(columns, rows))
            tokens.append(item + model.candidate)
        for layer in model.layers:
            tokens = stu(layer, tokens, len(columns.context))
        user = norm(model.user_norm, tokens[-1])
        item = encode(model.item_tower, candidate(columns, rows))
        outputs.append(score(model.score, user, item, sample) if has_candidate else user)
    return torch.stack(outputs)


@pytest.mark.parametrize("columns", [COLUMNS, PLAIN], ids=["all", "plain"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_logits_are_those_of_the_formula(columns: SequenceColumns, num_layers: int) -> None:
    model = make_hstu(columns, num_layers=num_layers).double()
    batch = make_batch(columns=columns)
    logits = model(*batch)
    assert logits.shape == (len(LENGTHS), NUM_LABELS)
    torch.testing.assert_close(logits, by_loops(model, batch), rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_formula() -> None:
    model, batch = make_hstu().double(), make_batch()
    inputs = [*model.parameters(), *(rows for rows, _ in batch[1].values())]
    found = torch.autograd.grad(model(*batch).square().sum(), inputs)
    expected = torch.autograd.grad(by_loops(model, batch).square().sum(), inputs)
    assert all(grads.abs().max() > 0 for grads in found)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_the_layer_is_that_of_a_public_implementation() -> None:
    with np.load(rechub.RECORD) as record:
        of = {name: torch.from_numpy(record[name]) for name in record.files}
    num_linear, num_attention = (
        rechub.NUM_HEADS * dim for dim in (rechub.LINEAR_DIM, rechub.ATTENTION_DIM)
    )
    layer = StuLayer(
        rechub.DIM,
        rechub.NUM_TOKENS,
        0.0,
        num_heads=rechub.NUM_HEADS,
        attention_dim=rechub.ATTENTION_DIM,
        linear_dim=rechub.LINEAR_DIM,
    ).double()
    sizes = [num_attention, num_attention, num_linear, num_linear]
    state = {
        "norm.weight": of["norm_in.weight"],
        "norm.bias": of["norm_in.bias"],
        "attention_norm.weight": of["norm_attn.weight"],
        "attention_norm.bias": of["norm_attn.bias"],
    }
    for what in ("weight", "bias"):
        q, k, u, v = of[f"proj1.{what}"].split(sizes)
        state |= {f"uq.{what}": torch.cat((u, q)), f"vk.{what}": torch.cat((v, k))}
    # The last linear layer of the paper reads neither U nor A.
    zeros = torch.zeros(rechub.DIM, 2 * num_linear, dtype=torch.float64)
    state["output.weight"] = torch.cat((zeros, of["proj2.weight"]), dim=1)
    layer.load_state_dict(state)
    is_token = of["is_token"]
    with torch.no_grad():
        outputs = layer(of["tokens"], attention_mask(is_token, 0), rechub.NUM_TOKENS)
    found = (outputs - of["tokens"])[is_token]
    torch.testing.assert_close(found, of["outputs"][is_token], rtol=0, atol=1e-12)


def test_gradients_add_up_over_parts_of_a_batch() -> None:
    model, batch = make_hstu().double(), make_batch()
    whole = gradients(model, batch)[: len(list(model.parameters()))]
    parts = [gradients(model, choose(batch, part)) for part in ([1], [0, 4], [3, 2])]
    for expected, *found in zip(whole, *parts, strict=False):
        torch.testing.assert_close(sum(found), expected, rtol=1e-11, atol=1e-11)


def test_the_maximum_length_of_a_batch_that_is_shorter_changes_nothing() -> None:
    """As on a device, where every history is padded to the maximum."""
    model, batch = make_hstu().double(), make_batch()
    shorter = choose(batch, [0, 4])
    both = choose(batch, [0, 4, 3])
    torch.testing.assert_close(model(*shorter), model(*both)[:2], rtol=0, atol=1e-12)
    assert model.tokens(shorter[1])[0].size(1) == 2 + 2
    assert model.tokens(both[1])[0].size(1) == 2 + MAX_LENGTH


def test_values_beyond_the_last_positions_are_not_read() -> None:
    model, batch = make_hstu().double(), make_batch((8,))
    logits = model(*batch)
    (rows, _) = batch[1]["watched"]
    (grads,) = torch.autograd.grad(logits.sum(), rows)
    assert torch.equal(grads[:3], torch.zeros_like(grads[:3]))
    assert (grads[3:] != 0).any(1).all()


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_batches_without_samples_or_ids(lengths: tuple[int, ...]) -> None:
    model, batch = make_hstu().double(), make_batch(lengths)
    assert model(*batch).shape == (len(lengths), NUM_LABELS)
    assert model.user_vectors(*batch).isfinite().all()
    grads = gradients(model, batch)
    assert all(values.isfinite().all() for values in grads)
    if lengths:
        torch.testing.assert_close(model(*batch), by_loops(model, batch), rtol=0, atol=1e-12)


def test_vectors_for_retrieval() -> None:
    model, batch = make_hstu().double(), make_batch()
    users = model.user_vectors(*batch)
    torch.testing.assert_close(users, by_loops(model, batch, has_candidate=False))
    # Of items, without their users.
    of_items = {name: batch[1][name] for name in COLUMNS.history.values()}
    items = model.item_vectors(of_items)
    expected = [encode(model.item_tower, candidate(COLUMNS, rows)) for _, rows in samples_of(batch)]
    torch.testing.assert_close(items, torch.stack(expected))


def test_bf16() -> None:
    model, batch = make_hstu(), to(make_batch(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(*batch)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(logits.float(), model(*batch), rtol=0.1, atol=0.2)


@pytest.mark.parametrize("changed", [{"num_heads": None}, {"width": 3}])
def test_sizes_that_do_not_fit_raise(changed: dict[str, Any]) -> None:
    sizes = {"num_layers": 1, "num_heads": 2, "attention_dim": 3, "linear_dim": 4} | changed
    sizes = {name: size for name, size in sizes.items() if size is not None}
    with pytest.raises(TypeError, match="num_heads|width"):
        Hstu(
            PLAIN,
            embedding_dim=6,
            num_dense=0,
            num_labels=1,
            max_length=5,
            dropout=0.0,
            over_layer_sizes=[1],
            **sizes,
        )


def test_work_of_a_pair() -> None:
    work = count_sequence_work(make_hstu(max_length=40))
    # A pair of positions: two layers but the last one's, 2 heads, of 3 and of 4 dimensions.
    assert work.per_pair == 3 * 2 * 2 * (3 + 4)
    with pytest.raises(ValueError, match="max_length: expected at least 3 .* got 2"):
        count_sequence_work(make_hstu(max_length=2))
