"""The labels of quantized layers: `comfy_quant` tensors and the `_quantization_metadata` header."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..architecture import MODEL_PREFIXES
from ..header import TensorEntry
from .layer import LayerFault, TensorSource

MARKER = ".comfy_quant"
METADATA = "_quantization_metadata"
MAX_MARKER_BYTES = 65_536


def read_marker(entry: TensorEntry, source: TensorSource) -> dict[str, Any]:
    """The config in a `comfy_quant` tensor: the bytes of a JSON object.

    Raises:
        LayerFault: if it is not one.
    """
    layer = entry.name.removesuffix(MARKER)
    if entry.dtype not in ("U8", "I8") or entry.nbytes > MAX_MARKER_BYTES:
        raise LayerFault(
            layer,
            f"its comfy_quant is {entry.dtype} of {entry.nbytes} bytes, expected U8 of at most "
            f"{MAX_MARKER_BYTES}",
            "get the file from another source",
        )
    return parse_config(layer, source.read(entry.name).numpy().tobytes())


def parse_config(layer: str, text: bytes | str) -> dict[str, Any]:
    """A config, with the parameters some writers nest under `params` on the top level.

    Some community files have their braces doubled; the config is what remains without them.

    Raises:
        LayerFault: if it is no JSON object.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    stripped = text.strip().strip("\0")
    if stripped.startswith("{{") and stripped.endswith("}}"):
        stripped = stripped.replace("{{", "{").replace("}}", "}")
    try:
        config = json.loads(stripped)
    except (ValueError, RecursionError) as error:
        raise LayerFault(
            layer,
            f"its comfy_quant is not JSON ({text[:60]!r}: {error})",
            "get the file from another source",
        ) from error
    if not isinstance(config, dict):
        raise LayerFault(
            layer, f"its comfy_quant is {text[:60]!r}, not an object", "get another file"
        )
    params = config.pop("params", None)
    config = {**params, **config} if isinstance(params, dict) else config
    if not isinstance(config.get("format", ""), str):
        raise LayerFault(
            layer, f"its format is {config['format']!r}, not a name", "get another file"
        )
    return config


def header_configs(
    metadata: Mapping[str, str], layers: Iterable[str]
) -> tuple[dict[str, dict[str, Any]], list[LayerFault]]:
    """The configs of the header by the layers' names in the file, and what is wrong with it.

    A header may name layers with or without a prefix that the tensors have or lack.
    """
    text = metadata.get(METADATA)
    if text is None:
        return {}, []
    try:
        listed = parse_config("header", text).get("layers")
    except LayerFault as fault:
        return {}, [
            LayerFault(METADATA, fault.fault.replace("its comfy_quant", "it"), fault.remedy)
        ]
    if not isinstance(listed, dict):
        return {}, [
            LayerFault(METADATA, "has no map of layers", "get the file from another source")
        ]
    by_bare_name = {bare(layer): layer for layer in layers}
    configs: dict[str, dict[str, Any]] = {}
    faults = []
    for name, config in listed.items():
        layer = by_bare_name.get(bare(name))
        if layer is None:
            faults.append(
                LayerFault(name, "is listed in the header but has no tensors", "it is ignored")
            )
            continue
        try:
            as_text = config if isinstance(config, str) else json.dumps(config)
            configs[layer] = parse_config(layer, as_text)
        except LayerFault as fault:
            faults.append(fault)
    return configs, faults


def bare(layer: str) -> str:
    """A layer's name without the prefix of the diffusion model."""
    return next((layer.removeprefix(p) for p in MODEL_PREFIXES if layer.startswith(p)), layer)


def whole_number(config: Mapping[str, Any], name: str, default: int, layer: str) -> int:
    """A positive integer of a config.

    Raises:
        LayerFault: naming the value.
    """
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayerFault(
            layer,
            f"its {name} is {value!r}, expected a positive whole number",
            "get the file from another source",
        )
    return value
