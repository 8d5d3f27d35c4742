"""`convrot_w4a4`, and comfy-kitchen's proposed `int4_tensorwise` with the same codes.

Two signed 4-bit codes a byte, the even column in the low nibble, one scale a row of the rotated
weight. `linear_dtype` "int8" runs the same weight with 8-bit activations.
"""

from __future__ import annotations

import torch

from ...quant.formats import FORMATS
from ...quant.stored.scheme import Grid, Scheme
from ...quant.stored.weight import StoredWeight
from ...quant.weight import QuantizedWeight
from .int8_rows import check_rotation, labelled_rotation
from .layer import FileFacts, LayerTensors, StoredLayer, TensorSource, Weight, stored_layer
from .marker import whole_number
from .scales import require_row_scale, row_scale

LINEAR_DTYPES = ("int4", "int8")
K_MULTIPLE = 64


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled so."""
    name = None if layer.config is None else layer.config.get("format")
    return name in ("convrot_w4a4", "int4_tensorwise")


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = unrotate(q * scale)`; int4_tensorwise is rotated only where its label says so."""
    config = layer.config or {}
    name = str(config.get("format"))
    weight = layer.require_dtype("weight", "I8", "U8")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise layer.fault(f"its weight has the shape {list(weight.shape)}, expected two sides")
    n, k = weight.shape[0], 2 * weight.shape[1]
    require_row_scale(layer, "weight_scale", n)
    rotation = None
    if name == "convrot_w4a4" or config.get("convrot"):
        rotation = labelled_rotation(whole_number(config, "convrot_groupsize", 256, layer.name))
        check_rotation(layer, rotation, k)
    linear_dtype = config.get("linear_dtype", "int4")
    if linear_dtype not in LINEAR_DTYPES:
        raise layer.fault(f"its linear_dtype is {linear_dtype!r}, expected int4 or int8")
    native = rotation is not None and rotation.kind == "regular" and k % K_MULTIPLE == 0

    def load(source: TensorSource) -> Weight:
        scale = row_scale(source.read(layer.key("weight_scale")), n)
        codes = source.read(layer.key("weight"))
        if native and rotation is not None:
            tensors = {"": codes.view(torch.int8), "_scale": scale.reshape(n)}
            spec = FORMATS["w4a4_convrot"]
            group = rotation.group_size
            return QuantizedWeight(spec, group, (n, k), tensors, linear_dtype=str(linear_dtype))
        grid = Grid(4, True, "low_first", block_rows=1, block_columns=k)
        scheme = Scheme(name, grid, rotation)
        return StoredWeight(scheme, (n, k), {"payload": codes, "scale": scale})

    return stored_layer(
        layer,
        load,
        format=name,
        writer="comfy-kitchen or a tool of its format",
        loads_as="convrot_w4a4" if native else "stored (int4, row scales)",
        stock="loads it" if name == "convrot_w4a4" else f"stops with KeyError: {name!r}",
        shape=(n, k),
        group_size=None if rotation is None else rotation.group_size,
    )
