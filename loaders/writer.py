"""Writing ComfyUI's native quantized files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..quant.weight import W4A8_SCALE_GROUP, QuantizedWeight


def native_config(weight: QuantizedWeight) -> dict[str, object]:
    """What ComfyUI stores in a layer's `comfy_quant`, as its own save writes it."""
    config: dict[str, object] = {"format": weight.format.native_format}
    if weight.format.native_format == "int8_tensorwise" and weight.group_size is not None:
        config["convrot"] = True
    if weight.format.native_format == "asym_w4a8_int8":
        config["group_size"] = W4A8_SCALE_GROUP
    if weight.group_size is not None:
        config["convrot_groupsize"] = weight.group_size
    return config


def native_layer(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of one layer under their names in a file: weight, scales, `comfy_quant`."""
    tensors = {f"{name}.weight{suffix}": value for suffix, value in weight.tensors.items()}
    text = json.dumps(native_config(weight)).encode()
    tensors[f"{name}.comfy_quant"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tensors


def write_native(
    path: Path,
    plain: Mapping[str, torch.Tensor],
    quantized: Mapping[str, QuantizedWeight],
    metadata: Mapping[str, str],
) -> None:
    """Write a native file; the name appears only when the file is complete.

    Args:
        plain: tensors stored as they are, by their names in the file.
        quantized: weights by layer name. metadata: more header entries.
    """
    tensors = dict(plain)
    for name, weight in quantized.items():
        tensors |= native_layer(name, weight)
    layers = {name: native_config(weight) for name, weight in quantized.items()}
    header = dict(metadata) | {
        "_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, header)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
