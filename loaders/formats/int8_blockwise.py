"""convert_to_quant's `int8_blockwise`: an int8 weight with one scale per square block.

Source: silveroxides' convert_to_quant; blocks of 128 unless `group_size` says otherwise.
"""

from __future__ import annotations

from ...quant.stored.scheme import Grid, Scheme
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, read_stored, stored_layer
from .marker import whole_number


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled so."""
    return layer.config is not None and layer.config.get("format") == "int8_blockwise"


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = q * scale` of the element's block."""
    weight = layer.require_dtype("weight", "I8")
    if len(weight.shape) != 2:
        raise layer.fault(f"its weight has the shape {list(weight.shape)}, expected two sides")
    n, k = weight.shape
    block = whole_number(layer.config or {}, "group_size", 128, layer.name)
    layer.require_dtype("weight_scale", *FLOATS)
    layer.require_shape("weight_scale", (-(-n // block), -(-k // block)))
    scheme = Scheme("int8_blockwise", Grid(8, True, "bytes", block, block))
    parts = {"payload": "weight", "scale": "weight_scale"}

    return stored_layer(
        layer,
        read_stored(layer, scheme, (n, k), parts),
        format="int8_blockwise",
        writer="convert_to_quant",
        loads_as="stored (int8, block scales)",
        stock="stops with KeyError: 'int8_blockwise'",
        shape=(n, k),
    )
