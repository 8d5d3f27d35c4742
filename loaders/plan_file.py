"""`leandit plan`: what of a model fits on a card, in which format, how fast, before it is downloaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..quant.errors import NothingSelectedError, SettingsError
from ..quant.offload_plan import CARDS, GIB, Card, Work, plan_offload
from ..quant.settings import settings_from
from .model_blocks import ModelBlocks, ModelFile, read_model_file

FORMATS = {
    "as stored": None,
    "int8_convrot": "int8_convrot",
    "w4a8_convrot": "w4a8_convrot",
}

ACTIVATION_FLOOR = int(0.6 * GIB)
ACTIVATION_COPIES = 15
"""Tensors of tokens x width in 16 bit that a forward holds at its peak: fits the peaks that users
report for 0.3 to 20 megapixels of video to about a fifth."""


def plan_file(
    path: Path, card_name: str, vram_gb: float | None, ram_gb: float | None, tokens: int
) -> dict[str, Any]:
    """Plans for every format, in the public JSON form.

    Args:
        card_name: one of `CARDS`, for its rates. vram_gb: in place of its memory, in GiB.
        ram_gb: main memory, in GiB. tokens: of one forward.

    Raises:
        CheckpointError: if the file is damaged or has no blocks.
        SettingsError: for an unknown card or a number that is not above 0.
    """
    if card_name not in CARDS:
        raise SettingsError(f"unknown card {card_name!r}; valid: {', '.join(CARDS)}")
    for name, value in (("vram", vram_gb), ("ram", ram_gb), ("tokens", tokens)):
        if value is not None and not value > 0:
            raise SettingsError(f"{name} must be above 0, got {value}")
    card = CARDS[card_name]
    if vram_gb is not None:
        card = dataclasses.replace(card, vram=int(vram_gb * GIB))
    ram = None if ram_gb is None else int(ram_gb * GIB)
    model = read_model_file(path)
    stored = model.blocks(None)
    plans, notes = [], []
    for label, name in FORMATS.items():
        try:
            blocks = model.blocks(None if name is None else settings_from(name))
        except NothingSelectedError:
            notes.append(f"{label}: nothing of the file is left to quantize")
            continue
        if name is not None and blocks == stored:
            notes.append(f"{label}: nothing of the file is left to quantize")
            continue
        plans.append(_plan(label, blocks, _is_int8(model, name), card, ram, tokens))
    return {
        "file": {
            "name": path.name,
            "family": model.family,
            "blocks": len(stored.blocks),
            "bytes": sum(stored.blocks) + stored.outside,
            "parameters_in_blocks": stored.parameters,
            "width": stored.width,
        },
        "machine": {
            "card": card.name,
            "vram_bytes": card.vram,
            "ram_bytes": ram,
            "tokens": tokens,
            "bandwidth": card.bandwidth,
            "rates": "assumed, not measured",
        },
        "plans": plans,
        "notes": notes,
    }


def _plan(
    label: str, blocks: ModelBlocks, int8: bool, card: Card, ram: int | None, tokens: int
) -> dict[str, Any]:
    activations = ACTIVATION_FLOOR + ACTIVATION_COPIES * 2 * tokens * blocks.width
    work = Work(
        blocks=blocks.blocks,
        outside=blocks.outside,
        multiplications=blocks.parameters * tokens,
        attention_operations=4 * tokens**2 * blocks.width * len(blocks.blocks),
        int8=int8,
        activations=activations,
    )
    plan = plan_offload(work, card, ram)
    return {
        "format": label,
        "weights_bytes": sum(blocks.blocks) + blocks.outside,
        "resident_blocks": plan.resident,
        "streamed_bytes_per_step": plan.streamed_bytes,
        "step_seconds": float(f"{plan.seconds:.4g}"),
        "compute_seconds": float(f"{plan.compute_seconds:.4g}"),
        "residents_to_hide": plan.residents_to_hide,
        "hidden": plan.hidden,
        "fits": plan.fits,
        "why": plan.why,
    }


def _is_int8(model: ModelFile, name: str | None) -> bool:
    """Whether the linears run in 8 bit: as they will be, or as the file has them."""
    if name is not None:
        return True
    native = [
        i for i in model.contents.layers if i.sources[0].loads_as.startswith(("int8", "asym"))
    ]
    return 2 * len(native) > len(model.layers)
