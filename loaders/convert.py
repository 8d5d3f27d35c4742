"""Quantizing a file into a file, one tensor at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..quant.families import family_of
from ..quant.plan import Layer, Plan, Quantize, make_plan
from ..quant.settings import QuantSettings
from ..quant.weight import W4A8_SCALE_GROUP, quantize_weight
from .architecture import image_model_of, model_prefix
from .diffusers.families import diffusers_family
from .errors import CheckpointError
from .header import TensorEntry
from .reader import Checkpoint, open_checkpoint
from .stream import TensorSpec, write_stream
from .survey import survey
from .writer import marker, native_config, native_layer, quantization_metadata

FLOAT_DTYPES = ("BF16", "F16", "F32")
WEIGHT = ".weight"

LOOKUP_TABLE = re.compile(
    r"(^|\.)(embed_tokens|shared|wte|lm_head|word_embeddings?|token_embedding"
    r"|relative_attention_bias|position_embeddings?|pos_embed|embedding|embeddings)$"
)
"""Names of embedding tables: 2-D weights, but rows are looked up, not multiplied."""

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did; sizes in bytes of the whole file's tensors."""

    plan: Plan
    bytes_before: int
    bytes_after: int
    seconds: float

    def as_json(self, peak_rss_bytes: int | None) -> dict[str, Any]:
        """The public JSON form."""
        return {
            "layers_quantized": len(self.plan.selected),
            "layers_kept": [{"name": d.layer.name, "reason": d.reason} for d in self.plan.kept],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": round(self.seconds, 3),
            "peak_rss_bytes": peak_rss_bytes,
        }


def describe_checkpoint(checkpoint: Checkpoint, prefix: str) -> list[Layer]:
    """The plan's view of every 2-D `.weight` under `prefix`, named without it."""
    layers = []
    for name, entry in checkpoint.entries.items():
        if name.startswith(prefix) and name.endswith(WEIGHT) and len(entry.shape) == 2:
            layer = name.removeprefix(prefix).removesuffix(WEIGHT)
            n, k = entry.shape
            packed = _why_packed(checkpoint, name, entry)
            barred = (
                "an embedding table: its rows are looked up" if is_lookup_table(layer) else None
            )
            layers.append(Layer(layer, n, k, entry.nbytes, packed, barred))
    return layers


def is_lookup_table(layer: str) -> bool:
    """Whether a layer's name is that of an embedding table: its rows are looked up."""
    return LOOKUP_TABLE.search(layer) is not None


def _why_packed(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> str | None:
    if name.removesuffix(WEIGHT) + ".comfy_quant" in checkpoint.entries:
        return "already quantized (comfy_quant)"
    if entry.dtype not in FLOAT_DTYPES:
        return f"already quantized or packed (stored as {entry.dtype})"
    return None


def quantize_file(
    source: Path,
    target: Path,
    settings: QuantSettings,
    overwrite: bool = False,
    start: Callable[[int], Progress] = lambda total: lambda count: None,
) -> Conversion:
    """Quantize a checkpoint into a native file, with the node's plan and arithmetic.

    One tensor is in memory at a time; `target` appears only when it is complete.

    Args:
        source: a .safetensors file or the .safetensors.index.json of shards.
        overwrite: replace `target` if it exists.
        start: is told the bytes to read, and returns a function that is told each count read.

    Raises:
        CheckpointError, NothingSelectedError, WeightError, OSError: nothing is written then. Files
            with diffusers' names or quantized by another tool are refused.
    """
    started = time.perf_counter()
    if target.exists() and not overwrite:
        raise CheckpointError(target, "exists already", "choose another name or pass --overwrite")
    checkpoint = open_checkpoint(source)
    kept_configs = _native_configs(checkpoint)
    if target.exists() and any(target.samefile(path) for path in _files(checkpoint)):
        raise CheckpointError(target, "is the source itself", "choose another name")
    prefix = model_prefix(checkpoint)
    names = [name.removeprefix(prefix) for name in checkpoint if name.startswith(prefix)]
    diffusers = diffusers_family(names)
    if diffusers is not None:
        raise CheckpointError(
            source,
            f"has diffusers' names ({diffusers.name}), under which ComfyUI would load a quantized "
            "file as noise",
            "in ComfyUI use Load Quantized Model, Quantize Model and Save Quantized Model",
        )
    family = family_of(image_model_of(names))
    plan = make_plan(describe_checkpoint(checkpoint, prefix), settings, family)
    if not plan.selected:
        raise CheckpointError(source, "is quantized already", "there is nothing left to do")
    selected = {f"{prefix}{d.layer.name}{WEIGHT}": d for d in plan.selected}
    specs = list(_specs(checkpoint, selected))
    configs = kept_configs | {
        name.removesuffix(WEIGHT): native_config(d.format, d.group_size)
        for name, d in selected.items()
    }
    metadata = dict(checkpoint.metadata) | quantization_metadata(configs)
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    tensors = _tensors(checkpoint, selected, start(total))
    write_stream(target, specs, metadata, tensors)
    return Conversion(
        plan=plan,
        bytes_before=total,
        bytes_after=sum(spec.nbytes for spec in specs),
        seconds=time.perf_counter() - started,
    )


def _native_configs(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """The labels of layers that are quantized already; they stay as they are.

    A header replaces one that was there, so it must go on naming them.

    Raises:
        CheckpointError: if a layer would load wrong in ComfyUI, now or after a header is added.
    """
    found = survey(checkpoint, "none")
    found.require_loadable()
    for layer in found.layers:
        if layer.stock != "loads it" or layer.config is None:
            raise CheckpointError(
                checkpoint.path,
                f"is quantized by another tool ({layer.name} is {layer.format}, {layer.writer})",
                "quantize the 16-bit file, or load this one in ComfyUI with Load Quantized Model",
            )
    return {
        layer.name: dict(layer.config or {})
        for layer in found.layers
        if f"{layer.name}.comfy_quant" not in checkpoint.entries
    }


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {entry.path for entry in checkpoint.entries.values()}


def _specs(checkpoint: Checkpoint, selected: dict[str, Quantize]) -> Iterator[TensorSpec]:
    for name, entry in checkpoint.entries.items():
        if name in selected:
            yield from _native_specs(name.removesuffix(WEIGHT), selected[name])
        else:
            yield TensorSpec(name, entry.dtype, entry.shape)


def _native_specs(name: str, decision: Quantize) -> Iterator[TensorSpec]:
    """The tensors `native_layer` will give, known before the weight is read."""
    n, k = decision.layer.n, decision.layer.k
    native = decision.format.native_format
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
    config = marker(native_config(decision.format, decision.group_size))
    yield TensorSpec(f"{name}.comfy_quant", "U8", tuple(config.shape))


def _tensors(
    checkpoint: Checkpoint, selected: dict[str, Quantize], progress: Progress
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, entry in checkpoint.entries.items():
        tensor = checkpoint.read(name)
        if name in selected:
            decision = selected[name]
            layer = name.removesuffix(WEIGHT)
            weight = quantize_weight(tensor, decision.format, decision.group_size, layer)
            del tensor
            yield from native_layer(layer, weight).items()
        else:
            yield name, tensor
        progress(entry.nbytes)
