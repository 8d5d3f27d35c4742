"""Reading a MODEL's weights as they are without any patch, whatever state it is in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher


def unload(model: BaseModel) -> None:
    """Take a model off every device it is loaded on, by whichever clone.

    Nothing is patched in place then: neither its weights nor its objects (`model_sampling`).
    """
    loaded = comfy.model_management.current_loaded_models
    ours = [entry for entry in loaded if entry.model is not None and entry.model.model is model]
    others = [entry for entry in loaded if entry not in ours]
    for device in {entry.device for entry in ours}:
        comfy.model_management.free_memory(1e30, device, others)


class PristineWeights:
    """Looks up a parameter or buffer as the file gave it.

    Weights that a load has patched or moved stand in the patcher's backups, which are shared by
    all clones of one model. Dynamic VRAM leaves some there even after unloading.
    """

    def __init__(
        self,
        backup: Mapping[str, Any],
        backup_buffers: Mapping[str, torch.Tensor],
        hook_backup: Mapping[str, Any],
    ) -> None:
        self._backup = backup
        self._backup_buffers = backup_buffers
        self._hook_backup = hook_backup

    @classmethod
    def of(cls, patcher: ModelPatcher) -> PristineWeights:
        """The look-up for a patcher's model; it follows later loads and unloads."""
        return cls(patcher.backup, patcher.backup_buffers, patcher.hook_backup)

    def parameter(self, key: str, current: torch.Tensor) -> torch.Tensor:
        """The unpatched tensor for the state-dict key, else `current`."""
        if key in self._hook_backup:
            return self._hook_backup[key][0]
        if key in self._backup:
            return self._backup[key].weight
        return current

    def buffer(self, key: str, current: torch.Tensor) -> torch.Tensor:
        """The buffer for the state-dict key as the model was built with, else `current`."""
        return self._backup_buffers.get(key, current)
