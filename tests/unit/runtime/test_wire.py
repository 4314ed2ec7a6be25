"""Values in bf16, on hotrec's wire and by TorchRec's codecs: what is lost and what is not."""

from __future__ import annotations

import math

import pytest
import torch
from torchrec.distributed.types import CommOp

from hotrec.runtime.codecs import wire_codecs
from hotrec.runtime.wire import decode, encode
from hotrec.types import WireType

DTYPES = {WireType.fp32: torch.float32, WireType.bf16: torch.bfloat16}
types = pytest.mark.parametrize("wire_type", list(WireType))


def roundtrip(values: torch.Tensor, wire_type: WireType) -> torch.Tensor:
    message = encode(values, wire_type)
    assert message.dtype == DTYPES[wire_type]
    assert message.shape == values.shape
    decoded = decode(message, wire_type)
    assert decoded.dtype == torch.float32
    return decoded


@types
def test_powers_of_two_and_what_is_no_number_arrive_exactly(wire_type: WireType) -> None:
    for exponent in (-100, -30, -1, 0, 14, 15, 16, 100, 127):
        powers = [2.0**exponent, -(2.0 ** (exponent - 1)), 0.0, 2.0 ** (exponent - 20)]
        assert roundtrip(torch.tensor(powers), wire_type).tolist() == powers
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 0.0])
    assert torch.equal(roundtrip(values, wire_type).nan_to_num(5.0), values.nan_to_num(5.0))


@pytest.mark.parametrize("op", [op.name for op in CommOp])
def test_codecs_of_torchrec_send_bf16(op: str) -> None:
    registry = wire_codecs(WireType.bf16)
    assert registry is not None
    values = torch.randn(12, 8, generator=torch.Generator().manual_seed(5)) * 1e-8
    for codec in (registry[op].forward, registry[op].backward):
        message = codec.encode(values)
        assert message.dtype == codec.quantized_dtype == torch.bfloat16
        assert message.numel() == codec.calc_quantized_size(values.numel())
        assert torch.equal(codec.decode(message), values.bfloat16().float())
    assert wire_codecs(WireType.fp32) is None
