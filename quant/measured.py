"""Quantizing one weight and measuring the error in one go, with a single rotation."""

from __future__ import annotations

import torch

from .error import rotated_sqnr_db, sqnr_db
from .formats import Format
from .weight import (
    QuantizedWeight,
    check_weight,
    quantize_rotated,
    quantize_weight,
    rotate_weight,
)


def quantize_and_measure(
    weight: torch.Tensor, format: Format, group_size: int | None, name: str
) -> tuple[QuantizedWeight, float]:
    """`quantize_weight(...)` and its `sqnr_db` in dB.

    At the peak, the float32 `weight` and one more float32 copy of it are in memory.

    Args:
        weight: (N, K) float32.

    Raises:
        WeightError, QuantError: see `quantize_weight`.
    """
    if format.native_format == "asym_w4a8_int8":
        quantized = quantize_weight(weight, format, group_size, name)
        return quantized, sqnr_db(weight, quantized)
    check_weight(weight, format, group_size, name)
    rotated = rotate_weight(weight, group_size)
    quantized = quantize_rotated(rotated, format, group_size)
    return quantized, rotated_sqnr_db(rotated, quantized)
