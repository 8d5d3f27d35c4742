"""Decoding and encoding integer weights with a scale per block of rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...kernels.nibbles import pack_nibbles, signed_nibbles, unpack_nibbles
from .rounding import round_integers
from .scheme import Grid


def prepare(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], codes: Grid
) -> Callable[[slice], torch.Tensor]:
    """A function from rows that begin at a block to their float32 weight."""
    payload = tensors["payload"]
    whole = from_halves(payload, shape, codes) if codes.packing == "row_halves" else None

    def rows_of(rows: slice) -> torch.Tensor:
        block = payload[rows] if whole is None else whole[rows]
        if codes.packing == "low_first":
            block = unpack_nibbles(block.view(torch.uint8))
        if codes.bits == 4 and codes.signed:
            block = signed_nibbles(block)
        values = block.float()
        if codes.bias:
            values -= codes.bias
        zero = spread(tensors["zero"], rows, shape[1], codes) if codes.zero != "none" else None
        if codes.zero == "subtracted" and zero is not None:
            values -= zero
        values *= spread(tensors["scale"], rows, shape[1], codes)
        if codes.zero == "added" and zero is not None:
            values += zero
        return values

    return rows_of


def spread(blocks: torch.Tensor, rows: slice, k: int, codes: Grid) -> torch.Tensor:
    """The blocks' values in float32 for each element of `rows`, or broadcastable to them."""
    count = rows.stop - rows.start
    part = blocks[rows.start // codes.block_rows : -(-rows.stop // codes.block_rows)].float()
    if codes.block_rows > 1:
        part = part.repeat_interleave(codes.block_rows, 0)[:count]
    if blocks.shape[1] > 1:
        part = part.repeat_interleave(codes.block_columns, 1)[:, :k]
    return part


def from_halves(payload: torch.Tensor, shape: tuple[int, int], codes: Grid) -> torch.Tensor:
    """Codes (N, K) of a payload packed in halves of its rows of blocks."""
    packed = payload.view(torch.uint8).reshape(-1, codes.block_columns)
    rows = shape[0] * shape[1] // codes.block_columns
    return torch.cat((packed & 0xF, packed >> 4))[:rows].reshape(shape)


def to_halves(values: torch.Tensor, codes: Grid) -> torch.Tensor:
    """The inverse of `from_halves`, for codes 0..15 in uint8."""
    rows = values.reshape(-1, codes.block_columns)
    half = (rows.shape[0] + 1) // 2
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 2 * half - rows.shape[0]))
    return rows[:half] | (rows[half:] << 4)


def encode(
    weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], codes: Grid, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors for a new float32 weight (N, K), in the shapes and dtypes of the old ones.

    Args:
        seed: above 0, codes are rounded up or down at random in proportion to the distance.
    """
    low = -(1 << (codes.bits - 1)) if codes.signed else -codes.bias
    high = low + (1 << codes.bits) - 1
    scale, zero = _fit(weight, low, high, codes)
    changed = dict(tensors)
    changed["scale"] = scale.to(tensors["scale"].dtype)
    every_row = slice(0, weight.shape[0])
    values = weight.clone()
    if zero is not None:
        changed["zero"] = zero.to(tensors["zero"].dtype)
        if codes.zero == "added":
            values -= spread(changed["zero"], every_row, weight.shape[1], codes)
    values /= spread(changed["scale"], every_row, weight.shape[1], codes)
    if zero is not None and codes.zero == "subtracted":
        values += spread(changed["zero"], every_row, weight.shape[1], codes)
    values = round_integers(values, seed).clamp_(low, high)
    stored = tensors["payload"]
    packed = _pack(values.add_(codes.bias).to(torch.int16), codes)
    return changed | {"payload": packed.view(stored.dtype).reshape(stored.shape)}


def _pack(values: torch.Tensor, codes: Grid) -> torch.Tensor:
    """Integers as the bytes of the payload, uint8."""
    if codes.packing == "bytes":
        return values.to(torch.uint8)
    nibbles = (values & 0xF).to(torch.uint8)
    return to_halves(nibbles, codes) if codes.packing == "row_halves" else pack_nibbles(nibbles)


def _fit(
    weight: torch.Tensor, low: int, high: int, codes: Grid
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale, and zero if the grid has one, of every block."""
    n, k = weight.shape
    rows, columns = -(-n // codes.block_rows), -(-k // codes.block_columns)
    pad = (0, columns * codes.block_columns - k, 0, rows * codes.block_rows - n)
    # A cut-off block is filled up with its own edge, so that padding changes no extreme.
    padded = torch.nn.functional.pad(weight[None, None], pad, mode="replicate")[0, 0]
    blocks = padded.reshape(rows, codes.block_rows, columns, codes.block_columns)
    least, greatest = blocks.amin((1, 3)), blocks.amax((1, 3))
    if codes.zero == "none":
        absmax = torch.maximum(least.abs(), greatest.abs())
        return absmax.clamp_(min=1e-30) / high, None
    scale = (greatest - least).clamp_(min=1e-30) / (high - low)
    if codes.zero == "added":
        return scale, least - low * scale
    return scale, (low - least / scale).round_()
