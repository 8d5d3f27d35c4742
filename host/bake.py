"""Merging the LoRAs of a MODEL into its weights, once, in a twin of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.lora
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ..quant.formats import DISPATCHED_INT8_LAYOUT
from ..quant.int8_layout import with_settings_of
from ..quant.measured import quantize_and_measure
from ..quant.native import dequantize, from_quantized_tensor, to_quantized_tensor
from ..quant.patterns import MODEL_PREFIX
from ..quant.weight import W4A8_SCALE_GROUP, QuantizedWeight
from .linears import FLOAT_DTYPES
from .pristine import PristineWeights, unload
from .progress import interruptible
from .twin import make_twin
from .twin_patcher import patcher_over, refuse_held_modules


def bake_loras(model: ModelPatcher) -> tuple[ModelPatcher, int]:
    """A twin whose weights have the LoRAs in them, and how many; `model` stays as it is.

    Float weights are merged in float32 and rounded once; quantized ones are quantized again. What no
    format of ours holds keeps its patches, and ComfyUI applies them.

    Raises:
        HostError: if nodes before this one hold on to the model's modules.
        WeightError: if a merged weight holds NaN or Inf.
    """
    keys = [key for key in model.patches if key.startswith(MODEL_PREFIX)]
    if not keys:
        return model.clone(), 0
    refuse_held_modules(model)
    unload(model.model)
    pristine = PristineWeights.of(model)
    parameters = dict(model.model.named_parameters())
    merged = {}
    for key in interruptible([key for key in keys if key in parameters]):
        held = pristine.parameter(key, parameters[key])
        shape = comfy.lora.calculate_shape(model.patches[key], held, key)
        tensor = _merged(key, held, model.patches[key]) if shape == held.shape else None
        if tensor is not None:
            merged[key] = tensor
    twin = make_twin(model.model, pristine, {}, model.offload_device, merged)
    baked = patcher_over(twin, model)
    for key in merged:
        del baked.patches[key]
    return baked, len(merged)


def merge_float(key: str, tensor: torch.Tensor, patches: list[Any]) -> torch.Tensor:
    """A float tensor with its patches, computed in float32, in its own dtype."""
    values = comfy.lora.calculate_weight(patches, tensor.float().clone(), key, torch.float32)
    return values.to(tensor.dtype)


def merge_quantized(
    key: str, weight: QuantizedWeight, patches: list[Any]
) -> tuple[QuantizedWeight, float]:
    """A quantized weight with its patches, quantized again, and its error in dB."""
    values = comfy.lora.calculate_weight(patches, dequantize(weight), key, torch.float32)
    again, sqnr = quantize_and_measure(values, weight.format, weight.group_size, key)
    return replace(again, linear_dtype=weight.linear_dtype), sqnr


def is_what_we_quantize_to(weight: QuantizedWeight) -> bool:
    """Whether quantizing again gives tensors of the same shapes: not so for every w4a8."""
    if weight.format.native_format != "asym_w4a8_int8":
        return True
    four_bit = weight.tensors[""].shape[1] * 2 == weight.shape[1]
    codebook = "_codebook" in weight.tensors
    return four_bit and codebook and weight.scale_group == W4A8_SCALE_GROUP


def _merged(key: str, held: Any, patches: list[Any]) -> torch.Tensor | None:
    """The merged weight as it is held; None if it is in no form that can be merged."""
    if not isinstance(held, QuantizedTensor):
        plain = type(held) in (torch.Tensor, torch.nn.Parameter) and held.dtype in FLOAT_DTYPES
        return merge_float(key, held, patches) if plain else None
    weight = from_quantized_tensor(held) if held.ndim == 2 else None
    if weight is None or "_correction" in weight.tensors or not is_what_we_quantize_to(weight):
        return None
    again, _ = merge_quantized(key, weight, patches)
    tensor = to_quantized_tensor(again, held._params.orig_dtype)
    if held._layout_cls == DISPATCHED_INT8_LAYOUT:
        tensor = with_settings_of(tensor, held)
    return tensor
