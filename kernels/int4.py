"""Signed INT4, two codes a byte, with one scale a row."""

from __future__ import annotations

import torch

from .nibbles import pack_nibbles, signed_nibbles, unpack_nibbles
from .row_blocks import row_blocks

ABSMAX_FLOOR = 1e-10
"""Smallest row maximum: a row of zeros gets codes 0 instead of 0/0. Same number as comfy-kitchen."""


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Pack two's-complement nibbles: `(codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)`.

    Args:
        codes: (N, K) int8 in [-8, 7], K even. The even column goes to the low nibble.

    Returns:
        (N, K/2) int8.

    Raises:
        ValueError: if K is odd.
    """
    return pack_nibbles(codes.view(torch.uint8) & 0xF).view(torch.int8)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_int4`: (N, K/2) int8 to (N, K) int8 codes in [-8, 7]."""
    return signed_nibbles(unpack_nibbles(packed.view(torch.uint8)))


def quantize_int4_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to packed INT4.

    Equals `scale = x.abs().amax(-1) / 7` and `pack_int4((x / scale[:, None]).round().clamp(-7, 7))`.

    Args:
        x: (N, K) float, K even.

    Returns:
        packed (N, K/2) int8 and scale (N,) float32.
    """
    packed = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    for rows in row_blocks(*x.shape):
        block = x[rows]
        block_scale = block.abs().amax(-1, keepdim=True).clamp_(min=ABSMAX_FLOOR) / 7
        scale[rows] = block_scale.squeeze(-1).float()
        packed[rows] = pack_int4((block / block_scale).round_().clamp_(-7, 7).to(torch.int8))
    return packed, scale
