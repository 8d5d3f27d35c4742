"""Comparing a backend's result with SDPA on a slice, to catch broken kernels: no more black videos."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .contract import Kind, SparseOptions
from .sdpa import Sdpa

HEADS, ROWS = 2, 128

BOUNDS: dict[Kind, float] = {"exact": 0.02, "quantized": 0.2, "sparse": 0.9}
"""Largest relative error of a healthy backend. Sparse attention of random data is off by 0.8; that of
real tokens, which attend few others, by less than 0.01; a black picture by 1."""


@dataclass(frozen=True)
class Quality:
    """error: relative distance from SDPA on the slice; finite: whether the result is; judged: whether
    it could be, which it cannot where the operands are not finite themselves."""

    error: float
    finite: bool
    bound: float
    judged: bool = True

    @property
    def broken(self) -> bool:
        """Whether the result cannot be used."""
        return self.judged and (not self.finite or not self.error <= self.bound)

    def __str__(self) -> str:
        if not self.judged:
            return "cannot be judged: the model's own values are not finite"
        if not self.finite:
            return "gives values that are not finite"
        return f"relative error {self.error:.4f} (bound {self.bound})"


def measure_quality(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    kind: Kind,
) -> Quality:
    """Compare `out` (B, H, N, D) with SDPA in float32 on some heads and rows of the first sample."""
    heads = _spread(q.shape[1], HEADS, q.device)
    rows = _spread(q.shape[2], ROWS, q.device)
    keys = heads // (q.shape[1] // k.shape[1])
    part_q = q[:1, heads][:, :, rows].float()
    part_k, part_v = k[:1, keys].float(), v[:1, keys].float()
    part_mask = mask
    if mask is not None:
        full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        part_mask = full[:1, heads][:, :, rows]
        part_mask = part_mask if part_mask.dtype == torch.bool else part_mask.float()
    exact = Sdpa().attention(part_q, part_k, part_v, part_mask, scale, SparseOptions())
    found = out[:1, heads][:, :, rows].float()
    error = (found - exact).norm() / exact.norm().clamp_min(1e-20)
    # A sum is finite only if every part is, or as good as that; it needs no memory.
    finite = bool(torch.isfinite(out.sum(dtype=torch.float32)))
    judged = bool(torch.isfinite(exact).all())
    return Quality(float(error), finite, BOUNDS[kind], judged)


def _spread(length: int, count: int, device: torch.device) -> torch.Tensor:
    """Up to `count` indices over a length, both ends among them."""
    return torch.linspace(0, length - 1, min(count, length), device=device).round().long()
