"""The native format nearest to a weight that another tool stored, and the error of going there."""

from __future__ import annotations

import torch

from .formats import FORMATS, ROTATION_GROUPS, Format
from .measured import quantize_and_measure
from .plan import gives_the_models_size
from .weight import QuantizedWeight


def nearest_native(
    weight: torch.Tensor, bits: int, layer: str, in_blocks: bool
) -> tuple[QuantizedWeight, float]:
    """A float32 weight (N, K) in the native format of as many bits, and its SQNR in dB.

    8 bits become int8_convrot, 4 bits w4a8_convrot; int8 where the width does not allow those, or
    where ComfyUI reads the model's size from the stored shape, which 4-bit packing halves.

    Args:
        layer: its name, for that rule and for error messages. in_blocks: see `plan`.

    Raises:
        WeightError: if the weight holds NaN or Inf.
    """
    format, group = _choose(weight.shape[1], bits, layer, in_blocks)
    return quantize_and_measure(weight, format, group, layer)


def _choose(k: int, bits: int, layer: str, in_blocks: bool) -> tuple[Format, int | None]:
    group = next((group for group in ROTATION_GROUPS if k % group == 0), None)
    if group is None:
        return FORMATS["int8"], None
    if bits == 4 and not gives_the_models_size(layer, in_blocks):
        return FORMATS["w4a8_convrot"], group
    return FORMATS["int8_convrot"], group
