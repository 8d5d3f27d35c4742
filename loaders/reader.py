"""Reading checkpoints: one safetensors file, or many through an index, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from .dtypes import TORCH
from .errors import CheckpointError
from .header import TensorEntry, read_header

SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors$")
INDEX_SUFFIX = ".safetensors.index.json"
MAX_INDEX_BYTES = 100_000_000

LAYER_LISTS = frozenset({"_quantization_metadata", "activation_rotation_fqns"})
"""Metadata that each shard may have for its own layers."""


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, in the order of their files and data, and metadata.

    Only headers are in memory; `read` brings in one tensor.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    def read(self, name: str) -> torch.Tensor:
        """One tensor in memory of its own; the file is not kept open or mapped.

        Raises:
            KeyError: if there is no tensor of that name.
            CheckpointError: if its dtype is one torch does not hold, or the file has changed.
        """
        entry = self.entries[name]
        if entry.dtype not in TORCH:
            raise CheckpointError(
                entry.path,
                f"tensor {name!r} has the dtype {entry.dtype}, which torch does not hold",
                "it needs a reader for that format",
            )
        payload = torch.empty(entry.nbytes, dtype=torch.uint8)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.start)
            view = payload.numpy().data
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(
                        entry.path, f"ends inside tensor {name!r}", "it changed while it was read"
                    )
                view = view[count:]
        return payload.view(TORCH[entry.dtype]).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.safetensors` file or a `.safetensors.index.json` of shards.

    For one shard beside its index, all shards are opened.

    Raises:
        CheckpointError: if a file is not what it claims to be.
        OSError: if a file cannot be opened.
    """
    shard = SHARD.match(path.name)
    if shard:
        path = path.with_name(f"{shard.group(1)}{INDEX_SUFFIX}")
        if not path.is_file():
            raise CheckpointError(
                path,
                "is missing: it says which files belong to the model of which you named a part",
                "get it, or one file with the whole model",
            )
    if path.name.endswith(INDEX_SUFFIX):
        return _open_shards(path)
    header = read_header(path)
    return Checkpoint(path, {entry.name: entry for entry in header.entries}, header.metadata)


def _open_shards(path: Path) -> Checkpoint:
    weight_map = _read_weight_map(path)
    entries: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for shard in dict.fromkeys(weight_map.values()):
        header = read_header(path.parent / shard)
        metadata = _merged(metadata, header.metadata, path)
        for entry in header.entries:
            if entry.name in entries:
                other = entries[entry.name].path.name
                raise CheckpointError(path, f"{entry.name!r} is in {other} and in {shard}")
            entries[entry.name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].path.name != shard:
            raise CheckpointError(path, f"says {name!r} is in {shard}, where it is not")
    return Checkpoint(path, entries, metadata)


def _merged(one: Mapping[str, str], other: Mapping[str, str], path: Path) -> dict[str, str]:
    """The metadata of two shards; lists and labels of layers hold those of both."""
    merged = {**one, **other}
    for key in LAYER_LISTS & one.keys() & other.keys():
        try:
            parts = [json.loads(text[key]) for text in (one, other)]
            if isinstance(parts[0], list):
                merged[key] = json.dumps([*parts[0], *parts[1]])
            else:
                layers = {**parts[0]["layers"], **parts[1]["layers"]}
                merged[key] = json.dumps({**parts[0], "layers": layers})
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            if one[key] != other[key]:
                raise CheckpointError(
                    path, f"its shards have a {key} each that do not fit together"
                ) from error
    return merged


def _read_weight_map(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(path, f"is longer than {MAX_INDEX_BYTES} bytes", "it is no index")
    try:
        content: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON ({error})") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CheckpointError(
                path,
                f"places {name!r} in {shard!r}, which is no file beside it",
                "shards must be .safetensors files in the index's own folder",
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    """A file name without any folder, by the rules of every system, so that none leads elsewhere."""
    plain = PurePosixPath(name).name == name and PureWindowsPath(name).name == name
    return plain and name.endswith(".safetensors") and "\0" not in name
