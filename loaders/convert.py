"""Quantizing a file into a file, one tensor at a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..quant.families import family_of
from ..quant.measured import quantize_and_measure
from ..quant.plan import Plan, Quantize, make_plan, quantized_before_note
from ..quant.report import finite
from ..quant.settings import QuantSettings
from .architecture import image_model_of
from .contents import Contents, LayerItem, PlainItem, contents, to_float
from .describe import WEIGHT, describe_layers, is_decoded
from .errors import CheckpointError
from .formats.native_float import SCALED_FP8
from .kept import keep_layer
from .layers import FP8
from .reader import Checkpoint, open_checkpoint
from .stream import TensorSpec, spec_of, write_stream
from .survey import Survey, survey
from .writer import (
    layer_specs,
    native_config,
    native_layer,
    quantization_metadata,
)

Progress = Callable[[int], None]

LORA = re.compile(r"[._](lora_?(A|B|up|down)|lokr_w\d|hada_w\d)[._]", re.I)
"""Names of a LoRA's factors."""

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Conversion:
    """What a conversion did; sizes in bytes of the whole file's tensors; sqnr the error of every
    quantized layer in dB."""

    plan: Plan
    bytes_before: int
    bytes_after: int
    seconds: float
    sqnr: Mapping[str, float]

    def as_json(self, peak_rss_bytes: int | None) -> dict[str, Any]:
        """The public JSON form."""
        return {
            "layers_quantized": len(self.plan.selected),
            "layers_kept": [{"name": d.layer.name, "reason": d.reason} for d in self.plan.kept],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": round(self.seconds, 3),
            "worst_sqnr_db": finite(min(self.sqnr.values())),
            "worst_layer": min(self.sqnr, key=self.sqnr.__getitem__),
            "peak_rss_bytes": peak_rss_bytes,
        }


def quantize_file(
    source: Path,
    target: Path,
    settings: QuantSettings,
    overwrite: bool = False,
    start: Callable[[int], Progress] = lambda total: lambda count: None,
    legacy_rotation: str = "auto",
) -> Conversion:
    """Quantize a checkpoint into a native file, with the node's plan and arithmetic.

    One tensor is in memory at a time; `target` appears only when it is complete. fp8 layers and
    those of formats ComfyUI lacks are decoded and quantized anew; int8 and int4 layers in its own
    formats stay as they are. Files with diffusers' names get ComfyUI's.

    Args:
        source: a .safetensors file or the .safetensors.index.json of shards.
        overwrite: replace `target` if it exists.
        start: is told the bytes to read, and returns a function that is told each count read.
        legacy_rotation: of int8 weights whose file does not say, see `survey`.

    Raises:
        CheckpointError, NothingSelectedError, WeightError, OSError: nothing is written then.
    """
    started = time.perf_counter()
    if target.is_dir():
        raise CheckpointError(target, "is a folder", "name the .safetensors file to write")
    if not target.parent.is_dir():
        raise CheckpointError(target, "is in a folder that does not exist", "make it first")
    if target.exists() and not overwrite:
        raise CheckpointError(target, "exists already", "choose another name or pass --overwrite")
    checkpoint = open_checkpoint(source)
    if target.exists() and any(target.samefile(path) for path in _files(checkpoint)):
        raise CheckpointError(target, "is the source itself", "choose another name")
    found = survey(checkpoint, legacy_rotation)
    found.require_loadable(whole=True)
    _refuse_loras(found)
    items = contents(found)
    names = [*(i.name for i in items.plain), *(f"{i.name}{WEIGHT}" for i in items.layers)]
    plan = make_plan(describe_layers(items), settings, family_of(image_model_of(names)))
    if not plan.selected:
        kept = next(d for d in plan.kept if d.layer.packed)
        raise CheckpointError(
            source,
            f"is quantized already: {kept.layer.name} and the like are {kept.layer.packed}, which "
            "is not quantized again",
            "start from the 16-bit file",
        )
    plan = _with_notes(plan, found, items)
    work = _Conversion(found, items, {d.layer.name: d for d in plan.selected})
    specs, configs = work.specs_and_configs()
    metadata = dict(checkpoint.metadata) | quantization_metadata(configs)
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    write_stream(target, specs, metadata, work.tensors(start(work.nbytes)))
    return Conversion(
        plan=plan,
        bytes_before=total,
        bytes_after=sum(spec.nbytes for spec in specs),
        seconds=time.perf_counter() - started,
        sqnr=work.sqnr,
    )


def _files(checkpoint: Checkpoint) -> set[Path]:
    return {entry.path for entry in checkpoint.entries.values()}


def _refuse_loras(found: Survey) -> None:
    matrices = [name for name in found.plain if len(found.checkpoint.entries[name].shape) == 2]
    loras = [name for name in matrices if LORA.search(name)]
    if 2 * len(loras) > len(matrices):
        raise CheckpointError(
            found.checkpoint.path,
            f"is a LoRA (it has {loras[0]!r}), which ComfyUI would merge as wrong numbers",
            "load it with a LoRA node; quantize the model it belongs to",
        )


