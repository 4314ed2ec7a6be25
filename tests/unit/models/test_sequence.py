"""Padding, the mask of attention, columns of a history, and what both models have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrec.models.flops import count_sequence_work
from hotrec.models.sequence import (
    SequenceColumns,
    attention_mask,
    check_lengths,
    last_output,
    pad_front,
    sum_rows,
)
from tests.unit.models.sequences import (
    COLUMNS,
    LENGTHS,
    NUM_LABELS,
    Batch,
    choose,
    gradients,
    make_batch,
    make_hstu,
    make_sasrec,
    to,
)

MODELS = [make_hstu, make_sasrec]
RETRIEVAL: dict[str, Any] = {"over_layer_sizes": [], "num_labels": 1}


@pytest.mark.parametrize(
    ("lengths", "max_length", "expected"),
    [
        ((2, 0, 3), 4, [[0, 1, 2], [0, 0, 0], [3, 4, 5]]),
        ((2, 0, 3), 2, [[1, 2], [0, 0], [4, 5]]),
        ((0, 0), 2, [[0], [0]]),
        ((), 2, []),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_padding_keeps_the_newest_rows(
    lengths: tuple[int, ...], max_length: int, expected: list[list[int]], dtype: torch.dtype
) -> None:
    num_rows = sum(lengths)
    rows = torch.arange(1.0, num_rows + 1).view(-1, 1).requires_grad_()
    padded, is_row = pad_front(rows, torch.tensor(lengths, dtype=dtype), max_length)
    assert padded.squeeze(2).tolist() == expected
    assert is_row.tolist() == [[value > 0 for value in sample] for sample in expected]
    (grads,) = torch.autograd.grad((padded * padded).sum(), rows)
    kept = {value for sample in expected for value in sample}
    assert grads.flatten().tolist() == [
        2 * row if row in kept else 0 for row in range(1, num_rows + 1)
    ]


@pytest.mark.parametrize("lengths", [(2, 0, 3), (0, 0), ()])
def test_sums_of_rows(lengths: tuple[int, ...]) -> None:
    rows = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    expected = [part.sum(0) for part in rows.split(list(lengths))] if lengths else []
    sums = sum_rows((rows, torch.tensor(lengths, dtype=torch.int32)))
    assert sums.shape == (len(lengths), 3)
    if lengths:
        torch.testing.assert_close(sums, torch.stack(expected), rtol=0, atol=1e-14)
        (grads,) = torch.autograd.grad(sums.sum(), rows)
        assert torch.equal(grads, torch.ones_like(rows))


def test_who_sees_whom() -> None:
    # A context of two, padding, two positions.
    is_token = torch.tensor([[True, True, False, True, True]])
    assert attention_mask(is_token, 2)[0].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_columns_of_a_history_agree_in_length() -> None:
    rows = torch.zeros(4, 2)
    columns = {
        "watched": (rows, torch.tensor([1, 3])),
        "action": (rows, torch.tensor([1, 3], dtype=torch.int32)),
    }
    check_lengths(columns)
    with pytest.raises(ValueError, match="^hour, sample 1: expected 3 ids, as of watched, got 2"):
        check_lengths(columns | {"hour": (rows, torch.tensor([1, 2]))})
    meta = {
        name: (rows.to("meta"), lengths.to("meta")) for name, (rows, lengths) in columns.items()
    }
    check_lengths(meta)
    with pytest.raises(ValueError, match="^hour: expected 4 ids, as of watched, got 3"):
        check_lengths(meta | {"hour": (rows[:3].to("meta"), torch.tensor([1, 2]).to("meta"))})


def test_a_history_is_needed() -> None:
    with pytest.raises(ValueError, match=r"^columns: .* got \{\}"):
        SequenceColumns(history={})


@pytest.mark.parametrize("num_context", [0, 2])
def test_samples_of_similar_lengths_are_computed_together(num_context: int) -> None:
    """Each in the order of the batch, with the tokens that it has with all the others."""
    torch.manual_seed(3)
    padding = torch.tensor([0, 7, 3, 8, 1, 4, 0, 6])
    tokens = torch.randn(len(padding), num_context + 8, 3)
    place = torch.arange(8)
    is_token = F.pad(place >= padding[:, None], (num_context, 0), value=True)
    widths = []

    class Sums(nn.Module):
        """What a token sees, added up."""

        def forward(self, of: torch.Tensor, sees: torch.Tensor, num_queries: int) -> torch.Tensor:
            widths.append(of.size(1))
            return (sees[:, -num_queries:].float() @ of)[:, -num_queries:]

    found = last_output(nn.ModuleList([Sums(), Sums()]), tokens, is_token, num_context)
    seen = attention_mask(is_token, num_context).float()
    torch.testing.assert_close(found, (seen @ (seen @ tokens))[:, -1])
    assert sorted(set(widths)) == {0: [1, 2, 4, 5, 8], 2: [3, 4, 7, 10]}[num_context]


# Of both models.


@pytest.mark.parametrize("make", MODELS)
def test_the_last_layer_for_one_token_is_that_for_all(make: Any) -> None:
    model = make().double()
    tokens, is_token = model.tokens(make_batch()[1])
    sees = attention_mask(is_token, 2)
    every = tokens
    for layer in model.layers:
        every = layer(every, sees, every.size(1))
    assert every.shape == tokens.shape
    last = last_output(model.layers, tokens, is_token, 2)
    torch.testing.assert_close(last, every[:, -1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", MODELS)
def test_a_sample_does_not_depend_on_its_batch(make: Any) -> None:
    model, batch = make(), to(make_batch(), torch.float32)
    logits = model(*batch)
    for samples in ([0], [1], [3, 1], [4, 3, 2, 1, 0]):
        found = model(*choose(batch, samples))
        torch.testing.assert_close(found, logits[samples], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", MODELS)
def test_the_gradients_of_the_rows_by_differences(make: Any) -> None:
    model, batch = make(num_layers=1).double(), make_batch((2, 0, 6))
    names = list(batch[1])

    def logits(*rows: torch.Tensor) -> torch.Tensor:
        columns = {name: (r, batch[1][name][1]) for name, r in zip(names, rows, strict=True)}
        return model(batch[0], columns)

    assert torch.autograd.gradcheck(logits, [batch[1][name][0] for name in names], fast_mode=True)


@pytest.mark.parametrize("make", MODELS)
def test_a_repeat_is_the_same_bit_for_bit(make: Any) -> None:
    model, batch = make(), to(make_batch(), torch.float32)
    first, second = gradients(model, batch), gradients(model, batch)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("make", MODELS)
def test_dropout_is_of_training(make: Any) -> None:
    model, batch = make(dropout=0.5).double(), make_batch()
    without = make().double()
    assert not torch.equal(model(*batch), model(*batch))
    assert torch.equal(model.eval()(*batch), without(*batch))


@pytest.mark.parametrize("make", MODELS)
def test_nothing_waits_for_a_device(make: Any) -> None:
    """A device without values could not give the host any."""
    meta = torch.device("meta")
    logits = make().double().to(meta)(*to(make_batch(), meta))
    assert logits.shape == (len(LENGTHS), NUM_LABELS)


@pytest.mark.parametrize("make", MODELS)
def test_work_by_length(make: Any) -> None:
    model = make(max_length=40)
    work = count_sequence_work(model)
    for length in (1, 17, 40):
        batch = to(make_batch((length,)), torch.float32)
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(*batch).sum().backward()
        assert work.flops(length) == counter.get_total_flops()


def weight_gradients(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model(*batch).square().mul(1.3).cumsum(0).sum(), model.parameters())


@pytest.mark.parametrize("make", MODELS)
def test_without_layers_over_them_the_vectors_are_multiplied(make: Any) -> None:
    model, batch = make(**RETRIEVAL).double(), make_batch()
    users, items = model.user_vectors(*batch), model.item_vectors(batch[1])
    products = model(*batch)
    torch.testing.assert_close(products, (users * items).sum(1, keepdim=True), rtol=0, atol=0)
    model.gives_vectors = True
    vectors = model(*batch)
    assert torch.equal(vectors, torch.stack((users, items), dim=1))
    # Every weight is trained, and the vectors are those of a model with such layers.
    assert all(values.abs().max() > 0 for values in weight_gradients(model, batch))
    other = make().double()
    assert other.gives_vectors is None
    other.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(other.user_vectors(*batch), users, rtol=0, atol=0)
    torch.testing.assert_close(other.item_vectors(batch[1]), items, rtol=0, atol=0)


@pytest.mark.parametrize("make", MODELS)
def test_a_users_vector_does_not_know_the_candidate(make: Any) -> None:
    model, batch = make(**RETRIEVAL).double(), make_batch()
    model.gives_vectors = True
    users = model(*batch)[:, 0]
    read = [*COLUMNS.history, *COLUMNS.side, *COLUMNS.context]
    inputs = [rows for rows, _ in batch[1].values()]
    grads = torch.autograd.grad(users.square().sum(), inputs, allow_unused=True)
    found = [name for name, of in zip(batch[1], grads, strict=True) if of is not None and of.any()]
    assert sorted(found) == sorted(read)


@pytest.mark.parametrize("make", MODELS)
def test_a_model_that_multiplies_vectors_has_one_label(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^model\.loss: expected cross_entropy for 3 labels, got"):
        make(over_layer_sizes=[])


@pytest.mark.parametrize("make", MODELS)
def test_work_of_vectors_by_length(make: Any) -> None:
    work = count_sequence_work(make(max_length=40, **RETRIEVAL))
    assert 0 < work.flops(17) < count_sequence_work(make(max_length=40)).flops(17)
