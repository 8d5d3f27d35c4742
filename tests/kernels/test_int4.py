"""INT4 packing and row-wise quantization."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from leandit.kernels.int4 import pack_int4, quantize_int4_rowwise, unpack_int4


def test_the_even_column_goes_to_the_low_nibble() -> None:
    assert pack_int4(torch.tensor([[1, -2]], dtype=torch.int8)).view(torch.uint8).item() == 0xE1


def test_every_byte_survives_unpacking_and_packing() -> None:
    packed = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).reshape(16, 16)
    codes = unpack_int4(packed)
    assert codes.min() == -8
    assert codes.max() == 7
    assert torch.equal(pack_int4(codes), packed)


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=40).filter(lambda v: len(v) % 2 == 0))
def test_codes_survive_packing_and_unpacking(values: list[int]) -> None:
    codes = torch.tensor([values], dtype=torch.int8)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)


def test_an_odd_width_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match="K=3"):
        pack_int4(torch.zeros(1, 3, dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantizing_rows_gives_the_bits_of_comfy_kitchen(dtype: torch.dtype) -> None:
    from comfy_kitchen.backends.eager.convrot_w4a4 import quantize_signed_int4_rowwise

    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    x[1, 3] = 500.0
    x = x.to(dtype)
    packed, scale = quantize_int4_rowwise(x)
    expected_packed, expected_scale = quantize_signed_int4_rowwise(x)
    assert torch.equal(packed, expected_packed)
    assert torch.equal(scale, expected_scale)
