"""Telling that memory ran out, whoever says so."""

from __future__ import annotations

import torch

WORDS = ("out of memory", "can't allocate memory", "alloc_failed", "error code 12")
"""Of CUDA, cuBLAS, cuda-core and torch's CPU allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: another kernel would not need less."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)
