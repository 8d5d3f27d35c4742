"""Attention on this machine: every backend that can run, with its error against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..kernels.attention.backends import attention_backends
from ..kernels.attention.contract import SparseOptions
from ..kernels.attention.request import request_of
from .timing import timed

ROUNDS = 3
ERROR_ROWS = 64
CLUSTERS = 24
"""Kinds of tokens in the data; each attends mostly to its own, as in real pictures. Random data would
be the worst case for sparse attention and say nothing."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads, tokens, width of a head."""

    heads: int
    tokens: int
    head_dim: int


@dataclass(frozen=True)
class AttentionRow:
    """One backend on one shape; ms and rel_error are None where it refuses, for `refusal`."""

    heads: int
    tokens: int
    head_dim: int
    backend: str
    ms: float | None
    tflops: float | None
    rel_error: float | None
    refusal: str


ON_CPU = (AttentionShape(4, 1024, 128), AttentionShape(4, 2048, 64), AttentionShape(4, 4096, 128))
ON_GPU = (
    AttentionShape(24, 4608, 128),
    AttentionShape(40, 32_760, 128),
    AttentionShape(56, 65_536, 128),
)


def bench_attention(
    shapes: Iterable[AttentionShape],
    device: str,
    progress: Callable[[AttentionShape], None] = lambda shape: None,
) -> list[AttentionRow]:
    """Measure every backend in bfloat16; they take turns, and the best of three rounds counts."""
    rows = []
    with torch.inference_mode():
        for shape in shapes:
            progress(shape)
            rows += _bench_shape(shape, torch.device(device))
    return rows


def clustered(shape: AttentionShape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v (1, H, N, D) bfloat16 of tokens that come in kinds."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.heads, shape.tokens, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device) for _ in range(3))
    centers = torch.randn(CLUSTERS, shape.head_dim, generator=generator, device=device)
    kind = torch.arange(shape.tokens, device=device) * CLUSTERS // shape.tokens
    q, k = 1.5 * centers[kind] + 0.5 * q, 1.5 * centers[kind] + 0.5 * k
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def _bench_shape(shape: AttentionShape, device: torch.device) -> list[AttentionRow]:
    q, k, v = clustered(shape, device)
    request = request_of(q, k, v, None, None)
    backends = attention_backends()
    refusals = {name: backend.refuses(request) or "" for name, backend in backends.items()}
    able = [name for name, reason in refusals.items() if not reason]
    best = dict.fromkeys(able, float("inf"))
    errors: dict[str, float] = {}
    exact = _exact(q, k, v)
    for round_number in range(ROUNDS + 1):
        for name in list(able):
            attention = backends[name].attention
            try:
                out, milliseconds = timed(
                    lambda run=attention: run(q, k, v, None, None, SparseOptions()), device
                )
            except Exception as error:  # a kernel of another package
                refusals[name] = f"failed: {type(error).__name__}: {error}"
                able.remove(name)
                continue
            if round_number:
                best[name] = min(best[name], milliseconds)
            else:
                errors[name] = _error(out, exact)
    work = 4 * shape.heads * shape.tokens**2 * shape.head_dim
    sides = (shape.heads, shape.tokens, shape.head_dim)
    rows = []
    for name, reason in refusals.items():
        measured = (None, None, None)
        if name in able:
            measured = (best[name], work / best[name] / 1e9, errors[name])
        rows.append(AttentionRow(*sides, name, *measured, reason))
    return rows


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last rows of the first head in float64."""
    scores = q[0, 0, -ERROR_ROWS:].double() @ k[0, 0].double().T * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v[0, 0].double()


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out[0, 0, -ERROR_ROWS:].double() - exact).norm() / exact.norm()).item()
