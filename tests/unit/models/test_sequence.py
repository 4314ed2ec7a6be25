"""Padding, the mask of attention, and what columns of a history must be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrec.models.sequence import (
    SequenceColumns,
    attention_mask,
    check_lengths,
    last_output,
    pad_front,
    sum_rows,
)


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
