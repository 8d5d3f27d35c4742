"""What a file is, in the public JSON form, without loading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .architecture import image_model_of
from .contents import contents
from .formats.layer import StoredLayer
from .reader import open_checkpoint
from .survey import Survey, survey

FIRST_VERSION = {
    "int8_tensorwise": (0, 27, 0),
    "convrot_w4a4": (0, 28, 0),
    "asym_w4a8_int8": (0, 31, 0),
}
"""First ComfyUI with each format. Source: users' reports, Mooshieblob1/MooshieUI issue 511."""


def inspect_file(
    path: Path, legacy_rotation: str = "auto", comfyui: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Writer, formats, layers and faults of a file.

    Args:
        comfyui: the version to say what ComfyUI alone would do; None for a current one.

    Raises:
        CheckpointError: if the file is damaged as a whole; faults of layers are listed.
    """
    found = survey(open_checkpoint(path), legacy_rotation)
    notes = list(found.notes)
    if not found.faults:
        notes += contents(found).notes
    notes += sorted({note for layer in found.layers for note in layer.notes})
    if found.outside:
        notes.append(f"{len(found.outside)} tensors are outside the diffusion model")
    entries = found.checkpoint.entries
    faults = [(fault, False) for fault in found.faults] + [(f, True) for f in found.ignored]
    return {
        "model": image_model_of(_bare_names(found)),
        "writer": "; ".join(found.writers) or ("unknown" if found.faults else None),
        "loads": not found.faults,
        "formats": found.formats,
        "layers": [_layer(layer, comfyui) for layer in found.layers],
        "faults": [
            {"layer": f.layer, "fault": f.fault, "remedy": f.remedy, "ignored": ignored}
            for f, ignored in faults
        ],
        "notes": notes,
        "plain_tensors": len(found.plain),
        "plain_bytes": sum(entries[name].nbytes for name in found.plain),
    }


def _bare_names(found: Survey) -> Iterator[str]:
    yield from (name.removeprefix(found.prefix) for name in found.plain)
    yield from (f"{layer.name.removeprefix(found.prefix)}.weight" for layer in found.layers)


def _layer(layer: StoredLayer, comfyui: tuple[int, ...] | None) -> dict[str, Any]:
    return {
        "name": layer.name,
        "format": layer.format,
        "group_size": layer.group_size,
        "shape": list(layer.shape),
        "bytes": layer.nbytes,
        "loads_as": layer.loads_as,
        "writer": layer.writer,
        "stock": _stock(layer, comfyui),
    }


def _stock(layer: StoredLayer, comfyui: tuple[int, ...] | None) -> str:
    first = FIRST_VERSION.get(layer.format)
    if comfyui is not None and first is not None and comfyui < first:
        needed, found = (".".join(map(str, version)) for version in (first, comfyui))
        return f"needs ComfyUI {needed}, this is {found}"
    return layer.stock


def group_layers(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The layers of an inspection added up by format, rotation and what becomes of them."""
    keys = ("format", "group_size", "loads_as", "stock")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in data["layers"]:
        key = tuple(layer[name] for name in keys)
        row = rows.setdefault(key, {**dict(zip(keys, key, strict=True)), "layers": 0, "bytes": 0})
        row["layers"] += 1
        row["bytes"] += layer["bytes"]
    return list(rows.values())
