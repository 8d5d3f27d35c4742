"""Rounding to the entries of a table or to integers, to the nearest or at random."""

from __future__ import annotations

import torch


def round_to(values: torch.Tensor, table: torch.Tensor, seed: int) -> torch.Tensor:
    """Indices (int64) into `table` for a flat float tensor.

    The nearest entry; with seed above 0, one of the two neighbors, the nearer one more often, so
    that the expected value is the value itself.
    """
    ordered, order = table.sort()
    upper = torch.searchsorted(ordered, values).clamp_(1, ordered.numel() - 1)
    low, high = ordered[upper - 1], ordered[upper]
    gap = high - low
    above = torch.where(gap == 0, 0, (values - low) / gap)
    return order[torch.where(above > _threshold(values, seed), upper, upper - 1)]


def round_integers(values: torch.Tensor, seed: int) -> torch.Tensor:
    """`values.round()`, or with seed above 0 stochastic rounding; in place."""
    if seed <= 0:
        return values.round_()
    return values.add_(1 - _threshold(values, seed)).floor_()


def _threshold(values: torch.Tensor, seed: int) -> torch.Tensor | float:
    if seed <= 0:
        return 0.5
    generator = torch.Generator(device=values.device).manual_seed(seed)
    return torch.rand(values.shape, generator=generator, device=values.device, dtype=values.dtype)
