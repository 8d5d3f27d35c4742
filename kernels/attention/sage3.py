"""SageAttention 3: FP4 on Blackwell cards."""

from __future__ import annotations

import torch

from .contract import Kind, SparseOptions, expand_kv, require_half_range
from .request import MAX_OFFSET, AttentionRequest
from .symbols import find

MODULE, FUNCTION = "sageattn3", "sageattn3_blackwell"
INSTALL = "built from SageAttention's repository (sageattention3_blackwell)"
CARDS = ((12, 0), (12, 1))
HEAD_DIMS = (64, 128)


class Sage3:
    """FP4 attention, not for first and last steps (its own README)."""

    name = "sage3"
    kind: Kind = "quantized"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses masks and scales, which it accepts and ignores."""
        if request.device != "cuda" or request.capability not in CARDS:
            return "needs an NVIDIA card of compute capability 12.0 or 12.1"
        if request.exact_only:
            return "the model asks for exact attention here"
        if request.mask != "none":
            return "it accepts masks and ignores them"
        if request.own_scale:
            return "it has no scale of its own"
        if request.head_dim not in HEAD_DIMS:
            return f"takes heads of 64 or 128, not {request.head_dim}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {request.dtype}"
        if request.largest_offset > MAX_OFFSET:
            return "its operands reach beyond its 32-bit indices"
        return find(MODULE, FUNCTION, INSTALL).reason or None

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
        function = find(MODULE, FUNCTION, INSTALL).require()
        k, v = expand_kv(q, k, v)
        require_half_range(v, "SageAttention 3")
        return function(q, k.clone(), v, is_causal=False)  # it subtracts the mean of k in place
