"""The header of a safetensors file, checked entry by entry before a byte of data is read.

A file is 8 bytes (the header's length, little endian), the header (JSON), and the data. Each
tensor's `data_offsets` count from the start of the data; together they cover it without overlap.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dtypes import BITS
from .errors import CheckpointError

LENGTH_BYTES = 8
GGUF_MAGIC = b"GGUF"
ZIP_MAGIC, PICKLE_MAGIC = b"PK\x03\x04", b"\x80\x02"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit; no allocation follows a larger claim."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its format dtype, shape, and place as [start, stop) in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return self.stop - self.start


@dataclass(frozen=True)
class Header:
    """The tensors of one file in the order of their data, and its metadata."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: for every way a header can contradict itself, the format or the file.
        OSError: if the file cannot be opened.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            raise CheckpointError(path, f"is {size} bytes long, too short for a safetensors file")
        if prefix.startswith(ZIP_MAGIC) or prefix.startswith(PICKLE_MAGIC):
            raise CheckpointError(
                path,
                "is a PyTorch file (.pt, .ckpt), not safetensors",
                "get the safetensors version; a PyTorch file can run code when it is opened",
            )
        if prefix.startswith(GGUF_MAGIC):
            raise CheckpointError(
                path,
                "is a GGUF file, not safetensors",
                "get the safetensors version, or load it with ComfyUI-GGUF",
            )
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                path,
                f"claims a header of {length} bytes, the limit is {MAX_HEADER_BYTES}",
                "it is not a safetensors file, or its start is damaged",
            )
        if length > size - LENGTH_BYTES:
            raise CheckpointError(
                path, f"ends inside its header ({size - LENGTH_BYTES} of {length} bytes are there)"
            )
        text = file.read(length)
    return _parse(path, text, data_start=LENGTH_BYTES + length, size=size)


def _parse(path: Path, text: bytes, data_start: int, size: int) -> Header:
    try:
        content = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(path, "its header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(path, "its __metadata__ is not a map of strings")
    entries = [_entry(path, name, value, data_start) for name, value in content.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_places(path, entries, data_start, size)
    return Header(tuple(entries), metadata)


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(path, f"its header names {twice!r} twice")
    return content


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    def fault(what: str) -> CheckpointError:
        return CheckpointError(path, f"tensor {name!r} {what}")

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise fault("has no dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise fault(f"has the unknown dtype {dtype!r}")
    if not _is_counts(shape):
        raise fault(f"has the impossible shape {shape!r}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(f"has the impossible data_offsets {offsets!r}")
    bits = math.prod(shape) * BITS[dtype]
    stored = offsets[1] - offsets[0]
    if bits != stored * 8:
        raise fault(
            f"of dtype {dtype} and shape {shape} needs {bits / 8:g} bytes, its data_offsets "
            f"{offsets} hold {stored}"
        )
    start, stop = (data_start + offset for offset in offsets)
    return TensorEntry(name, path, dtype, tuple(shape), start, stop)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _check_places(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    end = data_start
    for entry in entries:
        if entry.start < end:
            raise CheckpointError(path, f"tensor {entry.name!r} overlaps the one before it")
        if entry.start > end:
            raise CheckpointError(
                path, f"{entry.start - end} bytes before tensor {entry.name!r} belong to none"
            )
        end = entry.stop
    if end > size:
        raise CheckpointError(
            path,
            f"is cut short: its tensors end at byte {end}, the file at {size}",
            "the download is incomplete, download it again",
        )
    if end < size:
        raise CheckpointError(path, f"has {size - end} bytes after its last tensor")
