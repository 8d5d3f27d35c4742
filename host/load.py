"""Loading a file of any known format into a MODEL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

from ..loaders.contents import contents
from ..loaders.errors import CheckpointError
from ..loaders.formats.layer import NativeTensors
from ..loaders.formats.stored_scheme import FORMAT as STORED_FORMAT
from ..loaders.load_report import load_report
from ..loaders.reader import open_checkpoint
from ..loaders.survey import survey
from ..quant.report import Report
from ..quant.stored.layout import LAYOUT_NAME
from ..quant.weight import QuantizedWeight
from .errors import HostError
from .file_tensors import FileTensors
from .progress import interruptible
from .state_dict import SWITCH, StateDict, state_dict

WEIGHTS = ("as_stored", "native")


def load_model(
    path: Path, weights: str = "as_stored", legacy_rotation: str = "auto", dynamic: bool = True
) -> tuple[ModelPatcher, Report]:
    """A MODEL from a file, by ComfyUI's own model detection and patcher, and the report.

    Args:
        weights: "as_stored" keeps foreign formats in their bytes and decodes them in every call;
            "native" converts them to ComfyUI's nearest format.
        legacy_rotation: of int8 weights whose file does not say, see `survey`.
        dynamic: whether ComfyUI may use its dynamic VRAM patcher.

    Raises:
        CheckpointError: if the file is damaged or holds a layer that would load wrong.
        HostError: if ComfyUI does not know the model, or is too old for a format.
    """
    if weights not in WEIGHTS:
        raise CheckpointError(path, f"unknown weights {weights!r}", f"valid: {', '.join(WEIGHTS)}")
    found = survey(open_checkpoint(path), legacy_rotation)
    found.require_loadable()
    items = contents(found)
    source = FileTensors(found.checkpoint)
    made = state_dict(items, source, weights == "native", interruptible)
    _require_formats(made)
    names = tuple(name for name in made.tensors if name != SWITCH)
    patcher = _load(path, made, dict(found.checkpoint.metadata), dynamic)
    finished = _finish_layers(patcher, made)
    missing, unexpected = _unmatched(patcher, names, made)
    patcher.cached_patcher_init = (reload_model, (path, weights, legacy_rotation))
    report = load_report(
        "LeanDiTLoadModel", found, items, made.held, made.sqnr, missing, unexpected
    )
    if finished < sum(not isinstance(w, torch.Tensor | NativeTensors) for w in made.held.values()):
        report = report.with_note(
            "some quantized layers have no counterpart in the model and were ignored"
        )
    return patcher, report


def reload_model(
    path: Path, weights: str, legacy_rotation: str, disable_dynamic: bool = False
) -> ModelPatcher:
    """What ComfyUI calls to make the patcher again, without dynamic VRAM or for another GPU."""
    return load_model(path, weights, legacy_rotation, not disable_dynamic)[0]


def _load(path: Path, made: StateDict, metadata: dict[str, str], dynamic: bool) -> ModelPatcher:
    metadata.pop("_quantization_metadata", None)  # it is in the state dict by now
    tensors = dict(made.tensors)
    try:
        patcher = comfy.sd.load_diffusion_model_state_dict(
            tensors, metadata=metadata, disable_dynamic=not dynamic
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise HostError(
            f"{path}: ComfyUI cannot put these weights into its model: {error}"
        ) from error
    if patcher is None:
        some = ", ".join(list(made.tensors)[:3])
        raise HostError(
            f"{path}: ComfyUI does not recognise this model (its tensors begin with {some}); "
            "it needs a diffusion model ComfyUI supports, or a newer ComfyUI"
        )
    return patcher


def _require_formats(made: StateDict) -> None:
    needed = {
        weight.format.native_format
        for weight in made.held.values()
        if isinstance(weight, QuantizedWeight)
    }
    for name in sorted(needed - set(QUANT_ALGOS)):
        raise HostError(f"this ComfyUI has no format {name}; it needs ComfyUI 0.33 or newer")


def _finish_layers(patcher: ModelPatcher, made: StateDict) -> int:
    """Tell ComfyUI's layers what they hold, and give them back the scales as views of the file.

    Loading has wrapped every weight anew, with the right dtype and copies of its scales.
    """
    quantized: list[Any] = [t for t in made.tensors.values() if isinstance(t, QuantizedTensor)]
    originals = {tensor._qdata.data_ptr(): tensor._params for tensor in quantized}
    by_layout = {algorithm["comfy_tensor_layout"]: name for name, algorithm in QUANT_ALGOS.items()}
    finished = 0
    for module in patcher.model.diffusion_model.modules():
        weight = module._parameters.get("weight")
        if not isinstance(weight, QuantizedTensor) or hasattr(module, "quant_format"):
            continue
        _describe(module, weight, by_layout)
        original = originals.get(weight._qdata.data_ptr())
        if original is not None:
            params = replace(original, orig_dtype=weight._params.orig_dtype)
            same = QuantizedTensor(weight._qdata, weight._layout_cls, params)
            wrapped: Any = torch.nn.Parameter(same, requires_grad=False)
            wrapped._params = params  # making a Parameter has copied them once more
            module.weight = wrapped
        finished += 1
    return finished


def _describe(module: Any, weight: QuantizedTensor, by_layout: dict[str, str]) -> None:
    module.layout_type = weight._layout_cls
    if weight._layout_cls == LAYOUT_NAME:
        module.quant_format = STORED_FORMAT
        # No kernel takes these bytes: ComfyUI is to hand the layer its input as it is.
        module._full_precision_mm = True
    else:
        module.quant_format = by_layout[weight._layout_cls]


def _unmatched(
    patcher: ModelPatcher, names: tuple[str, ...], made: StateDict
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names the model has and the file lacks, and the reverse, after ComfyUI's own renaming."""
    empty = {
        name: torch.empty(made.tensors[name].shape, device="meta")
        for name in names
        if not name.endswith(".comfy_quant")
    }
    try:
        given = set(patcher.model.model_config.process_unet_state_dict(empty))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError):
        return (), ()  # a renaming that needs values; ComfyUI's log has the lists
    model = patcher.model.diffusion_model
    wanted = {name for name, _ in model.named_parameters()}
    known = set(model.state_dict()) | wanted
    missing = sorted(wanted - given)
    unexpected = sorted(name for name in given - known)
    return tuple(missing), tuple(unexpected)
