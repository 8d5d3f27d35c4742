"""What is in a file: every quantized layer recognised or its fault, and everything else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .architecture import model_prefix
from .errors import CheckpointError
from .formats import reader_for
from .formats.layer import FLOATS, FileFacts, LayerFault, LayerTensors, StoredLayer
from .formats.native_float import SCALED_FP8
from .formats.scales import row_scale, row_scale_shapes
from .formats.unlabelled_int8 import ROTATIONS
from .layers import group_by_layer, is_quantized, label
from .reader import Checkpoint
from .rotation_evidence import rotation_by_evidence

SIDE_FILES = ("quantization_config.json", "config.json")
MAX_SIDE_BYTES = 10_000_000
LEGACY_ROTATIONS = ("auto", *ROTATIONS)
EVIDENCE_LAYERS = 6
EVIDENCE_MULTIPLE = 256
MAX_NAMED = 4


@dataclass(frozen=True)
class Survey:
    """A file's layers and the rest.

    layers: the quantized layers that can be loaded. plain: names of all other tensors of the
    diffusion model. outside: names of tensors that belong to another part of a checkpoint (text
    encoder, VAE). faults: what is wrong; those in `ignored` do not hinder loading.
    """

    checkpoint: Checkpoint
    prefix: str
    layers: tuple[StoredLayer, ...]
    plain: tuple[str, ...]
    outside: tuple[str, ...]
    faults: tuple[LayerFault, ...]
    ignored: tuple[LayerFault, ...]
    notes: tuple[str, ...]

    @property
    def writers(self) -> dict[str, int]:
        """How many layers each writer wrote, most first."""
        return dict(Counter(layer.writer for layer in self.layers).most_common())

    @property
    def formats(self) -> dict[str, int]:
        """How many layers each on-disk format has, most first."""
        return dict(Counter(layer.format for layer in self.layers).most_common())

    def require_loadable(self) -> None:
        """Refuse a file with faults, naming the first few.

        Raises:
            CheckpointError: with the fault and its remedy.
        """
        if not self.faults:
            return
        shown = "; ".join(f"{f.layer}: {f.fault}" for f in self.faults[:MAX_NAMED])
        more = len(self.faults) - MAX_NAMED
        others = f"; and {more} more" if more > 0 else ""
        raise CheckpointError(
            self.checkpoint.path,
            f"has {len(self.faults)} layers that would load wrong: {shown}{others}",
            self.faults[0].remedy,
        )


def survey(checkpoint: Checkpoint, legacy_rotation: str = "auto") -> Survey:
    """Recognise every layer of a file; only headers and small tensors are read.

    With legacy_rotation "auto", up to six layers without a label are read whole, to see from their
    numbers whether they are rotated.

    Raises:
        CheckpointError: if a side file or the setting is not what it must be; faults of layers are
            collected in the result.
    """
    if legacy_rotation not in LEGACY_ROTATIONS:
        valid = ", ".join(LEGACY_ROTATIONS)
        raise CheckpointError(
            checkpoint.path, f"unknown legacy_rotation {legacy_rotation!r}", f"valid: {valid}"
        )
    prefix = model_prefix(checkpoint)
    inside = {n: e for n, e in checkpoint.entries.items() if n.startswith(prefix)}
    outside = tuple(name for name in checkpoint.entries if name not in inside)
    layers, ignored = label(group_by_layer(inside), checkpoint.metadata, checkpoint)
    faults = [fault for fault in ignored if fault.layer in layers or fault.layer.startswith("_")]
    ignored = [fault for fault in ignored if fault not in faults]
    quantized = {name: layer for name, layer in layers.items() if is_quantized(layer)}
    file = FileFacts(
        source=checkpoint,
        metadata=checkpoint.metadata,
        keys=frozenset(inside),
        side=_side_files(checkpoint.path),
        rotation=legacy_rotation,
    )
    file, notes = _settle_rotation(file, quantized)
    found: list[StoredLayer] = []
    broken = {fault.layer for fault in faults}
    for name, layer in quantized.items():
        if name in broken:
            continue
        try:
            found.append(_recognise(layer, file))
        except LayerFault as fault:
            faults.append(fault)
    taken = {key for layer in found for key in layer.keys}
    rest = [name for name in inside if name not in taken]
    faults += _unclaimed(rest, inside, {fault.layer for fault in faults})
    markers = {name for name in rest if name.endswith((".comfy_quant", SCALED_FP8))}
    plain = tuple(name for name in rest if name not in markers)
    faults.sort(key=lambda fault: fault.layer)
    return Survey(
        checkpoint, prefix, tuple(found), plain, outside, tuple(faults), tuple(ignored), notes
    )


def _recognise(layer: LayerTensors, file: FileFacts) -> StoredLayer:
    reader = reader_for(layer, file)
    if reader is None:
        parts = ", ".join(
            f"{layer.name}.{part} {entry.dtype}{list(entry.shape)}"
            for part, entry in sorted(layer.parts.items())
        )
        raise layer.fault(f"is of no known format (its tensors: {parts})")
    return reader.read(layer, file)


def _unclaimed(names: list[str], entries: Mapping[str, Any], faulty: set[str]) -> list[LayerFault]:
    """Integer matrices that belong to no recognised layer: they would load as noise."""
    faults = []
    for name in names:
        entry = entries[name]
        layer = name.rpartition(".")[0]
        known = any(name.startswith(f"{broken}.") for broken in faulty)
        integers = entry.dtype in ("I8", "U8", "I16", "I32", "U16", "U32", "I64", "U64")
        if len(entry.shape) >= 2 and integers and entry.nbytes and not known:
            fault = f"holds {entry.dtype}{list(entry.shape)} of no known format ({name})"
            faults.append(LayerFault(layer or name, fault, "get the file from another source"))
    return faults


def _settle_rotation(
    file: FileFacts, layers: Mapping[str, LayerTensors]
) -> tuple[FileFacts, tuple[str, ...]]:
    """Find out about unlabelled layers' rotation, once for the whole file."""
    if file.rotation != "auto":
        return file, ()
    candidates = [
        layer
        for layer in layers.values()
        if (reader := reader_for(layer, file)) is not None and reader.name == "unlabelled_int8"
    ]
    if not candidates:
        return file, ()
    fitting = [
        layer
        for layer in candidates
        if layer.parts["weight"].shape[1] % EVIDENCE_MULTIPLE == 0
        and layer.parts["weight_scale"].dtype in FLOATS
        and layer.parts["weight_scale"].nbytes
    ]
    step = max(1, len(fitting) // EVIDENCE_LAYERS)
    answer = rotation_by_evidence(
        (
            file.source.read(layer.key("weight")),
            row_scale(file.source.read(layer.key("weight_scale")), layer.parts["weight"].shape[0]),
        )
        for layer in fitting[::step][:EVIDENCE_LAYERS]
        if layer.parts["weight_scale"].shape in row_scale_shapes(layer.parts["weight"].shape[0])
    )
    note = (
        f"{len(candidates)} int8 layers carry no label; their numbers point to rotation: {answer}"
    )
    return replace(file, rotation=answer), (note,)


def _side_files(path: Path) -> dict[str, Mapping[str, Any]]:
    """JSON objects beside the file that some tools keep their scheme in."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in SIDE_FILES:
        beside = path.parent / name
        if not beside.is_file() or beside.stat().st_size > MAX_SIDE_BYTES:
            continue
        try:
            content = json.loads(beside.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                beside, f"is not JSON ({error})", "repair or remove it"
            ) from error
        if isinstance(content, dict):
            found[name] = content
    return found
