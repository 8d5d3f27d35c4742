"""ComfyUI's way to ask for a fresh copy of a model, for a MODEL that no file holds."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_patcher
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from .pristine import PristineWeights, unload
from .twin import make_twin


@dataclass(frozen=True)
class RebuildTwin:
    """What stands in a twin's `cached_patcher_init`.

    ComfyUI calls it for `clone(disable_dynamic=True)` (its torch.compile node) and for multi-GPU
    clones. The entry copied from the loader would silently build the unquantized model again.
    """

    model: BaseModel
    pristine: PristineWeights
    load_device: torch.device
    offload_device: torch.device

    def __call__(self, disable_dynamic: bool = False) -> ModelPatcher:
        """A patcher without patches over a new copy of the twin, sharing its weights."""
        unload(self.model)
        copied = make_twin(self.model, self.pristine, {}, self.offload_device).model
        patcher_class = ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
        patcher = patcher_class(copied, self.load_device, self.offload_device)
        patcher.cached_patcher_init = (self, ())
        return patcher
