"""Two 4-bit codes a byte, in either order."""

from __future__ import annotations

import torch


def unpack_nibbles(packed: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """(..., B) uint8 to (..., 2B) uint8 codes 0..15.

    Equals `stack((packed & 15, packed >> 4), -1).flatten(-2)`, or the two swapped if `high_first`.
    """
    low, high = packed & 0xF, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return torch.stack(pair, dim=-1).flatten(-2)


def pack_nibbles(codes: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """The inverse of `unpack_nibbles`: (..., 2B) uint8 codes 0..15 to (..., B) uint8.

    Raises:
        ValueError: if the number of codes in a row is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(
            f"cannot pack K={codes.shape[-1]} int4 codes two to a byte; K must be even"
        )
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first << 4) | second if high_first else first | (second << 4)


def signed_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 as the two's-complement int8 values -8..7 they stand for."""
    return (codes.view(torch.int8) << 4) >> 4
