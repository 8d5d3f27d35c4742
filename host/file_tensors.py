"""The tensors of a checkpoint through ComfyUI's own reader, which keeps them backed by the file."""

from __future__ import annotations

from pathlib import Path

import comfy.utils
import torch

from ..loaders.reader import Checkpoint

UNKNOWN_TO_COMFYUI = ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes ComfyUI's reader stops at; files with them are read by ours, into memory."""


class FileTensors:
    """Gives tensors by name; a shard is opened when its first tensor is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files: dict[Path, dict[str, torch.Tensor]] = {}
        self._foreign = {
            entry.path for entry in checkpoint.entries.values() if entry.dtype in UNKNOWN_TO_COMFYUI
        }

    def read(self, name: str) -> torch.Tensor:
        """The tensor, a view of the file where ComfyUI maps it; not to be written to."""
        path = self._checkpoint.entries[name].path
        if path in self._foreign or path.suffix not in (".safetensors", ".sft"):
            return self._checkpoint.read(name)
        if path not in self._files:
            self._files[path] = comfy.utils.load_torch_file(str(path))
        return self._files[path][name]
