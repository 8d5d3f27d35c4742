"""How far a quantized weight or a picture is from the original, in decibels."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..kernels.int4 import unpack_int4
from ..kernels.row_blocks import row_blocks
from .native import dequantize
from .weight import QuantizedWeight


def sqnr_db(weight: torch.Tensor, quantized: QuantizedWeight) -> float:
    """Signal to quantization noise: `10 log10(sum(w**2) / sum((w - dequantized)**2))`.

    inf for an exact result, also for a weight of zeros.

    Args:
        weight: (N, K) float, what was quantized.
    """
    return _ratio_db(
        (block, dequantize(quantized.rows(rows)))
        for rows in row_blocks(*quantized.shape)
        for block in (weight[rows].float(),)
    )


def rotated_sqnr_db(rotated: torch.Tensor, quantized: QuantizedWeight) -> float:
    """The same ratio, from the float32 weight as it was rotated and the codes as they are stored.

    Equals `sqnr_db` up to rounding, since a rotation keeps lengths; needs no second rotation.
    For formats with row scales.
    """
    payload, scale = quantized.tensors[""], quantized.tensors["_scale"].reshape(-1, 1)
    four_bit = quantized.format.weight_bits == 4
    return _ratio_db(
        (rotated[rows], (unpack_int4(codes) if four_bit else codes).float().mul_(scale[rows]))
        for rows in row_blocks(*quantized.shape)
        for codes in (payload[rows],)
    )


def _ratio_db(blocks: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """From (float block, its approximation) pairs; sums of blocks are added up in float64."""
    signal = noise = 0.0
    for block, approximation in blocks:
        error = approximation.sub_(block).flatten()
        signal += torch.dot(block.flatten(), block.flatten()).item()
        noise += torch.dot(error, error).item()
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def psnr_db(image: torch.Tensor, reference: torch.Tensor, peak: float = 1.0) -> float:
    """Peak signal to noise: `10 log10(peak**2 / mean((image - reference)**2))`; inf if equal."""
    error = (image.double() - reference.double()).square().mean().item()
    return math.inf if error == 0.0 else 10 * math.log10(peak**2 / error)
