"""Scales of an int8 weight in the one shape that is right everywhere."""

from __future__ import annotations

import torch

from ..header import TensorEntry
from .layer import FLOATS, LayerTensors


def row_scale_shapes(n: int) -> tuple[tuple[int, ...], ...]:
    """The shapes in which one scale a row, or one for all, is stored."""
    return (n, 1), (n,), (), (1,), (1, 1)


def require_row_scale(layer: LayerTensors, part: str, n: int) -> TensorEntry:
    """The part that holds one scale a row or one for all.

    Raises:
        LayerFault: if it is missing, or has another shape or an integer dtype.
    """
    layer.require_dtype(part, *FLOATS)
    return layer.require_shape(part, *row_scale_shapes(n))


def row_scale(scale: torch.Tensor, n: int) -> torch.Tensor:
    """A scale of shape [], [1], [N] or [N, 1] as F32 (N, 1).

    comfy-kitchen multiplies a scale of shape [N] along K when it dequantizes: an error, and for
    square layers a silently wrong weight.
    """
    if scale.dtype == torch.float32 and scale.shape == (n, 1):
        return scale  # as it is, so that it stays a view of the file
    column = scale.to(torch.float32).reshape(-1, 1)
    return column.expand(n, 1).contiguous() if column.shape[0] != n else column
