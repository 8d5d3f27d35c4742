"""Saving a MODEL as a native file that ComfyUI alone loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

from ..loaders.errors import CheckpointError
from ..loaders.stream import TensorSpec, spec_of, write_stream
from ..loaders.writer import config_of, native_layer, quantization_metadata
from ..quant.native import from_quantized_tensor
from ..quant.patterns import MODEL_PREFIX
from ..quant.report import Report, finite, size_text
from ..quant.stored.layout import LAYOUT_NAME, stored_weight
from ..quant.weight import QuantizedWeight
from .bake import is_what_we_quantize_to, merge_float, merge_quantized
from .errors import HostError
from .pristine import PristineWeights, unload
from .progress import interruptible


@dataclass
class Baked:
    """What merging LoRAs did: dB of every requantized layer, and the number of plain tensors."""

    sqnr: dict[str, float]
    plain: int = 0


def save_model(model: ModelPatcher, path: Path, overwrite: bool) -> Report:
    """Write the diffusion model to `path`, read it back, and only then give it its name.

    LoRAs on the model are merged: in float32, and quantized layers are quantized again.

    Raises:
        CheckpointError: if the file exists and may not be replaced, or the disk is too full.
        HostError: if the model holds weights or patches that a native file cannot express.
    """
    if path.exists() and not overwrite:
        raise CheckpointError(path, "exists already", "choose another name or switch overwrite on")
    _refuse_what_cannot_be_written(model)
    unload(model.model)
    pristine = PristineWeights.of(model)
    layers, passed_on = _quantized_layers(model, pristine)
    plain = _plain_tensors(model, pristine, layers, passed_on)
    specs = [spec_of(name, tensor) for name, tensor in plain.items()]
    for name, weight in layers.items():
        specs += [spec_of(n, t) for n, t in native_layer(name, weight).items()]
    configs = {name: config_of(weight) for name, weight in layers.items()}
    for name in passed_on:
        configs[name] = json.loads(bytes(plain[f"{name}.comfy_quant"].tolist()))
    baked = Baked({})
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(model, plain, layers, baked)
    write_stream(path, specs, quantization_metadata(configs), tensors)
    return _report(path, specs, layers, baked)


def _refuse_what_cannot_be_written(model: ModelPatcher) -> None:
    if model.weight_wrapper_patches:
        raise HostError("another node computes weights in every call; save the model before it")
    if model.hook_patches:
        raise HostError("the model carries LoRA hooks, which no file can hold; save it before them")


def _quantized_layers(
    model: ModelPatcher, pristine: PristineWeights
) -> tuple[dict[str, QuantizedWeight], tuple[str, ...]]:
    """The layers in the formats we quantize to, and those ComfyUI itself writes (fp8, nvfp4)."""
    layers, passed_on = {}, []
    core = {algorithm["comfy_tensor_layout"] for algorithm in QUANT_ALGOS.values()}
    foreign: dict[str, str] = {}
    for name, module in model.model.diffusion_model.named_modules():
        current = module._parameters.get("weight")
        if not isinstance(current, QuantizedTensor):
            continue
        held: Any = pristine.parameter(f"{MODEL_PREFIX}{name}.weight", current)
        weight = from_quantized_tensor(held) if held.ndim == 2 else None
        patched = f"{MODEL_PREFIX}{name}.weight" in model.patches
        if weight is None and held._layout_cls in core and not patched:
            passed_on.append(name)
        elif weight is None or "_correction" in weight.tensors:
            foreign[name] = _held_as(held) + (" with a LoRA" if patched else "")
        elif patched and not is_what_we_quantize_to(weight):
            foreign[name] = (
                f"{weight.format.native_format} of a kind this package only reads, with a LoRA"
            )
        else:
            layers[name] = weight
    if foreign:
        name = next(iter(foreign))
        raise HostError(
            f"{len(foreign)} layers are held as {foreign[name]}, such as {name!r}, which this node "
            "does not write; load the file with weights set to native, then save"
        )
    return layers, tuple(passed_on)


def _held_as(held: Any) -> str:
    if held._layout_cls == LAYOUT_NAME:
        return stored_weight(held).scheme.name
    return held._layout_cls


def _plain_tensors(
    model: ModelPatcher,
    pristine: PristineWeights,
    layers: dict[str, QuantizedWeight],
    passed_on: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    """Everything else of the model's state dict, without patches."""
    tensors = {}
    for name, tensor in model.model.diffusion_model.state_dict().items():
        module, _, part = name.rpartition(".")
        if module in layers and part != "bias":
            continue
        value = tensor
        if module not in passed_on:
            value = pristine.parameter(f"{MODEL_PREFIX}{name}", tensor)
        tensors[name] = value.detach().cpu()
    return tensors


def _tensors(
    model: ModelPatcher,
    plain: dict[str, torch.Tensor],
    layers: dict[str, QuantizedWeight],
    baked: Baked,
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in interruptible([*plain, *layers]):
        patches = model.patches.get(f"{MODEL_PREFIX}{name}" + (".weight" if name in layers else ""))
        if name in layers:
            weight = layers[name].to("cpu")
            if patches:
                key = f"{MODEL_PREFIX}{name}.weight"
                weight, baked.sqnr[name] = merge_quantized(key, weight, patches)
            yield from native_layer(name, weight).items()
            continue
        tensor = plain[name]
        if patches:
            tensor = merge_float(f"{MODEL_PREFIX}{name}", tensor, patches)
            baked.plain += 1
        yield name, tensor


def _report(
    path: Path, specs: list[TensorSpec], layers: dict[str, QuantizedWeight], baked: Baked
) -> Report:
    nbytes = sum(spec.nbytes for spec in specs)
    summary: dict[str, Any] = {
        "file": str(path),
        "bytes": nbytes,
        "layers_quantized": len(layers),
        "loras_baked": len(baked.sqnr) + baked.plain,
    }
    lines = [
        f"written and read back: {path}",
        f"{size_text(nbytes)}, {len(layers)} quantized layers; ComfyUI loads it without LeanDiT",
    ]
    if summary["loras_baked"]:
        lines.append(f"LoRAs merged into {summary['loras_baked']} weights")
    if baked.sqnr:
        worst = min(baked.sqnr, key=baked.sqnr.__getitem__)
        lines.append(f"largest error of quantizing again: {baked.sqnr[worst]:.1f} dB, {worst}")
    rows = tuple(
        {
            "name": name,
            "format": weight.format.name,
            "group_size": weight.group_size,
            "shape": list(weight.shape),
            "bytes": weight.nbytes,
            "sqnr_db": finite(baked.sqnr[name]) if name in baked.sqnr else None,
        }
        for name, weight in layers.items()
    )
    return Report("LeanDiTSaveModel", summary, rows, (), "\n".join(lines))
