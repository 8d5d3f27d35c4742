"""What quantizing a model depends on, as one key: its weights, LoRAs, formats and the arithmetic."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ..loaders.errors import CacheError
from ..quant.plan import Plan, Quantize
from ..quant.weight import ARITHMETIC_VERSION
from . import linears
from .pristine import PristineWeights
from .progress import interruptible

THREADS = 4
DIGEST_BYTES = 16
BEGINNING_BYTES = 4096


def quantized_key(
    model: ModelPatcher, plan: Plan, pristine: PristineWeights, bake: bool, device: torch.device
) -> str:
    """The key of a plan's weights: 32 hexadecimal digits. Whatever changes a bit of them changes it.

    Weights that ComfyUI maps read-only from a file are known by the file and their place in it; others
    by their bytes, which are all read.

    Raises:
        CacheError: if a LoRA holds something whose contents cannot be known.
    """
    modules = linears.linear_modules(model)
    selected = plan.selected
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(hasher, _arithmetic(selected, device, bake and bool(model.patches)))
    pool = ThreadPoolExecutor(THREADS)
    try:
        digests = pool.map(
            lambda decision: _layer(decision, model, modules, pristine, bake), selected
        )
        for digest, _ in zip(digests, interruptible(selected), strict=True):
            hasher.update(digest)
    finally:
        pool.shutdown(cancel_futures=True)
    return hasher.hexdigest()


def _arithmetic(
    selected: tuple[Quantize, ...], device: torch.device, merges: bool
) -> dict[str, Any]:
    versions = {"leandit": ARITHMETIC_VERSION, "device": device.type}
    if any(decision.format.native_format == "asym_w4a8_int8" for decision in selected):
        versions["comfy-kitchen"] = importlib.metadata.version("comfy-kitchen")
    if merges:
        version = sys.modules.get("comfyui_version")
        versions["comfyui"] = getattr(version, "__version__", "unknown")
    return versions


def _layer(
    decision: Quantize,
    model: ModelPatcher,
    modules: dict[str, Any],
    pristine: PristineWeights,
    bake: bool,
) -> bytes:
    name, key = decision.layer.name, linears.weight_key(decision.layer.name)
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _add(hasher, [name, decision.format.name, decision.group_size])
    _add(hasher, pristine.parameter(key, modules[name].weight))
    if bake and model.patches.get(key):
        _add(hasher, model.patches[key])
    return hasher.digest()


def _add(hasher: Any, value: Any) -> None:
    """Feed a value's type and contents, so that different values feed different bytes."""
    hasher.update(f"{type(value).__module__}.{type(value).__qualname__}:".encode())
    if isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype)):
        text = repr(value).encode()
        hasher.update(len(text).to_bytes(8, "little") + text)
    elif isinstance(value, (list, tuple)):
        hasher.update(len(value).to_bytes(8, "little"))
        for item in value:
            _add(hasher, item)
    elif isinstance(value, (dict, set, frozenset)):
        _add(hasher, sorted(value.items(), key=repr) if isinstance(value, dict) else sorted(value))
    elif callable(value) or not hasattr(value, "__dict__"):
        raise CacheError(f"a LoRA holds {type(value).__qualname__}, whose contents cannot be known")
    else:  # a weight adapter: its attributes are what it is
        _add(hasher, vars(value))


def _add_tensor(hasher: Any, tensor: Any) -> None:
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        _add(hasher, [str(context.get("layout_cls")), repr(context.get("non_tensor_fields"))])
        for name in names:
            _add(hasher, getattr(tensor, name))
        return
    plain = tensor.detach().as_subclass(torch.Tensor)
    _add(hasher, [str(plain.dtype), list(plain.size())])
    place = _place_in_file(plain)
    if place is not None:
        _add(hasher, place)
        return
    data = plain.cpu().contiguous().reshape(-1).view(torch.uint8)
    hasher.update(data.numpy().data)


def _place_in_file(tensor: torch.Tensor) -> list[Any] | None:
    """File, its size, time of change and beginning, and offset of a tensor ComfyUI has mapped read-only.

    Such memory cannot have been written since. None for others, and where the file cannot be asked.
    """
    place = getattr(tensor.untyped_storage(), "_comfy_tensor_file_slice", None)
    handle = getattr(place, "file_ref", None)
    if place is None or not isinstance(handle, int) or sys.platform == "win32":
        return None
    try:
        status = os.fstat(handle)
        beginning = os.pread(handle, BEGINNING_BYTES, 0)
    except (OSError, OverflowError):
        return None
    inside = [tensor.storage_offset(), *tensor.stride()]
    # The device's number is left out: some file systems have another one after every start.
    file = [status.st_ino, status.st_size, status.st_mtime_ns, beginning]
    return [*file, place.offset, place.size, *inside]
