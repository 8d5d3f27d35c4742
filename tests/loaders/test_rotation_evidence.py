"""Telling from an int8 weight's numbers whether it is rotated, and by which matrix."""

from __future__ import annotations

import pytest
import torch
from format_builders import turn
from leandit.loaders.rotation_evidence import rotation_by_evidence

TURNS = {"none": (None, ""), "regular_256": (256, "regular"), "sylvester_128": (128, "sylvester")}


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).float()
    return (weight / scale).round().to(torch.int8), scale


def weight(seed: int) -> torch.Tensor:
    """Columns of different size, as a trained layer's are."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp(0.3 * torch.randn(512, generator=generator)).double()
    return torch.randn(512, 512, generator=generator).double() * columns


@pytest.mark.parametrize("name", list(TURNS))
def test_finds(name: str) -> None:
    group, kind = TURNS[name]
    made = [quantized(turn(weight(seed), group, kind or "regular")) for seed in range(3)]
    assert rotation_by_evidence(made) == name


def test_equal_columns_tell_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(512, 512, generator=generator).double()
    assert rotation_by_evidence([quantized(flat)]) == "unknown"
    assert rotation_by_evidence([]) == "unknown"
