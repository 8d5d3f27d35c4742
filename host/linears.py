"""The Linear layers of a MODEL, and what hinders quantizing each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.lora
import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ..kernels.streaming.flat_block import stored_bytes
from ..quant.patterns import MODEL_PREFIX
from ..quant.plan import Layer
from ..quant.stored.layout import LAYOUT_NAME
from .pristine import PristineWeights

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DECODED_LAYOUTS = (
    "TensorCoreFP8Layout",
    "TensorCoreFP8E4M3Layout",
    "TensorCoreFP8E5M2Layout",
    LAYOUT_NAME,
)
"""Layouts whose weights are quantized anew: fp8, and formats that no integer kernel runs."""


def linear_modules(patcher: ModelPatcher) -> dict[str, Any]:
    """Every Linear by its name relative to the diffusion model, in the model's order."""
    return {
        name: module
        for name, module in patcher.model.diffusion_model.named_modules()
        if isinstance(module, (torch.nn.Linear, comfy.ops.CastWeightBiasOp))
        and isinstance(getattr(module, "in_features", None), int)
        and isinstance(getattr(module, "out_features", None), int)
    }


def weight_key(name: str) -> str:
    """Key of a layer's weight in the model's state dict and in a patcher's patches."""
    return f"{MODEL_PREFIX}{name}.weight"


def bias_key(name: str) -> str:
    """Key of a layer's bias in the model's state dict."""
    return f"{MODEL_PREFIX}{name}.bias"


def describe_layers(patcher: ModelPatcher, pristine: PristineWeights) -> list[Layer]:
    """The plan's view of every Linear of the model."""
    return [
        _describe(name, module, patcher, pristine)
        for name, module in linear_modules(patcher).items()
    ]


def _describe(name: str, module: Any, patcher: ModelPatcher, pristine: PristineWeights) -> Layer:
    key = weight_key(name)
    weight = getattr(module, "weight", None)
    if weight is not None:
        weight = pristine.parameter(key, weight)
    return Layer(
        name=name,
        n=module.out_features,
        k=module.in_features,
        nbytes=0 if weight is None else stored_bytes(weight),
        packed=_why_packed(module, weight),
        dtype="" if weight is None else str(weight.dtype).removeprefix("torch."),
        barred=_why_barred(module, weight, key, patcher),
    )


def is_quantized_before(weight: Any) -> bool:
    """Whether a weight is quantized already, in a form that is decoded and quantized anew."""
    if isinstance(weight, QuantizedTensor):
        return weight._layout_cls in DECODED_LAYOUTS and weight.ndim == 2
    return weight.dtype in FP8_DTYPES


def float_weight(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The numbers a weight stands for: (N, K) float32 on `device`, in memory of its own."""
    if isinstance(weight, QuantizedTensor):
        moved: Any = weight.detach().to(device=device)
        params = replace(moved._params, orig_dtype=torch.float32)
        return QuantizedTensor(moved._qdata, moved._layout_cls, params).dequantize()
    return weight.detach().to(device=device, dtype=torch.float32, copy=True)


def _why_packed(module: Any, weight: Any) -> str | None:
    if weight is None:
        return "has no weight loaded"
    if is_quantized_before(weight):
        return None
    if isinstance(weight, QuantizedTensor):
        return f"already quantized ({getattr(module, 'quant_format', weight._layout_cls)})"
    if hasattr(weight, "tensor_type"):
        return f"already quantized (GGUF {weight.tensor_type})"
    if weight.dtype not in FLOAT_DTYPES:
        return f"already quantized or packed (stored as {str(weight.dtype).removeprefix('torch.')})"
    return None


def _why_barred(
    module: Any, weight: torch.Tensor | None, key: str, patcher: ModelPatcher
) -> str | None:
    kind = type(module)
    if kind.__module__ != comfy.ops.__name__ and kind is not torch.nn.Linear:
        return f"a layer of its own kind ({kind.__module__}.{kind.__qualname__})"
    patched_forward = key.removesuffix(".weight") + ".forward"
    if "forward" in module.__dict__ or patched_forward in patcher.object_patches:
        return "another node has replaced its forward"
    if weight is None:
        return None
    if weight.is_meta:
        return "its weight is not in the file"
    if tuple(weight.shape) != (module.out_features, module.in_features):
        return f"its weight has the shape {tuple(weight.shape)}"
    if key in patcher.weight_wrapper_patches:
        return "another node computes its weight in every call"
    patches = patcher.patches.get(key)
    if patches and comfy.lora.calculate_shape(patches, weight, key) != weight.shape:
        return "a LoRA on it changes its shape"
    return None
