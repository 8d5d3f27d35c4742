"""An int8 weight with one scale a row: what most writers store, under different labels."""

from __future__ import annotations

import torch

from ...kernels.hadamard import is_rotation_group
from ...quant.formats import FORMATS
from ...quant.stored.scheme import Grid, Rotation, Scheme
from ...quant.stored.weight import StoredWeight
from ...quant.weight import QuantizedWeight
from .layer import LayerTensors, StoredLayer, TensorSource, Weight, stored_layer
from .scales import require_row_scale, row_scale


def int8_rows(
    layer: LayerTensors,
    *,
    format: str,
    writer: str,
    stock: str,
    payload: str = "weight",
    scale: str = "weight_scale",
    scale_factor: float = 1.0,
    rotation: Rotation | None = None,
    notes: tuple[str, ...] = (),
    uses: tuple[str, ...] = (),
) -> StoredLayer:
    """W = q * scale per row, un-rotated: ComfyUI's int8_tensorwise where the rotation allows.

    Args:
        scale_factor: multiplies the stored scales, in float32. uses: see `stored_layer`.

    Raises:
        LayerFault: for a dtype, shape or rotation group that cannot be.
    """
    entry = layer.require_dtype(payload, "I8")
    if len(entry.shape) != 2 or 0 in entry.shape:
        raise layer.fault(f"its {payload} has the shape {list(entry.shape)}, expected two sides")
    n, k = entry.shape
    require_row_scale(layer, scale, n)
    if rotation is not None:
        check_rotation(layer, rotation, k)
    native = is_native(rotation)

    def load(source: TensorSource) -> Weight:
        values = row_scale(source.read(layer.key(scale)), n)
        if scale_factor != 1.0:
            values = values * torch.tensor(scale_factor, dtype=torch.float32)
        return int8_weight(source.read(layer.key(payload)), values, rotation, format)

    return stored_layer(
        layer,
        load,
        format=format,
        writer=writer,
        loads_as="int8_tensorwise" if native else "stored (int8, Sylvester rotation)",
        stock=stock,
        shape=(n, k),
        group_size=None if rotation is None else rotation.group_size,
        notes=notes,
        uses=uses,
    )


def is_native(rotation: Rotation | None) -> bool:
    """Whether ComfyUI's int8 layout can undo a rotation."""
    return rotation is None or rotation.kind == "regular"


def int8_weight(
    codes: torch.Tensor, scale: torch.Tensor, rotation: Rotation | None, name: str
) -> Weight:
    """Codes (N, K) and scale F32 (N, 1) as ComfyUI's layout, or as stored if it lacks the rotation."""
    n, k = codes.shape
    if is_native(rotation):
        group = None if rotation is None else rotation.group_size
        spec = FORMATS["int8" if group is None else "int8_convrot"]
        return QuantizedWeight(spec, group, (n, k), {"": codes, "_scale": scale})
    grid = Grid(8, True, "bytes", block_rows=1, block_columns=k)
    scheme = Scheme(name, grid, rotation)
    return StoredWeight(scheme, (n, k), {"payload": codes, "scale": scale})


def check_rotation(layer: LayerTensors, rotation: Rotation, k: int) -> None:
    """Refuse a rotation that no matrix exists for or that does not fit K.

    Raises:
        LayerFault: naming group and K.
    """
    group = rotation.group_size
    if k % group:
        raise layer.fault(f"its rotation group {group} does not divide its width K={k}")
    exists = is_rotation_group(group) if rotation.kind == "regular" else not group & (group - 1)
    if not exists:
        raise layer.fault(f"there is no {rotation.kind} Hadamard matrix of size {group}")


def labelled_rotation(group: int) -> Rotation:
    """The matrix behind a label "rotated in groups of G".

    All ConvRot tools use the regular matrix where it exists, for powers of 4; for other powers of
    2 convert_to_quant and SDNQ fall back to Sylvester's. Source: those tools' code.
    """
    return Rotation("regular" if is_rotation_group(group) else "sylvester", group)
