"""What a backend for the INT8 linear is: it runs it, or says in words why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LinearRequest:
    """What has to be computed: `x (M, K) @ weight (N, K).T` in INT8.

    device is "cpu" or "cuda"; dtype is that of x and of the result; group_size is the rotation
    group G, or None for weights that are not rotated.
    """

    device: str
    dtype: torch.dtype
    m: int
    n: int
    k: int
    group_size: int | None


class Backend(Protocol):
    """A way to run the INT8 linear."""

    @property
    def name(self) -> str:
        """Short stable name, as shown in reports."""
        ...

    def refuses(self, request: LinearRequest) -> str | None:
        """Why this backend cannot run `request`, in words, or None if it can."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group_size: int | None,
    ) -> torch.Tensor:
        """Equals `kernels.int8.int8_linear` with the same arguments."""
        ...


class NoBackendError(RuntimeError):
    """No backend can run a request. `refusals` maps each backend's name to its reason."""

    def __init__(self, request: LinearRequest, refusals: dict[str, str]) -> None:
        self.request = request
        self.refusals = refusals
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        super().__init__(f"no backend can run {request}: {reasons or 'none is registered'}")
