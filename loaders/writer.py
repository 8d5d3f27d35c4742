"""ComfyUI's native quantized files: names, markers and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..quant.formats import Format
from ..quant.weight import W4A8_SCALE_GROUP, QuantizedWeight
from .stream import TensorSpec, spec_of, write_stream


def native_config(
    format: Format,
    group_size: int | None,
    linear_dtype: str = "int4",
    scale_group: int = W4A8_SCALE_GROUP,
) -> dict[str, object]:
    """What ComfyUI stores in a layer's `comfy_quant`, as its own save writes it."""
    config: dict[str, object] = {"format": format.native_format}
    if format.native_format == "int8_tensorwise" and group_size is not None:
        config["convrot"] = True
    if format.native_format == "asym_w4a8_int8":
        config["group_size"] = scale_group
    if group_size is not None:
        config["convrot_groupsize"] = group_size
    if linear_dtype != "int4":
        config["linear_dtype"] = linear_dtype
    return config


def config_of(weight: QuantizedWeight) -> dict[str, object]:
    """`native_config` of a weight."""
    return native_config(weight.format, weight.group_size, weight.linear_dtype, weight.scale_group)


def marker(config: Mapping[str, object]) -> torch.Tensor:
    """A config as the U8 tensor stored under `comfy_quant`: the bytes of its JSON."""
    return torch.frombuffer(bytearray(json.dumps(config).encode()), dtype=torch.uint8)


def quantization_metadata(configs: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
    """The header entry that lists the layers' configs."""
    text = json.dumps({"format_version": "1.0", "layers": dict(sorted(configs.items()))})
    return {"_quantization_metadata": text}


def weight_specs(name: str, format: Format, n: int, k: int) -> Iterator[TensorSpec]:
    """The tensors of a layer quantized to `format`, without its label, before there is a weight."""
    native = format.native_format
    if native == "int8_tensorwise":
        yield TensorSpec(f"{name}.weight", "I8", (n, k))
        yield TensorSpec(f"{name}.weight_scale", "F32", (n, 1))
    elif native == "convrot_w4a4":
        yield TensorSpec(f"{name}.weight", "I8", (n, k // 2))
        yield TensorSpec(f"{name}.weight_scale", "F32", (n,))
    else:
        yield TensorSpec(f"{name}.weight", "I8", (n, k // 2))
        yield TensorSpec(f"{name}.weight_s_rel", "F8_E4M3", (n, k // W4A8_SCALE_GROUP))
        yield TensorSpec(f"{name}.weight_s_channel", "F32", (n,))
        yield TensorSpec(f"{name}.weight_codebook", "F32", (16,))


def layer_specs(
    name: str, format: Format, group_size: int | None, n: int, k: int
) -> Iterator[TensorSpec]:
    """The tensors `native_layer` will give for a layer quantized to `format`."""
    yield from weight_specs(name, format, n, k)
    config = marker(native_config(format, group_size))
    yield TensorSpec(f"{name}.comfy_quant", "U8", tuple(config.shape))


def native_layer(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """The tensors of one layer under their names in a file: weight, scales, `comfy_quant`."""
    tensors = {f"{name}.weight{suffix}": value for suffix, value in weight.tensors.items()}
    tensors[f"{name}.comfy_quant"] = marker(config_of(weight))
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

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from plain.items()
        for name, weight in quantized.items():
            yield from native_layer(name, weight).items()

    configs = {name: config_of(w) for name, w in quantized.items()}
    specs = [spec_of(name, tensor) for name, tensor in tensors()]
    write_stream(path, specs, dict(metadata) | quantization_metadata(configs), tensors())
