"""Who manages a MODEL's memory, and whether its own code copies blocks ahead already."""

from __future__ import annotations

from typing import Any

import comfy.model_management
from comfy.model_patcher import ModelPatcher

from ..quant.offload_report import CPU, DYNAMIC, ORDINARY

QUEUE = "make_prefetch_queue"


def manager_of(patcher: ModelPatcher) -> str:
    """Who decides what of a model is on the card: CPU, DYNAMIC or ORDINARY."""
    if comfy.model_management.is_device_cpu(patcher.load_device):
        return CPU
    return DYNAMIC if getattr(patcher, "is_dynamic", bool)() else ORDINARY


def has_own_queue(model: Any) -> bool:
    """Whether a method of the model's class calls ComfyUI's block queue."""
    for owner in type(model).__mro__:
        for method in vars(owner).values():
            code = getattr(method, "__code__", None)
            if code is not None and QUEUE in code.co_names:
                return True
    return False


def cap_dynamic(patcher: Any, count: int) -> bool:
    """Limit the bytes of a model that dynamic VRAM keeps on the card; whether this ComfyUI can."""
    vbar = _vbar(patcher)
    if vbar is None or not hasattr(vbar, "set_watermark"):
        return False
    vbar.set_watermark(count)
    return True


def dynamic_bytes(patcher: Any) -> int | None:
    """Bytes of a model on the card under dynamic VRAM; None where it cannot be asked."""
    vbar = _vbar(patcher)
    return None if vbar is None else int(patcher.loaded_size())


def _vbar(patcher: Any) -> Any:
    get = getattr(patcher, "_vbar_get", None)
    return None if get is None else get()
