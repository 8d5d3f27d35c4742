"""Shapes of the large linears of real models, for benchmarks."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """M rows (tokens), N out_features, K in_features, and where they come from."""

    m: int
    n: int
    k: int
    source: str


VIDEO, IMAGE = 32_700, 4096

ON_CPU = (
    LinearShape(4096, 5376, 5376, "MiniMax H3, attention output"),
    LinearShape(4096, 16_128, 5376, "MiniMax H3, qkv"),
)
ON_GPU = (
    LinearShape(VIDEO, 16_128, 5376, "MiniMax H3, qkv"),
    LinearShape(VIDEO, 5376, 5376, "MiniMax H3, attention output"),
    LinearShape(VIDEO, 13_824, 5120, "Wan 14B, MLP up"),
    LinearShape(VIDEO, 5120, 13_824, "Wan 14B, MLP down"),
    LinearShape(IMAGE, 9216, 3072, "Flux, qkv"),
    LinearShape(IMAGE, 12_288, 3072, "Flux, MLP up"),
    LinearShape(IMAGE, 6144, 6144, "Krea 2, attention"),
)


def parse_shapes(text: str) -> tuple[LinearShape, ...]:
    """Shapes written as MxNxK, separated by commas.

    Raises:
        ValueError: naming the part that is none.
    """
    return tuple(LinearShape(*sides, "given") for sides in parse_sides(text))


def parse_sides(text: str) -> list[tuple[int, int, int]]:
    """Three sides each, written as 4096x5376x5376 and separated by commas.

    Raises:
        ValueError: naming the part that is none.
    """
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d{0,6})x([1-9]\d{0,6})x([1-9]\d{0,6})\s*", part)
        if found is None:
            raise ValueError(f"{part!r} is no shape; write three sides, such as 4096x5376x5376")
        first, second, third = map(int, found.groups())
        shapes.append((first, second, third))
    return shapes
