"""comfy-kitchen's QuantizedTensor: the form in which ComfyUI holds and runs a quantized weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .formats import DISPATCHED_INT8_LAYOUT, FORMATS, INT8_LAYOUT
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


def from_quantized_tensor(tensor: QuantizedTensor) -> QuantizedWeight | None:
    """The weight a QuantizedTensor holds, without copying; None if its layout is not ours to read.

    int8 scales of shape [], [1] and [N] become (N, 1).
    """
    params = tensor._params
    n, k = tensor.shape
    name = tensor._layout_cls
    if name in (INT8_LAYOUT, DISPATCHED_INT8_LAYOUT):
        group = params.convrot_groupsize if params.convrot else None
        spec = FORMATS["int8" if group is None else "int8_convrot"]
        scale = params.scale.float().reshape(-1, 1).expand(n, 1)
        return QuantizedWeight(spec, group, (n, k), {"": tensor._qdata, "_scale": scale})
    if name == FORMATS["w4a4_convrot"].layout:
        spec = FORMATS["w4a4_convrot"]
        tensors = {"": tensor._qdata, "_scale": params.scale}
        group, linear = params.convrot_groupsize, params.linear_dtype
        return QuantizedWeight(spec, group, (n, k), tensors, linear_dtype=linear)
    if name == FORMATS["w4a8_convrot"].layout:
        optional = {"_codebook": params.codebook, "_correction": params.correction}
        tensors = {"": tensor._qdata, "_s_rel": params.scale, "_s_channel": params.s_channel}
        tensors |= {suffix: value for suffix, value in optional.items() if value is not None}
        group, scales = params.convrot_groupsize, params.group_size
        spec = FORMATS["w4a8_convrot"]
        return QuantizedWeight(spec, group, (n, k), tensors, scale_group=scales)
    return None
