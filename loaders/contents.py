"""A surveyed file as ComfyUI's model wants it: its names without prefix, diffusers' translated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ..quant.native import dequantize
from ..quant.stacking import stack_native, stack_stored
from ..quant.stored.weight import StoredWeight, decode
from ..quant.weight import QuantizedWeight
from .diffusers.families import diffusers_family
from .diffusers.rule import Place, Renamer
from .errors import CheckpointError
from .formats.layer import NativeTensors, StoredLayer, TensorSource, Weight
from .survey import Survey

LoadedWeight = Weight | torch.Tensor

OPAQUE = ("mxfp8", "nvfp4")
"""Formats that only ComfyUI decodes; their rows are not stacked."""


@dataclass(frozen=True)
class PlainItem:
    """A tensor stored as plain numbers; sources are stacked along dim 0."""

    name: str
    sources: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    change: str = ""

    def load(self, source: TensorSource) -> torch.Tensor:
        """The tensor; a view of the source's where nothing is stacked or changed."""
        parts = [source.read(name) for name in self.sources]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.change == "swap":
            tensor = torch.cat(tensor.chunk(2)[::-1])
        return tensor.flatten() if self.change == "flatten" else tensor


@dataclass(frozen=True)
class LayerItem:
    """A quantized layer; sources are stacked by rows."""

    name: str
    sources: tuple[StoredLayer, ...]
    shape: tuple[int, ...]
    change: str = ""

    @property
    def nbytes(self) -> int:
        """Stored bytes of all sources."""
        return sum(source.nbytes for source in self.sources)

    def load(self, source: TensorSource) -> LoadedWeight:
        """The weight; a bf16 tensor where parts of different schemes had to be stacked."""
        parts = [layer.load(source) for layer in self.sources]
        if self.change == "swap":
            return _swapped(parts[0])
        return parts[0] if len(parts) == 1 else _stacked(parts)


@dataclass(frozen=True)
class Contents:
    """Everything of the diffusion model in a file, in ComfyUI's names.

    family is the diffusers family that was translated, None if none; notes say what was done.
    """

    plain: tuple[PlainItem, ...]
    layers: tuple[LayerItem, ...]
    family: str | None
    notes: tuple[str, ...]


def contents(survey: Survey) -> Contents:
    """The survey's layers and tensors under ComfyUI's names.

    Raises:
        CheckpointError: if a file has diffusers' names and lacks a part of a fused layer.
    """
    bare = {name: name.removeprefix(survey.prefix) for name in survey.plain}
    modules = [layer.name.removeprefix(survey.prefix) for layer in survey.layers]
    every_name = [*bare.values(), *(f"{module}.weight" for module in modules)]
    family = diffusers_family(every_name)
    place = _identity if family is None else _placing(Renamer(family))
    plain = _Gathered[str]()
    for name, short in bare.items():
        plain.add(place(short), name)
    layers = _Gathered[StoredLayer]()
    for layer, module in zip(survey.layers, modules, strict=True):
        placed = place(f"{module}.weight")
        layers.add(None if placed is None else _module_of(placed), layer)
    # Where a fused layer is quantized only in part, its plain parts join as weights of their own.
    mixed = [n for n in plain.found if n.removesuffix(".weight") in layers.found]
    if mixed:
        raise CheckpointError(
            survey.checkpoint.path,
            f"{mixed[0]!r} would be made of quantized and plain parts",
            "quantize all of a layer's q, k and v or none",
        )
    unplaced = [*plain.unplaced, *(layer.name for layer in layers.unplaced)]
    notes = [f"names translated from diffusers' ({family.name})"] if family else []
    if unplaced and family:
        notes.append(
            f"{len(unplaced)} tensors have no place in {family.name} and are ignored, such as "
            f"{unplaced[0]!r}"
        )
    return Contents(
        plain=tuple(_plain_item(survey, name, parts) for name, parts in plain.complete(survey)),
        layers=tuple(_layer_item(survey, name, parts) for name, parts in layers.complete(survey)),
        family=family.name if family else None,
        notes=tuple(notes),
    )


def _identity(name: str) -> Place | None:
    return Place(name, 0, 1, "")


def _placing(renamer: Renamer) -> Callable[[str], Place | None]:
    def place(name: str) -> Place | None:
        whole = renamer.place(f"{name}!")
        if whole is not None:
            return whole
        module, _, part = name.rpartition(".")
        found = renamer.place(module)
        if found is None:
            return None
        return Place(f"{found.target}.{part}", found.index, found.count, found.change)

    return place


