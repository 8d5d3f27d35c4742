"""Sorting a file's tensors into layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .formats.layer import FLOATS, PART, PAYLOADS, LayerFault, LayerTensors, TensorSource
from .formats.marker import header_configs, read_marker
from .header import TensorEntry

FP8 = ("F8_E4M3", "F8_E5M2")


def group_by_layer(entries: Mapping[str, TensorEntry]) -> dict[str, LayerTensors]:
    """The layers that have a payload, by name, with every tensor that belongs to each."""
    parts: dict[str, dict[str, TensorEntry]] = {
        name.removesuffix(f".{payload}"): {}
        for name in sorted(entries)
        for payload in PAYLOADS
        if name.endswith(f".{payload}")
    }
    for name, entry in entries.items():
        layer = _owner(name, parts)
        if layer is not None:
            parts[layer][name[len(layer) + 1 :]] = entry
    return {name: LayerTensors(name, found, None) for name, found in parts.items() if found}


def _owner(name: str, layers: Iterable[str]) -> str | None:
    """The longest layer name that a tensor's name begins with and whose part the rest is."""
    end = len(name)
    while (end := name.rfind(".", 0, end)) > 0:
        if name[:end] in layers and PART.match(name[end:]):
            return name[:end]
    return None


def label(
    layers: Mapping[str, LayerTensors], metadata: Mapping[str, str], source: TensorSource
) -> tuple[dict[str, LayerTensors], list[LayerFault]]:
    """The layers with their configs, from the header and from `comfy_quant`; and faults in those.

    Where both label a layer the header wins, as in ComfyUI.
    """
    configs, faults = header_configs(metadata, layers)
    labelled = {}
    for name, layer in layers.items():
        config = configs.get(name)
        if config is None and "comfy_quant" in layer.parts:
            try:
                config = read_marker(layer.parts["comfy_quant"], source)
            except LayerFault as fault:
                faults.append(fault)
        labelled[name] = replace(layer, config=config)
    return labelled, faults


def is_quantized(layer: LayerTensors) -> bool:
    """Whether a layer's numbers are anything but plain floats."""
    if layer.config is not None or "weight" not in layer.parts:
        return True
    weight = layer.parts["weight"]
    if weight.dtype in FLOATS:
        return False
    alone = len(layer.parts) == (2 if "bias" in layer.parts else 1)
    if weight.dtype in FP8:
        return not alone  # fp8 without a scale is a plain cast, which ComfyUI loads as such
    return len(weight.shape) >= 2 or not alone
