"""Putting a changed weight back into the form its file has, as a merged LoRA needs."""

from __future__ import annotations

import torch

from ...kernels.hadamard import rotate
from . import codebook, grid
from .scheme import HADAMARD, Codebook
from .weight import StoredWeight


def requantize(weight: torch.Tensor, stored: StoredWeight, seed: int = 0) -> StoredWeight:
    """A float weight (N, K) in the scheme of `stored`: same tables, same low-rank part, new codes.

    Args:
        seed: above 0, stochastic rounding, so that changes smaller than a step are kept on average.
    """
    scheme, tensors = stored.scheme, stored.tensors
    values = weight.float()
    low_rank = None
    if scheme.low_rank != "none":
        low_rank = tensors["up"].float() @ tensors["down"].float()
    if scheme.low_rank == "outside" and low_rank is not None:
        values = values - low_rank
    if scheme.rotation is not None:
        values = rotate(values, scheme.rotation.group_size, HADAMARD[scheme.rotation.kind])
    if scheme.low_rank == "inside" and low_rank is not None:
        values = values - low_rank
    codes = scheme.codes
    if isinstance(codes, Codebook):
        changed = codebook.encode(values, tensors, codes, seed)
    else:
        changed = grid.encode(values, tensors, codes, seed)
    return StoredWeight(scheme, stored.shape, changed)
