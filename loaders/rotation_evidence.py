"""Whether an unlabelled int8 weight is rotated, and by which matrix, from its numbers.

Columns of a trained weight differ in size; a rotation mixes the columns of a group until all are
alike. So of the candidates, the right un-rotation is the one after which columns differ most.
The measure is the variance of the columns' log energies within groups, relative to the 2/N that
equal Gaussian columns would show.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..kernels.hadamard import rotate
from ..quant.stored.scheme import HADAMARD
from .formats.unlabelled_int8 import ROTATIONS

WINDOW = 128
MAX_ROWS = 2048
MIN_SPREAD = 2.0
"""Times the spread of equal columns that the winner must show."""

MIN_LEAD = 1.5
"""Times the runner-up's spread that the winner must show."""


def column_spread(weight: torch.Tensor) -> float:
    """Variance of log column energies within windows of 128, over that of equal Gaussian columns.

    Args:
        weight: (N, K) float32, K >= 128.
    """
    energy = weight.square().mean(0).clamp_(min=1e-30).log_()
    windows = energy[: energy.numel() // WINDOW * WINDOW].reshape(-1, WINDOW)
    return (windows.var(1).mean() * weight.shape[0] / 2).item()


def rotation_by_evidence(weights: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """The candidate that the weights point to, or "unknown".

    Args:
        weights: (codes (N, K) int8, scale (N, 1)) of layers whose K the groups divide.
    """
    totals = dict.fromkeys(ROTATIONS, 0.0)
    count = 0
    for codes, scale in weights:
        weight = codes[:MAX_ROWS].float() * scale[:MAX_ROWS].float()
        for name, rotation in ROTATIONS.items():
            turned = weight
            if rotation is not None:
                turned = rotate(weight, rotation.group_size, HADAMARD[rotation.kind])
            totals[name] += column_spread(turned)
        count += 1
    if not count:
        return "unknown"
    ranked = sorted(totals, key=totals.__getitem__, reverse=True)
    best, second = totals[ranked[0]], totals[ranked[1]]
    clear = best / count >= MIN_SPREAD and best >= MIN_LEAD * second
    return ranked[0] if clear else "unknown"
