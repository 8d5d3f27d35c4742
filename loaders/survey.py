"""What is in a file: every quantized layer recognised or its fault, and everything else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .architecture import model_prefix, strays
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
MISPLACED = "is outside of"
LEFTOVERS = frozenset({"weight_scale", "scale_weight", "input_scale", "scale_input"})


@dataclass(frozen=True)
class Survey:
    """A file's layers and the rest.

    layers: the quantized layers that can be loaded. plain: names of all other tensors of the
    diffusion model. outside: names of all tensors of another part of a checkpoint (text encoder,
    VAE), and outside_layers the quantized layers there. faults: what is wrong in the model, and
    outside_faults beside it; those in `ignored` do not hinder loading.
    """

    checkpoint: Checkpoint
    prefix: str
    layers: tuple[StoredLayer, ...]
    plain: tuple[str, ...]
    outside: tuple[str, ...]
    faults: tuple[LayerFault, ...]
    ignored: tuple[LayerFault, ...]
    notes: tuple[str, ...]
    outside_layers: tuple[StoredLayer, ...] = ()
    outside_faults: tuple[LayerFault, ...] = ()

    @property
    def writers(self) -> dict[str, int]:
        """How many layers each writer wrote, most first."""
        return dict(Counter(layer.writer for layer in self.layers).most_common())

    @property
    def formats(self) -> dict[str, int]:
        """How many layers each on-disk format has, most first."""
        return dict(Counter(layer.format for layer in self.layers).most_common())

    def require_loadable(self, whole: bool = False) -> None:
        """Refuse a file with faults, naming the first few.

        Args:
            whole: also for faults outside of the diffusion model.

        Raises:
            CheckpointError: with the fault and its remedy.
        """
        faults = (*self.faults, *self.outside_faults) if whole else self.faults
        if not faults:
            return
        shown = "; ".join(f"{f.layer}: {f.fault}" for f in faults[:MAX_NAMED])
        more = len(faults) - MAX_NAMED
        others = f"; and {more} more" if more > 0 else ""
        raise CheckpointError(
            self.checkpoint.path,
            f"has {len(faults)} layers that would load wrong: {shown}{others}",
            faults[0].remedy,
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
    entries = checkpoint.entries
    outside = tuple(name for name in entries if not name.startswith(prefix))
    layers, ignored = label(group_by_layer(entries), checkpoint.metadata, checkpoint)
    faults = [fault for fault in ignored if fault.layer in layers or fault.layer.startswith("_")]
    ignored = [fault for fault in ignored if fault not in faults]
    quantized = {name: layer for name, layer in layers.items() if is_quantized(layer)}
    file = FileFacts(
        source=checkpoint,
        metadata=checkpoint.metadata,
        keys=frozenset(entries),
        side=_side_files(checkpoint.path),
        rotation=legacy_rotation,
    )
    inside = {n: layer for n, layer in quantized.items() if n.startswith(prefix)}
    file, notes = _settle_rotation(file, inside)
    broken = {fault.layer for fault in faults}
    found, recognition_faults = _recognise_all(quantized, file, broken)
    faults += recognition_faults
    taken = {key for layer in found for key in layer.keys}
    taken |= {name for name in entries if name.endswith((".comfy_quant", SCALED_FP8))}
    leftovers = _leftover_scales(layers)
    ignored += leftovers.values()
    taken |= set(leftovers)
    rest = [name for name in entries if name not in taken]
    faults += _unclaimed(rest, entries, {fault.layer for fault in faults})
    faults += _misplaced(strays(entries, prefix), prefix)
    faults.sort(key=lambda fault: fault.layer)
    beside = {fault for fault in faults if _is_beside(fault, outside, prefix)}
    return Survey(
        checkpoint=checkpoint,
        prefix=prefix,
        layers=tuple(layer for layer in found if layer.name.startswith(prefix)),
        plain=tuple(name for name in rest if name.startswith(prefix)),
        outside=outside,
        faults=tuple(fault for fault in faults if fault not in beside),
        ignored=tuple(ignored),
        notes=notes,
        outside_layers=tuple(layer for layer in found if not layer.name.startswith(prefix)),
        outside_faults=tuple(fault for fault in faults if fault in beside),
    )


def _recognise_all(
    layers: Mapping[str, LayerTensors], file: FileFacts, broken: set[str]
) -> tuple[list[StoredLayer], list[LayerFault]]:
    found, faults = [], []
    for name, layer in layers.items():
        if name in broken:
            continue
        try:
            found.append(_recognise(layer, file))
        except LayerFault as fault:
            faults.append(fault)
    return found, faults


def _is_beside(fault: LayerFault, outside: Sequence[str], prefix: str) -> bool:
    """Whether a fault is in another part of the checkpoint than the diffusion model."""
    if fault.layer.startswith((prefix, "_")) or fault.fault.startswith(MISPLACED):
        return False
    return any(name.startswith(fault.layer) for name in outside)


def _misplaced(names: Sequence[str], prefix: str) -> list[LayerFault]:
    return [
        LayerFault(
            name,
            f"{MISPLACED} the prefix {prefix!r} that the rest of the model has",
            "give all of the model's tensors one prefix, or none",
        )
        for name in names[:1]
    ]


def _leftover_scales(layers: Mapping[str, LayerTensors]) -> dict[str, LayerFault]:
    """Scales beside weights that are plain floats: ComfyUI ignores them, too."""
    return {
        layer.key(part): LayerFault(
            layer.name,
            f"has a {part} although its weight is {layer.parts['weight'].dtype}",
            "it is ignored",
        )
        for layer in layers.values()
        if not is_quantized(layer) and layer.parts["weight"].dtype in FLOATS
        for part in LEFTOVERS & layer.parts.keys()
    }


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
        integers = entry.dtype in ("I8", "U8", "I16", "U16")
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
