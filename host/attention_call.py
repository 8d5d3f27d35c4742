"""One call of ComfyUI's attention, as its override gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

POSITIONAL = (
    "q",
    "k",
    "v",
    "heads",
    "mask",
    "attn_precision",
    "skip_reshape",
    "skip_output_reshape",
)
"""Names of the arguments that callers also give by position: the mask among them."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments by name, and the operands as (B, H, N, D)."""

    arguments: dict[str, Any]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None

    @property
    def scale(self) -> float | None:
        """The scale of the scores; None for D ** -0.5."""
        return self.arguments.get("scale")

    @property
    def transformer_options(self) -> dict[str, Any]:
        """ComfyUI's options of the running model."""
        return self.arguments.get("transformer_options") or {}

    @property
    def exact_only(self) -> bool:
        """Whether the model asks for no quantized or sparse attention in this call."""
        return self.arguments.get("low_precision_attention") is False

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """A result (B, H, N, D) in the form the caller wants: (B, N, H * D) unless told."""
        out = out.to(self.q.dtype)
        if self.arguments.get("skip_output_reshape"):
            return out
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1)


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall | None:
    """The call, or None if its operands have a form that is not known here.

    Flat operands are (B, N, heads * D); with grouped queries k and v have fewer heads.
    """
    arguments = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
    q, k, v, heads = (arguments.get(name) for name in ("q", "k", "v", "heads"))
    tensors = [part for part in (q, k, v) if isinstance(part, torch.Tensor)]
    if len(tensors) != 3 or not isinstance(heads, int) or len(args) > len(POSITIONAL):
        return None
    if arguments.get("skip_reshape"):
        if any(tensor.ndim != 4 for tensor in tensors):
            return None
        parts = tensors
    else:
        if any(tensor.ndim != 3 for tensor in tensors) or tensors[0].shape[-1] % heads:
            return None
        head_dim = tensors[0].shape[-1] // heads
        if any(tensor.shape[-1] % head_dim for tensor in tensors):
            return None
        parts = [t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in tensors]
    if parts[1].shape[1] != parts[2].shape[1] or parts[1].shape[2] != parts[2].shape[2]:
        return None
    mask = arguments.get("mask")
    q, k, v = parts
    return AttentionCall(arguments, q, k, v, None if mask is None else four_sides(mask))


def four_sides(mask: torch.Tensor) -> torch.Tensor:
    """A mask of rank 2 (rows, keys), 3 (B, rows, keys) or 4, as one that broadcasts to scores."""
    if mask.ndim == 2:
        return mask[None, None]
    return mask[:, None] if mask.ndim == 3 else mask


Override = Callable[..., torch.Tensor]
