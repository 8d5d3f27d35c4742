"""A patcher over a twin that keeps everything else of the MODEL it came from."""

from __future__ import annotations

import types
import uuid

import torch
from comfy.model_patcher import ModelPatcher

from .errors import HostError
from .pristine import PristineWeights
from .rebuild import RebuildTwin
from .twin import Twin

TORCH_COMPILE_KEY = "torch.compile"
"""Key under which ComfyUI's torch.compile nodes keep modules they compiled."""


def refuse_held_modules(model: ModelPatcher) -> None:
    """Refuse patches that act on module objects: they would stay those of the original.

    Raises:
        HostError: naming the patch and the order of nodes that works.
    """
    remedy = "put that node after LeanDiT's"
    if model.injections:
        names = ", ".join(map(repr, model.injections))
        raise HostError(f"the model carries injections {names} tied to its modules; {remedy}")
    for by_key in model.wrappers.values():
        if by_key.get(TORCH_COMPILE_KEY):
            raise HostError(f"the model is compiled already (torch.compile); {remedy}")
    for key, patch in model.object_patches.items():
        if (
            key.startswith("diffusion_model")
            and callable(patch)
            and not _is_own_method(patch, model)
        ):
            raise HostError(f"another node has replaced the model's {key!r}; {remedy}")
    if model.additional_models.get("multigpu"):
        raise HostError(f"the model is spread over several GPUs already (MultiGPU); {remedy}")


def _is_own_method(patch: object, model: ModelPatcher) -> bool:
    """Whether a patch is a method of one of the model's modules, which can be bound to the twin's.

    What any other callable holds cannot be seen; it may go on running the original's modules.
    """
    return isinstance(patch, types.MethodType) and any(
        patch.__self__ is module for module in model.model.modules()
    )


def patcher_over(twin: Twin, source: ModelPatcher) -> ModelPatcher:
    """A clone of `source`, with its patches and options, whose model is the twin.

    Methods that other nodes have patched onto the original's modules are bound to the twin's.
    """
    patcher = source.clone(model_override=(twin.model, ({}, {}, {}, set())))
    patcher.size = 0  # clone() copies the source's size; 0 makes ComfyUI measure again
    # ComfyUI falls back to a patcher's parent when the patcher is gone: that is another model.
    patcher.parent = None
    patcher.clone_base_uuid = uuid.uuid4()
    patcher.patches_uuid = uuid.uuid4()
    patcher.hook_backup = {}
    patcher.cached_hook_patches = {}
    for key, patch in patcher.object_patches.items():
        if isinstance(patch, types.MethodType) and isinstance(patch.__self__, torch.nn.Module):
            counterpart = twin.counterpart(patch.__self__)
            if counterpart is not None:
                patcher.object_patches[key] = types.MethodType(patch.__func__, counterpart)
    rebuild = RebuildTwin(
        twin.model, PristineWeights.of(patcher), source.load_device, source.offload_device
    )
    patcher.cached_patcher_init = (rebuild, ())
    return patcher
