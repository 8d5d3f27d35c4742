"""optimum-quanto and mmgp (Wan2GP): int8 per row, and int4 in groups with a float shift.

int4 codes lie as a matrix of one group a row, whose upper half fills the low nibbles and whose
lower half the high ones. The weight's shape is not stored: the bias tells the rows.
"""

from __future__ import annotations

from ...quant.stored.scheme import Grid, Scheme
from ...quant.stored.weight import StoredWeight
from .int8_rows import int8_rows
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, TensorSource, stored_layer

WRITER = "optimum-quanto or mmgp"
INT8, PACKED = "weight._data", "weight._data._data"
SCALE, SHIFT = "weight._scale", "weight._shift"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Named so."""
    return (INT8 in layer.parts or PACKED in layer.parts) and SCALE in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """int8: `W = data * scale`; int4: `W = data * scale - shift`."""
    if PACKED in layer.parts:
        return _int4(layer)
    return int8_rows(
        layer,
        format="quanto_int8",
        writer=WRITER,
        stock="leaves the weight uninitialised: noise or NaN",
        payload=INT8,
        scale=SCALE,
    )


def _int4(layer: LayerTensors) -> StoredLayer:
    packed = layer.require_dtype(PACKED, "U8")
    scale = layer.require_dtype(SCALE, *FLOATS)
    shift = layer.require_dtype(SHIFT, *FLOATS, "I8", "U8")
    if len(packed.shape) != 2 or len(scale.shape) != 2 or scale.shape[1] != 1:
        raise layer.fault(
            f"its data and scale have the shapes {list(packed.shape)} and {list(scale.shape)}, "
            "expected a matrix and a column"
        )
    rows, group = scale.shape[0], packed.shape[1]
    layer.require_shape(SHIFT, scale.shape)
    if packed.shape[0] != (rows + 1) // 2:
        bits = 2 if packed.shape[0] == (rows + 3) // 4 else "an unknown number of"
        raise layer.fault(f"is stored in {bits} bits; only 4 and 8 are supported")
    n = _rows_of_weight(layer, rows, group)
    k = rows * group // n
    whole = shift.dtype in ("I8", "U8")
    grid = Grid(4, False, "row_halves", 1, group, "subtracted" if whole else "added")

    def load(source: TensorSource) -> StoredWeight:
        zero = source.read(layer.key(SHIFT)).reshape(n, -1)
        tensors = {
            "payload": source.read(layer.key(PACKED)),
            "scale": source.read(layer.key(SCALE)).reshape(n, -1),
            "zero": zero if whole else -zero,
        }
        return StoredWeight(Scheme("quanto_int4", grid), (n, k), tensors)

    return stored_layer(
        layer,
        load,
        format="quanto_int4",
        writer=WRITER,
        loads_as="stored (int4, group scales)",
        stock="leaves the weight uninitialised: noise or NaN",
        shape=(n, k),
    )


def _rows_of_weight(layer: LayerTensors, rows: int, group: int) -> int:
    bias = layer.parts.get("bias")
    if bias is not None and len(bias.shape) == 1 and bias.shape[0] and rows % bias.shape[0] == 0:
        return bias.shape[0]
    if group % 32 or group > 128:
        return rows  # quanto's groups are 128, 96, 64 or 32 wide; other widths are a whole row
    raise layer.fault(
        "does not say how many rows it has: optimum-quanto stores no shape, and it has no bias",
        "save it as int8, or get the model in another format",
    )
