"""Writing a safetensors file tensor by tensor, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from .digest import digest
from .dtypes import BITS, TORCH
from .errors import CheckpointError
from .header import LENGTH_BYTES
from .reader import open_checkpoint

FORMAT_NAME = {dtype: name for name, dtype in TORCH.items()}
ALIGNMENT = 8
"""The header's end is padded to this, so that every tensor starts at a multiple of its width."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written: its name, the format's dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        elements = 1
        for length in self.shape:
            elements *= length
        return elements * BITS[self.dtype] // 8


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor that is at hand."""
    return TensorSpec(name, FORMAT_NAME[tensor.dtype], tuple(tensor.shape))


def write_stream(
    path: Path,
    specs: Sequence[TensorSpec],
    metadata: Mapping[str, str],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, int]:
    """Write a file from tensors that are made one at a time, in any order; returns their digests.

    Equal contents give equal bytes: the order in the file is by width, then name.

    The data goes to a temporary file beside `path`, which takes its name only when it is complete
    and reads back as what was written.

    Args:
        specs: every tensor the file will hold. tensors: each of them once, by name.

    Raises:
        CheckpointError: if the disk is too full, `tensors` are not those of `specs`, or the file
            reads back differently.
    """
    ordered = sorted(specs, key=lambda spec: (-BITS[spec.dtype], spec.name))
    offsets: dict[str, int] = {}
    position = 0
    for spec in ordered:
        offsets[spec.name] = position
        position += spec.nbytes
    header = _header(ordered, offsets, metadata)
    _check_space(path, len(header) + position)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            by_name = {spec.name: spec for spec in specs}
            digests = _write_data(file, path, len(header), by_name, offsets, tensors)
            file.flush()
            os.fsync(file.fileno())
        _read_back(path, Path(temporary), digests)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return digests


def _header(
    ordered: Sequence[TensorSpec], offsets: Mapping[str, int], metadata: Mapping[str, str]
) -> bytes:
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for spec in ordered:
        start = offsets[spec.name]
        content[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + LENGTH_BYTES) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_data(
    file: BinaryIO,
    path: Path,
    start: int,
    specs: Mapping[str, TensorSpec],
    offsets: Mapping[str, int],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, int]:
    waiting = dict(specs)
    digests = {}
    for name, tensor in tensors:
        expected = waiting.pop(name, None)
        if expected is None or spec_of(name, tensor) != expected:
            raise CheckpointError(
                path, f"tensor {spec_of(name, tensor)} is not the {expected} in the header"
            )
        file.seek(start + offsets[name])
        file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        digests[name] = digest(tensor)
    if waiting:
        raise CheckpointError(path, f"tensor {next(iter(waiting))!r} was never written")
    return digests


def _read_back(path: Path, written: Path, digests: Mapping[str, int]) -> None:
    """Compare the file on the disk with what was meant to be in it."""
    checkpoint = open_checkpoint(written)
    for name, expected in digests.items():
        if digest(checkpoint.read(name)) != expected:
            raise CheckpointError(
                path,
                f"tensor {name!r} read back differs from what was written",
                "the disk or the memory is failing; nothing was kept",
            )


def _check_space(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise CheckpointError(
            path,
            f"needs {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB free",
            "make room or choose another folder",
        )


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
