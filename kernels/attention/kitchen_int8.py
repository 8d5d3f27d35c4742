"""comfy-kitchen's INT8 attention."""

from __future__ import annotations

import torch

from .contract import Kind, SparseOptions
from .request import AttentionRequest
from .symbols import find

MODULE, FUNCTION = "comfy_kitchen", "int8_attention"
INSTALL = "pip install -U comfy-kitchen"
MAX_HEAD_DIM = 256
OLDEST = (7, 5)


class KitchenInt8:
    """INT8 attention with masks, on NVIDIA cards from Turing on and AMD cards from RDNA3 on."""

    name = "kitchen_int8"
    kind: Kind = "quantized"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses the CPU, wide heads, old cards."""
        if request.device != "cuda" or request.capability is None:
            return f"needs a card, the tensors are on {request.device}"
        if request.exact_only:
            return "the model asks for exact attention here"
        if torch.version.hip is None and request.capability < OLDEST:
            return "needs compute capability 7.5"
        if request.head_dim > MAX_HEAD_DIM:
            return f"takes heads of up to {MAX_HEAD_DIM}, not {request.head_dim}"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"takes float16, bfloat16 and float32, not {request.dtype}"
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
        return function(q, k, v, scale=scale, attn_mask=mask)
