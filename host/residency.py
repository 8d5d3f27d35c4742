"""Which weights ComfyUI's ordinary patcher keeps on the card: asked of it, never done behind its back.

ComfyUI has divided the card's memory when it loaded the model. Here its own `load` and
`partially_unload` are called again, for chosen modules, so that its books stay right.

One thing it takes for granted: what is loaded are modules that it would load again, going through its own
order, largest first. A `load` that finds others loaded would patch them a second time. So whole blocks are
held on the card only for as long as a run lasts, and `restore_order` has to follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_management
import comfy.sampler_helpers
import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.streaming.flat_block import stored_bytes
from ..quant.offload_plan import spread
from . import block_weights

FITTING_ROUNDS = 4
"""Freeing weights makes blocks stream more, which wants larger buffers."""

EVERYTHING = 1e32
"""Bytes to free or to use, where the choice of modules is the limit."""


def bytes_for_one_step(patcher: ModelPatcher, noise_shape: Sequence[int], conds: Any) -> int:
    """What ComfyUI keeps free of weights for computing, as it counts it when it loads the model.

    Args:
        conds: as ComfyUI's `prepare_sampling` gets them; None where they are not known.
    """
    management: Any = comfy.model_management
    helpers: Any = comfy.sampler_helpers
    if conds is not None and hasattr(helpers, "estimate_memory"):
        needed = helpers.estimate_memory(patcher, noise_shape, conds)[1]
        if hasattr(helpers, "get_additional_models"):
            needed += helpers.get_additional_models(conds, patcher.model_dtype())[1]
    else:
        needed = patcher.memory_required(list(noise_shape))
    return int(
        max(management.minimum_inference_memory(), needed + management.extra_reserved_memory())
    )


def spare_bytes(patcher: ModelPatcher, for_one_step: int) -> int:
    """Free bytes of the card beyond what is kept for computing; 0 if there is less."""
    free = comfy.model_management.get_free_memory(patcher.load_device)
    return max(int(free) - for_one_step, 0)  # type: ignore[arg-type]  # a number when asked for one


def make_room(patcher: ModelPatcher, blocks: Sequence[str], slots: int, spare: int) -> None:
    """Have ComfyUI take weights off the card, until buffers for the blocks' rest fit as well.

    Args:
        blocks: names of all. slots: buffers; 0 for none, if room is wanted by others only. spare: see
            `spare_bytes`, less what others are to have; may be below 0.
    """
    for _ in range(FITTING_ROUNDS):
        needed = slots * max(offloaded_bytes(patcher, blocks), default=0) - spare
        if needed <= 0:
            return
        freed = int(patcher.partially_unload(patcher.offload_device, needed) or 0)
        if freed <= 0:
            return
        spare += freed


def offloaded_bytes(patcher: ModelPatcher, blocks: Sequence[str]) -> list[int]:
    """Bytes of each block in main memory."""
    return [
        sum(
            stored_bytes(tensor)
            for held in block_weights.offloaded_modules(patcher, block, patcher.load_device)
            for tensor in held.tensors
        )
        for block in blocks
    ]


def hold_blocks(
    patcher: ModelPatcher, blocks: Sequence[str], resident: int, slots: int, spare: int
) -> int:
    """Keep so many blocks on the card, evenly spaced, and no others; returns how many there are.

    That is less than asked for where they and the buffers would not fit. `restore_order` has to follow.

    Args:
        blocks: names of all. slots: buffers of a block's size. spare: see `make_room`.
    """
    modules = {block: block_weights.modules_of(patcher, block) for block in blocks}
    sizes = {b: sum(map(block_weights.module_bytes, modules[b])) for b in blocks}
    room = spare + sum(
        block_weights.module_bytes(module)
        for block in blocks
        for module in modules[block]
        if not block_weights.is_offloaded(module, patcher.load_device)
    )
    resident = _most_that_fit(list(sizes.values()), min(resident, len(blocks)), slots, room)
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
        if not block_weights.is_offloaded(module, patcher.load_device)
    }
    staying |= {id(module) for block in blocks for module in modules[block]}
    _load_only(patcher, staying - leaving, leaving)
    return resident


def restore_order(patcher: ModelPatcher) -> None:
    """Have ComfyUI take off the card what its own order would not have loaded before the rest."""
    out_of_order: set[int] = set()
    gap = False
    for entry in sorted(patcher._load_list(), key=_sorted_by, reverse=True):
        module = _module_in(entry)
        if module is None:
            continue
        if not getattr(module, "comfy_patched_weights", False):
            gap = gap or hasattr(module, "comfy_cast_weights")
        elif gap:
            out_of_order.add(id(module))
    if out_of_order:
        with _only(patcher, out_of_order):
            patcher.partially_unload(patcher.offload_device, EVERYTHING)


def loaded_modules(patcher: ModelPatcher) -> set[int]:
    """The identities of the modules that ComfyUI has loaded."""
    return {
        id(module)
        for module in patcher.model.modules()
        if getattr(module, "comfy_patched_weights", False)
    }


def load_again(patcher: ModelPatcher, modules: set[int]) -> None:
    """Have ComfyUI hold just these modules, as it did before: see `loaded_modules`."""
    now = loaded_modules(patcher)
    if now != modules:
        _load_only(patcher, modules, now - modules)


def _most_that_fit(sizes: list[int], resident: int, slots: int, room: int) -> int:
    while resident > 0:
        streamed = spread(len(sizes), len(sizes) - resident)
        kept = sum(size for size, is_on in zip(sizes, streamed, strict=True) if not is_on)
        ring = slots * max(sizes) if resident < len(sizes) else 0
        if kept + ring <= room:
            break
        resident -= 1
    return resident


def _load_only(patcher: ModelPatcher, staying: set[int], leaving: set[int]) -> None:
    model: Any = patcher.model
    buffer = model.model_offload_buffer_memory
    try:
        with _only(patcher, leaving):
            patcher.partially_unload(patcher.offload_device, EVERYTHING)
        with _only(patcher, staying):
            patcher.load(patcher.load_device, lowvram_model_memory=EVERYTHING)  # type: ignore[arg-type]
    except Exception:
        patcher.detach()  # as ComfyUI does when its own load fails
        raise
    # `load` has seen the staying modules only, and thinks that they are all.
    model.model_lowvram = any(hasattr(m, "prev_comfy_cast_weights") for m in model.modules())
    model.model_offload_buffer_memory = max(buffer, model.model_offload_buffer_memory)


@contextmanager
def _only(patcher: ModelPatcher, modules: set[int]) -> Iterator[None]:
    """Let the patcher's own code see some modules only."""
    load_list = patcher._load_list

    def chosen(*args: Any, **kwargs: Any) -> list[Any]:
        return [entry for entry in load_list(*args, **kwargs) if id(_module_in(entry)) in modules]

    patcher.__dict__["_load_list"] = chosen
    try:
        yield
    finally:
        del patcher.__dict__["_load_list"]


def _module_in(entry: tuple[Any, ...]) -> torch.nn.Module | None:
    """Entries are tuples that have changed between versions; the module is found by its type."""
    return next((part for part in entry if isinstance(part, torch.nn.Module)), None)


def _sorted_by(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ComfyUI's sorting of its entries comes down to: names are unique."""
    return tuple(part for part in entry if isinstance(part, int | float | str))
