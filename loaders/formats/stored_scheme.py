"""Stored weights that ComfyUI's own ModelSave wrote from a model this package had loaded.

Their scheme travels with them as JSON in `weight_scheme`; ComfyUI alone cannot read them.
"""

from __future__ import annotations

from ...quant.stored.scheme import Codebook, Scheme, scheme_from_json
from .layer import FileFacts, LayerTensors, StoredLayer, read_stored, stored_layer
from .marker import MAX_MARKER_BYTES

FORMAT = "leandit_stored"
BESIDE = ("scale", "zero", "codebook", "nested_scale", "nested_codebook", "up", "down")


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """Labelled so, with a scheme beside it."""
    labelled = layer.config is not None and layer.config.get("format") == FORMAT
    return labelled and "weight_scheme" in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """The weight and scheme as they were."""
    entry = layer.require_dtype("weight_scheme", "U8")
    if entry.nbytes > MAX_MARKER_BYTES:
        raise layer.fault(f"its weight_scheme has {entry.nbytes} bytes")
    try:
        scheme = scheme_from_json(file.source.read(entry.name).numpy().tobytes().decode())
    except ValueError as error:
        raise layer.fault(f"its weight_scheme cannot be read ({error})") from error
    sides = layer.require_shape("weight_shape", (2,))
    n, k = (int(side) for side in file.source.read(sides.name).tolist())
    parts = {"payload": "weight"}
    parts |= {name: f"weight_{name}" for name in BESIDE if f"weight_{name}" in layer.parts}
    _check(layer, scheme, n, k)

    return stored_layer(
        layer,
        read_stored(layer, scheme, (n, k), parts),
        format=scheme.name,
        writer="ComfyUI's ModelSave, of a model loaded with LeanDiT",
        loads_as=f"stored ({scheme.name})",
        stock=f"stops with KeyError: {FORMAT!r}",
        shape=(n, k),
        group_size=None if scheme.rotation is None else scheme.rotation.group_size,
    )


def _check(layer: LayerTensors, scheme: Scheme, n: int, k: int) -> None:
    codes = scheme.codes
    if n < 1 or k < 1:
        raise layer.fault(f"its shape is [{n}, {k}]")
    layer.require("weight")
    layer.require("weight_scale")
    needed = (n * k * scheme.bits + 7) // 8
    if layer.require("weight").nbytes < needed:
        raise layer.fault(f"its weight has fewer than the {needed} bytes of [{n}, {k}]")
    if isinstance(codes, Codebook):
        layer.require_shape("weight_codebook", (16,))
        layer.require_shape("weight_scale", (-(-n * k // codes.block),))
        if codes.nested_block is not None:
            layer.require_shape("weight_nested_codebook", (256,))
            layer.require("weight_nested_scale")
    else:
        grid = (-(-n // codes.block_rows), -(-k // codes.block_columns))
        layer.require_shape("weight_scale", grid)
        if codes.zero != "none":
            layer.require_shape("weight_zero", grid)
    if scheme.low_rank != "none":
        rank = layer.require("weight_up").shape[-1]
        layer.require_shape("weight_up", (n, rank))
        layer.require_shape("weight_down", (rank, k))
