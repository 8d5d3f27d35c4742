"""torchao's Int8Tensor as its safetensors support writes it, and unsloth's rotation metadata.

The weight's parts are separate tensors `X._weight_qdata`, `X._weight_scale` and, in some versions,
`X._weight_zero_point` (torchao 0.14: `X.weight:qdata` and so on).
"""

from __future__ import annotations

import json
import re

from ...quant.stored.scheme import Grid, Rotation, Scheme
from .int8_rows import check_rotation, int8_rows
from .layer import FLOATS, FileFacts, LayerTensors, StoredLayer, read_stored, stored_layer
from .marker import bare

FORMS = ("_weight_", "weight:")
ROTATION = "convrot_hadamard_v1"


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Named so."""
    return any(f"{form}qdata" in layer.parts for form in FORMS)


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = (qdata - zero_point) * scale`, per row or per group of columns."""
    form = next(form for form in FORMS if f"{form}qdata" in layer.parts)
    payload, scale, zero = (f"{form}{part}" for part in ("qdata", "scale", "zero_point"))
    rotation = _rotation(layer, file)
    weight = layer.require_dtype(payload, "I8")
    shape = layer.require_dtype(scale, *FLOATS).shape
    if len(weight.shape) != 2:
        raise layer.fault(f"its qdata has the shape {list(weight.shape)}, expected two sides")
    n, k = weight.shape
    grouped = len(shape) == 2 and shape[0] == n and shape[1] > 1
    zeros = zero in layer.parts and bool(file.source.read(layer.key(zero)).any())
    if not grouped and not zeros:
        return int8_rows(
            layer,
            format="torchao_int8",
            writer="torchao" if rotation is None else "unsloth (torchao)",
            stock="stops: the layer has no weight it knows",
            payload=payload,
            scale=scale,
            rotation=rotation,
            uses=(zero,),
        )
    groups = shape[1] if grouped else 1
    layer.require_shape(scale, (n, groups))
    if k % groups:
        raise layer.fault(f"its scale has {groups} groups, which do not divide K={k}")
    if rotation is not None:
        check_rotation(layer, rotation, k)
    if zeros:
        layer.require_shape(zero, (n, groups))
    grid = Grid(8, True, "bytes", 1, k // groups, "subtracted" if zeros else "none")
    scheme = Scheme("torchao_int8", grid, rotation)
    parts = {"payload": payload, "scale": scale} | ({"zero": zero} if zeros else {})

    return stored_layer(
        layer,
        read_stored(layer, scheme, (n, k), parts),
        format="torchao_int8",
        writer="torchao",
        loads_as="stored (int8, group scales)",
        stock="stops: the layer has no weight it knows",
        shape=(n, k),
        group_size=None if rotation is None else rotation.group_size,
        uses=(zero,),
    )


def _rotation(layer: LayerTensors, file: FileFacts) -> Rotation | None:
    """unsloth lists the rotated layers by name; one that is not listed is not rotated."""
    kind = file.metadata.get("activation_rotation")
    if kind is None:
        return None
    if kind != ROTATION:
        raise layer.fault(f"the file is rotated by {kind!r}; only {ROTATION!r} is known")
    listed = {bare(name) for name in _names(file.metadata.get("activation_rotation_fqns", ""))}
    if not listed:
        raise layer.fault("the file is rotated but does not list which layers")
    if bare(layer.name) not in listed:
        return None
    group = file.metadata.get("activation_rotation_group", "256")
    if not re.fullmatch(r"[1-9]\d{0,5}", group):
        raise layer.fault(f"its activation_rotation_group is {group!r}, expected a number")
    return Rotation("regular", int(group))


def _names(text: str) -> list[str]:
    """The list as JSON, or names between commas, as strings in a header may hold it."""
    try:
        content = json.loads(text.replace("'", '"'))
    except (ValueError, RecursionError):
        content = [name.strip() for name in text.split(",")]
    if not isinstance(content, list):
        return []
    names = [name for name in content if isinstance(name, str)]
    return [name.removesuffix(".weight") for name in names if name]
