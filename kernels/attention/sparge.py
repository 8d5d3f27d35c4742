"""SpargeAttn: SageAttention over the key blocks with the highest scores."""

from __future__ import annotations

import torch

from .contract import Kind, SparseOptions, expand_kv, require_half_range
from .request import MAX_OFFSET, AttentionRequest
from .symbols import find

MODULE, FUNCTION = "spas_sage_attn", "spas_sage2_attn_meansim_topk_cuda"
INSTALL = "built from the repository thu-ml/SpargeAttn"
CARDS = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))
HEAD_DIMS = (64, 128)
MIN_TOKENS = 128


class Sparge:
    """Sparse attention by top-k, quantized."""

    name = "sparge"
    kind: Kind = "sparse"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses masks, which it accepts and ignores, and cards without a kernel."""
        if request.device != "cuda" or request.capability not in CARDS:
            return "needs an NVIDIA card of compute capability 8.0 to 9.0"
        if request.exact_only:
            return "the model asks for exact attention here"
        if request.mask != "none":
            return "it accepts masks and ignores them"
        if request.head_dim not in HEAD_DIMS:
            return f"takes heads of 64 or 128, not {request.head_dim}"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {request.dtype}"
        if not request.is_self_attention or request.tokens < MIN_TOKENS:
            return f"takes self-attention of at least {MIN_TOKENS} tokens"
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
        require_half_range(v, "SpargeAttn")
        out = function(
            q, k.clone(), v, scale=scale, topk=options.keep, tensor_layout="HND", is_causal=False
        )
        return out.to(q.dtype)