def _with_notes(plan: Plan, found: Survey, items: Contents) -> Plan:
    """The plan with what was noticed about the file, and what was quantized twice."""
    for note in (*found.notes, *items.notes):
        plan = plan.with_note(note)
    stored = {item.name: item for item in items.layers}
    anew = [stored[d.layer.name].sources[0] for d in plan.selected if d.layer.name in stored]
    if anew:
        was = f"{anew[0].format}, {anew[0].writer}"
        plan = plan.with_note(quantized_before_note(len(anew), was))
    cast = [d.layer.dtype for d in plan.selected if d.layer.dtype in FP8]
    if cast:
        plan = plan.with_note(quantized_before_note(len(cast), cast[0]))
    kept = {d.layer.name for d in plan.kept}
    unfit = [i for i in items.layers if i.name in kept and _becomes_plain(i)]
    if unfit:
        plan = plan.with_note(
            f"{len(unfit)} kept layers are in a format ComfyUI lacks ({unfit[0].sources[0].format})"
            " and are written as bf16"
        )
    return plan


def _becomes_plain(item: LayerItem) -> bool:
    return is_decoded(item.sources[0]) and item.sources[0].loads_as.startswith("stored (")


@dataclass(frozen=True)
class _Conversion:
    """What goes into the new file: selected is by ComfyUI's name of the layer.

    sqnr fills while `tensors` runs.
    """

    found: Survey
    items: Contents
    selected: Mapping[str, Quantize]
    sqnr: dict[str, float] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The source's prefix; ComfyUI's names alone where they were translated."""
        return "" if self.items.family else self.found.prefix

    @property
    def nbytes(self) -> int:
        """The bytes that `tensors` will report."""
        items = (*self.items.plain, *self.items.layers, *self._outside_layers)
        entries = self.found.checkpoint.entries
        return sum(item.nbytes for item in items) + sum(entries[n].nbytes for n in self._outside)

    @property
    def _outside_layers(self) -> tuple[LayerItem, ...]:
        """Quantized layers beside the diffusion model, under their own names."""
        return tuple(LayerItem(w.name, (w,), w.shape) for w in self.found.outside_layers)

    @property
    def _outside(self) -> tuple[str, ...]:
        """Everything else there, but for the old sign that scales have old names."""
        taken = {key for layer in self.found.outside_layers for key in layer.keys}
        return tuple(n for n in self.found.outside if n not in taken and not n.endswith(SCALED_FP8))

    def specs_and_configs(self) -> tuple[list[TensorSpec], dict[str, Config]]:
        """Every tensor that `tensors` will give, and the labels of the quantized layers.

        Kept layers are read for it, one at a time: what they become is known only then.
        """
        entries = self.found.checkpoint.entries
        specs = [TensorSpec(n, entries[n].dtype, entries[n].shape) for n in self._outside]
        configs: dict[str, Config] = {}
        for item in self._outside_layers:
            self._add_kept(item, "", specs, configs)
        for item in self.items.plain:
            decision = self._decision(item)
            if decision is None:
                specs.append(TensorSpec(f"{self.prefix}{item.name}", item.dtype, item.shape))
            else:
                specs += _native_specs(self.prefix, decision)
                configs[f"{self.prefix}{decision.layer.name}"] = _config(decision)
        for item in self.items.layers:
            decision = self._decision(item)
            name = f"{self.prefix}{item.name}"
            if decision is None:
                self._add_kept(item, self.prefix, specs, configs)
            else:
                specs += _native_specs(self.prefix, decision)
                configs[name] = _config(decision)
        return specs, configs

    def _add_kept(
        self, item: LayerItem, prefix: str, specs: list[TensorSpec], configs: dict[str, Config]
    ) -> None:
        kept = keep_layer(item, self.found.checkpoint, prefix)
        specs += [spec_of(part, tensor) for part, tensor in kept.tensors.items()]
        if kept.config is not None:
            configs[f"{prefix}{item.name}"] = kept.config

    def tensors(self, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
        """The new file's tensors; `progress` is told the bytes read for each."""
        checkpoint = self.found.checkpoint
        for name in self._outside:
            yield name, checkpoint.read(name)
            progress(checkpoint.entries[name].nbytes)
        for item in self._outside_layers:
            yield from keep_layer(item, checkpoint).tensors.items()
            progress(item.nbytes)
        for item in (*self.items.plain, *self.items.layers):
            yield from self._item_tensors(item)
            progress(item.nbytes)

    def _item_tensors(self, item: PlainItem | LayerItem) -> Iterator[tuple[str, torch.Tensor]]:
        decision = self._decision(item)
        if decision is not None:
            name = f"{self.prefix}{decision.layer.name}"
            weight, self.sqnr[name] = quantize_and_measure(
                to_float(item.load(self.found.checkpoint)),
                decision.format,
                decision.group_size,
                name,
            )
            yield from native_layer(name, weight).items()
        elif isinstance(item, PlainItem):
            yield f"{self.prefix}{item.name}", item.load(self.found.checkpoint)
        else:
            kept = keep_layer(item, self.found.checkpoint, self.prefix)
            yield from kept.tensors.items()

    def _decision(self, item: PlainItem | LayerItem) -> Quantize | None:
        if isinstance(item, LayerItem):
            return self.selected.get(item.name)
        if not item.name.endswith(WEIGHT):
            return None
        return self.selected.get(item.name.removesuffix(WEIGHT))


def _config(decision: Quantize) -> Config:
    return native_config(decision.format, decision.group_size)


def _native_specs(prefix: str, decision: Quantize) -> Iterator[TensorSpec]:
    layer = decision.layer
    name = f"{prefix}{layer.name}"
    return layer_specs(name, decision.format, decision.group_size, layer.n, layer.k)
