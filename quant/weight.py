"""One quantized weight as plain tensors, and the arithmetic that makes and unmakes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ..kernels.hadamard import rotate
from ..kernels.int4 import quantize_int4_rowwise
from ..kernels.int8 import quantize_int8_rowwise
from ..kernels.row_blocks import row_blocks
from .errors import QuantError, WeightError
from .formats import Format

ARITHMETIC_VERSION = 1
"""Goes up whenever a weight would be quantized to other bits: cached weights are made again then."""

W4A8_SCALE_GROUP = 16
"""Columns per FP8 scale of w4a8; the only size comfy-kitchen's GPU kernels take."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (N, K) in a quantized format.

    tensors maps ComfyUI's suffix after `weight` to a tensor; "" is the payload:
    int8: "" I8 (N, K), "_scale" F32 (N, 1). w4a4: "" I8 (N, K/2), "_scale" F32 (N,).
    w4a8: "" I8 (N, K/2), "_s_rel" F8_E4M3 (N, K/16), "_s_channel" F32 (N,), "_codebook" F32 (16,).
    group_size is the rotation group, None when not rotated. Files may also hold w4a8 with 6-bit
    codes (I8 (N, 3K/4)), other scale_group sizes, no codebook, or a "_correction" (K/scale_group,
    N), and w4a4 meant to run with linear_dtype "int8" (8-bit activations).
    """

    format: Format
    group_size: int | None
    shape: tuple[int, int]
    tensors: Mapping[str, torch.Tensor]
    linear_dtype: str = "int4"
    scale_group: int = W4A8_SCALE_GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of the payload and its scales."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight with its tensors on `device`."""
        moved = {suffix: tensor.to(device) for suffix, tensor in self.tensors.items()}
        return replace(self, tensors=moved)

    def rows(self, rows: slice) -> QuantizedWeight:
        """The rows `rows` of the weight; tensors shared by all rows stay whole."""
        part = {
            suffix: tensor
            if suffix == "_codebook"
            else tensor[:, rows]
            if suffix == "_correction"
            else tensor[rows]
            for suffix, tensor in self.tensors.items()
        }
        return replace(self, shape=(part[""].shape[0], self.shape[1]), tensors=part)


def quantize_weight(
    weight: torch.Tensor, format: Format, group_size: int | None, name: str = "weight"
) -> QuantizedWeight:
    """Rotate and quantize a weight; everything is computed in float32 on its device.

    Bit-identical to comfy-kitchen's eager quantizers applied to `weight.float()`.

    Args:
        weight: (N, K) float. name: the layer's name, for the error message.
        group_size: rotation group for rotated formats, else None.

    Raises:
        WeightError: if the weight holds NaN or Inf.
        QuantError: if the format needs a rotation group and has none, or the reverse, or the
            installed comfy-kitchen lacks the format.
    """
    check_weight(weight, format, group_size, name)
    if format.native_format == "asym_w4a8_int8":
        shape = (weight.shape[0], weight.shape[1])
        return QuantizedWeight(format, group_size, shape, _w4a8_tensors(weight.float(), group_size))
    return quantize_rotated(rotate_weight(weight, group_size), format, group_size)


def rotate_weight(weight: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """A weight (N, K) in float32, rotated unless `group_size` is None."""
    return weight.float() if group_size is None else rotate(weight.float(), group_size)


def quantize_rotated(
    rotated: torch.Tensor, format: Format, group_size: int | None
) -> QuantizedWeight:
    """Quantize a float32 (N, K) weight that is rotated already, to a format with row scales."""
    shape = (rotated.shape[0], rotated.shape[1])
    if format.native_format == "convrot_w4a4":
        payload, scale = quantize_int4_rowwise(rotated)
    else:
        payload, scale = quantize_int8_rowwise(rotated)
    return QuantizedWeight(format, group_size, shape, {"": payload, "_scale": scale})


def _w4a8_tensors(weight: torch.Tensor, group_size: int | None) -> dict[str, torch.Tensor]:
    """comfy-kitchen owns this format's arithmetic; its eager backend defines the bits."""
    try:
        from comfy_kitchen import quantize_w4a8_int8_weight
        from comfy_kitchen.registry import registry
    except ImportError as error:
        raise QuantError(
            "format w4a8_convrot needs comfy-kitchen with asym_w4a8_int8 (0.2.31 or newer): "
            "pip install -U comfy-kitchen"
        ) from error
    codebook = _decide_codebook(weight, group_size or 256)
    # With the codebook decided on the whole weight, rows are independent; small blocks need a
    # tenth of the memory. Without it the whole weight goes in one call.
    blocks = row_blocks(*weight.shape) if codebook is not None else [slice(None)]
    parts = []
    with registry.use_backend("eager"):
        for rows in blocks:
            part = quantize_w4a8_int8_weight(
                weight[rows],
                group_size=W4A8_SCALE_GROUP,
                convrot_groupsize=group_size or 256,
                codebook_tensor=codebook,
            )
            parts.append(part)
    payloads, s_rels, s_channels, _corrections, codebooks = zip(*parts, strict=True)
    return {
        "": torch.cat(payloads),
        "_s_rel": torch.cat(s_rels),
        "_s_channel": torch.cat(s_channels),
        "_codebook": codebooks[0],
    }


def _decide_codebook(weight: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """The codebook comfy-kitchen would choose for the whole weight, or None if it cannot be asked.

    The function is private to comfy-kitchen: used where it exists, never required.
    """
    from comfy_kitchen.backends.eager import w4a8_int8

    decide = getattr(w4a8_int8, "_decide_codebook", None)
    if decide is None:
        return None
    return decide(weight, rotate, W4A8_SCALE_GROUP, group_size)


def check_weight(weight: torch.Tensor, format: Format, group_size: int | None, name: str) -> None:
    """Raise what `quantize_weight` raises for a weight or a format and group it cannot take."""
    if format.rotated != (group_size is not None):
        raise QuantError(f"{name}: format {format.name} with rotation group {group_size}")
    low, high = torch.aminmax(weight)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    bad = ~torch.isfinite(weight)
    row, column = (int(index) for index in bad.nonzero()[0])
    raise WeightError(
        f"layer {name!r} holds {int(bad.sum())} values that are not finite, the first is "
        f"{weight[row, column].item()} at row {row}, column {column}; "
        "the file or a LoRA on it is broken, load it again or exclude the layer"
    )
