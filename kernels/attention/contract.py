"""What an attention backend is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from .request import AttentionRequest

Kind = Literal["exact", "quantized", "sparse"]


@dataclass(frozen=True)
class SparseOptions:
    """tau: routing threshold in sigmas, higher is sparser; sinks: token ranges [start, stop) that
    every query sees exactly; keep: share of key blocks that backends with a top-k rule keep."""

    tau: float = 1.3
    sinks: tuple[tuple[int, int], ...] = ()
    keep: float = 0.5


class AttentionBackend(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """Stable name, as in the node's settings and reports."""
        ...

    @property
    def kind(self) -> Kind:
        """exact: equal to SDPA up to rounding; quantized: within a few percent; sparse: not all keys
        are seen exactly."""
        ...

    def refuses(self, request: AttentionRequest) -> str | None:
        """Why it cannot run the request, in words, or None; decided before any call."""
        ...

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None,
        options: SparseOptions,
    ) -> torch.Tensor:
        """`softmax(q @ k.mT * scale + mask) @ v` of operands (B, H, N, D), which stay unchanged.

        k and v may have fewer heads than q, a divisor of them. mask is boolean (True: seen) or
        additive, and broadcasts to (B, H, N, keys). scale None means D ** -0.5.
        """
        ...


class ValueRefusal(RuntimeError):
    """A backend cannot take these values, which no shape shows; raised before it computes."""


HALF_MAX = 65_504.0
"""Largest float16."""


def require_half_range(v: torch.Tensor, name: str) -> None:
    """Refuse values that a kernel would cast to float16 and so turn into infinity: black pictures.

    Raises:
        ValueRefusal: naming the largest value.
    """
    if v.dtype == torch.float16:
        return
    low, high = torch.stack(torch.aminmax(v)).tolist()  # one wait for the GPU, not two
    largest = max(-low, high)
    if not largest <= HALF_MAX:
        raise ValueRefusal(
            f"{name} casts values to float16; the largest here is {largest:.3g}, its limit {HALF_MAX:.0f}"
        )


def expand_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v with as many heads as q."""
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
