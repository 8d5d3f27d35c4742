"""compressed-tensors, the format of vLLM's tools: int8 per channel, tensor or group, and packed.

The scheme stands in `config.json` beside the file; int8 per channel without it is read as
`unlabelled_int8`. Packed 4- and 8-bit weights (int32 words) name themselves by their keys.
"""

from __future__ import annotations

import torch

from ...kernels.nibbles import unpack_nibbles
from ...quant.stored.scheme import Grid, Scheme
from ...quant.stored.weight import StoredWeight
from .int8_rows import int8_rows
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, TensorSource, stored_layer

WRITER = "compressed-tensors (llm-compressor, vLLM)"
NOISE = "loads it as noise, without an error"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Packed words, or int8 where config.json says so or group scales or zero points do."""
    if "weight_packed" in layer.parts:
        return True
    weight, scale = layer.parts.get("weight"), layer.parts.get("weight_scale")
    if weight is None or scale is None or weight.dtype != "I8" or len(weight.shape) != 2:
        return False
    if "weight_zero_point" in layer.parts or _says_so(file):
        return True
    n, k = weight.shape
    grouped = len(scale.shape) == 2 and scale.shape[0] == n and scale.shape[1] > 1
    return grouped and k % scale.shape[1] == 0


def _says_so(file: FileFacts) -> bool:
    config = file.side.get("config.json", {}).get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "compressed-tensors"


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = (q - zero_point) * scale`."""
    if "weight_g_idx" in layer.parts:
        raise layer.fault("its columns are reordered (weight_g_idx), which is not supported")
    if "weight_packed" in layer.parts:
        return _packed(layer, file)
    scale = layer.require_dtype("weight_scale", *FLOATS)
    if "weight_zero_point" not in layer.parts and (len(scale.shape) < 2 or scale.shape[1] == 1):
        return int8_rows(layer, format="compressed_tensors_int8", writer=WRITER, stock=NOISE)
    n, k = layer.require("weight").shape
    groups = _groups(layer, n, k)
    grid = Grid(8, True, "bytes", 1, k // groups, _zero(layer))

    def load(source: TensorSource) -> StoredWeight:
        tensors = {
            "payload": source.read(layer.key("weight")),
            "scale": _full(source.read(layer.key("weight_scale")), n, groups),
        }
        if grid.zero != "none":
            tensors["zero"] = _full(source.read(layer.key("weight_zero_point")), n, groups)
        return StoredWeight(Scheme("compressed_tensors_int8", grid), (n, k), tensors)

    return stored_layer(
        layer,
        load,
        format="compressed_tensors_int8",
        writer=WRITER,
        loads_as="stored (int8, group scales)",
        stock=NOISE,
        shape=(n, k),
        uses=("weight_zero_point",),
    )


def _groups(layer: LayerTensors, n: int, k: int) -> int:
    scale = layer.require("weight_scale")
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    if groups < 1 or k % groups:
        raise layer.fault(f"its weight_scale has {groups} groups, which do not divide K={k}")
    layer.require_shape("weight_scale", (n, groups), (1,), (), (1, 1))
    if "weight_zero_point" in layer.parts and "weight" in layer.parts:
        layer.require_shape("weight_zero_point", scale.shape)
    return groups


def _zero(layer: LayerTensors) -> str:
    return "subtracted" if "weight_zero_point" in layer.parts else "none"


def _full(values: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    return values if values.shape == (n, groups) else values.reshape(1, 1).expand(n, 1).contiguous()


def _packed(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    words = layer.require_dtype("weight_packed", "I32")
    shape = layer.require_shape("weight_shape", (2,))
    layer.require_dtype("weight_shape", "I64", "I32")
    n, k = (int(side) for side in file.source.read(shape.name).tolist())
    if len(words.shape) != 2 or words.shape[0] != n or k < 1:
        raise layer.fault(f"its weight_packed {list(words.shape)} is not of the shape [{n}, {k}]")
    bits = next((b for b in (4, 8) if words.shape[1] * 32 // b - k in range(32 // b)), None)
    if bits is None:
        raise layer.fault(f"its weight_packed {list(words.shape)} holds neither 4 nor 8 bits")
    groups = _groups(layer, n, k)
    packing = "low_first" if bits == 4 else "bytes"
    grid = Grid(bits, False, packing, 1, k // groups, _zero(layer), bias=1 << (bits - 1))
    if grid.zero != "none":
        layer.require_dtype("weight_zero_point", "I32")
        layer.require_shape("weight_zero_point", (-(-n * bits // 32), groups))
    if k % (8 // bits):
        raise layer.fault(f"its width K={k} is odd, which packed weights do not support here")

    def load(source: TensorSource) -> StoredWeight:
        packed = source.read(layer.key("weight_packed")).view(torch.uint8)
        tensors = {
            "payload": packed[:, : k * bits // 8],
            "scale": _full(source.read(layer.key("weight_scale")), n, groups),
        }
        if grid.zero != "none":
            zeros = source.read(layer.key("weight_zero_point"))
            tensors["zero"] = _unpack_rows(zeros, bits)[:n]
        return StoredWeight(Scheme(f"compressed_tensors_w{bits}", grid), (n, k), tensors)

    return stored_layer(
        layer,
        load,
        format=f"compressed_tensors_w{bits}",
        writer=WRITER,
        loads_as=f"stored (int{bits}, group scales)",
        stock="stops: the layer has no weight it knows",
        shape=(n, k),
        uses=("weight_zero_point",),
    )


def _unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Zero points packed along the rows, as int8 centered on 0."""
    columns = words.t().contiguous().view(torch.uint8)
    codes = unpack_nibbles(columns) if bits == 4 else columns
    return (codes.t().to(torch.int16) - (1 << (bits - 1))).to(torch.int8).contiguous()
