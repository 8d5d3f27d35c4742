"""bitsandbytes' LLM.int8: an int8 weight and `SCB`, the largest magnitude of each row."""

from __future__ import annotations

from .int8_rows import int8_rows
from .layer import FileFacts, LayerTensors, StoredLayer

ROW_MAJOR = 0
"""`weight_format` of a plain matrix; other values are GPU tilings bitsandbytes itself refuses."""


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """int8 with SCB beside it."""
    return "SCB" in layer.parts and "weight" in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = q * SCB / 127`, the scale rounded to float32 once."""
    if "weight_format" in layer.parts:
        entry = layer.require_shape("weight_format", (), (1,))
        value = int(file.source.read(entry.name).reshape(-1)[0].item())
        if value != ROW_MAJOR:
            raise layer.fault(f"its weight_format is {value}, a GPU tiling; only 0 (rows) is known")
    return int8_rows(
        layer,
        format="bnb_int8",
        writer="bitsandbytes LLM.int8",
        stock="loads it as noise, without an error",
        scale="SCB",
        scale_factor=1 / 127,
    )
