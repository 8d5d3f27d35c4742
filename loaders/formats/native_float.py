"""ComfyUI's own floating-point formats: fp8, mxfp8 and nvfp4. Passed on as they are."""

from __future__ import annotations

import torch

from .layer import (
    FLOATS,
    FileFacts,
    LayerTensors,
    NativeTensors,
    StoredLayer,
    TensorSource,
    stored_layer,
)

DTYPES = {
    "float8_e4m3fn": ("F8_E4M3", "U8"),
    "float8_e5m2": ("F8_E5M2", "U8"),
    "mxfp8": ("F8_E4M3", "U8"),
    "nvfp4": ("U8",),
}
FP8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SCALED_FP8 = "scaled_fp8"
"""Name of the tensor by which older fp8 files say that every layer has a `scale_weight`."""

RENAMED = {"scale_weight": "weight_scale", "scale_input": "input_scale"}


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled with one of the names, or fp8 with a scale beside it."""
    if layer.config is not None:
        return layer.config.get("format") in tuple(DTYPES)
    weight = layer.parts.get("weight")
    scaled = "weight_scale" in layer.parts or "scale_weight" in layer.parts
    return weight is not None and weight.dtype in FP8 and scaled


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """The tensors under ComfyUI's present names, and the label they should have."""
    entry = layer.require("weight")
    config = dict(layer.config or {"format": FP8.get(entry.dtype)})
    name = str(config["format"])
    layer.require_dtype("weight", *DTYPES[name])
    if len(entry.shape) not in (2, 3):
        raise layer.fault(f"its weight has the shape {list(entry.shape)}, expected a matrix")
    scale = "scale_weight" if "scale_weight" in layer.parts else "weight_scale"
    if name in FP8.values():
        layer.require_dtype(scale, *FLOATS)
        layer.require_shape(scale, (), (1,), (1, 1))
    layer.require(scale)
    if scale == "scale_weight" and _full_precision(file):
        config["full_precision_matrix_mult"] = True
    width = 2 if name == "nvfp4" else 1
    shape = (*entry.shape[:-1], entry.shape[-1] * width)

    def load(source: TensorSource) -> NativeTensors:
        tensors = {
            RENAMED.get(part, part): source.read(layer.key(part))
            for part in layer.parts
            if part not in ("bias", "comfy_quant")
        }
        if scale == "scale_weight" and "input_scale" in tensors:
            given = tensors["input_scale"]
            if given.numel() == 1 and given.item() == 1.0:
                del tensors["input_scale"]  # ComfyUI reads 1.0 in these files as "none"
        if name in FP8.values():
            # Where a tool had no fp8 dtype, it stored the bytes.
            tensors["weight"] = tensors["weight"].view(getattr(torch, name))
        return NativeTensors(config, tensors)

    return stored_layer(
        layer,
        load,
        format=name,
        writer="ComfyUI or a tool of its format",
        loads_as=name,
        stock="loads it"
        if layer.config or scale == "scale_weight"
        else "loads it without its scale",
        shape=shape,
        uses=layer.parts,
    )


def _full_precision(file: FileFacts) -> bool:
    """Whether a `scaled_fp8` marker of two elements asks for float matrix products."""
    key = next((key for key in file.keys if key.endswith(SCALED_FP8)), None)
    return key is not None and file.source.read(key).numel() == 2
