"""HSTU and SASRec against their formulas, and themselves in other batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hotrec.models.flops import count_sequence_work
from hotrec.models.sequence import SequenceColumns, check_lengths
from tests.unit.models.sequences import (
    COLUMNS,
    LENGTHS,
    NUM_LABELS,
    by_samples,
    choose,
    gradients,
    make_batch,
    make_hstu,
    make_sasrec,
    to,
)

MODELS = pytest.mark.parametrize("make", [make_hstu, make_sasrec])
RETRIEVAL: dict[str, Any] = {"over_layer_sizes": [], "num_labels": 1}
PAPER = SequenceColumns(history={"watched": "video"})  # items with positions alone


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
    for values, expected in zip(found, by_samples(model, batch), strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)


@MODELS
def test_gradients_are_those_of_the_formula_and_add_up(make: Any) -> None:
    model, batch = make(seed=1).double(), make_batch()
    inputs = [*model.parameters(), *(batch[1][name][0] for name in sorted(batch[1]))]
    found = gradients(model, batch)
    expected = torch.autograd.grad(by_samples(model, batch)[0].square().sum(), inputs)
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
    for said, make in (
        ("^hour, sample 1: .*3 .*2", lambda: check_lengths(columns)),
        ("num_heads: .*4", lambda: make_sasrec(num_heads=4)),
        (r"^model\.loss", lambda: make_hstu(over_layer_sizes=[])),
    ):
        with pytest.raises(ValueError, match=said):
            make()
