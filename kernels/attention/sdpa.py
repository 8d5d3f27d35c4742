"""torch's scaled dot product attention: the reference."""

from __future__ import annotations

import torch

from .contract import Kind, SparseOptions
from .request import AttentionRequest


class Sdpa:
    """Runs everywhere, takes everything."""

    name = "sdpa"
    kind: Kind = "exact"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses nothing but heads that do not divide."""
        return why_heads_refused(request)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        options: SparseOptions,
    ) -> torch.Tensor:
        """See the contract."""
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped
        )


def why_heads_refused(request: AttentionRequest) -> str | None:
    """Why the numbers of heads do not fit each other, or None."""
    if request.heads % request.kv_heads:
        return f"{request.heads} query heads are no multiple of {request.kv_heads} key heads"
    return None
