"""SDNQ: 8- and 4-bit weights in groups, with a float zero point, low-rank parts and a rotation.

`W = unrotate(q * scale + zero_point + svd_up @ svd_down)`. 4-bit weights lie flat, the even element
in the low nibble, signed ones shifted by 8. Layers made for its own integer products are stored
transposed; the scale's shape tells. Source: SDNQ 0.2.8 and 0.1.9, run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...quant.stored.scheme import Grid, Scheme
from ...quant.stored.weight import StoredWeight
from .int8_rows import int8_weight, is_native
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, TensorSource, Weight, stored_layer
from .scales import row_scale
from .sdnq_config import config_of, of_layer, rotation_of

SCALE_TENSORS = ("scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")
NOISE = "loads int8 as noise, without an error, and stops at others"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Integers with `scale` beside the weight."""
    weight = layer.parts.get("weight")
    packed = weight is not None and weight.dtype in ("I8", "U8")
    return packed and "scale" in layer.parts and layer.config is None


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """See the module's text."""
    config = config_of(file)
    settings = None if config is None else of_layer(config, layer.name)
    _refuse_others(layer, settings)
    weight = layer.require("weight")
    scale = layer.require_dtype("scale", *FLOATS)
    transposed = (
        len(weight.shape) == 2
        and len(scale.shape) == 2
        and scale.shape == (1, weight.shape[1])
        and weight.shape[1] > 1
    )
    n = weight.shape[1] if transposed else scale.shape[0] if scale.shape else 0
    bits = 4 if len(weight.shape) == 1 else 8
    elements = weight.nbytes * 8 // bits
    if n < 1 or elements % n or len(weight.shape) > 3:
        raise layer.fault(
            f"its weight {list(weight.shape)} and scale {list(scale.shape)} do not fit each other"
        )
    k = elements // n
    groups = scale.shape[1] if len(scale.shape) == 3 else 1
    if not transposed:
        layer.require_shape("scale", (n, groups, 1), *([(n, 1)] if groups == 1 else []))
    if k % groups or (len(weight.shape) == 3 and weight.shape != (n, groups, k // groups)):
        raise layer.fault(f"its scale has {groups} groups, its weight {list(weight.shape)}")
    unsigned = "zero_point" in layer.parts
    if unsigned:
        layer.require_dtype("zero_point", *FLOATS)
        layer.require_shape("zero_point", scale.shape)
    low_rank = _check_low_rank(layer, n, k)
    rotation, note = rotation_of(layer, settings, file.rotation, k)
    grid = Grid(
        bits=bits,
        signed=weight.dtype == "I8",
        packing="bytes" if bits == 8 else "low_first",
        block_rows=1,
        block_columns=k // groups,
        zero="added" if unsigned else "none",
        bias=8 if bits == 4 and not unsigned else 0,
    )
    name = f"sdnq_{'u' if unsigned else ''}int{bits}"
    native = bits == 8 and groups == 1 and not unsigned and not low_rank and is_native(rotation)
    scheme = Scheme(name, grid, rotation, "inside" if low_rank else "none")

    def load(source: TensorSource) -> Weight:
        payload = source.read(layer.key("weight"))
        payload = payload.t().contiguous() if transposed else payload.reshape(n, -1)
        if native:
            return int8_weight(
                payload, row_scale(source.read(layer.key("scale")), n), rotation, name
            )
        tensors = {"payload": payload, "scale": source.read(layer.key("scale")).reshape(n, groups)}
        if unsigned:
            tensors["zero"] = source.read(layer.key("zero_point")).reshape(n, groups)
        if low_rank:
            up, down = source.read(layer.key("svd_up")), source.read(layer.key("svd_down"))
            turned = not _upright(layer, n, k)
            tensors["up"] = up.t().contiguous() if turned else up
            tensors["down"] = down.t().contiguous() if turned else down
        return StoredWeight(scheme, (n, k), tensors)

    return stored_layer(
        layer,
        load,
        format=name,
        writer="SDNQ",
        loads_as="int8_tensorwise"
        if native
        else f"stored (int{bits}{', low-rank part' if low_rank else ''})",
        stock=NOISE,
        shape=(n, k),
        group_size=None if rotation is None else rotation.group_size,
        notes=(note,) if note else (),
        uses=("zero_point", "svd_up", "svd_down"),
    )


def _refuse_others(layer: LayerTensors, settings: Mapping[str, Any] | None) -> None:
    """SDNQ stores many more kinds of numbers in the same dtypes; only its config tells them apart."""
    unsigned = "zero_point" in layer.parts
    weight = layer.require("weight")
    for part in SCALE_TENSORS:
        if part in layer.parts:
            raise layer.fault(f"its scales are quantized themselves ({part}), not supported")
    dtype = None if settings is None else settings.get("weights_dtype")
    if settings is None and len(weight.shape) == 1:
        raise layer.fault(
            "is packed by SDNQ; how many bits a weight has stands only in its "
            "quantization_config.json, which is not beside the file",
            "put quantization_config.json beside the file",
        )
    if settings is not None and settings.get("use_codebook"):
        raise layer.fault("is stored by SDNQ with a codebook, not supported")
    if len(weight.shape) == 1:
        expected = ("uint4",) if unsigned else ("int4",)
    else:
        expected = ("uint8",) if weight.dtype == "U8" else ("int8",)
    if dtype is not None and dtype not in expected:
        raise layer.fault(
            f"is stored in SDNQ's {dtype!r}; int8, uint8, int4 and uint4 are supported",
            "get a file in one of them",
        )
    if weight.dtype == "U8" and len(weight.shape) > 1 and not unsigned:
        raise layer.fault("is stored by SDNQ as packed floats, not supported")


def _check_low_rank(layer: LayerTensors, n: int, k: int) -> bool:
    if "svd_up" not in layer.parts and "svd_down" not in layer.parts:
        return False
    up, down = layer.require_dtype("svd_up", *FLOATS), layer.require_dtype("svd_down", *FLOATS)
    fits = len(up.shape) == len(down.shape) == 2 and (
        _upright(layer, n, k) or (up.shape[1], down.shape[0], up.shape[0]) == (n, k, down.shape[1])
    )
    if not fits:
        raise layer.fault(
            f"its svd_up {list(up.shape)} and svd_down {list(down.shape)} do not fit [{n}, {k}]"
        )
    return True


def _upright(layer: LayerTensors, n: int, k: int) -> bool:
    """Whether the low-rank parts are (N, R) and (R, K), not both transposed."""
    up, down = layer.require("svd_up").shape, layer.require("svd_down").shape
    return (up[0], down[1], up[1]) == (n, k, down[0])
