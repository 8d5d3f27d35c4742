"""A twin: a second model over the same weights, with some of its modules replaced.

Object patches on modules would not do: clones of a MODEL share one module tree, so a patched clone
that is loaded changes every sibling, and a LoRA on the original does nothing in its next run.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any

import torch
from comfy.model_base import BaseModel
from comfy.quant_ops import QuantizedTensor

from .errors import HostError
from .pristine import PristineWeights

LOAD_STATE = (
    "_pin_state",
    "_pins",
    "_prefetch",
    "_v",
    "_v_bias",
    "_v_block",
    "_v_block_faulted",
    "_v_signature",
    "_v_weight",
    "bias_lowvram_function",
    "comfy_force_cast_weights",
    "comfy_patched_weights",
    "prev_comfy_cast_weights",
    "seed_key",
    "weight_lowvram_function",
)
"""Attributes that loading hangs on a module: they belong to the original's memory."""

PATCH_FUNCTIONS = ("weight_function", "bias_function")
"""Lists of functions a load fills with the patches of the clone it loads."""

MODEL_STATE = {
    "current_patcher": None,
    "current_weight_patches_uuid": None,
    "lowvram_patch_counter": 0,
    "model_loaded_weight_memory": 0,
    "model_lowvram": False,
    "model_offload_buffer_memory": 0,
}
"""A BaseModel's record of what is loaded, as it is for a model that is not."""

DEVICE_TABLES = ("dynamic_vbars", "dynamic_pins", "dynamic_patchers")
"""Dynamic VRAM's tables on the BaseModel; a patcher makes fresh ones."""


class Twin:
    """The copied model, and the map from the original's modules to the copy's."""

    def __init__(self, model: BaseModel, memo: dict[int, Any]) -> None:
        self.model = model
        self._memo = memo

    def counterpart(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """The twin's module for one of the original's, or None for a foreign module."""
        return self._memo.get(id(module))


def make_twin(
    model: BaseModel,
    pristine: PristineWeights,
    replaced: Mapping[str, torch.nn.Module],
    device: torch.device,
    weights: Mapping[str, torch.Tensor] = types.MappingProxyType({}),
) -> Twin:
    """Copy a model's structure; weights that are kept share their memory with the original.

    Args:
        model: the original; it is only read.
        pristine: its weights without patches.
        replaced: new modules by name relative to `model.diffusion_model`.
        device: where the weights live (the patcher's offload device).
        weights: parameters to put in place of the original's, by name relative to `model`.

    Raises:
        HostError: if the model holds something Python cannot copy.
    """
    twin = model.__class__.__new__(model.__class__)
    memo: dict[int, Any] = {id(model): twin}
    skip: set[int] = set()
    for name, module in model.diffusion_model.named_modules(remove_duplicate=False):
        if name in replaced:
            memo[id(module)] = replaced[name]
            skip.update(id(part) for part in module.modules())
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in skip:
            _share_tensors(module, f"{name}." if name else "", pristine, weights, memo)
            _forget_load_state(module, memo)
    try:
        _fill(twin, model, memo)
    except Exception as error:  # whatever a foreign object's own copying raises
        raise HostError(
            f"{type(model).__name__} cannot be copied, some node has put something on it that "
            f"Python cannot copy: {error}. Put LeanDiT's node directly after the loader"
        ) from error
    for module in twin.modules():
        for attribute in LOAD_STATE:
            module.__dict__.pop(attribute, None)
        for attribute in PATCH_FUNCTIONS:
            if attribute in module.__dict__:
                module.__dict__[attribute] = []
    twin.device = device
    return Twin(twin, memo)


def _share_tensors(
    module: torch.nn.Module,
    prefix: str,
    pristine: PristineWeights,
    weights: Mapping[str, torch.Tensor],
    memo: dict[int, Any],
) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in memo:
            given = weights.get(prefix + name)
            own = pristine.parameter(prefix + name, parameter) if given is None else given
            memo[id(parameter)] = _shared(own)
    for name, buffer in module._buffers.items():
        if buffer is not None and id(buffer) not in memo:
            memo[id(buffer)] = pristine.buffer(prefix + name, buffer).detach().clone()


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """A Parameter over the same memory; packed tensors of other packages are taken as they are."""
    if isinstance(tensor, QuantizedTensor) or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor


def _forget_load_state(module: torch.nn.Module, memo: dict[int, Any]) -> None:
    """Make deepcopy return None for values that must not, or cannot, be copied."""
    for attribute in LOAD_STATE + PATCH_FUNCTIONS:
        value = module.__dict__.get(attribute)
        if value is not None and not isinstance(value, (bool, int, str)):
            memo[id(value)] = None


def _fill(twin: BaseModel, model: BaseModel, memo: dict[int, Any]) -> None:
    for name, value in model.__dict__.items():
        if name in DEVICE_TABLES:
            continue
        if isinstance(value, types.MethodType) and value.__self__ is model:
            value = types.MethodType(value.__func__, twin)
        elif name in ("_parameters", "_buffers", "_modules"):
            value = copy.deepcopy(value, memo)
        elif isinstance(value, (dict, set)):
            value = copy.copy(value)
        twin.__dict__[name] = value
    twin.__dict__.update(MODEL_STATE)
