"""How far a quantized weight or a picture is from the original, in decibels."""

from __future__ import annotations

import math

import torch

from ..kernels.row_blocks import row_blocks
from .native import dequantize
from .weight import QuantizedWeight


def sqnr_db(weight: torch.Tensor, quantized: QuantizedWeight) -> float:
    """Signal to quantization noise: `10 log10(sum(w**2) / sum((w - dequantized)**2))`.

    Computed in row blocks in float32, summed in float64. inf for an exact result, also for a
    weight of zeros.

    Args:
        weight: (N, K) float, what was quantized.
    """
    signal = noise = 0.0
    for rows in row_blocks(*quantized.shape):
        block = weight[rows].float()
        signal += block.square().sum(dtype=torch.float64).item()
        error = block - dequantize(quantized.rows(rows))
        noise += error.square_().sum(dtype=torch.float64).item()
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def psnr_db(image: torch.Tensor, reference: torch.Tensor, peak: float = 1.0) -> float:
    """Peak signal to noise: `10 log10(peak**2 / mean((image - reference)**2))`; inf if equal."""
    error = (image.double() - reference.double()).square().mean().item()
    return math.inf if error == 0.0 else 10 * math.log10(peak**2 / error)
