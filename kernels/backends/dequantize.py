"""The last resort: decode the weight and multiply in the activations' own dtype."""

from __future__ import annotations

import torch

from ..backend import LinearRequest
from ..int8 import dequantize_int8


class DequantizeBackend:
    """Runs everywhere, at the speed of a 16-bit linear plus the decoding, and exactly."""

    name = "dequantize"

    def refuses(self, request: LinearRequest) -> str | None:
        """Refuses nothing."""
        return None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """`F.linear(x, dequantize_int8(weight, weight_scale, G).to(x.dtype), bias)`."""
        dense = dequantize_int8(weight, weight_scale.reshape(-1, 1), group_size, x.dtype)
        return torch.nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
