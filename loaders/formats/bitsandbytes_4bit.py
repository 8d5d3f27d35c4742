"""bitsandbytes' NF4 and FP4, with plain or double-quantized block scales.

The scheme stands as JSON in `weight.quant_state.bitsandbytes__nf4` or `..__fp4`.
"""

from __future__ import annotations

import json
from typing import Any

from ...quant.stored.scheme import Codebook, Scheme
from .layer import FileFacts, LayerTensors, StoredLayer, TensorSource, read_stored, stored_layer
from .marker import MAX_MARKER_BYTES

STATES = {
    "nf4": "weight.quant_state.bitsandbytes__nf4",
    "fp4": "weight.quant_state.bitsandbytes__fp4",
}
STOCK = "stops with a size mismatch"
REMEDY = "get the file from another source"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Packed, with a quant_state beside it."""
    return any(state in layer.parts for state in STATES.values())


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """See `Codebook`; blocks run over the flattened weight and may cross rows."""
    kind = next(kind for kind, state in STATES.items() if state in layer.parts)
    state = _state(layer, STATES[kind], file.source)
    n, k = _shape(layer, state)
    block = _count(layer, state, "blocksize")
    blocks = -(-n * k // block)
    payload = layer.require_dtype("weight", "U8", "I8")
    if payload.nbytes != (n * k + 1) // 2:
        raise layer.fault(
            f"its weight has {payload.nbytes} bytes; the shape [{n}, {k}] needs {(n * k + 1) // 2}"
        )
    layer.require_shape("weight.quant_map", (16,))
    nested = "nested_blocksize" in state or "weight.nested_absmax" in layer.parts
    layer.require_dtype("weight.absmax", "U8" if nested else "F32")
    layer.require_shape("weight.absmax", (blocks,))
    codes = Codebook(block)
    if nested:
        nested_block = _count(layer, state, "nested_blocksize")
        layer.require_shape("weight.nested_absmax", (-(-blocks // nested_block),))
        layer.require_shape("weight.nested_quant_map", (256,))
        offset = state.get("nested_offset", 0.0)
        if not isinstance(offset, (int, float)):
            raise layer.fault(f"its nested_offset is {offset!r}, expected a number")
        codes = Codebook(block, nested_block, float(offset))
    scheme = Scheme(f"bnb_{kind}", codes)
    parts = {"payload": "weight", "scale": "weight.absmax", "codebook": "weight.quant_map"}
    if nested:
        parts["nested_scale"] = "weight.nested_absmax"
        parts["nested_codebook"] = "weight.nested_quant_map"

    return stored_layer(
        layer,
        read_stored(layer, scheme, (n, k), parts),
        format=f"bnb_{kind}",
        writer="bitsandbytes",
        loads_as=f"stored ({kind.upper()} codebook)",
        stock=STOCK,
        shape=(n, k),
    )


def _state(layer: LayerTensors, part: str, source: TensorSource) -> dict[str, Any]:
    entry = layer.require_dtype(part, "U8")
    if entry.nbytes > MAX_MARKER_BYTES:
        raise layer.fault(f"its quant_state has {entry.nbytes} bytes", REMEDY)
    try:
        state = json.loads(source.read(entry.name).numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise layer.fault(f"its quant_state is not JSON ({error})", REMEDY) from error
    if not isinstance(state, dict):
        raise layer.fault("its quant_state is not a JSON object", REMEDY)
    return state


def _shape(layer: LayerTensors, state: dict[str, Any]) -> tuple[int, int]:
    shape = state.get("shape")
    if isinstance(shape, list) and len(shape) == 2:
        n, k = shape
        if isinstance(n, int) and isinstance(k, int) and n > 0 and k > 0:
            return n, k
    raise layer.fault(f"its quant_state has the shape {shape!r}, expected two sides")


def _count(layer: LayerTensors, state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or value < 2 or value & (value - 1):
        raise layer.fault(f"its {name} is {value!r}, expected a power of 2")
    return value
