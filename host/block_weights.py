"""A model's repeated blocks, and which of their weights ComfyUI has left in main memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..kernels.streaming.flat_block import can_stream, stored_bytes
from ..quant import towers
from . import linears


@dataclass(frozen=True)
class HeldModule:
    """A module in a block and all its parameters, as they stand when streaming begins."""

    module: torch.nn.Module
    names: tuple[str, ...]
    tensors: tuple[Any, ...]

    def is_in_place(self) -> bool:
        """Whether the module still holds these parameters and no others, in main memory."""
        now = {name: p for name, p in self.module._parameters.items() if p is not None}
        return tuple(now) == self.names and all(
            now[name] is tensor and tensor.device.type == "cpu"
            for name, tensor in zip(self.names, self.tensors, strict=True)
        )

    def bind(self, tensors: Sequence[Any]) -> None:
        """Have the module hold other tensors in place of its parameters."""
        for name, tensor in zip(self.names, tensors, strict=True):
            self.module._parameters[name] = tensor


def block_names(patcher: ModelPatcher) -> tuple[str, ...]:
    """Blocks of the main towers, in the model's order, such as `double_blocks.0`."""
    names = {}
    for name, position in towers.locate(linears.linear_modules(patcher)).items():
        if position.tower is not None and position.helper is None:
            names[name.removesuffix(f".{position.inner}")] = None
    return tuple(names)


def modules_of(patcher: ModelPatcher, block: str) -> list[torch.nn.Module]:
    """A block's modules that ComfyUI may leave in main memory: it casts them when they run."""
    model = patcher.model.diffusion_model
    return [m for m in model.get_submodule(block).modules() if hasattr(m, "comfy_cast_weights")]


def is_offloaded(module: torch.nn.Module, load_device: torch.device) -> bool:
    """Whether ComfyUI's ordinary patcher has not loaded a module; by its own mark."""
    if getattr(module, "comfy_patched_weights", False):
        return False
    parameters = [p for p in module._parameters.values() if p is not None]
    if comfy.model_management.is_device_cpu(load_device):
        return bool(parameters)
    return any(p.device != load_device for p in parameters)


def offloaded_modules(
    patcher: ModelPatcher, block: str, load_device: torch.device
) -> list[HeldModule]:
    """The modules of a block all of whose parameters are in main memory and can be streamed."""
    found = []
    for module in modules_of(patcher, block):
        held = {name: p for name, p in module._parameters.items() if p is not None}
        if is_offloaded(module, load_device) and all(
            p.device.type == "cpu" and can_stream(p) for p in held.values()
        ):
            found.append(HeldModule(module, tuple(held), tuple(held.values())))
    return found


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's own parameters."""
    return sum(stored_bytes(p) for p in module._parameters.values() if p is not None)
