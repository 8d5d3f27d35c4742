"""Which weights ComfyUI's ordinary patcher keeps on the card: asked of it, never done behind its back.

ComfyUI has divided the card's memory when it loaded the model. Here its own `load` and
`partially_unload` are called again, for chosen modules, so that its books stay right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.streaming.flat_block import stored_bytes
from ..quant.offload_plan import spread
from . import block_weights

FITTING_ROUNDS = 4
"""Freeing weights makes blocks stream more, which wants larger buffers."""

EVERYTHING = 1e32
"""Bytes to free or to use, where the choice of modules is the limit."""


def spare_bytes(patcher: ModelPatcher, noise_shape: Sequence[int]) -> int:
    """Free bytes of the card beyond what ComfyUI has kept free for one step; 0 if it was less."""
    management: Any = comfy.model_management
    needed = max(
        management.minimum_inference_memory(),
        patcher.memory_required(list(noise_shape)) + management.extra_reserved_memory(),
    )
    return max(int(management.get_free_memory(patcher.load_device) - needed), 0)


def make_room(patcher: ModelPatcher, blocks: Sequence[str], slots: int, spare: int) -> None:
    """Take weights off the card, smallest first, until the buffers for the rest fit as well.

    Args:
        blocks: names of all. slots: buffers. spare: see `spare_bytes`; what others are to have is
            taken off it.
    """
    for _ in range(FITTING_ROUNDS):
        needed = slots * max(map(sum, _offloaded_bytes(patcher, blocks)), default=0) - spare
        if needed <= 0:
            return
        freed = int(patcher.partially_unload(patcher.offload_device, needed) or 0)
        if freed <= 0:
            return
        spare += freed


def _offloaded_bytes(patcher: ModelPatcher, blocks: Sequence[str]) -> list[list[int]]:
    return [
        [
            stored_bytes(held.tensor)
            for held in block_weights.offloaded_weights(patcher, block, patcher.load_device)
        ]
        for block in blocks
    ]


def hold_blocks(
    patcher: ModelPatcher, blocks: Sequence[str], resident: int, slots: int, spare: int
) -> int:
    """Keep so many blocks on the card, evenly spaced, and no others; returns how many there are.

    That is less than asked for where they and the buffers would not fit.

    Args:
        blocks: names of all. slots: buffers of a block's size. spare: see `spare_bytes`.
    """
    modules = {block: block_weights.modules_of(patcher, block) for block in blocks}
    sizes = {b: sum(map(block_weights.module_bytes, modules[b])) for b in blocks}
    device = patcher.load_device
    loaded = sum(
        block_weights.module_bytes(module)
        for block in blocks
        for module in modules[block]
        if not block_weights.is_offloaded(module, device)
    )
    resident = min(resident, len(blocks))
    while resident > 0:
        streamed = spread(len(blocks), len(blocks) - resident)
        kept = [b for b, is_streamed in zip(blocks, streamed, strict=True) if not is_streamed]
        ring = slots * max(sizes.values()) if resident < len(blocks) else 0
        if sum(sizes[b] for b in kept) + ring <= loaded + spare:
            break
        resident -= 1
    streamed = spread(len(blocks), len(blocks) - resident)
    leaving = {
        id(module)
        for block, is_streamed in zip(blocks, streamed, strict=True)
        if is_streamed
        for module in modules[block]
    }
    staying = {
        id(module)
        for module in patcher.model.modules()
        if id(module) not in leaving and not block_weights.is_offloaded(module, device)
    } | {id(m) for b in blocks for m in modules[b] if id(m) not in leaving}
    with _only(patcher, leaving):
        patcher.partially_unload(patcher.offload_device, EVERYTHING)
    with _only(patcher, staying):
        patcher.load(device, lowvram_model_memory=EVERYTHING)
    # ComfyUI's load has seen the staying modules only, and thinks that they are all.
    patcher.model.model_lowvram = bool(leaving)
    return resident


@contextmanager
def _only(patcher: ModelPatcher, modules: set[int]) -> Iterator[None]:
    """Let the patcher's own code see some modules only."""
    load_list = patcher._load_list

    def chosen(*args: Any, **kwargs: Any) -> list[Any]:
        entries = load_list(*args, **kwargs)
        return [entry for entry in entries if _module_in(entry) in modules]

    patcher.__dict__["_load_list"] = chosen
    try:
        yield
    finally:
        del patcher.__dict__["_load_list"]


def _module_in(entry: tuple[Any, ...]) -> int | None:
    """Entries are tuples that have changed between versions; the module is found by its type."""
    return next((id(part) for part in entry if isinstance(part, torch.nn.Module)), None)
