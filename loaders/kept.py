"""Writing what a conversion does not quantize: as it is, or as ComfyUI alone can load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ..quant.weight import QuantizedWeight
from .contents import LayerItem, LoadedWeight, to_float
from .formats.layer import NativeTensors, TensorSource
from .writer import config_of, marker, native_layer

KEPT_DTYPE = torch.bfloat16
"""What a layer of a format that ComfyUI lacks is written as where it is not quantized anew."""


@dataclass(frozen=True)
class KeptLayer:
    """A layer's tensors by their full names, and its label, None for a plain float weight."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any] | None


def keep_layer(item: LayerItem, source: TensorSource, prefix: str = "") -> KeptLayer:
    """A quantized layer under ComfyUI's names.

    Native formats keep their bits, and get the label and the scale's shape that ComfyUI reads;
    others are decoded to bf16.
    """
    name = f"{prefix}{item.name}"
    weight = item.load(source)
    if is_native(weight):
        return KeptLayer(native_layer(name, weight), config_of(weight))
    if isinstance(weight, NativeTensors):
        tensors = {f"{name}.{part}": tensor for part, tensor in weight.tensors.items()}
        tensors[f"{name}.comfy_quant"] = marker(weight.config)
        return KeptLayer(tensors, weight.config)
    return KeptLayer({f"{name}.weight": to_float(weight).to(KEPT_DTYPE)}, None)


def is_native(weight: LoadedWeight) -> TypeGuard[QuantizedWeight]:
    """Whether ComfyUI alone loads all of this weight from a native file.

    It drops the correction of an asymmetric w4a8 weight.
    """
    return isinstance(weight, QuantizedWeight) and "_correction" not in weight.tensors
