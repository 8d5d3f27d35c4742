"""FlashAttention 2, 3 or 4, whichever is installed and fits the card."""

from __future__ import annotations

import torch

from .contract import Kind, SparseOptions
from .request import MAX_OFFSET, AttentionRequest
from .symbols import Symbol, find

INSTALL = "pip install flash-attn --no-build-isolation"

VERSIONS = (
    ("flash_attn_interface", ((9, 0),)),
    ("flash_attn.cute", ((9, 0), (10, 0), (12, 0))),
    ("flash_attn", ()),
)
"""Modules with a `flash_attn_func`, best first, and the cards each is for; () means any from 8.0 on.
Version 4 installs into the namespace of version 2, so only the function tells which is there."""

MAX_HEAD_DIM = 256


class FlashAttention:
    """Exact attention on NVIDIA cards from Ampere on, without masks."""

    name = "fa"
    kind: Kind = "exact"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses masks, float32, other cards, wide heads, and a missing package."""
        if request.device != "cuda" or request.capability is None:
            return f"needs an NVIDIA card, the tensors are on {request.device}"
        if request.capability < (8, 0):
            major, minor = request.capability
            return f"needs compute capability 8.0, the card has {major}.{minor}"
        if request.mask != "none":
            return "takes no mask"
        if request.dtype not in (torch.float16, torch.bfloat16):
            return f"takes float16 and bfloat16, not {request.dtype}"
        if request.head_dim > MAX_HEAD_DIM or request.head_dim % 8:
            return f"takes heads of up to {MAX_HEAD_DIM}, a multiple of 8, not {request.head_dim}"
        if request.largest_offset > MAX_OFFSET:
            return "its operands reach beyond 32-bit indices"
        return function_for(request.capability).reason or None

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        options: SparseOptions,
    ) -> torch.Tensor:
        """See the contract; the package takes (B, N, H, D)."""
        function = function_for(torch.cuda.get_device_capability(q.device)).require()
        operands = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = function(*operands, softmax_scale=scale)
        # Older builds of version 3 give the log-sum-exp with it.
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def function_for(capability: tuple[int, int]) -> Symbol:
    """The best version's function for a card, or the last reason why there is none."""
    symbol = Symbol(None, INSTALL)
    for module, cards in VERSIONS:
        if cards and (capability[0], 0) not in cards:
            continue
        symbol = find(module, "flash_attn_func", INSTALL)
        if symbol.function is not None:
            break
    return symbol
