"""Decoding and encoding 4-bit codebook weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...kernels.nibbles import pack_nibbles, unpack_nibbles
from .rounding import round_to
from .scheme import Codebook


def prepare(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], codes: Codebook
) -> Callable[[slice], torch.Tensor]:
    """A function from rows that begin at a block to their float32 weight."""
    k = shape[1]
    payload = tensors["payload"].flatten().view(torch.uint8)
    scales = block_scales(tensors, codes)
    table = tensors["codebook"].float()

    def rows_of(rows: slice) -> torch.Tensor:
        start, stop = rows.start * k, rows.stop * k
        packed = payload[start // 2 : (stop + 1) // 2]
        indices = unpack_nibbles(packed, high_first=True)[: stop - start]
        values = table.index_select(0, indices.int())
        scale = scales[start // codes.block : -(-stop // codes.block)]
        values *= scale.repeat_interleave(codes.block)[: stop - start]
        return values.reshape(-1, k)

    return rows_of


def block_scales(tensors: Mapping[str, torch.Tensor], codes: Codebook) -> torch.Tensor:
    """The float32 scale of every block, nested or not."""
    scale = tensors["scale"].flatten()
    if codes.nested_block is None:
        return scale.float()
    nested = tensors["nested_scale"].float().repeat_interleave(codes.nested_block)
    values = tensors["nested_codebook"].float().index_select(0, scale.view(torch.uint8).int())
    return values * nested[: scale.numel()] + codes.nested_offset


def encode(
    weight: torch.Tensor, tensors: Mapping[str, torch.Tensor], codes: Codebook, seed: int
) -> dict[str, torch.Tensor]:
    """Tensors for a new float32 weight (N, K), with the tables of the old ones.

    Args:
        seed: above 0, codes are rounded up or down at random in proportion to the distance.
    """
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % codes.block))
    blocks = flat.reshape(-1, codes.block)
    changed = dict(tensors) | _encode_scales(blocks.abs().amax(-1), tensors, codes)
    scales = block_scales(changed, codes).unsqueeze(-1)
    relative = torch.where(scales == 0, 0, blocks / scales)
    indices = round_to(relative.flatten(), tensors["codebook"].float(), seed)
    count = weight.numel() + weight.numel() % 2
    packed = pack_nibbles(indices[:count].to(torch.uint8), high_first=True)
    stored = tensors["payload"]
    return changed | {"payload": packed.view(stored.dtype).reshape(stored.shape)}


def _encode_scales(
    absmax: torch.Tensor, tensors: Mapping[str, torch.Tensor], codes: Codebook
) -> dict[str, torch.Tensor]:
    stored = tensors["scale"]
    if codes.nested_block is None:
        return {"scale": absmax.to(stored.dtype).reshape(stored.shape)}
    centered = absmax - codes.nested_offset
    padded = torch.nn.functional.pad(centered, (0, -centered.numel() % codes.nested_block))
    groups = padded.reshape(-1, codes.nested_block)
    nested = groups.abs().amax(-1)
    relative = torch.where(nested.unsqueeze(-1) == 0, 0, groups / nested.unsqueeze(-1))
    table = tensors["nested_codebook"].float()
    indices = round_to(relative.flatten()[: absmax.numel()], table, seed=0)
    nested_stored = tensors["nested_scale"]
    return {
        "scale": indices.to(torch.uint8).view(stored.dtype).reshape(stored.shape),
        "nested_scale": nested.to(nested_stored.dtype).reshape(nested_stored.shape),
    }
