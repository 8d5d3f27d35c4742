"""Checksums of tensors, to know that what is on the disk is what was meant to be."""

from __future__ import annotations

import zlib

import torch


def digest(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes in order."""
    if not tensor.numel():
        return 0
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
