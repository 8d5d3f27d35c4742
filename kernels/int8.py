"""INT8 with one scale a row: quantize, dequantize, and the linear that runs on it.

These functions define the arithmetic; every faster backend is tested against them.
"""

from __future__ import annotations

import torch

from .hadamard import rotate
from .row_blocks import row_blocks

SCALE_FLOOR = 1e-30
"""Smallest scale: a row of zeros gets codes 0 instead of 0/0. Same number as comfy-kitchen."""


def quantize_int8_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row of a float tensor on its own scale.

    Equals `scale = x.abs().amax(-1, keepdim=True).float() / 127` and
    `q = (x / scale).round().clamp(-128, 127)`, round half to even.

    Args:
        x: (..., K) float32, float16 or bfloat16.

    Returns:
        q of shape (..., K) int8 and scale of shape (..., 1) float32.
    """
    flat = x.reshape(-1, x.shape[-1])
    codes = torch.empty(flat.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(flat.shape[0], 1, dtype=torch.float32, device=x.device)
    for rows in row_blocks(*flat.shape):
        block = flat[rows]
        block_scale = (block.abs().amax(-1, keepdim=True).float() / 127.0).clamp_(min=SCALE_FLOOR)
        scale[rows] = block_scale
        divisor = block_scale.to(x.dtype)
        # The floor underflows to 0 in float16; kitchen divides by the smallest normal number then.
        divisor.masked_fill_(divisor == 0, torch.finfo(x.dtype).tiny)
        codes[rows] = (block / divisor).round_().clamp_(-128, 127).to(torch.int8)
    return codes.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


def dequantize_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`q.float() * scale`, rotated back when `group_size` is given, in `dtype`.

    Args:
        q: (N, K) int8. scale: (N, 1) float32. group_size: G of the stored rotation, or None.
    """
    weight = q.float() * scale
    if group_size is not None:
        weight = rotate(weight, group_size)
    return weight.to(dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
) -> torch.Tensor:
    """Linear with INT8 weights and activations quantized row by row.

    Equals `q, s = quantize_int8_rowwise(rotate(x, G))` and
    `((q.int() @ weight.int().T).float() * (s * weight_scale.T) + bias).to(x.dtype)`.
    The product is accumulated in int32, so it is exact for K < 2**31 / 128**2.

    Args:
        x: (..., K) float. weight: (N, K) int8, stored rotated when `group_size` is given.
        weight_scale: (N, 1) float32. bias: (N,) or None.

    Returns:
        (..., N) in the dtype of x. A row with NaN or Inf spoils that row only.
    """
    flat = x.reshape(-1, x.shape[-1])
    if group_size is not None:
        flat = rotate(flat, group_size)
    q, scale = quantize_int8_rowwise(flat)
    if flat.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    out = torch._int_mm(q, weight.t()).float()
    out.mul_(scale).mul_(weight_scale.reshape(1, -1))
    if bias is not None:
        out.add_(bias.float())
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
