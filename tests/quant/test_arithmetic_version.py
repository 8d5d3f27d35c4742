"""Cached weights are known by a version of the arithmetic: it has to change with the bits."""

from __future__ import annotations

import hashlib

import pytest
import torch
from leandit.quant.formats import FORMATS
from leandit.quant.weight import ARITHMETIC_VERSION, quantize_weight

DIGESTS: dict[int, dict[str, str]] = {
    1: {
        "int8_convrot": "4d9c9a3b508bc94b",
        "int8": "d4f3455066219fb6",
        "w4a4_convrot": "4218e374468aab25",
    }
}
"""Of the weight below in every format. If one changes, raise ARITHMETIC_VERSION and add a row.
w4a8's arithmetic is comfy-kitchen's, whose version is a part of the key itself."""


def digest(name: str) -> str:
    """Small whole numbers: rotating them is exact on every machine."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 9, (32, 256), generator=generator).float()
    format = FORMATS[name]
    quantized = quantize_weight(weight, format, 256 if format.rotated else None)
    hasher = hashlib.sha256()
    for suffix in sorted(quantized.tensors):
        hasher.update(suffix.encode())
        hasher.update(quantized.tensors[suffix].contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


@pytest.mark.parametrize("name", DIGESTS[ARITHMETIC_VERSION])
def test_the_bits_are_those_of_the_version(name: str) -> None:
    assert digest(name) == DIGESTS[ARITHMETIC_VERSION][name]
