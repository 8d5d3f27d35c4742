"""What a file was, what became of it, and what was ignored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ..quant.report import Report, finite, size_text
from ..quant.weight import QuantizedWeight
from .contents import Contents, LayerItem, LoadedWeight
from .survey import Survey

SHOWN = 5


def load_report(
    node: str,
    survey: Survey,
    contents: Contents,
    held: Mapping[str, LoadedWeight],
    sqnr: Mapping[str, float],
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
) -> Report:
    """The report of a load.

    Args:
        held: what each layer is held as. sqnr: dB of each layer that was converted.
        missing, unexpected: names the model has and the file lacks, and the reverse.
    """
    notes = [*survey.notes, *contents.notes]
    notes += sorted({note for layer in survey.layers for note in layer.notes})
    notes += [f"{fault.layer} {fault.fault}; {fault.remedy}" for fault in survey.ignored]
    if survey.outside:
        notes.append(
            f"{len(survey.outside)} tensors outside the diffusion model are ignored, such as "
            f"{survey.outside[0]!r}; load text encoders and VAE from their own files"
        )
    if unexpected:
        notes.append(f"ignored, the model has no place for: {_some(unexpected)}")
    if missing:
        notes.append(f"NOT IN THE FILE, the model keeps random values for: {_some(missing)}")
    as_float = [name for name, weight in held.items() if isinstance(weight, torch.Tensor)]
    if as_float:
        notes.append(f"held in 16 bit, since their parts differ: {_some(as_float)}")
    worst = sorted(sqnr, key=sqnr.__getitem__)[:SHOWN]
    summary: dict[str, Any] = {
        "file": survey.checkpoint.path.name,
        "writers": survey.writers,
        "formats": survey.formats,
        "loads_as": dict(Counter(_held_as(item, held, sqnr) for item in contents.layers)),
        "layers_quantized": len(contents.layers) - len(as_float),
        "plain_tensors": len(contents.plain),
        "bytes": sum(item.nbytes for item in (*contents.plain, *contents.layers)),
        "layers_converted": len(sqnr),
        "worst_layers": [{"name": name, "sqnr_db": finite(sqnr[name])} for name in worst],
        "ignored": len(survey.outside) + len(unexpected),
        "missing": list(missing),
    }
    layers = tuple(_layer(item, held, sqnr) for item in contents.layers)
    return Report(node, summary, layers, tuple(notes), _text(summary, notes))


def _held_as(item: LayerItem, held: Mapping[str, LoadedWeight], sqnr: Mapping[str, float]) -> str:
    weight = held[item.name]
    if isinstance(weight, torch.Tensor):
        return "16 bit"
    if item.name in sqnr and isinstance(weight, QuantizedWeight):
        return f"converted to {weight.format.name}"
    return item.sources[0].loads_as


def _layer(
    item: LayerItem, held: Mapping[str, LoadedWeight], sqnr: Mapping[str, float]
) -> dict[str, Any]:
    source = item.sources[0]
    return {
        "name": item.name,
        "format": source.format,
        "loads_as": _held_as(item, held, sqnr),
        "group_size": source.group_size,
        "shape": list(item.shape),
        "bytes": held[item.name].nbytes,
        "sqnr_db": finite(sqnr[item.name]) if item.name in sqnr else None,
        "reason": source.writer,
    }


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _text(summary: dict[str, Any], notes: list[str]) -> str:
    layers = sum(summary["formats"].values())
    lines = [
        f"{summary['file']}: {size_text(summary['bytes'])}, {layers} quantized layers, "
        f"{summary['plain_tensors']} plain tensors"
    ]
    if not layers:
        lines.append("nothing in it is quantized; loaded as ComfyUI loads it")
    for writer, count in summary["writers"].items():
        lines.append(f"written by {writer} ({count} layers)")
    for name, count in summary["formats"].items():
        lines.append(f"stored as {name} ({count} layers)")
    for name, count in summary["loads_as"].items():
        lines.append(f"held as {name} ({count} layers)")
    if summary["layers_converted"]:
        lines.append("error added by converting, worst layers (signal to noise):")
        for layer in summary["worst_layers"]:
            value = layer["sqnr_db"]
            shown = "  exact" if value is None else f"{value:5.1f} dB"
            lines.append(f"  {shown}  {layer['name']}")
    lines += [f"note: {note}" for note in notes]
    return "\n".join(lines)
