"""Where and when: token positions, rotary tables and timestep features of the Flux forward."""

import math

import torch
from torch import Tensor

ROTARY_BASE = 10000.0
TIME_SCALE = 1000.0
MAX_PERIOD = 10000.0


def timestep_features(timestep: Tensor, count: int) -> Tensor:
    """(B,) noise levels in [0, 1] -> (B, count) cosines then sines, float32 (float64 if given)."""
    # A bfloat16 timestep times 1000 would turn the fastest sines into noise.
    wide = torch.promote_types(timestep.dtype, torch.float32)
    half = count // 2
    steps = torch.arange(half, device=timestep.device, dtype=wide) / half
    angle = timestep.to(wide)[:, None] * TIME_SCALE * torch.exp(-math.log(MAX_PERIOD) * steps)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


def grid_positions(
    text_tokens: int, rows: int, columns: int, device: torch.device | None = None
) -> Tensor:
    """(T + rows * columns, 3) float64: text tokens at the origin, image tokens at (0, row, col)."""
    row = torch.arange(rows, device=device, dtype=torch.float64)
    column = torch.arange(columns, device=device, dtype=torch.float64)
    image = torch.cartesian_prod(torch.zeros_like(row[:1]), row, column)
    return torch.cat((image.new_zeros(text_tokens, 3), image))


def rotation_table(positions: Tensor, axes_dim: tuple[int, ...], wide: bool = False) -> Tensor:
    """(N, axes) positions -> (2, N, sum(axes_dim) / 2) cosines and sines.

    The angles are formed in float64; the table is float32, or stays float64 when ``wide``.
    """
    angles = []
    for axis, dim in enumerate(axes_dim):
        power = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
        angles.append(positions[:, axis, None] * ROTARY_BASE**-power)
    angle = torch.cat(angles, dim=1)
    table = torch.stack((angle.cos(), angle.sin()))
    return table if wide else table.float()


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Turn neighbouring channel pairs of (B, heads, N, D) by the table's angles, same dtype out."""
    even, odd = heads.to(table.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(heads.dtype)
