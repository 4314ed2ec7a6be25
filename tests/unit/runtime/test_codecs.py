"""Codecs for TorchRec's exchanges: sizes, errors, what survives, what is refused."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.types import CommOp

from hotrec.runtime.codecs import BlockCodec, Codec, wire_codecs
from hotrec.types import WireType

OPS = [op.name for op in CommOp]
# Half a step between neighbours, relative to the value: of 11 and of 8 bits.
HALF_ULP = {WireType.fp16: 2.0**-11, WireType.bf16: 2.0**-8}
DIM = 64


def codecs_of(
    wire_type: WireType, op: str = "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
) -> tuple[Codec, Codec]:
    registry = wire_codecs(wire_type, [DIM])
    assert registry is not None
    found = registry[op]
    assert isinstance(found.forward, Codec)
    assert isinstance(found.backward, Codec)
    return found.forward, found.backward


def values(scale: float, num: int = 50 * DIM) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(5)) * scale


def test_fp32_leaves_torchrec_as_it_is() -> None:
    assert wire_codecs(WireType.fp32, [DIM]) is None


@pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])
def test_every_exchange_of_torchrec_has_codecs(wire_type: WireType) -> None:
    registry = wire_codecs(wire_type, [DIM])
    assert registry is not None
    assert sorted(registry) == sorted(OPS)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])
def test_message_has_the_size_that_the_codec_says_in_16_bits(wire_type: WireType, op: str) -> None:
    for codec in codecs_of(wire_type, op):
        for num in (0, DIM, 7 * DIM):
            message = codec.encode(values(1.0, num), codec.create_context())
            assert message.dtype == codec.quantized_dtype
            assert message.element_size() == 2
            assert message.numel() == codec.calc_quantized_size(num)
            assert message.numel() <= num * 33 / 32
            assert codec.decode(message).numel() == num


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])
def test_gradients_of_a_mean_loss_survive(wire_type: WireType, op: str) -> None:
    _, codec = codecs_of(wire_type, op)
    for size in (1e-3, 1e-6, 1e-8):
        gradient = torch.full((2 * DIM,), size)
        arrived = codec.decode(codec.encode(gradient))
        assert ((arrived - gradient).abs() <= HALF_ULP[wire_type] * size).all(), (size, arrived[0])


def test_gradients_round_relative_to_the_largest_of_their_block() -> None:
    _, codec = codecs_of(WireType.fp16)
    for scale in (1e-30, 1e-12, 1e-8, 1e-3, 1.0, 1e4, 1e30):
        gradient = values(scale)
        arrived = codec.decode(codec.encode(gradient))
        largest = gradient.view(-1, 32).abs().amax(1, keepdim=True)
        error = (arrived - gradient).abs().view(-1, 32)
        assert (error <= HALF_ULP[WireType.fp16] * largest).all(), scale


def test_a_large_gradient_does_not_drown_the_small_ones_of_other_rows() -> None:
    _, codec = codecs_of(WireType.fp16)
    gradient = torch.cat([torch.full((DIM,), 1e4), torch.full((DIM,), 1e-8)])
    arrived = codec.decode(codec.encode(gradient))
    assert torch.allclose(arrived, gradient, rtol=HALF_ULP[WireType.fp16], atol=0.0)


def test_powers_of_two_and_zeros_arrive_exactly() -> None:
    _, codec = codecs_of(WireType.fp16)
    gradient = torch.cat([torch.zeros(DIM), 2.0 ** -torch.arange(32.0).repeat(DIM // 32) / 4])
    gradient[DIM:].view(-1, 32)[:, 15:] = 0.0
    assert torch.equal(codec.decode(codec.encode(gradient)), gradient)


@pytest.mark.parametrize("wire_type", [WireType.fp16, WireType.bf16])
def test_what_is_not_finite_stays_so(wire_type: WireType) -> None:
    for codec in codecs_of(wire_type):
        gradient = torch.ones(2 * DIM)
        gradient[0], gradient[1] = torch.inf, torch.nan
        arrived = codec.decode(codec.encode(gradient))
        assert torch.isinf(arrived[0])
        assert torch.isnan(arrived[1])
        assert torch.equal(arrived[DIM:], gradient[DIM:])


def test_fixed_factor_overflows_to_infinity_not_to_another_number() -> None:
    _, codec = codecs_of(WireType.fp16, "POOLED_EMBEDDINGS_REDUCE_SCATTER")
    assert torch.isinf(codec.decode(codec.encode(torch.full((2,), 100.0)))).all()


def test_rows_go_without_headers() -> None:
    codec, _ = codecs_of(WireType.fp16)
    rows = values(1e-2)
    assert torch.equal(codec.decode(codec.encode(rows)), rows.half().float())
    assert codec.padded_size(rows.view(-1, DIM), [DIM], 0, None) == (DIM, 0)


def test_blocks_fit_into_every_dimension() -> None:
    registry = wire_codecs(WireType.fp16, [48, 8, 64])
    assert registry is not None
    codec = registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].backward
    assert codec.calc_quantized_size(48) == 48 // 8 * 9


def test_broken_block_is_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 32 values, got 40"):
        BlockCodec(32).calc_quantized_size(40)
