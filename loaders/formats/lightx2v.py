"""LightX2V's ComfyUI mode: int8 under the names of scaled fp8, one scale a tensor."""

from __future__ import annotations

from .int8_rows import int8_rows
from .layer import FileFacts, LayerTensors, StoredLayer


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """int8 with `scale_weight`."""
    weight = layer.parts.get("weight")
    return weight is not None and weight.dtype == "I8" and "scale_weight" in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = q * scale_weight`."""
    return int8_rows(
        layer,
        format="lightx2v_comfyui",
        writer="LightX2V (ComfyUI mode)",
        stock="stops with an error: it takes the int8 weight for fp8",
        scale="scale_weight",
    )
