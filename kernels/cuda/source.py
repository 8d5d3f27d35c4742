"""Where the CUDA sources are, and what identifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
"""The folder of the .cu and .cuh files."""


def source_of(kernel: str) -> str:
    """The text of a kernel's .cu file."""
    return (FOLDER / f"{kernel}.cu").read_text(encoding="utf-8")


@cache
def sources_digest() -> str:
    """Changes whenever any of the sources does."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_key(kernel: str, macros: Mapping[str, object], arch: str, compiler: str) -> str:
    """Identifies one compiled kernel: sources, options, architecture and compiler version."""
    parts = [sources_digest(), kernel, repr(sorted(macros.items())), arch, compiler]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
