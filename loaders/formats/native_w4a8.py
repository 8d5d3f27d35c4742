"""`asym_w4a8_int8`: 4-bit codes into a codebook, or uniform 6-bit codes, with two levels of scales.

The row's bytes tell which: K/2 for 4 bits, 3K/4 for 6. Source: comfy-kitchen's W4A8 layout.
"""

from __future__ import annotations

import torch

from ...kernels.hadamard import is_rotation_group
from ...quant.formats import FORMATS
from ...quant.weight import QuantizedWeight
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, TensorSource, stored_layer
from .marker import whole_number


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled so."""
    return layer.config is not None and layer.config.get("format") == "asym_w4a8_int8"


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = unrotate(codebook[code] * s_rel * s_channel)`, with `weight_correction` added if stored."""
    config = layer.config or {}
    weight = layer.require_dtype("weight", "I8", "U8")
    relative = layer.require_dtype("weight_s_rel", "F8_E4M3", "U8", "F32")
    if len(weight.shape) != 2 or len(relative.shape) != 2 or 0 in weight.shape:
        raise layer.fault(
            f"its weight and weight_s_rel have the shapes {list(weight.shape)} and "
            f"{list(relative.shape)}, expected two sides each"
        )
    n, row_bytes = weight.shape
    group = whole_number(config, "group_size", 16, layer.name)
    rotation = whole_number(config, "convrot_groupsize", 256, layer.name)
    k = relative.shape[1] * group
    layer.require_shape("weight_s_rel", (n, k // group))
    six_bit = 4 * row_bytes == 3 * k
    if not six_bit and 2 * row_bytes != k:
        raise layer.fault(
            f"a row has {row_bytes} bytes; K={k} needs {k // 2} in 4 bits or {3 * k // 4} in 6"
        )
    if not is_rotation_group(rotation) or k % rotation or k % 16:
        raise layer.fault(f"its rotation group {rotation} does not fit K={k}")
    layer.require_dtype("weight_s_channel", *FLOATS)
    layer.require_shape("weight_s_channel", (n,), (n, 1))
    if not six_bit and "weight_codebook" in layer.parts:
        layer.require_shape("weight_codebook", (16,))
    corrected = "weight_correction" in layer.parts
    if corrected:
        layer.require_shape("weight_correction", (k // group, n))

    def load(source: TensorSource) -> QuantizedWeight:
        scale = source.read(layer.key("weight_s_rel"))
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e4m3fn)
        tensors = {
            "": source.read(layer.key("weight")).view(torch.int8),
            "_s_rel": scale,
            "_s_channel": source.read(layer.key("weight_s_channel")).float().reshape(n),
        }
        for part in ("weight_codebook", "weight_correction"):
            if part in layer.parts:
                tensors[part.removeprefix("weight")] = source.read(layer.key(part)).float()
        spec = FORMATS["w4a8_convrot"]
        return QuantizedWeight(spec, rotation, (n, k), tensors, scale_group=group)

    return stored_layer(
        layer,
        load,
        format="asym_w4a8_int8 (6 bit)" if six_bit else "asym_w4a8_int8",
        writer="comfy-kitchen or a tool of its format",
        loads_as="asym_w4a8_int8",
        stock="loads it, without its weight_correction" if corrected else "loads it",
        shape=(n, k),
        group_size=rotation,
        uses=("weight_correction",) if corrected and not six_bit else (),
    )
