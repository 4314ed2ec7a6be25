"""Values in 16 bits: what is lost and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrec.runtime.wire import decode, encode, wire_numel
from hotrec.types import WireType

DTYPES = {
    WireType.fp32: torch.float32,
    WireType.fp16: torch.float16,
    WireType.bf16: torch.bfloat16,
}
# Of the value, and of the largest value of the message; see ``encode``.
BOUNDS = {WireType.fp32: (0.0, 0.0), WireType.fp16: (2**-11, 2**-39), WireType.bf16: (2**-8, 0.0)}


def roundtrip(values: torch.Tensor, wire_type: WireType) -> torch.Tensor:
    message = encode(values, wire_type)
    assert message.dtype == DTYPES[wire_type]
    assert message.numel() == wire_numel(values.numel(), wire_type)
    decoded = decode(message, wire_type)
    assert decoded.dtype == torch.float32
    return decoded


def assert_within_bounds(values: torch.Tensor, wire_type: WireType) -> None:
    of_value, of_most = BOUNDS[wire_type]
    error = (roundtrip(values, wire_type).double() - values.double()).abs()
    exact = values.double().abs()
    assert (error <= of_value * exact + of_most * exact.max()).all(), (values, error)


@pytest.mark.parametrize("wire_type", list(WireType))
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e-9, 1e-4, 1.0, 6e4, 7e4, 1e9, 1e30, 3e38])
def test_error_is_bounded_at_any_scale(wire_type: WireType, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1000, generator=generator) * 2 - 1
    assert_within_bounds(values * scale, wire_type)
    spread = values * torch.exp2(torch.arange(1000).remainder(30).neg().float())
    assert_within_bounds(spread * scale, wire_type)


@pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])
@given(
    values=st.lists(
        st.floats(-1.5 * 2**126, 1.5 * 2**126, width=32, allow_subnormal=False).filter(
            lambda value: value == 0 or abs(value) >= 2**-100
        ),
        min_size=1,
        max_size=20,
    )
)
def test_error_is_bounded_for_any_values(wire_type: WireType, values: list[float]) -> None:
    assert_within_bounds(torch.tensor(values), wire_type)


@pytest.mark.parametrize("wire_type", list(WireType))
@pytest.mark.parametrize("exponent", [-100, -30, -1, 0, 14, 15, 16, 100, 127])
def test_powers_of_two_are_exact(wire_type: WireType, exponent: int) -> None:
    values = torch.tensor([2.0**exponent, -(2.0 ** (exponent - 1)), 0.0, 2.0 ** (exponent - 20)])
    assert torch.equal(roundtrip(values, wire_type), values)


@pytest.mark.parametrize("wire_type", list(WireType))
def test_infinities_and_nans_stay(wire_type: WireType) -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 0.0])
    assert torch.equal(roundtrip(values, wire_type).nan_to_num(5.0), values.nan_to_num(5.0))
    for single in (math.inf, -math.inf):
        assert roundtrip(torch.tensor([single]), wire_type).item() == single
    assert roundtrip(torch.tensor([math.nan]), wire_type).isnan().all()


@pytest.mark.parametrize("wire_type", list(WireType))
def test_zeros_and_nothing(wire_type: WireType) -> None:
    assert not roundtrip(torch.zeros(5), wire_type).any()
    assert roundtrip(torch.zeros(0), wire_type).shape == (0,)
    assert wire_numel(0, wire_type) == 0


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_message_may_stand_anywhere_in_a_buffer(start: int) -> None:
    """The factor is a float in front of 16-bit values: it need not be aligned there."""
    values = torch.tensor([1e-9, -3e-9, 2e-9])
    message = encode(values, WireType.fp16)
    buffer = torch.zeros(20, dtype=torch.float16)
    buffer[start : start + message.numel()] = message
    found = decode(buffer[start : start + message.numel()], WireType.fp16)
    assert torch.equal(found, decode(message, WireType.fp16))


def test_integers_stay_integers_in_32_bits() -> None:
    values = torch.tensor([2**31 - 1, -1, 16_777_217], dtype=torch.int32)
    assert torch.equal(decode(encode(values, WireType.fp32), WireType.fp32), values)
