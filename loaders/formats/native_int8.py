"""ComfyUI's `int8_tensorwise`, the same under the name `int8_rowwise`, and its legacy label.

Files of ComfyUI-INT8-Fast and of early comfy-quants carry `convrot` and `per_row` in `comfy_quant`
but no `format`; ComfyUI stops at them.
"""

from __future__ import annotations

from ...quant.stored.scheme import Rotation
from .int8_rows import int8_rows, labelled_rotation
from .layer import FileFacts, LayerTensors, NativeTensors, StoredLayer, TensorSource, stored_layer
from .marker import whole_number
from .scales import row_scale

NAMES = ("int8_tensorwise", "int8_rowwise")


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled with one of the names, or int8 with the legacy label."""
    if layer.config is None:
        return False
    if "format" not in layer.config:
        weight = layer.parts.get("weight")
        return weight is not None and weight.dtype == "I8"
    return layer.config["format"] in NAMES


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """See `int8_rows`; three-dimensional banks of experts are passed on with scales (E, N, 1)."""
    config = layer.config or {}
    name = config.get("format")
    rotation = _rotation(layer)
    weight = layer.require_dtype("weight", "I8")
    if len(weight.shape) == 3 and name is not None:
        return _bank(layer, str(name), rotation)
    scale_shape = layer.require("weight_scale").shape
    if name is None:
        return int8_rows(
            layer,
            format="int8_legacy",
            writer="ComfyUI-INT8-Fast or early comfy-quants",
            stock="stops with 'Unknown quantization format'",
            rotation=rotation,
        )
    stock = "loads it"
    if name != "int8_tensorwise":
        stock = f"stops with KeyError: {name!r}"
    elif rotation is not None and rotation.kind == "sylvester":
        stock = f"stops at the first use: no regular Hadamard matrix of size {rotation.group_size}"
    elif scale_shape == (weight.shape[0],):
        stock = "loads it, but LoRAs fail, and on square layers go wrong silently (scale [N])"
    writer = "comfy-kitchen, ComfyUI or a tool of its format"
    return int8_rows(layer, format=str(name), writer=writer, stock=stock, rotation=rotation)


def _rotation(layer: LayerTensors) -> Rotation | None:
    config = layer.config or {}
    if not config.get("convrot"):
        return None
    return labelled_rotation(whole_number(config, "convrot_groupsize", 256, layer.name))


def _bank(layer: LayerTensors, name: str, rotation: Rotation | None) -> StoredLayer:
    experts, n, k = layer.require("weight").shape
    layer.require_shape("weight_scale", (experts, n, 1), (experts, n), (experts,), (experts, 1, 1))
    if rotation is not None and (rotation.kind != "regular" or k % rotation.group_size):
        raise layer.fault(f"its rotation group {rotation.group_size} does not fit K={k}")
    config = {**(layer.config or {}), "format": "int8_tensorwise", "num_experts": experts}

    def load(source: TensorSource) -> NativeTensors:
        scale = source.read(layer.key("weight_scale")).float().reshape(experts, -1)
        scale = row_scale(scale.expand(experts, n).reshape(-1), experts * n)
        tensors = {
            "weight": source.read(layer.key("weight")),
            "weight_scale": scale.reshape(experts, n, 1),
        }
        return NativeTensors(config, tensors)

    return stored_layer(
        layer,
        load,
        format=name,
        writer="a tool of ComfyUI's format",
        loads_as="int8_tensorwise (bank of experts)",
        stock="loads it",
        shape=(experts, n, k),
        group_size=None if rotation is None else rotation.group_size,
    )
