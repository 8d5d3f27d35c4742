"""Sol attention: key blocks that matter are attended exactly, the others as one pooled term each.

Blocks of 64 tokens. A key block is exact for a query block if the proxy score of their means is above
mean + tau * deviation of the query block's scores, if it is the same block or a neighbor, or if it is
a sink. Source: arXiv 2607.24027. comfy-kitchen has it (on a CPU as plain torch); else the standalone
package is used.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .contract import Kind, SparseOptions
from .request import MAX_OFFSET, AttentionRequest
from .symbols import find

KITCHEN = ("comfy_kitchen", "sol_attn", "pip install -U comfy-kitchen (0.2.33 or newer)")
STANDALONE = ("sol_attn", "sol_attn", "built from the repository NVlabs/Sana")
HEAD_DIM = 128
BLOCK = 64
MAX_CPU_SCORES = 4 << 30
"""Bytes of scores beyond which comfy-kitchen's plain torch path refuses."""


class SolAttention:
    """Sparse attention for long self-attention without masks."""

    name = "sol_attn"
    kind: Kind = "sparse"

    def refuses(self, request: AttentionRequest) -> str | None:
        """Refuses all but self-attention with heads of 128."""
        if request.exact_only:
            return "the model asks for exact attention here"
        if request.mask != "none":
            return "takes no mask"
        if not request.is_self_attention:
            return "takes self-attention only: queries and keys of the same shape"
        if request.head_dim != HEAD_DIM:
            return f"takes heads of {HEAD_DIM}, not {request.head_dim}"
        if request.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"takes float16, bfloat16 and float32, not {request.dtype}"
        if request.largest_offset > MAX_OFFSET:
            return "its operands reach beyond 32-bit indices"
        kitchen = find(*KITCHEN)
        if request.device == "cpu":
            scores = request.heads * request.batch * request.tokens**2 * 4
            if scores > MAX_CPU_SCORES:
                return f"on a CPU it needs {scores / 1e9:.1f} GB for its scores, the limit is 4.3"
            return kitchen.reason or None
        if kitchen.function is not None and _kitchen_has_a_kernel():
            return None
        standalone = find(*STANDALONE)
        if standalone.function is not None:
            return None
        return f"comfy-kitchen has no kernel for this card, and {standalone.reason}"

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        options: SparseOptions,
    ) -> torch.Tensor:
        """See the contract; float32 on a card is computed in bfloat16."""
        dtype = q.dtype
        if q.is_cuda and dtype == torch.float32:
            q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
        operands = [_aligned(tensor.transpose(1, 2)) for tensor in (q, k, v)]
        kitchen = find(*KITCHEN).function
        if kitchen is not None and (not q.is_cuda or _kitchen_has_a_kernel()):
            sinks = block_range(options.sinks, q.shape[2])
            out = kitchen(*operands, tau=options.tau, scale=scale, sink_blocks=sinks)
        else:
            out = self._standalone(operands, scale, options)
        return out.transpose(1, 2).to(dtype)

    def _standalone(
        self, operands: list[torch.Tensor], scale: float | None, options: SparseOptions
    ) -> torch.Tensor:
        function = find(*STANDALONE).require()
        wanted: dict[str, Any] = {"tau": options.tau, "scale": scale, "int8_qk": True}
        if options.sinks:
            start = min(first for first, _ in options.sinks)
            stop = max(last for _, last in options.sinks)
            wanted |= {"sink_start": start, "sink_tokens": stop - start}
        accepted = inspect.signature(function).parameters
        given = {name: value for name, value in wanted.items() if name in accepted}
        return function(*(tensor.contiguous() for tensor in operands), **given)


def block_range(sinks: tuple[tuple[int, int], ...], tokens: int) -> list[int] | None:
    """The blocks [start, stop) that cover all sinks, or None without any."""
    if not sinks:
        return None
    blocks = -(-tokens // BLOCK)
    start = min(first for first, _ in sinks) // BLOCK
    stop = min(-(-max(last for _, last in sinks) // BLOCK), blocks)
    return [start, stop] if start < stop else None


def _kitchen_has_a_kernel() -> bool:
    """Without asking, comfy-kitchen would silently run plain torch on a card it has no kernel for."""
    available = find("comfy_kitchen", "sol_attn_is_available", KITCHEN[2]).function
    return available is not None and bool(available())


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Its kernels want 16-byte aligned rows and strides that are multiples of 8."""
    strides = all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    fits = tensor.stride(-1) == 1 and strides and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.contiguous()
