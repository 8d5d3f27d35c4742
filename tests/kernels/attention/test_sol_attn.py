"""Sol attention against its definition, written as plain loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from leandit.kernels.attention.contract import SparseOptions
from leandit.kernels.attention.request import request_of
from leandit.kernels.attention.sol_attn import BLOCK, SolAttention, block_range

HEADS, DIM = 2, 128


def operands(tokens: int, seed: int = 0, clusters: int = 0) -> tuple[torch.Tensor, ...]:
    """(1, H, N, D) float32; with clusters, tokens attend mostly to their own kind."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3))
    if clusters:
        centers = 2 * torch.randn(clusters, DIM, generator=generator)
        kind = torch.arange(tokens) * clusters // tokens
        q, k = centers[kind] + 0.1 * q, centers[kind] + 0.1 * k
    return q, k, v


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tau: float, sinks: range = range(0)
) -> tuple[torch.Tensor, float]:
    """The definition, and the share of block pairs that are exact."""
    q, k, v = (tensor[0].double() for tensor in (q, k, v))
    tokens = q.shape[1]
    scale = DIM**-0.5
    starts = range(0, tokens, BLOCK)
    out, exact_pairs = torch.zeros_like(q), 0
    for head in range(HEADS):
        k_means = torch.stack([k[head, s : s + BLOCK].mean(0) for s in starts])
        # All keys are taken relative to the mean of the block means. For exact keys a softmax does
        # not see that; beside pooled terms, which share their query block's score, it counts.
        center = k_means.mean(0)
        k_means = k_means - center
        keys = k[head] - center
        v_sums = torch.stack([v[head, s : s + BLOCK].sum(0) for s in starts])
        lengths = [min(BLOCK, tokens - s) for s in starts]
        for i, start in enumerate(starts):
            q_mean = q[head, start : start + BLOCK].mean(0)
            proxy = scale * (k_means @ q_mean)
            variance = (q_mean**2 * k_means.var(0, correction=0)).sum() * scale**2
            threshold = proxy.mean() + tau * variance.sqrt()
            exact = [
                j
                for j in range(len(starts))
                if proxy[j] > threshold or abs(i - j) <= 1 or j in sinks
            ]
            exact_pairs += len(exact)
            for row in range(start, min(start + BLOCK, tokens)):
                numerator, denominator = torch.zeros(DIM).double(), 0.0
                for j, first in enumerate(starts):
                    if j in exact:
                        scores = scale * (keys[first : first + BLOCK] @ q[head, row])
                        weights = scores.exp()
                        numerator += weights @ v[head, first : first + BLOCK]
                        denominator += weights.sum().item()
                    else:
                        pooled = math.exp(proxy[j])
                        numerator += pooled * v_sums[j]
                        denominator += pooled * lengths[j]
                out[head, row] = numerator / denominator
    return out[None], exact_pairs / (HEADS * len(starts) ** 2)


def ours(q, k, v, tau: float, sinks: tuple[tuple[int, int], ...] = ()) -> torch.Tensor:
    return SolAttention().attention(q, k, v, None, None, SparseOptions(tau, sinks)).double()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("tau", [-100.0, 0.5, 1.3, 100.0])
@pytest.mark.parametrize("tokens", [512, 450], ids=["whole blocks", "a ragged block"])
def test_equals_its_definition(tau: float, tokens: int) -> None:
    q, k, v = operands(tokens, clusters=4)
    expected, _ = naive(q, k, v, tau)
    assert distance(ours(q, k, v, tau), expected) < 1e-5


def test_a_sink_is_seen_exactly() -> None:
    q, k, v = operands(512)
    expected, _ = naive(q, k, v, 100.0, range(2, 4))
    assert distance(ours(q, k, v, 100.0, ((130, 250),)), expected) < 1e-5
    assert distance(ours(q, k, v, 100.0), expected) > 0.01


@pytest.mark.parametrize("how", ["tau", "sinks"])
def test_everything_exact_is_dense_attention(how: str) -> None:
    q, k, v = operands(1024)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
    sinks = ((0, 1024),) if how == "sinks" else ()
    assert distance(ours(q, k, v, -100.0 if how == "tau" else 100.0, sinks), dense) < 1e-5


def test_the_share_of_exact_blocks_follows_tau_and_so_does_the_error() -> None:
    q, k, v = operands(1024, clusters=8)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v).double()
    shares, errors = [], []
    for tau in (-2.0, 0.0, 1.0, 3.0):
        shares.append(naive(q[:, :, :1024], k, v, tau)[1])
        errors.append(distance(ours(q, k, v, tau), dense))
    assert shares == sorted(shares, reverse=True) and shares[0] > 2 * shares[-1]
    assert errors == sorted(errors)


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [((), None), (((0, 1),), [0, 1]), (((70, 130),), [1, 3]), (((0, 10), (600, 9999)), [0, 8])],
)
def test_sinks_are_rounded_outward_to_blocks(sinks, expected) -> None:
    assert block_range(sinks, 512) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 64}, "heads of 128, not 64"),
        ({"keys": 256}, "self-attention only"),
        ({"mask": True}, "takes no mask"),
        ({"dtype": torch.float64}, "takes float16"),
        ({"tokens": 60_000}, "GB for its scores"),
    ],
)
def test_what_it_cannot_take_is_refused_before_any_call(change, words: str) -> None:
    shape = (1, HEADS, change.get("tokens", 512), change.get("dim", DIM))
    dtype = change.get("dtype", torch.float32)
    q = torch.empty(1, dtype=dtype).expand(shape)
    k = torch.empty(1, dtype=dtype).expand(1, HEADS, change.get("keys", shape[2]), shape[3])
    mask = torch.ones(1, dtype=torch.bool) if change.get("mask") else None
    assert words in (SolAttention().refuses(request_of(q, k, k, mask, None)) or "")
