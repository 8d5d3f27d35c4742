"""An int8 weight with `weight_scale` and no label at all.

LightX2V and vLLM-style exports are not rotated; ComfyUI-INT8-Fast's build of April 2026 rotated
by Sylvester's matrix in groups of 128 and recorded nothing. What it is was settled for the whole
file before (see `rotation_evidence`); where it could not be, the file is refused.
"""

from __future__ import annotations

from ...quant.stored.scheme import Rotation
from .int8_rows import int8_rows
from .layer import FileFacts, LayerTensors, StoredLayer

ROTATIONS = {
    "none": None,
    "regular_256": Rotation("regular", 256),
    "sylvester_128": Rotation("sylvester", 128),
}
"""The user's `legacy_rotation` and the rotation it stands for."""


def detect(layer: LayerTensors, file: FileFacts) -> bool:
    """int8 with weight_scale, without comfy_quant."""
    weight = layer.parts.get("weight")
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        return False
    return layer.config is None and "weight_scale" in layer.parts


def read(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    """`W = q * scale` per row, un-rotated as the file was found to be."""
    if file.rotation not in ROTATIONS:
        raise layer.fault(
            "is int8 without a label, and its numbers do not tell whether it is rotated",
            "set legacy_rotation to none (LightX2V and most tools), sylvester_128 "
            "(ComfyUI-INT8-Fast of April 2026) or regular_256",
        )
    rotation = ROTATIONS[file.rotation]
    k = layer.require("weight").shape[1]
    if rotation is not None and k % rotation.group_size:
        rotation = None  # the writers left layers of other widths unrotated
    return int8_rows(
        layer,
        format="int8_unlabelled",
        writer="LightX2V or another tool that records nothing",
        stock="loads it as noise, without an error",
        rotation=rotation,
        notes=(f"rotation not recorded, taken as {file.rotation}",),
    )
