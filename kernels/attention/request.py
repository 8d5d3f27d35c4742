"""What one attention call asks for, as plain numbers that a backend can judge without running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MAX_OFFSET = 2**31 - 1
"""Largest element offset that kernels with 32-bit indices reach."""

MaskKind = Literal["none", "bool", "additive"]


@dataclass(frozen=True)
class AttentionRequest:
    """device: "cpu" or "cuda"; capability: of the card, None on a CPU; kv_heads differ from heads
    with grouped queries; own_scale: whether the scale is another than D ** -0.5; exact_only: the
    model asks for no quantized or sparse attention; largest_offset: of any operand's elements."""

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    key_tokens: int
    head_dim: int
    mask: MaskKind = "none"
    own_scale: bool = False
    exact_only: bool = False
    largest_offset: int = 0

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are as many, with as many heads."""
        return self.tokens == self.key_tokens and self.heads == self.kv_heads

    @property
    def shape(self) -> str:
        """The shape as a short text, for reports."""
        keys = "" if self.tokens == self.key_tokens else f" to {self.key_tokens}"
        return f"{self.heads} heads of {self.head_dim}, {self.tokens}{keys} tokens"


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    exact_only: bool = False,
) -> AttentionRequest:
    """The request of operands (B, H, N, D)."""
    kind: MaskKind = "none"
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "additive"
    head_dim = q.shape[-1]
    return AttentionRequest(
        device=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype,
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        tokens=q.shape[2],
        key_tokens=k.shape[2],
        head_dim=head_dim,
        mask=kind,
        own_scale=scale is not None and abs(scale - head_dim**-0.5) > 1e-6 * head_dim**-0.5,
        exact_only=exact_only,
        largest_offset=max(_largest_offset(tensor) for tensor in (q, k, v)),
    )


def _largest_offset(tensor: torch.Tensor) -> int:
    return sum(
        (length - 1) * stride
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if length
    )
