"""The reference backend: plain torch, any device with an integer matrix product."""

from __future__ import annotations

import torch

from ..backend import LinearRequest
from ..int8 import int8_linear
from ..integer_product import why_inexact_on_cpu


class ReferenceBackend:
    """Runs `kernels.int8.int8_linear` as it is written."""

    name = "reference"

    def refuses(self, request: LinearRequest) -> str | None:
        """Refuses only what `torch._int_mm` cannot take on the device."""
        if request.device not in ("cpu", "cuda"):
            return f"torch has no integer matrix product on {request.device}"
        if request.device == "cuda" and (request.m <= 16 or request.k % 8 or request.n % 8):
            return (
                "torch._int_mm on CUDA needs M > 16 and K, N divisible by 8, "
                f"got M={request.m}, K={request.k}, N={request.n}"
            )
        return why_inexact_on_cpu() if request.device == "cpu" else None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """See `kernels.int8.int8_linear`."""
        return int8_linear(x, weight, weight_scale, bias, group_size)
