"""Row-wise INT8 and the linear on it."""

from __future__ import annotations

import pytest
import torch
from leandit.kernels.hadamard import rotate
from leandit.kernels.int8 import dequantize_int8, int8_linear, quantize_int8_rowwise
from leandit.kernels.row_blocks import BLOCK_ELEMENTS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def edge_rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, one huge outlier, tiny values, and equal positive and negative maxima."""
    rows = randn(8, 256)
    rows[0] = 0
    rows[1, 17] = 60000.0
    rows[2] *= 1e-7
    rows[3, 0], rows[3, 1] = -9.0, 9.0
    rows[4] = -1.0
    rows[5] = torch.linspace(-127.5, 127.5, 256)
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantizing_rows_gives_the_bits_of_comfy_kitchen(dtype: torch.dtype) -> None:
    from comfy_kitchen.backends.eager.quantization import quantize_int8_rowwise as kitchen

    x = edge_rows(dtype)
    codes, scale = quantize_int8_rowwise(x)
    expected_codes, expected_scale = kitchen(x)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)


def test_quantizing_in_blocks_gives_the_bits_of_one_block() -> None:
    x = randn(2100, 2048)
    assert x.numel() > BLOCK_ELEMENTS
    codes, scale = quantize_int8_rowwise(x)
    assert torch.equal(scale, (x.abs().amax(1, keepdim=True) / 127))
    assert torch.equal(codes, (x / scale).round().clamp(-128, 127).to(torch.int8))


def test_a_row_of_zeros_gives_zeros() -> None:
    codes, scale = quantize_int8_rowwise(torch.zeros(2, 64))
    assert codes.eq(0).all()
    assert dequantize_int8(codes, scale).eq(0).all()


def test_bfloat16_arithmetic_reaches_minus_128_and_it_dequantizes() -> None:
    x = randn(4096, 64).bfloat16()
    codes, scale = quantize_int8_rowwise(x)
    assert codes.min() == -128
    at = codes == -128
    assert torch.equal(dequantize_int8(codes, scale)[at], (-128 * scale).expand_as(codes)[at])


def naive_linear(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Integer arithmetic in Python-sized integers, scaled in float64."""
    q, s = quantize_int8_rowwise(x)
    out = (q.long() @ w.long().T).double() * s.double() * scale.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["with bias", "without bias"])
@pytest.mark.parametrize("group", [None, 16, 64, 256])
def test_the_linear_equals_exact_integer_arithmetic(
    dtype: torch.dtype, with_bias: bool, group: int | None
) -> None:
    x = randn(5, 256).to(dtype)
    w, scale = quantize_int8_rowwise(randn(24, 256, seed=1))
    bias = randn(24, seed=2) if with_bias else None
    out = int8_linear(x, w, scale, bias, group)
    expected = naive_linear(x if group is None else rotate(x, group), w, scale, bias)
    assert out.dtype == dtype
    rounding = torch.finfo(dtype).eps * expected.abs().max()
    assert (out.double() - expected).abs().max() <= rounding


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (2, 3, 64), (64,)], ids=str)
def test_the_linear_keeps_leading_dimensions(shape: tuple[int, ...]) -> None:
    w, scale = quantize_int8_rowwise(randn(8, 64))
    assert int8_linear(torch.ones(shape), w, scale).shape == (*shape[:-1], 8)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_a_row_that_is_not_finite_spoils_no_other_row(poison: float) -> None:
    x = randn(4, 256)
    w, scale = quantize_int8_rowwise(randn(16, 256, seed=3))
    clean = int8_linear(x, w, scale, None, 64)
    x[2, 5] = poison
    out = int8_linear(x, w, scale, None, 64)
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])
    assert not out[2].isfinite().any()


def test_k_with_the_largest_codes_does_not_overflow_the_accumulator() -> None:
    k = 32768
    w, scale = quantize_int8_rowwise(torch.ones(8, k))
    out = int8_linear(torch.ones(1, k), w, scale)
    assert torch.allclose(out, torch.full((1, 8), float(k)), rtol=1e-6)
