"""Values in 16 bits, on hotrec's wire and by TorchRec's codecs: what is lost and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.types import CommOp

from hotrec.runtime.codecs import BlockCodec, Codec, wire_codecs
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
def test_what_arrives_exactly(wire_type: WireType) -> None:
    for exponent in (-100, -30, -1, 0, 14, 15, 16, 100, 127):
        powers = [2.0**exponent, -(2.0 ** (exponent - 1)), 0.0, 2.0 ** (exponent - 20)]
        assert roundtrip(torch.tensor(powers), wire_type).tolist() == powers
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 0.0])
    assert torch.equal(roundtrip(values, wire_type).nan_to_num(5.0), values.nan_to_num(5.0))
    for single in (math.inf, -math.inf):
        assert roundtrip(torch.tensor([single]), wire_type).item() == single
    assert roundtrip(torch.tensor([math.nan]), wire_type).isnan().all()
    assert not roundtrip(torch.zeros(5), wire_type).any()
    assert roundtrip(torch.zeros(0), wire_type).shape == (0,)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_message_may_stand_anywhere_in_a_buffer(start: int) -> None:
    """The factor is a float in front of 16-bit values: it need not be aligned there."""
    message = encode(torch.tensor([1e-9, -3e-9, 2e-9]), WireType.fp16)
    buffer = torch.zeros(20, dtype=torch.float16)
    buffer[start : start + message.numel()] = message
    found = decode(buffer[start : start + message.numel()], WireType.fp16)
    assert torch.equal(found, decode(message, WireType.fp16))


def test_integers_stay_integers_in_32_bits() -> None:
    values = torch.tensor([2**31 - 1, -1, 16_777_217], dtype=torch.int32)
    assert torch.equal(decode(encode(values, WireType.fp32), WireType.fp32), values)


OPS = [op.name for op in CommOp]
DIM = 64
in_16_bits = pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])


def codecs_of(wire_type: WireType, op: str = "SEQUENCE_EMBEDDINGS_ALL_TO_ALL") -> list[Codec]:
    """Of the rows, and of their gradients."""
    registry = wire_codecs(wire_type, [DIM])
    assert registry is not None
    assert sorted(registry) == sorted(OPS)
    codecs = [registry[op].forward, registry[op].backward]
    assert all(isinstance(codec, Codec) for codec in codecs)
    return codecs  # type: ignore[return-value]


def draw(scale: float, num: int = 50 * DIM) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(5)) * scale


@pytest.mark.parametrize("op", OPS)
@in_16_bits
def test_message_has_the_size_that_the_codec_says(wire_type: WireType, op: str) -> None:
    for codec in codecs_of(wire_type, op):
        for num in (0, DIM, 7 * DIM):
            message = codec.encode(draw(1.0, num), codec.create_context())
            assert message.dtype == codec.quantized_dtype == DTYPES[wire_type]
            assert message.numel() == codec.calc_quantized_size(num) <= num * 33 / 32
            assert codec.decode(message).numel() == num


@pytest.mark.parametrize("op", OPS)
@in_16_bits
def test_gradients_of_a_mean_loss_survive(wire_type: WireType, op: str) -> None:
    _, codec = codecs_of(wire_type, op)
    for size in (1e-3, 1e-6, 1e-8):
        arrived = codec.decode(codec.encode(torch.full((2 * DIM,), size)))
        assert ((arrived - size).abs() <= BOUNDS[wire_type][0] * size).all(), (size, arrived[0])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e30])
def test_gradients_round_relative_to_the_largest_of_their_block(scale: float) -> None:
    _, codec = codecs_of(WireType.fp16)
    # The large gradients do not drown the small ones of other rows.
    gradient = torch.cat([draw(scale), draw(1e-8)])
    arrived = codec.decode(codec.encode(gradient))
    largest = gradient.view(-1, 32).abs().amax(1, keepdim=True)
    assert ((arrived - gradient).abs().view(-1, 32) <= 2.0**-11 * largest).all()


@in_16_bits
def test_what_is_exact_or_not_finite_stays_so(wire_type: WireType) -> None:
    for codec in codecs_of(wire_type):
        gradient = torch.ones(2 * DIM)
        gradient[:3] = torch.tensor([torch.inf, torch.nan, 0.0])
        gradient[DIM:] = 2.0 ** -torch.arange(15.0).repeat(5)[:DIM] / 4
        arrived = codec.decode(codec.encode(gradient))
        assert torch.equal(arrived.nan_to_num(5.0), gradient.nan_to_num(5.0))


def test_fixed_factor_overflows_to_infinity_not_to_another_number() -> None:
    _, codec = codecs_of(WireType.fp16, "POOLED_EMBEDDINGS_REDUCE_SCATTER")
    assert torch.isinf(codec.decode(codec.encode(torch.full((2,), 100.0)))).all()


def test_rows_go_without_headers_and_fp32_without_codecs() -> None:
    codec, _ = codecs_of(WireType.fp16)
    rows = draw(1e-2)
    assert torch.equal(codec.decode(codec.encode(rows)), rows.half().float())
    assert codec.padded_size(rows.view(-1, DIM), [DIM], 0, None) == (DIM, 0)
    assert wire_codecs(WireType.fp32, [DIM]) is None


def test_blocks_fit_into_every_dimension() -> None:
    registry = wire_codecs(WireType.fp16, [48, 8, 64])
    assert registry is not None
    codec = registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].backward
    assert codec.calc_quantized_size(48) == 48 // 8 * 9
    with pytest.raises(ValueError, match="whole blocks of 32 values, got 40"):
        BlockCodec(32).calc_quantized_size(40)
