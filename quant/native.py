"""comfy-kitchen's QuantizedTensor: the form in which ComfyUI holds and runs a quantized weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .weight import QuantizedWeight

if TYPE_CHECKING:
    from comfy_kitchen.tensor import QuantizedTensor


def to_quantized_tensor(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedTensor:
    """Wrap a weight, without copying its tensors.

    Args:
        dtype: what the tensor says it is and dequantizes to (ComfyUI's compute dtype).
    """
    from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

    tensors = weight.tensors
    params: dict[str, object] = {"orig_dtype": dtype, "orig_shape": weight.shape}
    if weight.format.native_format == "asym_w4a8_int8":
        params |= {
            "scale": tensors["_s_rel"],
            "s_channel": tensors["_s_channel"],
            "correction": tensors.get("_correction"),
            "codebook": tensors.get("_codebook"),
            "group_size": weight.scale_group,
        }
    else:
        params["scale"] = tensors["_scale"]
    if weight.group_size is not None:
        params["convrot_groupsize"] = weight.group_size
        if weight.format.native_format == "int8_tensorwise":
            params["convrot"] = True
    if weight.linear_dtype != "int4":
        params["linear_dtype"] = weight.linear_dtype
    layout = get_layout_class(weight.format.layout)
    return QuantizedTensor(tensors[""], weight.format.layout, layout.Params(**params))


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The (N, K) weight the format stands for, in the basis it had before rotation."""
    return to_quantized_tensor(weight, dtype).dequantize()