def _module_of(place: Place) -> Place:
    return Place(place.target.removesuffix(".weight"), place.index, place.count, place.change)


Part = TypeVar("Part")


@dataclass
class _Gathered(Generic[Part]):
    """Parts by the name of what they make, and those without a place."""

    found: dict[str, dict[int, tuple[Part, Place]]] = field(default_factory=dict)
    unplaced: list[Part] = field(default_factory=list)

    def add(self, place: Place | None, part: Part) -> None:
        if place is None:
            self.unplaced.append(part)
        else:
            self.found.setdefault(place.target, {})[place.index] = (part, place)

    def complete(self, survey: Survey) -> Iterable[tuple[str, list[tuple[Part, Place]]]]:
        for name, parts in self.found.items():
            count = next(iter(parts.values()))[1].count
            if len(parts) != count:
                raise CheckpointError(
                    survey.checkpoint.path,
                    f"has {len(parts)} of the {count} parts of {name!r}",
                    "get the whole file",
                )
            yield name, [parts[index] for index in range(count)]


def _plain_item(survey: Survey, name: str, parts: list[tuple[str, Place]]) -> PlainItem:
    entries = [survey.checkpoint.entries[source] for source, _ in parts]
    first = entries[0]
    if len(entries) > 1 and any(
        not e.shape or e.shape[1:] != first.shape[1:] or e.dtype != first.dtype for e in entries
    ):
        parts_text = ", ".join(f"{e.name} {e.dtype}{list(e.shape)}" for e in entries)
        raise CheckpointError(
            survey.checkpoint.path,
            f"{name!r} would be stacked of parts that do not fit ({parts_text})",
            "get the file from another source",
        )
    shape = entries[0].shape
    if len(entries) > 1:
        shape = (sum(entry.shape[0] for entry in entries), *shape[1:])
    change = parts[0][1].change
    if change == "flatten":
        shape = (torch.Size(shape).numel(),)
    return PlainItem(
        name=name,
        sources=tuple(source for source, _ in parts),
        dtype=entries[0].dtype,
        shape=shape,
        nbytes=sum(entry.nbytes for entry in entries),
        change=change,
    )


def _layer_item(survey: Survey, name: str, parts: list[tuple[StoredLayer, Place]]) -> LayerItem:
    layers = [layer for layer, _ in parts]
    change = parts[0][1].change
    widths = {w.shape[1:] for w in layers}
    fit = len(widths) == 1 and all(len(w.shape) == 2 for w in layers)
    opaque = any(w.loads_as in OPAQUE for w in layers)
    if (len(layers) > 1 or change) and (opaque or not fit):
        parts_text = ", ".join(f"{w.name} {w.format} {list(w.shape)}" for w in layers)
        raise CheckpointError(
            survey.checkpoint.path,
            f"{name!r} would be made of parts that cannot be stacked ({parts_text})",
            "get the model with ComfyUI's names, or in another format",
        )
    shape = layers[0].shape
    if len(layers) > 1:
        shape = (sum(w.shape[0] for w in layers), *shape[1:])
    return LayerItem(name, tuple(layers), shape, change)


def _stacked(parts: Sequence[Weight]) -> LoadedWeight:
    native = [part for part in parts if isinstance(part, QuantizedWeight)]
    stored = [part for part in parts if isinstance(part, StoredWeight)]
    made = None
    if len(native) == len(parts):
        made = stack_native(native)
    elif len(stored) == len(parts):
        made = stack_stored(stored)
    if made is not None:
        return made
    return torch.cat([to_float(part, torch.bfloat16) for part in parts])


def _swapped(weight: Weight) -> LoadedWeight:
    if not isinstance(weight, QuantizedWeight):
        return torch.cat(to_float(weight, torch.bfloat16).chunk(2)[::-1])
    half = weight.shape[0] // 2
    return _stacked([weight.rows(slice(half, 2 * half)), weight.rows(slice(0, half))])


def to_float(weight: LoadedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The (N, K) weight that any loaded weight stands for.

    Raises:
        ValueError: for formats that only ComfyUI decodes (mxfp8, nvfp4, banks of experts).
    """
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, StoredWeight):
        return decode(weight, dtype)
    if isinstance(weight, QuantizedWeight):
        return dequantize(weight, dtype)
    return _from_fp8(weight).to(dtype)


def _from_fp8(weight: NativeTensors) -> torch.Tensor:
    name = weight.config.get("format")
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        raise ValueError(f"{name} is decoded by ComfyUI only")
    return weight.tensors["weight"].float() * weight.tensors["weight_scale"].float()
