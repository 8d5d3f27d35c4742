"""One file per on-disk format: `detect` says whether a layer is its, `read` what exactly it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from . import (
    bitsandbytes_4bit,
    bitsandbytes_int8,
    compressed_tensors,
    int8_blockwise,
    lightx2v,
    native_float,
    native_int8,
    native_w4a4,
    native_w4a8,
    quanto,
    refused,
    sdnq,
    stored_scheme,
    torchao,
    unlabelled_int8,
)
from .layer import FileFacts, LayerTensors, StoredLayer


@dataclass(frozen=True)
class FormatReader:
    """The two functions of a format's module."""

    name: str
    detect: Callable[[LayerTensors, FileFacts], bool]
    read: Callable[[LayerTensors, FileFacts], StoredLayer]


def _reader(module: ModuleType) -> FormatReader:
    return FormatReader(module.__name__.rpartition(".")[2], module.detect, module.read)


READERS: tuple[FormatReader, ...] = tuple(
    _reader(module)
    for module in (
        stored_scheme,
        native_int8,
        native_w4a4,
        native_w4a8,
        int8_blockwise,
        native_float,
        refused,
        bitsandbytes_4bit,
        bitsandbytes_int8,
        lightx2v,
        quanto,
        torchao,
        sdnq,
        compressed_tensors,
        unlabelled_int8,
    )
)
"""Most specific first: labelled layers are settled before any is recognised by its names."""


def reader_for(layer: LayerTensors, file: FileFacts) -> FormatReader | None:
    """The first reader that takes a layer, or None."""
    return next((reader for reader in READERS if reader.detect(layer, file)), None)
